"""DeepSpeed's configuration: its own JSON, and other files that name it or hold it; NeMo's YAML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.errors import PlanError
from planner.interop.price import Configuration, read_configuration

STAGE_3: dict[str, Any] = {
    "bf16": {"enabled": True},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "reduce_bucket_size": 5e8,
    },
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "train_batch_size": "auto",
}


def read(folder: Path, table: dict[str, Any], *overrides: str, devices: int = 8) -> Configuration:
    (folder / "mine.json").write_text(json.dumps(table))
    return read_configuration(folder / "mine.json", devices, overrides=overrides)


def test_its_own_file_is_recognised_and_says_stage_rows_and_batch(tmp_path: Path) -> None:
    """It was priced, with --from hf, as data parallelism without ZeRO at eight rows a device."""
    found = read(tmp_path, STAGE_3)
    s = found.settings
    assert found.launcher == "hf"
    assert (s.zero_stage, s.data, s.batch, s.microbatches) == (3, 8, 64, 4)
    assert s.precision == "bf16-mixed"
    assert [n for n in found.notes if "host's memory" in n] == [
        "offload_optimizer_device is left out: nothing is priced in the host's memory"
    ]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"train_batch_size": 64, "gradient_accumulation_steps": "auto"}, (64, 4)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto"}, (64, 4)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": "auto"}, (32, 2)),
    ],
)
def test_of_three_sizes_of_the_batch_the_third_follows(
    tmp_path: Path, said: dict[str, Any], expected: tuple[int, int]
) -> None:
    s = read(tmp_path, STAGE_3 | said).settings
    assert (s.batch, s.microbatches) == expected


def test_sizes_that_contradict_each_other_and_rows_that_nobody_says(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="train_batch_size 60 is not 2 rows x 4 microbatches x 8"):
        read(tmp_path, STAGE_3 | {"train_batch_size": 60})
    auto = STAGE_3 | {"train_micro_batch_size_per_gpu": "auto"}
    with pytest.raises(PlanError, match="train_micro_batch_size_per_gpu is missing"):
        read(tmp_path, auto)
    assert read(tmp_path, auto, "per_device_train_batch_size=1").settings.batch == 32


def test_values_behind_the_file_may_be_in_its_own_words(tmp_path: Path) -> None:
    s = read(
        tmp_path, STAGE_3, "train_micro_batch_size_per_gpu=4", "zero_optimization.stage=1"
    ).settings
    assert (s.batch, s.zero_stage) == (128, 1)


@pytest.mark.parametrize("inside", [False, True])
def test_a_file_that_names_it_or_holds_it_has_its_stage(tmp_path: Path, inside: bool) -> None:
    """TrainingArguments, or a section of them."""
    (tmp_path / "ds.json").write_text(json.dumps(STAGE_3))
    arguments = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "gradient_checkpointing": True,
        "deepspeed": STAGE_3 if inside else "ds.json",
    }
    s = read(tmp_path, {"training_arguments": arguments} if inside else arguments).settings
    assert (s.zero_stage, s.batch, s.recompute) == (3, 64, "block")


def test_a_named_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="names gone.json, whose ZeRO stage decides") as e:
        read(tmp_path, {"per_device_train_batch_size": 2, "deepspeed": "gone.json"})
    assert e.value.code == "P191" and e.value.help == ("put it beside mine.json",)


def test_programs_with_degrees_of_their_own_are_not_taken_for_it(tmp_path: Path) -> None:
    """GPT-NeoX has DeepSpeed's keys at its top, and stages and tensor ranks of its own."""
    with pytest.raises(PlanError) as e:
        read(tmp_path, STAGE_3 | {"pipe-parallel-size": 2, "model-parallel-size": 2})
    assert e.value.code == "P190"


NEMO = """
name: megatron_llama
trainer: {devices: 8, num_nodes: 1}
model:
  micro_batch_size: 1
  global_batch_size: 16
  tensor_model_parallel_size: 2
  encoder_seq_length: 4096
  activations_checkpoint_granularity: full
  activations_checkpoint_method: uniform
  activations_checkpoint_num_layers: 1
  optim: {name: distributed_fused_adam, lr: 1e-4}
"""


def test_nemos_optimizer_and_recompute_are_read(tmp_path: Path) -> None:
    (tmp_path / "nemo.yaml").write_text(NEMO)
    found = read_configuration(tmp_path / "nemo.yaml", 8)
    s = found.settings
    assert found.launcher == "megatron"
    assert (s.zero_stage, s.recompute, s.length) == (1, "block", 4096)
    assert "model.optim.name" not in found.unread and "name" in found.unread
    (tmp_path / "nemo.yaml").write_text(NEMO.replace("distributed_fused_adam", "fused_adam"))
    assert read_configuration(tmp_path / "nemo.yaml", 8).settings.zero_stage == 0
