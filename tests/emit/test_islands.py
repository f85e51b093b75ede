"""Programs whose islands run microbatches in unequal shares equal the unsharded program."""

from __future__ import annotations

import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import planner
from planner.cli import main
from planner.emit.from_strategy import program
from planner.emit.program import emit
from planner.errors import PlanError
from planner.execution.plan import Plan
from planner.graph.ir import Graph
from planner.verify.numerics import compare, load_program, seeded_values
from planner.whatif.reprice import own_model

GPT = "zoo:gpt-tiny"
PINS = (
    "dp=4,zero=0,micro=4",
    "dp=4,zero=1,micro=4,recompute=block",
    "dp=2,tp=2,zero=2,micro=4",
    pytest.param("dp=4,zero=3,micro=4", marks=pytest.mark.slow),
)


def with_islands(pins: str, source: str = GPT, **options: object) -> tuple[Graph, Plan]:
    """The graph and plan of four devices, on two islands of them: three microbatches, and one."""
    made = planner.plan(
        source,
        devices=4,
        hardware="cpu",
        batch=16,
        pins=pins,
        baselines=False,
        **options,  # type: ignore[arg-type]
    )
    graph = own_model(made, source).graph(4)
    plan = made.plan_for(graph)
    return graph, replace(plan, mesh=(("island", 2), *plan.mesh), islands=(3, 1))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("pins", PINS)
def test_a_step_equals_the_unsharded_one(pins: str) -> None:
    graph, plan = with_islands(pins)
    errors, _ = compare(
        graph,
        plan,
        workload="train",
        backend="shard_map",
        values=seeded_values(graph, {}),
        step=True,
    )
    assert errors.compared and errors.outputs < 1e-5 and errors.gradients < 1e-4
    assert errors.update is not None and errors.update < 1e-4


@pytest.mark.slow
def test_rows_that_count_are_weighed_over_all_islands() -> None:
    """Labels to ignore are spread unevenly: the mean is over all rows that count, of all islands."""
    graph, plan = with_islands("dp=4,zero=1,micro=4", ignore_index=-100)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 512, (6, 4, 16)).astype(np.int32)
    for i in range(6):
        labels[i, :, : 2 * i] = -100
    errors, _ = compare(
        graph,
        plan,
        workload="train",
        backend="shard_map",
        values=seeded_values(graph, {}),
        batch={"labels": labels},
    )
    assert errors.outputs < 1e-5 and errors.gradients < 1e-4


@pytest.fixture(scope="module")
def module() -> types.ModuleType:
    graph, plan = with_islands("dp=4,zero=1,micro=4")
    return load_program(emit(graph, plan, workload="train"))


def test_places_that_no_island_runs_read_no_sample_of_their_own(module: types.ModuleType) -> None:
    """Every sample of a step stands once among those that are run, in order."""
    places = module.sample_places(list(range(100, 116)), (6, 4))
    run = np.concatenate([places[:3], places[3:4]]).ravel()
    assert run.tolist() == list(range(100, 116))
    assert (places[4:] == 100).all()
    assert module.leading((6, 4, 16)) == 2 and module.leading((6, 16)) == 0


def test_data_is_read_by_every_island(module: types.ModuleType, tmp_path: Path) -> None:
    rows = {
        name: np.arange(64 * 16, dtype=np.int32).reshape(64, 16) % 512
        for name in ("input_ids", "labels")
    }
    for name, values in rows.items():
        np.save(tmp_path / f"{name}.npy", values)
    data = module.open_data(str(tmp_path))
    batch = module.next_batch(data, 0, 0, module.make_mesh())
    numbers = module.sample_numbers(data, 0, 0)
    got = np.asarray(batch["input_ids"])
    run = np.concatenate([got[:3], got[3:4]]).reshape(16, 16)
    assert (run == rows["input_ids"][numbers]).all()


def test_jit_programs_are_refused() -> None:
    graph, plan = with_islands("dp=4,zero=1,micro=4")
    with pytest.raises(PlanError, match="unequal shares of islands are written for shard_map"):
        emit(graph, plan, workload="train", backend="jit")


@pytest.mark.slow
def test_a_planned_cluster_is_written_and_holds_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a plan of two kinds of device: numbers equal, and what is sent and multiplied is what
    was predicted, to the byte."""
    slow = tmp_path / "slow.toml"
    text = (Path(planner.__file__).parents[1] / "costmodels/hardware/devices/cpu.toml").read_text()
    slow.write_text(
        text.replace('name = "cpu"', 'name = "slow"').replace("50 GFLOP/s", "20 GFLOP/s")
    )
    made = planner.plan(GPT, hardware=f"4xcpu+4x{slow}", batch=512, baselines=False)
    turns = made.techniques["islands"]
    assert turns[0] > turns[1]
    assert f"ISLANDS = {tuple(turns)}" in program(made, GPT).text
    made.save(tmp_path / "p.json")
    assert main(["verify", str(tmp_path / "p.json"), "--model", GPT]) == 0
    said = capsys.readouterr().out
    assert "traffic: exact" in said and "FLOPs: exact" in said and "all-reduce over island" in said
