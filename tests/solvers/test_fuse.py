"""Fusion: the best mixture of choices is what trying every mixture finds, it fits, and it is never
worse than the first."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.solvers import auto
from planner.solvers.bounds.messages import SETTLED, Incumbent, Rising
from planner.solvers.neighbourhood.fuse import MOST, Pool, fused
from planner.solvers.problem import Budget, Problem, Solution, evaluate
from tests.solvers.problems import random_problem


def exactly(problem: Problem, start: tuple[int, ...] | None) -> Solution:
    return auto._reduced(problem, Budget(work=10**9), start, None, exact=True)


def choices_of(problem: Problem, seed: int, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.array([rng.integers(len(c)) for c in problem.cost]) for _ in range(count)]


@given(st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_the_best_mixture_is_found(seed: int) -> None:
    problem = random_problem(seed, nodes=6)
    choices = sorted(choices_of(problem, seed, 3), key=lambda x: not evaluate(problem, x).feasible)
    before = evaluate(problem, choices[0])
    if not before.feasible:
        return
    x, cost = fused(problem, choices, exactly)
    priced = [
        evaluate(problem, np.array(mixed))
        for mixed in product(*(sorted(set(column)) for column in np.array(choices).T.tolist()))
    ]
    assert cost == min(p.cost for p in priced if p.feasible) <= before.cost
    assert evaluate(problem, x).feasible and evaluate(problem, x).cost == cost


def roomy() -> tuple[Problem, list[np.ndarray]]:
    """A problem with many random choices that fit, and some of them."""
    for seed in range(100):
        problem = replace(random_problem(seed, nodes=9), usage_limit=None)
        fitting = [x for x in choices_of(problem, seed, 1000) if evaluate(problem, x).feasible]
        if len(fitting) > MOST + 4 and len(problem.edges) > 9:
            return problem, fitting[: MOST + 4]
    raise AssertionError("none")


def test_a_pool_keeps_the_last_and_updates_the_incumbent() -> None:
    problem, fitting = roomy()
    pool, best = Pool(problem, exactly), Incumbent()
    pool.fuse(best)
    assert best.x is None, "nothing to mix with"
    for x in fitting:
        pool.add(x)
    assert len(pool.choices) == MOST and (pool.choices[-1] == fitting[-1]).all()
    best.x, best.cost = fitting[0], float(evaluate(problem, fitting[0]).cost)
    before = best.cost
    pool.fuse(best)
    assert (
        best.cost
        == evaluate(problem, best.x).cost
        <= min(before, *(evaluate(problem, x).cost for x in pool.choices))
    )


def test_an_interruption_is_handed_on() -> None:
    problem, choices = roomy()
    with pytest.raises(KeyboardInterrupt):
        fused(
            problem,
            choices,
            lambda rest, start: Solution(
                tuple([0] * len(rest.cost)), "feasible", None, stopped="interrupt"
            ),
        )


def test_a_bound_that_stands_still_is_not_raised_further(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("planner.solvers.bounds.messages.time.monotonic", lambda: now)
    best = Incumbent(cost=100.0, bound=50.0)
    rising = Rising(best, 100.0)
    ended = []
    for turn in range(4000):
        now = turn / 20
        best.bound = min(90.0, 50.0 + now)
        ended.append(not rising.worthwhile())
    first = ended.index(True) / 20
    assert 40 < first < 80, "it rises until 40, and is then watched for a fifth of its time"
    now, slow = 0.0, Rising(Incumbent(cost=100.0, bound=50.0), 100.0)
    for turn in range(SETTLED - 1):
        now = turn / 8
        assert slow.worthwhile(), "slow passes have told nothing yet"
    now += 1.0
    assert not slow.worthwhile()
    now = 0.0
    unknown = Rising(Incumbent(bound=50.0), 100.0)
    for turn in range(100):
        now = float(turn)
        assert unknown.worthwhile(), "without a choice there is no gap to judge by"
    now = 101.0
    assert not unknown.worthwhile()
