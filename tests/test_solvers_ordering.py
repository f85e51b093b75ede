"""Nodes in order of time: the same problem, whatever its nodes are numbered."""

from __future__ import annotations

import numpy as np
import pytest

from planner.problem import Problem, evaluate
from planner.solvers.ordering import IN_TIME, by_time, ordered
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
    problem = random_problem(seed, nodes=20)
    first = {k: int(problem.live_span[problem.live_node == k, 0].min()) for k in problem.live_node.tolist()}
    shuffled = ordered(problem, np.random.default_rng(seed).permutation(20))
    times = {k: int(shuffled.live_span[shuffled.live_node == k, 0].min()) for k in shuffled.live_node.tolist()}
    found = by_time(shuffled)
    given, sorted_out = [times[k] for k in sorted(times)], [times[k] for k in found.tolist() if k in times]
    assert sorted(found.tolist()) == list(range(20))
    if np.mean(np.diff(given) >= 0) < IN_TIME:
        assert sorted_out == sorted(first.values())
    else:
        assert found.tolist() == list(range(20))


def test_what_is_never_live_stands_beside_its_earliest_neighbour() -> None:
    """Nodes 3, 2 and 0 are live from 2, 4 and 7 on, against their order; 5 and 4 hang on 3, and nothing leads to 1."""
    one = np.array([0, 0])
    problem = Problem((one,) * 6, np.array([[5, 4], [4, 3]]), np.array([0, 0]), (np.zeros((2, 2), np.int64),), np.array([0, 2, 3]),
                      np.array([[7, 9], [4, 6], [2, 4]]), (one, one, one), 1)  # fmt: skip
    assert by_time(problem).tolist() == [3, 4, 5, 2, 0, 1]
    assert by_time(ordered(problem, np.array([3, 4, 5, 2, 0, 1]))).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_problem_that_stands_almost_in_order_stays_as_it_is() -> None:
    one = np.array([0, 0])
    spans = np.array([[0, 9], [1, 9], [2, 9], [1, 9], [4, 9]])
    problem = Problem((one,) * 5, np.zeros((0, 2), np.int64), np.zeros(0, np.int64), (), np.arange(5), spans, (one,) * 5, 1)
    assert by_time(problem).tolist() == [0, 1, 2, 3, 4]
