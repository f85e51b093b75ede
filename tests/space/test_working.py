"""What lives only for a while, in the problem: each operator's working set at its time, and at
ZeRO stage 3 what is gathered of a block."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.execution.plan import Plan
from planner.machine.mesh_choices import pinned_mesh
from planner.pricing.plan_price import price_plan
from planner.search.build_request import make_request
from planner.search.search import Search
from planner.solvers import solve
from planner.solvers.problem import Budget, evaluate
from planner.space.assemble import assemble, has_liveness, least_usage, least_working, usage_of
from planner.space.build import splits_of
from planner.space.families import restrict
from planner.space.techniques import Techniques
from planner.space.variables import Space
from planner.workload.model import Model, Workload

CASES = [
    ("zoo:gpt-tiny,layers=4", {"data": 2, "model": 4}),
    ("zoo:llama-tiny,layers=4", {"data": 4, "model": 2}),
    ("zoo:t5-tiny", {"data": 4, "model": 2}),
    ("zoo:mixtral-tiny", {"data": 2, "model": 4}),
]
DRAWN, ROUNDED = 12, 8.0
"""Choices of a case; bytes that a plan's parts are rounded down by together."""


def opened(source: str, sizes: dict[str, int]) -> tuple[Search, Space]:
    search = Search(
        Model.open(source, Workload("train", batch=32), 8),
        make_request(devices=8, hardware=None, topology=None),
    )
    space = search.space(pinned_mesh(search.request.topology, sizes), 2, None)
    assert space is not None
    return search, space


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("source", "sizes"), CASES)
def test_the_peak_over_moments_is_that_of_what_is_kept_and_the_largest_working_set(
    source: str, sizes: dict[str, int]
) -> None:
    """Exactly where ZeRO stage 3 counts no gradients to come, elsewhere no more; and never less than
    with the least that any operator needs."""
    _, space = opened(source, sizes)
    rng = np.random.default_rng(0)
    for at in (
        Techniques(zero, recompute, 2) for zero in (0, 1, 3) for recompute in ("none", "block")
    ):
        assert has_liveness(space)
        problem, plain = assemble(space, at, 10**15, liveness=True), assemble(space, at, 10**15)
        for _ in range(DRAWN):
            choice = tuple(int(rng.integers(len(c))) for c in problem.cost)
            peak, usage = evaluate(problem, choice).peak_usage, sum(usage_of(space, at, choice))
            assert peak <= usage * (1 + 1e-6) + 64 and peak >= evaluate(plain, choice).peak_usage
            assert at.zero_stage < 3 or peak == pytest.approx(usage, rel=1e-6, abs=64)
            assert usage >= evaluate(plain, choice).peak_usage + least_working(space, at) - 64


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("source", "sizes"), CASES)
def test_what_level_3_gathers_is_counted_and_no_more_than_plans_hold(
    source: str, sizes: dict[str, int]
) -> None:
    """Drawn plans that are recomputed need at least the bytes of their problem, and where the
    heaviest layer is a block's nothing else."""
    search, space = opened(source, sizes)
    rng, at, mesh, shares = (
        np.random.default_rng(1),
        Techniques(3, "block", 2),
        pinned_mesh(search.request.topology, sizes),
        list[float](),
    )
    problem = assemble(space, at, None)
    for _ in range(DRAWN):
        costs = tuple(c + rng.integers(0, 10**10, len(c)) for c in problem.cost)
        choice = solve(replace(problem, cost=costs), "dp", Budget(work=2_000_000)).choice
        splits = splits_of(space, choice)
        cost, _, runs = price_plan(
            space.base,
            Plan(
                mesh.shape,
                splits,
                zero_stage=3,
                zero_axes=mesh.zero_axes,
                recompute="block",
                microbatches=2,
                repeated_blocks=space.base.runs,
            ),
            search.pricer(mesh),
        )
        own = restrict(
            space, {i: (splits[space.base.graph.nodes[i].id],) for i in space.base.times}
        )  # whatever its hubs
        if own is not None and len(runs) == len(space.base.runs):  # else blocks are written out
            shares.append((least_usage(own, at) - ROUNDED) / cost.memory.total)
    assert shares and 0.9 < max(shares) <= 1, shares
