"""Levanter: meshes of 2026, and the keys it had before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.cli import main
from planner.errors import PlanError
from planner.interop.price import Configuration, read_configuration
from planner.interop.settings import Settings


def read(folder: Path, text: str, devices: int = 8, domain: int = 0) -> Configuration:
    (folder / "c.yaml").write_text(text)
    return read_configuration(folder / "c.yaml", devices, domain=domain)


BEFORE = """data: !include data/pile.yaml
model: {type: gpt2, gradient_checkpointing: true, hidden_dim: 64, seq_len: 16}
trainer:
  tracker: {project: levanter}
  train_batch_size: 64
  per_device_parallelism: 2
  model_axis_size: 2
  tensor_parallel_axes: [mlp, heads]
  fsdp_axis: embed
  batch_axis: batch
"""
MESH = "trainer:\n  train_batch_size: 32\n  mesh:\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            BEFORE,
            Settings(64, data=4, tensor=2, microbatches=8, zero_stage=3, recompute="block",
                     length=16),
        ),
        ("trainer:\n  per_device_parallelism: 4\n  train_batch_size: -1\n  fsdp_axis: null\n",
         Settings(32, data=8, recompute="block")),
        ("trainer:\n  axis_resources: {batch: data, mlp: model}\n  model_axis_size: 4\n"
         "  fsdp_axis: null\n  parameter_axis_resources: {embed: data}\n",
         Settings(512, data=2, tensor=4, zero_stage=3, recompute="block")),
        (f"{MESH}    axes: {{model: 2, context: 2}}\n    param_mapping: {{}}\n",
         Settings(32, data=2, tensor=2, sequence=2, recompute="block")),
        (f"{MESH}    axes: {{data: 4, model: 2}}\nmodel: {{gradient_checkpointing: false}}\n",
         Settings(32, data=4, tensor=2, zero_stage=3)),
    ],
)  # fmt: skip
def test_its_keys(text: str, expected: Settings, tmp_path: Path) -> None:
    found = read(tmp_path, text)
    expected = replace(expected, blocks="looped")
    assert (found.launcher, found.settings, found.notes) == ("levanter", expected, ())


@pytest.mark.parametrize(
    "text",
    [
        "replica_ici_axis_size: 2\n",
        "replica_dcn_axis_size: -1\n",
        f"{MESH}    axes: {{replica: 2}}\n",
    ],
)
def test_replicas_keep_copies_of_what_is_sharded(text: str, tmp_path: Path) -> None:
    found = read(tmp_path, text, 16, 8)
    assert (found.settings.zero_stage, found.settings.zero_group) == (3, 8)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("model_axis_size: 2\n", "nothing of the model is cut by the axis model"),
        (f"{MESH}    axis_types: explicit\n", "mesh.axis_types was not read"),
        ("model_axis_size: 1\ngradient_checkpointing: offload\n", "'offload' is priced as"),
    ],
)
def test_what_is_priced_as_another_thing(text: str, note: str, tmp_path: Path) -> None:
    assert any(note in n for n in read(tmp_path, text, 16, 8).notes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model_axis_size: 3\n", "do not divide 8 devices"),
        ("model_axis_size: 1\ntrain_batch_size: 12\n", "no multiple of 8 devices"),
        (
            "train_batch_size: 24\nper_device_parallelism: 2\n",
            "no multiple of per_device_parallelism 2 x 8",
        ),
        ("train_batch_size: -1\nper_device_parallelism: -1\n", "are both -1"),
        (f"{MESH}    axes: {{pipeline: 2}}\n", "mesh.axes.pipeline = 2: the planner has no"),
        (f"{MESH}    axes: {{model: two}}\n", "is no size of an axis"),
        (f"{MESH}    axes: 4\n", "mesh.axes = '4' is no table"),
    ],
)
def test_contradictions(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=said) as e:
        read(tmp_path, text)
    assert e.value.code == "P191"


def test_unknown_keys_are_told_and_the_model_is_held_against(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read(tmp_path, BEFORE).unread == (
        "data", "model.type", "trainer.tracker.project", "trainer.batch_axis",
    )  # fmt: skip
    argv = ["import", str(tmp_path / "c.yaml"), "--model", "zoo:llama-tiny", "--devices", "8",
            "-o", str(tmp_path / "x.json")]  # fmt: skip
    assert main(argv) == 0
    assert "keys of" in capsys.readouterr().err
    (tmp_path / "c.yaml").write_text(BEFORE.replace("hidden_dim: 64", "hidden_dim: 4096"))
    assert main([*argv, "--force"]) == 2 and "hidden_dim = 4096" in capsys.readouterr().err
