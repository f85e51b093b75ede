"""What a search proves holds for every plan of its space: those of spaces drawn at random, and those that pins find."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import planner
from planner.api import make_request
from planner.assemble import PICO, Techniques, assemble, seconds_of, usage_of
from planner.evaluate import price_plan
from planner.flow import Plan
from planner.meshes import pinned_mesh
from planner.model import Model, Workload
from planner.problem import FORBIDDEN, Budget, evaluate
from planner.relax import Relaxed
from planner.search import Search
from planner.solvers import solve
from planner.space import splits_of
from planner.surely import charges, spare, surely

ROUNDED = 1e-6


@pytest.mark.parametrize("source, shape", [("zoo:gpt-tiny,layers=4", {"data": 2, "model": 4}), ("zoo:llama3-8b,layers=4", {"data": 2, "model": 4}), ("zoo:t5-tiny", {"data": 8}),
                                           ("zoo:gpt-tiny,layers=4", {"stage": 2, "model": 4})])  # fmt: skip
def test_plans_that_keep_results_of_collectives_are_not_below_their_bound(source: str, shape: dict[str, int]) -> None:
    """Drawn by random prices of options and of conversions, so that many collectives lie before what the backward pass reads. Some spare what is charged; none more."""
    search = Search(Model.open(source, Workload("train", batch=32), 8), make_request(devices=8, hardware=None, topology=None))
    mesh, rng, below = pinned_mesh(search.request.topology, shape), random.Random(2), 0
    micro = 4 if mesh.stages > 1 else 2
    space, at = search.space(mesh, micro, None), Techniques(1, "block-keep", micro)
    assert space is not None
    problem, plain, kept = assemble(space, at, None), assemble(space, replace(at, recompute="none"), None), spare(space, at)
    first = np.concatenate([[0], np.cumsum([len(v.kept_bytes) for v in space.variables])[:-1]])
    least = surely(Relaxed(space), at, np.inf)
    for _ in range(10):
        drawn = tuple(np.where(c >= FORBIDDEN, c, c + np.array([rng.randrange(int(np.median(c)) + 10**6) for _ in c])) for c in problem.cost)
        tables = tuple(np.where(t >= FORBIDDEN, t, t * 0) for t in problem.tables)
        choice = solve(replace(problem, cost=drawn, tables=tables), "dp", Budget(work=2_000_000)).choice
        plan = Plan(mesh.shape, splits_of(space, choice), 1, mesh.zero_axes, "block-keep", micro, space.base.runs, schedule="1f1b" if mesh.stages > 1 else "")
        cost = price_plan(space.base, plan, search.pricer(mesh))[0]
        again = cost.recompute_time_s * (1 + (cost.bubble_time_s / cost.compute_time_s if cost.compute_time_s else 0.0))
        charged = float(charges(space, at)[first + np.array(choice)].sum())
        more, size = kept.spared(0.0)
        assert again >= (charged - more) * (1 - ROUNDED) and least <= cost.step_time_s
        assert size >= 0 and evaluate(plain, choice).cost <= evaluate(problem, choice).cost
        below += again < float((seconds_of(space, at) - seconds_of(space, replace(at, recompute="none")))[first + np.array(choice)].sum()) * (1 - ROUNDED)
        price = more / size / 2 if size else 0.0  # of a byte: what is spared there costs what is kept for it
        assert kept.spared(price)[0] <= more and usage_of(space, at, choice)[0] > 0
    assert below or source == "zoo:t5-tiny"


PINS: list[str] = ["bucket=1MiB", "bucket=1GiB", "micro=1", "micro=4", "recompute=block", "recompute=block-keep", "recompute=none", "zero=0", "zero=2", "zero=3", "tp=2", "pp=2"]


@pytest.mark.parametrize("source, machine, batch", [
    ("zoo:gpt-tiny,layers=4", {"devices": 8}, 32), ("zoo:llama3-8b,layers=2", {"devices": 16, "memory_limit_bytes": 12 * 2**30}, 32),
    ("zoo:resnet18", {"devices": 4, "hardware": "tpu-v5e"}, 64), ("zoo:mixtral-tiny", {"devices": 8, "hardware": "tpu-v4"}, 16),
    ("zoo:mlp-tiny", {"devices": 4, "hardware": "cpu"}, 16),
])  # fmt: skip
def test_no_pin_finds_a_plan_below_the_bound(source: str, machine: dict[str, Any], batch: int) -> None:
    """One level, two and a torus; what contradicts a machine is refused."""
    open_ = planner.plan(source, batch=batch, baselines=False, **machine)
    found = 0
    for pin in PINS:
        try:
            pinned = planner.plan(source, batch=batch, baselines=False, remedies=False, pins=pin, **machine)
        except planner.PlanError:
            continue
        found += 1
        assert pinned.costs["step_time_s"] >= open_.solver["bound_s"] * (1 - ROUNDED), pin
        assert pinned.solver["bound_s"] <= pinned.costs["step_time_s"]
    assert found >= 6 and open_.solver["bound_s"] > 0
    assert open_.costs["step_time_s"] * PICO > 0
