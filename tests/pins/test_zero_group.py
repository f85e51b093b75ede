"""Optimizer sharding inside groups of neighbouring devices (HSDP): meshes, pins, files, programs
and what the search offers."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import planner
from planner.errors import PlanError
from planner.machine.mesh_choices import divisors, grouped, pinned_mesh
from planner.machine.topology import for_devices
from planner.pins.pins import parse_pins
from planner.strategy.strategy import Strategy
from planner.verify import worker

EAGER = str(Path(__file__).parents[2] / "benchmarks" / "eager.toml")
GPT = "zoo:gpt-tiny,layers=4,seq=32"


@given(st.sampled_from((8, 16, 64)), st.data())
def test_groups_are_neighbours(devices: int, data: st.DataObject) -> None:
    """A group is the innermost axes of a stage; sizes of the axes outside and of the stages stay,
    nothing is lost."""
    topology = for_devices("h100-sxm", devices)
    stages = data.draw(st.sampled_from(divisors(devices)[:2]))
    model = data.draw(st.sampled_from([d for d in divisors(devices // stages) if d <= 8]))
    mesh = pinned_mesh(
        topology, {"stage": stages, "data": devices // stages // model, "model": model}
    )
    n = data.draw(
        st.sampled_from([d for d in divisors(devices // stages) if d % model == 0 and d > 1])
    )
    found = grouped(topology, mesh, n)
    assert found is not None
    sizes = dict(found.shape)
    inside = [a.size for a in found.axes if a.name in found.group]
    outside = sizes["stage"] * (sizes["data"] if "data" not in found.group else 1)
    assert (
        prod(inside) == n
        and outside * n == devices
        and sizes["model"] == model
        and found.zero_axes == found.group
    )
    assert list(found.group) == [a.name for a in found.inner if a.size > 1][-len(found.group) :]
    assert grouped(topology, mesh, 3 * devices) is None and grouped(topology, mesh, 1) is None


def plan(pins: str, **options: object) -> Strategy:
    return planner.plan(
        GPT, devices=8, batch=16, pins=parse_pins(pins), baselines=False, hardware=EAGER, **options
    )  # type: ignore[arg-type]


@pytest.mark.slow
def test_programs_reduce_inside_a_group_and_sum_what_is_left_between_groups() -> None:
    strategy = plan("dp=8,zero=3,zero_group=4,micro=1")
    assert (
        strategy.mesh_shape == (("data", 2), ("fsdp", 4))
        and strategy.techniques["zero_group"] == ["fsdp"]
        and strategy.plan.zero_axes == ("fsdp",)
    )
    report = worker.verify(strategy, GPT)
    assert report.ok and not report.findings(), report.text()
    seen = {f.what: f.compiled for f in report.figures}
    assert {
        "reduce-scatter over fsdp",
        "all-gather over fsdp",
        "all-reduce over data",
    } <= seen.keys()
    assert not any(
        what.startswith(("reduce-scatter", "all-gather")) and what != f"{what.split()[0]} over fsdp"
        for what in seen
    )


def test_a_group_holds_more_and_reduces_nearer_than_all_replicas() -> None:
    whole, group, none = (plan(f"dp=8,micro=1,zero={z}") for z in ("1", "1,zero_group=4", "0"))
    state = [s.cost.memory_breakdown_bytes["optimizer"] for s in (whole, group, none)]
    assert state[0] < state[1] < state[2]
    assert plan("dp=8,micro=1,zero=1,zero_group=8") == whole


def test_a_file_says_its_group(tmp_path: Path) -> None:
    strategy = plan("dp=4,tp=2,zero=2,zero_group=4,micro=2")
    strategy.save(tmp_path / "s.json")
    back = Strategy.load(tmp_path / "s.json")
    assert (
        strategy.graph is not None
        and back.plan_for(strategy.graph) == strategy.plan
        and back.techniques["zero_group"] == ["data2", "tensor"]
    )
    assert "ZeRO-2 over data2+tensor" in str(strategy)


@pytest.mark.parametrize("pins", ["dp=8,zero=1,zero_group=3", "pp=4,dp=2,zero=1,zero_group=4"])
def test_groups_that_cannot_be_are_refused(pins: str) -> None:
    with pytest.raises(PlanError) as e:
        plan(pins)
    assert e.value.code == "P022" and "zero_group" in str(e.value)


@pytest.mark.slow
def test_the_search_offers_a_group_a_node() -> None:
    """Around a plan over several nodes that cuts the optimizer's state."""
    from tests.execution.test_pipeline import staged_search

    search, _ = staged_search("zoo:gpt2-small", 32, 64, 2, parse_pins("recompute=none"))
    best = search.run().best
    assert best is not None and best.plan.zero_stage
    offered = [m for m in search.offered.finer(best) if m.group]
    assert offered and all(
        {a.name: a.size for a in m.axes}["data"] * 8 == 32 // m.stages for m in offered
    )
