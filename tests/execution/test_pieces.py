"""jit programs: which nodes run under shard_map, that programs stay equal, and (slow) that the GPU
compiler then sends what the plan says."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import models_zoo
import planner
from benchmarks.hand_plans import megatron, mlp_megatron
from planner.emit.program import emit
from planner.errors import PlanError
from planner.execution.plan import Plan
from planner.graph.ir import Graph
from planner.graph.repeats import hoist
from planner.pins.pins import parse_pins
from planner.reader import read_model
from planner.sharding.rule import Split
from planner.verify import worker
from planner.verify.numerics import compare, seeded_values
from planner.verify.targets import parse_target, require
from planner.workload.loss import add_loss

FLAT = (("data", 2), ("model", 4))
CUBE = (("pod", 2), ("data", 2), ("model", 2))
HYBRID = Plan(CUBE, {}, zero_stage=1, zero_axes=("data",))
"""The batch over pod and data, optimizer state over data alone."""


def model(spec: str) -> Graph:
    return hoist(add_loss(read_model(models_zoo.build(spec), batch=16)))


def hybrid(spec: str) -> tuple[Graph, Plan]:
    graph = model(spec)
    flat = (("data", 4), ("model", 2))
    splits = mlp_megatron(graph, flat) if "mlp" in spec else megatron(graph, flat)
    wide = {
        n: Split.of(
            {
                f: [b for a in axes for b in (("pod", "data") if a == "data" else (a,))]
                for f, axes in s.pairs
            }
        )
        for n, s in splits.items()
    }
    return graph, replace(HYBRID, splits=wide)


def sequence(spec: str) -> tuple[Graph, Plan]:
    graph = model(spec)
    return graph, Plan(
        FLAT, megatron(graph, FLAT, sequence=True), zero_stage=1, zero_axes=("data",)
    )


def pieces(graph: Graph, plan: Plan) -> list[str]:
    """The statements of a jit program that run under shard_map."""
    text = emit(graph, plan, workload="train", backend="jit", unroll=True).text
    return [line.strip() for line in text.splitlines() if re.match(r"\s+\w+ = by_piece\(", line)]


def test_lookups_and_pending_products_scatter_where_every_reader_wants_pieces() -> None:
    found = pieces(*sequence("zoo:llama-tiny,layers=1"))
    assert [line.rpartition("  # ")[2].split(" ")[0].rpartition("/")[2] for line in found] == [
        "Gather",
        "MatMul",
        "MatMul",
    ]
    assert all("lax.psum_scatter(" in line and 'P("data", "model"))(' in line for line in found)
    assert "take_shard(" in found[0] and "o_proj" in found[1] and "down_proj" in found[2]


def test_sums_stay_whole_where_readers_differ() -> None:
    graph, plan = hybrid("zoo:gpt-tiny,layers=1")
    found = pieces(graph, replace(plan, zero_stage=0))
    assert all("lax.psum(" in line and "scatter" not in line for line in found)
    assert len(found) == 3  # the lookup, and the rows of attention and of the feed-forward layer


def test_gradients_over_some_of_the_axes_are_scattered_before_they_are_summed() -> None:
    found = pieces(*hybrid("zoo:gpt-tiny,layers=1"))
    assert (
        sum('scattered_first(x0, "data", "pod", 0)' in line for line in found) == 1
    )  # the table, looked up
    assert (
        sum('scattered_first(x1, "data", "pod", 0)' in line for line in found) == 3
    )  # its other use, and the two products cut by rows
    assert len(found) == 4
    assert not any(
        "scattered_first" in line for line in pieces(*sequence("zoo:gpt-tiny,layers=1"))
    )  # one axis: the partitioner does


@pytest.mark.parametrize(
    ("build", "spec"), [(sequence, "zoo:llama-tiny,layers=1"), (hybrid, "zoo:gpt-tiny,layers=1")]
)
def test_programs_stay_equal(build: object, spec: str) -> None:
    graph, plan = build(spec)  # type: ignore[operator]
    found, _ = compare(
        graph, plan, workload="train", backend="jit", values=seeded_values(graph, {})
    )
    assert found.gradients < 1e-4 and found.loss == pytest.approx(found.reference_loss, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pins", ["dp=4,tp=2,zero=1,micro=1", "dp=4,tp=2,zero=1,zero_group=2,micro=1"]
)
def test_the_gpu_compiler_sends_what_is_planned(pins: str) -> None:
    try:
        require(parse_target("gpu:h100", 8))
    except PlanError as e:
        pytest.skip(e.what)
    strategy = planner.plan(
        "zoo:gpt-tiny,layers=1", devices=8, batch=16, pins=parse_pins(pins), baselines=False
    )
    report = worker.verify(strategy, "zoo:gpt-tiny,layers=1", target="gpu:h100", backend="jit")
    sent = next(f for f in report.figures if f.what == "all collectives")
    assert sent.predicted and sent.distance <= 0.01 * sent.predicted, report.text()
