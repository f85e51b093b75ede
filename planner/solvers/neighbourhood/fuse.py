"""Fusion: the best mixture of choices that were found apart.

Where every node may take the option that any of some choices has, and no other, few differ: exact
reduction fixes most of them, and what is left has small tables. So the best of all mixtures that
fit, which takes each part from whichever choice does it best, comes from an exact solve (`auto`'s,
without its search). It is never worse than the best of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.solvers.bounds.messages import Incumbent
from planner.solvers.problem import Problem, Solution, evaluate
from planner.solvers.reduce.reductions import reduce

MOST = 16
"""Choices that are looked at together: those found last, and the best."""
Solve = Callable[[Problem, tuple[int, ...] | None], Solution]
"""Solves a problem of few options from a choice to start from."""


@dataclass
class Pool:
    """Choices of one problem that searches ended with."""

    problem: Problem
    solve: Solve
    choices: list[np.ndarray] = field(default_factory=list)
    took_s: float = 0.0
    """The longest that fusing took."""

    def add(self, x: np.ndarray) -> None:
        """Keep a choice that fits."""
        self.choices = [*self.choices, x.copy()][-MOST:]

    def fuse(self, best: Incumbent) -> None:
        """Update the incumbent by the best mixture of it and what was found."""
        if best.x is None or best.closed:
            return
        began = time.monotonic()
        x, cost = fused(self.problem, [best.x, *self.choices], self.solve)
        self.took_s = max(self.took_s, time.monotonic() - began)
        best.offer(x, cost)


def fused(
    problem: Problem, choices: Sequence[np.ndarray], solve: Solve
) -> tuple[np.ndarray, float]:
    """The best mixture of choices of which the first fits, and its cost: that one where none is
    better. [nodes]"""
    first = choices[0]
    cost = float(evaluate(problem, first).cost)
    kept = [np.unique(column) for column in np.array(choices).T]
    if all(len(k) == 1 for k in kept):
        return first, cost
    reduction = reduce(problem, only=kept)
    if reduction.problem is None:  # it cannot be while the first fits
        return first, cost
    start = reduction.restrict(first)
    solution = solve(
        reduction.problem, None if start is None else tuple(np.asarray(start).tolist())
    )
    if solution.stopped == "interrupt":
        raise KeyboardInterrupt
    if not solution.choice:
        return first, cost
    x = np.asarray(reduction.expand(solution.choice), np.int64)
    result = evaluate(problem, x)
    return (x, float(result.cost)) if result.feasible and result.cost < cost else (first, cost)
