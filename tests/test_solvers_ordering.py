"""Nodes in order of time: the same problem, whatever its nodes are numbered."""

from __future__ import annotations

import numpy as np
import pytest

from planner.problem import evaluate
from planner.solvers.ordering import by_time, ordered
from tests.problems import random_problem


@pytest.mark.parametrize("seed", range(30))
def test_a_problem_in_another_order_costs_and_uses_the_same(seed: int) -> None:
    problem, rng = random_problem(seed), np.random.default_rng(seed)
    for order in (by_time(problem), rng.permutation(len(problem.cost))):
        other = ordered(problem, order)
        x = np.array([rng.integers(len(c)) for c in problem.cost])
        assert evaluate(other, tuple(x[order].tolist())) == evaluate(problem, tuple(x.tolist()))


@pytest.mark.parametrize("seed", range(30))
def test_nodes_stand_as_they_are_live_however_they_were_numbered(seed: int) -> None:
    problem = random_problem(seed)
    first = {k: int(problem.live_span[problem.live_node == k, 0].min()) for k in problem.live_node.tolist()}
    for given in (problem, ordered(problem, np.random.default_rng(seed).permutation(len(problem.cost)))):
        times = {k: int(given.live_span[given.live_node == k, 0].min()) for k in given.live_node.tolist()}
        found = by_time(given)
        assert sorted(found.tolist()) == list(range(len(problem.cost)))
        assert [times[k] for k in found.tolist() if k in times] == sorted(first.values())


def test_what_is_never_live_stands_beside_its_earliest_neighbour() -> None:
    problem = random_problem(3, nodes=6)
    assert len(problem.cost) == 6
    chain = ordered(problem, np.arange(6))
    late = by_time(type(problem)(chain.cost, np.array([[5, 4], [4, 3]]), np.array([0, 0]), chain.tables, np.array([3, 0]), np.array([[7, 9], [2, 4]]),
                                 (chain.cost[3], chain.cost[0]), 10**9))  # fmt: skip
    assert late.tolist() == [0, 3, 4, 5, 1, 2]  # 4 and 5 are as early as 3; nothing leads to 1 and 2
