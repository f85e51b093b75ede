"""`auto`: elimination where the width allows, the integer program for what it leaves open."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Literal

from planner.problem import Budget, Problem, Solution, evaluate
from planner.solvers import dp, ilp


def solve(problem: Problem, budget: Budget, start: tuple[int, ...] | None = None) -> Solution:
    """The best of the portfolio within the budget."""
    began = time.monotonic()
    found = dp.solve(problem, budget, start)
    if found.status in ("optimal", "infeasible") or found.stopped:
        return replace(found, solver="auto")
    left = budget if budget.time_limit_s is None else replace(budget, time_limit_s=max(0.1, began + budget.time_limit_s - time.monotonic()))
    second = ilp.solve(problem, left, found.choice or start)
    return replace(_merge(problem, found, second), solver="auto")


def _merge(problem: Problem, a: Solution, b: Solution) -> Solution:
    """The cheaper choice with the higher bound."""
    if b.status == "infeasible" or not a.choice:
        return b
    if not b.choice:
        return a
    best = min((a, b), key=lambda s: evaluate(problem, s.choice).cost)
    cost = evaluate(problem, best.choice).cost
    bound = max((s.bound for s in (a, b) if s.bound is not None), default=None)
    optimal = bound is not None and cost - bound <= 1e-6 * max(1.0, abs(cost))
    status: Literal["optimal", "feasible"] = "optimal" if optimal else "feasible"
    return replace(best, bound=bound, status=status, stopped="" if optimal else b.stopped, work=a.work + b.work)
