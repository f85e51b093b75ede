"""Gated units: which nodes are made again in the backward pass, that nothing keeps what they make,
that conversions between them are counted as often as they run, and that programs are right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

import planner
from planner.analysis.facts import GraphFacts
from planner.emit.program import emit
from planner.execution import collectives
from planner.execution.gated_units import gated_units
from planner.execution.layout_flow import derive
from planner.execution.loops import repeated_blocks
from planner.execution.plan import Plan
from planner.graph.ir import Graph, Node
from planner.graph.repeats import find_runs
from planner.ops.lookup import gradient_tensors
from planner.pins.pins import parse_pins
from planner.pricing.kernels import kernel_times
from planner.sharding.rule import Split
from planner.verify.numerics import compare, seeded_values
from planner.whatif.reprice import open_recorded

LLAMA = "zoo:llama-tiny,layers=3"
APART: Mapping[str, Any] = {
    "*/mlp/act_fn/Mul": {"split": {"d0": ["data"], "d2": ["tensor"]}},
    "*/mlp/Mul": {"split": {"d0": ["data"], "d2": ["tensor"]}},
    "*/mlp/down_proj/MatMul": {"split": {"b0": ["data"], "m": ["tensor"]}},
}
"""Between the gate's product and what reads it lies an all-to-all."""


def planned(
    pins: str, source: str = LLAMA, nodes: Mapping[str, Any] | None = None
) -> tuple[Graph, Plan]:
    pinned = replace(parse_pins(pins), nodes=nodes or {})
    found = planner.plan(
        source,
        devices=8,
        batch=8,
        hardware="cpu",
        precision="fp32",
        pins=pinned,
        baselines=False,
        cache=None,
    )
    graph = open_recorded(found, source).graph(1)
    return graph, found.plan_for(graph)


@pytest.fixture(scope="module")
def llama() -> Graph:
    return planned("dp=8")[0]


def test_a_swiglu_is_made_again_for_what_reads_it(llama: Graph) -> None:
    grad, runs = gradient_tensors(llama), find_runs(llama)
    units = gated_units(llama, grad, runs)
    ops = [
        ([llama.nodes[i].op for i in inside], llama.nodes[reader].op)
        for reader, inside in units.inside.items()
    ]
    assert ops == [(["Silu", "Mul"], "MatMul")] * 3
    assert len(units.tensors) == 6
    assert not gated_units(llama, frozenset(), runs).inside
    assert not gated_units(llama, grad, ()).inside  # no loop: the compiler chooses


def test_what_others_read_is_kept(llama: Graph) -> None:
    """Where the gate's product has another reader, nothing is inside."""
    grad, runs = gradient_tensors(llama), find_runs(llama)
    product = llama.nodes[max(next(iter(gated_units(llama, grad, runs).inside.values())))]
    (name,) = product.outputs
    nodes = (*llama.nodes, Node("reader", "Neg", (name,), ("negative",), {}))
    tensors = {**llama.tensors, "negative": llama.tensors[name]}
    read = replace(llama, nodes=nodes, tensors=tensors)
    assert len(gated_units(read, grad, runs).inside) == 2


def test_gpt_has_none() -> None:
    graph, _ = planned("dp=8", "zoo:gpt-tiny,layers=3")
    assert not gated_units(graph, gradient_tensors(graph), find_runs(graph)).inside


def test_gate_and_up_are_all_that_is_kept(llama: Graph) -> None:
    base = GraphFacts.of(llama, training=True)
    hidden = max(
        llama.tensors[o].shape[-1]
        for i in base.gated.nodes
        for o in llama.nodes[i].outputs
        if i in base.repeated
    )
    kept = [
        n
        for (i, _), n in base.residuals.items()
        if i in base.repeated and llama.tensors[n].shape[-1] == hidden
    ]
    assert len(kept) == 2 * 3
    assert base.gated.tensors.isdisjoint(base.residuals.values())


def test_what_is_inside_costs_one_more_pass(llama: Graph) -> None:
    from tests.space.test_space import space_of

    space = space_of(LLAMA, 8)
    base, pricer = space.base, space.pricer
    inside = min(base.gated.nodes)
    forward, backward = kernel_times(base, inside, Split(), pricer)
    assert backward == pytest.approx(3 * forward)
    assert inside not in base.recomputed and inside not in base.demanded


@pytest.mark.parametrize("recompute", ["none", "block", "block-keep"])
def test_a_conversion_inside_runs_again(recompute: str) -> None:
    graph, plan = planned(f"dp=4,tp=2,recompute={recompute}", nodes=APART)
    (name,) = {
        graph.nodes[max(inside)].outputs[0]
        for reader, inside in gated_units(
            graph, gradient_tensors(graph), find_runs(graph)
        ).inside.items()
        if reader < min(plan.repeated_blocks)[0] + min(plan.repeated_blocks)[1]
    }
    flow = derive(graph, plan, training=True)
    blocks, _ = repeated_blocks(flow)
    uses = [
        use
        for use in collectives.collectives(flow, tuple(blocks))
        if use.what == graph.labels.get(name, name) and use.kind == "all-to-all"
    ]
    assert {use.phase: use.count for use in uses} == {"forward": 3, "recompute": 3, "backward": 3}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("pins", "backend", "unroll"),
    [
        ("dp=4,tp=2", "shard_map", False),
        ("dp=4,tp=2", "jit", False),
        ("dp=4,tp=2,recompute=block-keep", "shard_map", True),
        ("dp=8,zero=3", "shard_map", False),
    ],
)
def test_programs_are_the_unsharded_one(pins: str, backend: str, unroll: bool) -> None:
    graph, plan = planned(pins, nodes=APART if "tp" in pins else None)
    program = emit(graph, plan, workload="train", backend=backend, unroll=unroll)  # type: ignore[arg-type]
    assert ("made_again(gated" if unroll else "lean(gated") in program.text
    found, _ = compare(
        graph,
        plan,
        workload="train",
        backend=backend,
        values=seeded_values(graph, {}),
        unroll=unroll,
        program=program,
    )
    assert found.outputs < 1e-5 and found.gradients < 1e-4


def test_a_program_that_does_not_train_has_no_such_function(llama: Graph) -> None:
    assert "gated" not in emit(llama, planned("dp=8")[1], workload="infer").text
