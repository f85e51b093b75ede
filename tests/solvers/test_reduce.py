"""Every reduction keeps the optimum, and the way back prices every choice the same."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from planner.solvers.problem import FORBIDDEN, Problem, evaluate
from planner.solvers.reduce import pool
from planner.solvers.reduce.reductions import reduce
from tests.solvers.problems import brute_force, random_problem


def structured(seed: int) -> Problem:
    """A random problem with what the reductions look for: functional and separable edges, shared
    usage, dominated strategies."""
    rng = np.random.default_rng(seed)
    problem = random_problem(seed, nodes=int(rng.integers(3, 7)), span=30)
    sizes = [len(c) for c in problem.cost]
    edges, tables = problem.edges.tolist(), list(problem.tables)
    for _ in range(int(rng.integers(1, 4))):
        u, v = (int(i) for i in rng.choice(len(sizes), 2, replace=False))
        kind = rng.integers(3)
        if kind == 0:  # v is a function of u
            table = np.full((sizes[u], sizes[v]), FORBIDDEN)
            table[np.arange(sizes[u]), rng.integers(0, sizes[v], sizes[u])] = rng.integers(0, 30)
        elif kind == 1:
            table = rng.integers(0, 30, (sizes[u], 1)) + rng.integers(0, 30, sizes[v])
        else:
            table = np.zeros((sizes[u], sizes[v]), np.int64)
        edges.append([u, v])
        tables.append(table)
    usage = tuple(np.full(len(u), u[0]) if rng.random() < 0.4 else u for u in problem.live_usage)
    return replace(
        problem,
        edges=np.array(edges, np.int64),
        edge_table=np.arange(len(edges)),
        tables=tuple(tables),
        live_usage=usage,
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seeds", [60, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dominance", [True, False])
@pytest.mark.parametrize("make", [random_problem, structured])
def test_the_optimum_survives(make, dominance: bool, seeds: int) -> None:  # type: ignore[no-untyped-def]
    smaller = 0
    for seed in range(seeds):
        problem = make(seed)
        best = brute_force(problem)
        reduction = reduce(problem, dominance=dominance)
        if reduction.problem is None:
            assert best is None, seed
            continue
        assert brute_force(reduction.problem) == best, seed
        smaller += len(reduction.problem.cost) < len(problem.cost)
        for x in itertools.islice(
            itertools.product(*[range(len(c)) for c in reduction.problem.cost]), 200
        ):
            ours, judged = evaluate(reduction.problem, x), evaluate(problem, reduction.expand(x))
            assert ours.feasible == judged.feasible, seed
            if ours.feasible:
                assert ours.cost == judged.cost, seed
    assert smaller > seeds / 2


@pytest.mark.parametrize("seeds", [6, pytest.param(150, marks=pytest.mark.slow)])
def test_large_tables_are_answered_for_as_small_ones(
    monkeypatch: pytest.MonkeyPatch, seeds: int
) -> None:
    def found(seed: int) -> tuple[bytes, ...] | None:
        left = reduce(random_problem(seed, nodes=9)).problem
        return (
            None
            if left is None
            else tuple(
                a.tobytes() for a in (*left.cost, left.edges, *left.tables, *left.live_usage)
            )
        )

    small = [found(seed) for seed in range(seeds)]
    asked: list[int] = []
    lead = pool.Pool.lead

    def watched(self: pool.Pool, t: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        asked.append(t)
        return lead(self, t, a, b)

    monkeypatch.setattr(pool.Pool, "lead", watched)
    monkeypatch.setattr(pool, "SMALL", 0)
    assert [found(seed) for seed in range(seeds)] == small
    assert len(asked) > 2 * seeds / 3  # pairs that the bound alone did not decide


def test_a_chain_of_functions_becomes_one_node() -> None:
    rng = np.random.default_rng(0)
    tables = []
    for _ in range(5):
        table = np.full((4, 4), FORBIDDEN)
        table[np.arange(4), rng.permutation(4)] = 3
        tables.append(table)
    usage = tuple(rng.integers(1, 9, 4) for _ in range(6))
    ends = np.array([(i, i + 1) if i % 2 else (i + 1, i) for i in range(5)])
    span = np.array([(i, i + 3) for i in range(6)])
    problem = Problem(
        tuple(rng.integers(0, 9, 4) for _ in range(6)),
        ends,
        np.arange(5),
        tuple(tables),
        np.arange(6),
        span,
        usage,
        14,
    )
    reduction = reduce(problem)
    assert reduction.problem is None or len(reduction.problem.cost) <= 2
    assert (brute_force(problem) is None) == (
        reduction.problem is None or brute_force(reduction.problem) is None
    )


def test_a_known_choice_can_be_carried_over() -> None:
    carried = 0
    for seed in range(60):
        problem = random_problem(seed)
        reduction = reduce(problem)
        if reduction.problem is None:
            continue
        for x in itertools.islice(
            itertools.product(*[range(len(c)) for c in reduction.problem.cost]), 20
        ):
            back = reduction.restrict(reduction.expand(x))
            assert back is not None and back.tolist() == list(x)
            carried += 1
    assert carried > 60
