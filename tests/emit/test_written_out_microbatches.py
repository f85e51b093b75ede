"""Which programs make all gradients of a block before the one below goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

import planner
from planner.cli import main

PINS = "dp=8,micro=2,blocks=written-out,recompute=none"
WAITS = "at_once(lambda *operands: block"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("model", "pins", "lora", "waits"),
    [
        ("bert-tiny,layers=3", PINS, None, True),
        ("bert-tiny,layers=3", PINS.replace("micro=2", "micro=1"), None, True),
        ("gpt-tiny,layers=3", PINS.replace("micro=2", "micro=1"), None, True),
        ("bert-tiny,layers=3", PINS.replace("blocks=written-out", "copies=2"), None, False),
        ("bert-tiny,layers=3", PINS, "rank=4,targets=*.query.weight", False),
        ("gpt-tiny,layers=3", PINS, None, False),
    ],
)
def test_blocks_whose_weights_all_train_wait(
    model: str, pins: str, lora: str | None, waits: bool
) -> None:
    """Products of decoders add to sums of microbatches; weights that do not train would get
    gradients; two microbatches at a time run each beside the other's collectives. Plans of these
    have loops, which `plan emit --unroll` writes out."""
    made = planner.plan(f"zoo:{model}", devices=8, batch=32, pins=pins, lora=lora, baselines=False)
    assert (WAITS in planner.emit(made, f"zoo:{model}", unroll=True)) is waits


def test_gradients_that_are_equal_everywhere_keep_their_type(tmp_path: Path) -> None:
    """Those of a state space's A, which weights alone follow from, are summed inside the block."""
    pins = "dp=2,micro=1,blocks=written-out"
    made = planner.plan("zoo:ssm-tiny", devices=2, batch=4, pins=pins, baselines=False)
    assert WAITS in planner.emit(made, "zoo:ssm-tiny")
    made.save(tmp_path / "a.json")
    assert main(["verify", str(tmp_path / "a.json"), "--model", "zoo:ssm-tiny"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert-tiny", "vit-tiny", "t5-tiny"])
def test_such_programs_are_verified(model: str, tmp_path: Path) -> None:
    """Numbers, traffic and FLOPs are those of the plan."""
    pins = "dp=4,tp=2,micro=2,blocks=written-out,recompute=none"
    made = planner.plan(f"zoo:{model}", devices=8, batch=32, pins=pins, baselines=False)
    assert WAITS in planner.emit(made, f"zoo:{model}")
    made.save(tmp_path / "a.json")
    assert main(["verify", str(tmp_path / "a.json"), "--model", f"zoo:{model}"]) == 0
