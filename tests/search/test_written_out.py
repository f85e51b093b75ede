"""Blocks that are written out: where the search has them so, and what it proves of both ways."""

from __future__ import annotations

from typing import Any

import pytest

import planner
from planner.errors import PlanError
from planner.execution.techniques import LOOPED, RECOMPUTE, WRITTEN_OUT
from planner.pricing import written_out
from planner.search.build_request import make_request
from planner.search.search import Search
from planner.verify import worker
from planner.workload.model import Model, Workload

GPT = "zoo:gpt2-small,layers=4"


def step(pins: str | None = None, source: str = GPT, **options: Any) -> planner.Strategy:
    options = {"devices": 8, "batch": 64, "hardware": "h100-sxm", **options}
    return planner.plan(source, pins=pins, baselines=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "options"),
    [
        (GPT, {}),
        pytest.param("zoo:resnet50", {}, marks=pytest.mark.slow),
        pytest.param(
            "zoo:llama3-8b,layers=8", {"memory_limit_bytes": 24 * 2**30}, marks=pytest.mark.slow
        ),
        pytest.param(
            "zoo:llama3-8b,layers=8", {"memory_limit_bytes": 14 * 2**30}, marks=pytest.mark.slow
        ),
    ],
)
def test_neither_way_is_faster_than_the_free_plan_nor_below_its_bound(
    source: str, options: dict[str, Any]
) -> None:
    free = step(None, source, **options)
    ways = [step("blocks=looped", source, **options)]
    if free.chosen.blocks == "written-out":
        ways.append(step("blocks=written-out", source, **options))
        assert free.cost.step_time_s < ways[0].cost.step_time_s
    for way in ways:
        assert free.cost.step_time_s <= way.cost.step_time_s * (1 + 5e-3)
        assert free.solver["bound_s"] <= way.cost.step_time_s * (1 + 1e-9)


@pytest.mark.slow
def test_long_programs_and_other_devices_have_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    assert step().chosen.blocks == "written-out"
    assert step(hardware="cpu").chosen.blocks == "looped"
    assert step(hardware="tpu-v5e").chosen.blocks == "looped"
    monkeypatch.setattr("planner.search.request.LONGEST", 10)
    assert step().chosen.blocks == "looped"
    assert step("blocks=written-out").chosen.blocks == "written-out"
    assert written_out.LONGEST > 10


def test_forward_passes_copy_no_weights() -> None:
    """Nothing is cut out of stacks, and no more memory is taken."""
    free, looped = (step(pins, workload="infer") for pins in (None, "blocks=looped"))
    assert free.chosen.blocks == "written-out" and looped.chosen.blocks == "looped"
    assert "loop_copy_time_s" not in free.costs and looped.costs["loop_copy_time_s"] > 0
    assert free.cost.step_time_s < looped.cost.step_time_s
    assert free.solver["bound_s"] <= free.cost.step_time_s * (1 + 1e-9)
    peaks = [s.costs["memory_per_device_bytes"] for s in (free, looped)]
    assert peaks[0] <= peaks[1] * 1.01
    assert step(source="zoo:llama-tiny", workload="infer", hardware="cpu").chosen.blocks == "looped"


@pytest.mark.parametrize(
    ("source", "workload"),
    [
        pytest.param("zoo:gpt-tiny", "infer", marks=pytest.mark.slow),
        pytest.param("zoo:bert-tiny,layers=3", "infer", marks=pytest.mark.slow),
        pytest.param("zoo:t5-tiny", "infer", marks=pytest.mark.slow),
        pytest.param("zoo:gpt-tiny", "train", marks=pytest.mark.slow),
        pytest.param("zoo:bert-tiny,layers=3", "train", marks=pytest.mark.slow),
    ],
)
def test_what_enters_a_block_is_converted_for_each_repeat(source: str, workload: str) -> None:
    """One function is called for every repeat: the first does not read what was made whole before
    it, though a graph without blocks would let it."""
    pins = "dp=2,tp=4,blocks=written-out"
    options = {"hardware": "cpu", "batch": 16, "precision": "fp32", "workload": workload}
    report = worker.verify(step(pins, source, **options), source, run=False)
    assert report.ok, report.verdicts


@pytest.mark.one_in(4)
@pytest.mark.parametrize("other", ["recompute=block", "zero=3", "pp=2", "copies=2"])
def test_what_only_loops_do_contradicts(other: str) -> None:
    assert step(other).chosen.blocks == "looped"
    with pytest.raises(PlanError, match="written-out") as refused:
        step(f"{other},blocks=written-out")
    assert refused.value.code in ("P020", "P022", "P024")


def test_ways_searched_alone_leave_out_what_both_have_had() -> None:
    """Stages, stage 3 and recompute loop in any case: no plan of one way alone has them where the
    way is written out, and stages and policies of names are not searched again where it is not."""
    model = Model.open(GPT, Workload("train", batch=64), 8)
    search = Search(model, make_request(devices=8, hardware="h100-sxm", topology=None))
    base, mesh = search.base(1), search.offered.meshes()[0]
    assert base is not None and search.offered.saves_by_name(base, mesh)
    assert any(m.stages > 1 for m in search.offered.meshes())
    for way, recomputes in ((WRITTEN_OUT, ("none",)), (LOOPED, RECOMPUTE)):
        alone = search.with_blocks(way)
        offered = alone.offered
        assert offered.recomputes(base, mesh) == recomputes
        assert (3 in offered.levels()) == (way == LOOPED)
        assert not offered.saves_by_name(base, mesh)
        assert all(m.stages == 1 for m in offered.meshes())


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("pins", ["zero=3", "pp=2", "copies=2"])
def test_baselines_that_keep_no_pin_may_have_their_blocks_written_out(pins: str) -> None:
    """The pin leaves loops alone to the plan; data parallelism is as fast as without the pin."""
    options = {"devices": 8, "batch": 64, "hardware": "h100-sxm"}
    free, pinned = (planner.plan(GPT, pins=p, **options) for p in (None, pins))
    assert free.chosen.blocks == "written-out" and pinned.chosen.blocks == "looped"
    for name in ("data_parallel", "megatron"):
        assert pinned.baselines[name] == free.baselines[name]


def test_baselines_beside_pinned_widths_of_stages() -> None:
    """They keep no pin of stages, so none of the widths of these either."""
    pins = "pp=3,dp=2,widths=2+1,micro=4"
    made = planner.plan("zoo:resnet-tiny", devices=6, batch=96, pins=pins)
    assert made.chosen.stage_widths == (2, 1)
    assert "data_parallel" in made.baselines
