"""Optimizer sharding of weights that the group does not divide: padded, the same result, the bytes
that are predicted."""

from __future__ import annotations

from math import prod

import pytest

import models_zoo
from benchmarks.compiled_truth import truth
from benchmarks.hand_plans import data_parallel
from planner.execution.layout_flow import cut_layout, derive, weight_plan
from planner.execution.plan import Plan, WeightPlan
from planner.graph.ir import Graph, Tensor
from planner.graph.repeats import find_runs, hoist
from planner.reader import read_model
from planner.sharding.layout import Layout, local_shape
from planner.verify.numerics import compare, seeded_values
from planner.workload.loss import add_loss

MESH = (("data", 8),)


def odd_model() -> Graph:
    """Every dim but the batch leaves a remainder when it is divided by 8; the last has two columns,
    too few to cut 8 ways."""
    return hoist(
        add_loss(read_model(models_zoo.build("mlp-tiny,layers=6,hidden=30,in=13,out=2"), batch=32))
    )


@pytest.mark.parametrize(
    ("shape", "dim", "piece"),
    [
        ((30, 13), 0, (4, 13)),
        ((13, 15), 1, (13, 2)),
        ((3, 64), 1, (3, 8)),
        ((2, 3), -1, (2, 3)),
        ((5,), 0, (1,)),
        ((4,), -1, (4,)),
    ],
)
def test_the_dim_of_least_padding_is_cut(
    shape: tuple[int, ...], dim: int, piece: tuple[int, ...]
) -> None:
    graph = Graph(
        "one",
        (),
        {"w": Tensor("w", shape, "float32", "weight")},
        (),
        (),
        weights={"w": None},
        labels={"w": "w"},
    )  # type: ignore[dict-item]
    grad_partial = Layout(((),) * len(shape), grad_partial=("data",))
    kept = weight_plan(
        graph, "w", [grad_partial], Plan(MESH, {}, zero_stage=1, zero_axes=("data",)), True
    )
    assert kept.zero_dim == dim and local_shape(shape, cut_layout(kept), dict(MESH)) == piece


def test_a_dim_that_the_split_cuts_is_not_padded() -> None:
    mesh = (("data", 4), ("model", 2))
    graph = Graph(
        "one",
        (),
        {"w": Tensor("w", (30, 2), "float32", "weight")},
        (),
        (),
        weights={"w": None},
        labels={"w": "w"},
    )  # type: ignore[dict-item]
    kept = weight_plan(
        graph,
        "w",
        [Layout((("model",), ()), grad_partial=("data",))],
        Plan(mesh, {}, zero_stage=1, zero_axes=("data",)),
        True,
    )
    assert kept == WeightPlan(Layout((("model",), ())), grad_partial=("data",))


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("zero", "micro"), [(1, 1), (2, 2), (3, 1), (3, 2)])
@pytest.mark.parametrize("unroll", [False, True])
def test_programs_are_right_and_move_what_is_predicted(zero: int, micro: int, unroll: bool) -> None:
    graph = odd_model()
    plan = Plan(
        MESH,
        data_parallel(graph, MESH),
        zero_stage=zero,
        zero_axes=("data",),
        microbatches=micro,
        repeated_blocks=find_runs(graph),
    )
    flow = derive(graph, plan, training=True)
    cut = [n for n, w in flow.weights.items() if w.zero_stage]
    assert any(graph.tensors[n].shape == (30, 30) for n in cut) and all(
        prod(graph.tensors[n].shape) <= 2 for n in flow.weights if n not in cut
    )
    if not unroll:
        result, _ = compare(
            graph,
            plan,
            workload="train",
            backend="shard_map",
            values=seeded_values(graph, {}),
            step=True,
        )
        assert (
            result.outputs < 1e-5 and result.gradients < 1e-5 and (result.update or 0.0) < 1e-5
        ), result
    assert truth(graph, plan, unroll=unroll).differences() == ()
