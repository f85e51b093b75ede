"""Programs in bfloat16 alone: parameters and the optimizer's state have two bytes an element, and
there are no master copies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.precisions import TOLERANCES, begun, errors, program_of
from costmodels.optimizers import OPTIMIZERS
from costmodels.precision import load_recipe
from planner.verify.numerics import load_program, seeded_values
from planner.verify.predicted import predict
from tests.emit.shared import STEPS

MLP = "zoo:mlp-tiny"


@pytest.mark.parametrize(("source", "pins", "backend"), STEPS)
def test_a_step_is_that_of_float32_but_for_rounding(source: str, pins: str, backend: str) -> None:
    found = errors(source, pins, backend, "bf16-pure")
    assert found.within(TOLERANCES["bf16-pure"]), found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bytes_of_arrays_are_those_that_are_priced(optimizer: str) -> None:
    """Of what is kept from step to step, of the price, and of what `plan verify` predicts."""
    import planner
    from planner.emit.from_strategy import program

    strategy = planner.plan(
        MLP,
        devices=8,
        batch=16,
        precision="bf16-pure",
        optimizer=optimizer,
        pins="dp=2,tp=4,zero=1,micro=1",
        baselines=False,
    )
    graph, made = strategy.graph, program(strategy, MLP)
    assert graph is not None
    recipe = load_recipe("bf16-pure", optimizer)
    assert (recipe.parameter_bytes, recipe.gradient_bytes) == (2, 2)
    assert recipe.state_bytes == 2 * OPTIMIZERS[optimizer].moments
    m = load_program(made, compute="bfloat16")
    params, state, frozen = begun(m, made, seeded_values(graph, {}))
    arrays = [*params.values(), *(x for row in state.values() for x in row)]
    assert {str(a.dtype) for a in arrays} == {"bfloat16"}
    held = sum(a.addressable_shards[0].data.nbytes for a in [*arrays, *frozen.values()])
    predicted = predict(
        graph,
        strategy.plan,
        workload="train",
        optimizer=optimizer,
        compute="bfloat16",
        precision="bf16-pure",
    )
    count = 4 * OPTIMIZERS[optimizer].counts_steps
    assert held == predicted.argument_bytes - predicted.batch_bytes - count
    memory = strategy.costs["memory_breakdown_bytes"]
    assert memory["optimizer"] == sum(
        x.addressable_shards[0].data.nbytes for row in state.values() for x in row
    )


def test_in_float32_it_keeps_float32() -> None:
    strategy, made = program_of(MLP, "dp=8,micro=1", "shard_map", "bf16-pure")
    assert strategy.graph is not None
    m = load_program(made)
    params, state, _ = begun(m, made, seeded_values(strategy.graph, {}))
    assert {str(x.dtype) for row in state.values() for x in (*row, *params.values())} == {"float32"}
    assert all(len(row) == 2 for row in state.values())


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """main(precision, options...): runs a program's main."""

    def run(precision: str, *options: str) -> None:
        _, made = program_of(MLP, "dp=8,micro=1", "shard_map", precision)
        m = load_program(made, compute=load_recipe(precision).between)
        m.__dict__["__file__"] = str(tmp_path / "m.py")
        monkeypatch.setattr(sys, "argv", ["m.py", "--lr", "1e-2", *options])
        m.main()

    return run


@pytest.mark.slow
def test_a_resumed_run_is_that_which_was_not_interrupted(main: Any, tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    saved = ["--checkpoints", str(tmp_path / "ck")]
    main("bf16-pure", "--steps", "4", "--export", str(tmp_path / "one"))
    main("bf16-pure", "--steps", "2", *saved)
    main("bf16-pure", "--steps", "4", *saved, "--export", str(tmp_path / "two"))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.slow
def test_checkpoints_go_to_and_from_master_copies(
    main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What bfloat16 has is exact as float32; the way back rounds."""
    pytest.importorskip("orbax.checkpoint")
    for first, then in (("bf16-pure", "bf16-mixed"), ("bf16-mixed", "bf16-pure")):
        folder = tmp_path / first
        main(first, "--steps", "2", "--checkpoints", str(folder))
        main(then, "--steps", "3", "--checkpoints", str(folder), "--export", str(folder) + ".out")
    raws = [np.fromfile(f"{tmp_path / p}.out", np.uint8) for p in ("bf16-pure", "bf16-mixed")]
    assert len(raws[0]) == len(raws[1])
    assert capsys.readouterr().out.count("going on after step 1") == 2
