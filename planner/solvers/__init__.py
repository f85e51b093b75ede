"""Solvers of `planner.solvers.problem.Problem`: one file each, all with `solve(problem, budget,
start=None) -> Solution`.

Modules are imported when first used, so that planning with one solver does not load another's
dependencies.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from planner.solvers.problem import Budget, Problem, Solution, Solver

SOLVERS: Mapping[str, str] = {
    "auto": "planner.solvers.auto",
    "dp": "planner.solvers.dp",
    "recursive": "planner.solvers.recursive",
    "ilp": "planner.solvers.ilp",
}
"""Name -> module."""


def solver(name: str) -> Solver:
    """The solve function of a solver by name. KeyError when there is none."""
    return importlib.import_module(SOLVERS[name]).solve


def solve(
    problem: Problem,
    name: str = "auto",
    budget: Budget | None = None,
    start: tuple[int, ...] | None = None,
) -> Solution:
    """Solve with the named solver ("auto": the portfolio)."""
    return solver(name)(problem, budget or Budget(), start)


__all__ = ["SOLVERS", "solve", "solver"]
