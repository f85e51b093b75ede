"""What named values cost in a space is what the whole plan's price has of them, or no more."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from planner.execution.save_policies import PRESETS, saving
from planner.pricing.plan_price import price_plan
from planner.solvers import solve
from planner.solvers.problem import FORBIDDEN, Budget, evaluate
from planner.space.assemble import PICO, assemble, usage_of
from planner.space.families import batch_only, restrict
from planner.space.techniques import Techniques
from tests.space.test_space import MODELS, plan_of, space_of


@pytest.mark.parametrize(("source", "batch"), MODELS[:2])
@pytest.mark.parametrize("preset", ["save_qkv_proj", "minimal_with_context"])
def test_data_parallel_problems_are_the_price_of_the_plan(
    source: str, batch: int, preset: str
) -> None:
    """Nothing named is converted then: seconds to the rounding to whole picoseconds, and bytes."""
    space = space_of(source, batch, model=1)
    own = restrict(space, batch_only(space.base, space.pricer.mesh.shape))
    assert own is not None
    at = Techniques(1, saving(PRESETS[preset]))
    problem = assemble(own, at, None)
    choice = solve(problem, "dp", Budget()).choice
    cost, _, _ = price_plan(own.base, plan_of(own, choice, at), own.pricer)
    held, working = usage_of(own, at, choice)
    assert evaluate(problem, choice).cost / PICO == pytest.approx(cost.step_time_s, rel=1e-6)
    assert held == pytest.approx(cost.memory.total - cost.memory.temporary, rel=1e-6, abs=8)
    assert working == pytest.approx(cost.memory.temporary, rel=1e-6, abs=8)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("source", "batch"), MODELS[:2])
def test_problems_count_no_more_of_names_than_plans_take(source: str, batch: int) -> None:
    """Beside the same splits under recompute=block, plans drawn at random."""
    space, rng, block = space_of(source, batch), np.random.default_rng(3), Techniques(1, "block")
    problem = assemble(space, block, None)
    for preset in random.Random(4).choices(sorted(set(PRESETS) - {"full"}), k=8):
        costs = tuple(
            np.where(c >= FORBIDDEN, c, rng.integers(0, 10**9, len(c))) for c in problem.cost
        )
        drawn = replace(problem, cost=costs)
        choice = solve(drawn, "dp", Budget(work=2_000_000)).choice
        found = []
        for at in (block, Techniques(1, saving(PRESETS[preset]))):
            cost, _, _ = price_plan(space.base, plan_of(space, choice, at), space.pricer)
            found.append((usage_of(space, at, choice)[0], cost.memory.activations))
        (counted, saved), (counted_named, saved_named) = found
        assert 0 < counted_named - counted <= saved_named - saved + 8
