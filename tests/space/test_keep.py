"""What a recomputed block runs again when results of collectives are kept: the search charges what
the price charges."""

from __future__ import annotations

import numpy as np

from benchmarks.hand_plans import megatron
from planner.execution.plan import Plan
from planner.machine.mesh_choices import pinned_mesh
from planner.pricing.plan_price import price_plan
from planner.pricing.step_time import recomputed_nodes
from planner.search.build_request import make_request
from planner.search.search import Search
from planner.solvers.problem import evaluate
from planner.space.assemble import assemble
from planner.space.techniques import Techniques
from planner.workload.model import Model, Workload


def test_products_behind_a_kept_sum_are_not_charged_again() -> None:
    """Megatron's plan of a transformer: the row-parallel product of attention leaves a sum, whose
    result is kept."""
    request = make_request(devices=8, hardware=None, topology=None)
    search = Search(Model.open("zoo:gpt-tiny", Workload("train", batch=32), 8), request)
    mesh = pinned_mesh(request.topology, {"data": 2, "model": 4})
    space = search.space(mesh, 1, None)
    assert space is not None
    splits = megatron(space.base.graph, mesh.shape)
    rows = [v.splits.index(splits[v.name]) if v.kind == "op" else -1 for v in space.variables]
    behind = [
        (v, k)
        for v, k in zip(space.variables, rows, strict=True)
        if v.kind == "op"
        and space.base.rules[v.node].result(0, v.splits[k], ("data", "model")).partial
        and v.node in space.base.recomputed
    ]
    assert behind and all(
        v.costs.not_recomputed_s[k] == v.costs.forward_s[k] > 0 for v, k in behind
    )
    plan = Plan(
        mesh.shape,
        splits,
        zero_stage=0,
        zero_axes=("data", "model"),
        recompute="block-keep",
        microbatches=1,
        repeated_blocks=space.base.runs,
    )
    _, flow, runs = price_plan(space.base, plan, space.pricer)
    again = {space.base.shared[i] for i in recomputed_nodes(flow, runs)}
    assert again and not again & {v.node for v, _ in behind}


def test_keeping_more_is_charged_less() -> None:
    request = make_request(devices=8, hardware=None, topology=None)
    search = Search(Model.open("zoo:gpt-tiny", Workload("train", batch=32), 8), request)
    space = search.space(pinned_mesh(request.topology, {"data": 2, "model": 4}), 1, None)
    assert space is not None
    none, keep, again = (
        assemble(space, Techniques(0, how, 1), None) for how in ("none", "block-keep", "block")
    )
    choice = tuple(int(np.argmax(v.costs.not_recomputed_s)) for v in space.variables)
    costs = [evaluate(p, choice).cost for p in (none, keep, again)]
    assert costs[0] <= costs[1] < costs[2]
