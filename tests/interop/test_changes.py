"""`plan tune`'s changes: a file with them says the settings that were priced, in whatever way it
said its own."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.analysis.facts import GraphFacts
from planner.errors import PlanError
from planner.interop.changes import Rewrite, changes
from planner.interop.keys import Keys, read_keys
from planner.interop.launchers import maxtext, megatron, torchtitan
from planner.interop.price import facts_of, forms_of, read_configuration
from planner.interop.settings import Facts, Settings
from planner.machine.topology import for_devices
from planner.workload.open import open_model

SCRIPT = """torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 \\
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --sequence-parallel \\
  --micro-batch-size 1 --global-batch-size 256 --seq-length 4096 --use-distributed-optimizer \\
  --bf16 {more}
"""
FACTS = Facts("m", for_devices("h100-sxm", 32), 32)


def rewritten(
    path: Path, launcher: Any, devices: int = 32, **better: Any
) -> tuple[list[str], list[str], Settings]:
    """(lines, keys that go, better settings) of a file."""
    found = read_configuration(path, devices, launcher.NAME, domain=8)
    best = replace(found.settings, **better)
    write = forms_of(launcher).get(path.suffix, launcher.write)
    after = path.with_name(f"after{path.suffix}")
    after.write_text(write(best, FACTS))

    def read(keys: Keys) -> Settings:
        settings: Settings = launcher.read(keys, devices, 8)[0]
        return settings

    of = Rewrite(
        found.settings,
        best,
        write(found.settings, FACTS),
        after.read_text(),
        read_keys(after, (), lambda table: True)[0],
        read,
        getattr(launcher, "STAGE_KEYS", ()),
    )
    return *changes(found.keys, of), best


@pytest.mark.parametrize(
    ("more", "better", "goes"),
    [
        ("", {"tensor": 4, "data": 2}, ()),
        ("--num-layers-per-virtual-pipeline-stage 2", {"stage": 8, "data": 2}, ("layers-per",)),
        ("--num-virtual-stages-per-pipeline-rank 4", {"virtual_stages": 2}, ()),
        (
            "--num-layers-per-virtual-pipeline-stage 4 --recompute-activations",
            {"recompute": "block", "virtual_stages": 4},
            ("layers-per",),
        ),
        (
            "--decoder-first-pipeline-num-layers 5 --decoder-last-pipeline-num-layers 9",
            {"stage": 2, "data": 8, "microbatches": 32},
            ("first", "last"),
        ),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            {"recompute": "none"},
            ("granularity", "method", "num-layers"),
        ),
        ("--no-such-thing 3", {"positions": False}, ("sequence-parallel",)),
    ],
)
def test_a_script_with_its_changes_says_what_was_priced(
    more: str, better: dict[str, Any], goes: tuple[str, ...], tmp_path: Path
) -> None:
    """Keys behind a "-" are taken out of the script, arguments behind a "+" written at its end."""
    path = tmp_path / "mine.sh"
    path.write_text(SCRIPT.format(more=more))
    lines, gone, best = rewritten(path, megatron, **better)
    assert len(gone) == len(goes)
    assert all(any(part in key for key in gone) for part in goes)
    words = path.read_text().replace("\\\n", " ").split()
    for line in lines:
        if line[0] == "-":
            at = words.index(line[2:].split()[0])
            end = next((k for k in range(at + 1, len(words)) if words[k][:2] == "--"), len(words))
            del words[at:end]
    words += [word for line in lines if line[0] == "+" for word in line[2:].split()]
    path.write_text(" ".join(words) + "\n")
    assert read_configuration(path, 32, domain=8).settings == best


def test_a_key_that_has_its_value_is_not_named_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.sh"
    path.write_text(SCRIPT.format(more=""))
    lines, gone, _ = rewritten(path, megatron, tensor=4, data=2, microbatches=128)
    assert [line.split() for line in lines] == [
        ["-", "--tensor-model-parallel-size", "2"],
        ["+", "--tensor-model-parallel-size", "4"],
    ]
    assert gone == []


@pytest.mark.parametrize(
    ("launcher", "text", "better"),
    [
        (
            maxtext,
            "per_device_batch_size: 1\nici_fsdp_parallelism: 8\ndcn_data_parallelism: 4\n"
            "remat_policy: full\nmax_target_length: 4096\n",
            {"recompute": "none", "microbatches": 2, "batch": 64},
        ),
        (
            maxtext,
            "per_device_batch_size: 2\nici_tensor_parallelism: 8\ndcn_fsdp_parallelism: 4\n"
            "dcn_data_parallelism: 1\n"
            "remat_policy: minimal\nmax_target_length: 4096\n",
            {"recompute": "block", "tensor": 4, "data": 8},
        ),
        (
            megatron,
            "model:\n  tensor_model_parallel_size: 8\n  pipeline_model_parallel_size: 2\n"
            "  virtual_pipeline_model_parallel_size: 4\n  sequence_parallel: true\n"
            "train:\n  micro_batch_size: 1\n  global_batch_size: 64\n",
            {"tensor": 4, "data": 4, "virtual_stages": 2, "microbatches": 16},
        ),
    ],
)
def test_a_table_with_its_changes_says_what_was_priced(
    launcher: Any, text: str, better: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    lines, gone, best = rewritten(path, launcher, **better)
    table = yaml.safe_load(text)
    for line in lines:
        key = line[2:].partition(":")[0].strip()
        for part in (table, *(t for t in table.values() if isinstance(t, dict))):
            part.pop(key, None)
    table |= {
        key: value
        for line in lines
        if line[0] == "+"
        for key, value in yaml.safe_load(line[2:].strip()).items()
    }
    path.write_text(yaml.safe_dump(table))
    assert read_configuration(path, 32, launcher.NAME, domain=8).settings == best, (lines, gone)


def test_chunks_said_twice_are_refused_as_megatron_does(tmp_path: Path) -> None:
    path = tmp_path / "both.sh"
    more = "--num-layers-per-virtual-pipeline-stage 2 --num-virtual-stages-per-pipeline-rank 4"
    path.write_text(SCRIPT.format(more=more))
    with pytest.raises(PlanError, match="which Megatron refuses") as e:
        read_configuration(path, 32)
    assert e.value.code == "P191"


def test_torchtitan_says_layers_of_stages_in_its_own_keys() -> None:
    assert set(torchtitan.STAGE_KEYS) >= set(torchtitan.WEIGHED)


FEWER: dict[int, list[int | None]] = {24: [None, None], 26: [4, 6]}  # and eight on either between


@pytest.mark.parametrize("layers", FEWER)
def test_layers_that_alternate_are_all_laid_out(layers: int) -> None:
    """A block of windows and whole attention is two layers: the second of each was put before the
    first block, on the first stage."""
    model = f"zoo:llama-tiny,layers={layers},window=32,full_every=2,seq=64"
    machine = for_devices("h100-sxm", 16)
    base = GraphFacts.of(open_model(model, 16).graph(1), training=True)
    facts = facts_of(model, machine, base)
    assert (facts.all_layers, facts.beside) == (layers, 0)
    s = Settings(64, stage=4, data=4, microbatches=8, zero_stage=1, schedule="1f1b")
    chunks = facts.chunks(4, 1)
    assert sum(chunks) == layers and max(chunks) - min(chunks) <= 2
    text = megatron.write(s, facts)
    ends = [re.search(f"{key}: (.+)", text) for key in megatron.ENDS]
    assert [found and int(found[1]) for found in ends] == FEWER[layers]
    assert ("pipeline_parallel_layers_per_stage = 6" in torchtitan.write_toml(s, facts)) == (
        layers == 24
    )
