"""Every exact solver against brute force on random small problems."""

from __future__ import annotations

import pytest

from planner.problem import Budget, Problem, evaluate
from planner.solvers import solve

from .problems import brute_force, random_problem

CASES = [random_problem(seed) for seed in range(200)]
BEST = [brute_force(problem) for problem in CASES]


def test_the_cases_are_what_they_should_be() -> None:
    free = [solve(Problem(p.cost, p.edges, p.edge_table, p.tables), "dp") for p in CASES]
    binding = sum(b is not None and s.choice != () and evaluate(p, s.choice).peak_usage > p.usage_limit
                  for p, b, s in zip(CASES, BEST, free, strict=True) if p.usage_limit is not None)  # fmt: skip
    infeasible = sum(b is None for b in BEST)
    assert infeasible >= 20
    assert binding + infeasible >= 100


@pytest.mark.parametrize("name", ["dp", "ilp"])
def test_exact_solvers_find_the_optimum(name: str) -> None:
    for seed, (problem, best) in enumerate(zip(CASES, BEST, strict=True)):
        found = solve(problem, name, Budget())
        if best is None:
            assert found.status == "infeasible", (name, seed, found)
            continue
        assert found.status == "optimal", (name, seed, found, best)
        verdict = evaluate(problem, found.choice)
        assert verdict.feasible and verdict.cost == best, (name, seed, verdict, best)
        assert found.bound is not None and found.bound <= best * (1 + 1e-9)
        assert best - found.bound <= 1e-6 * max(1, best)
