"""`dp`: the exact optimum by variable elimination, memory limit included.

1. Eliminate without memory (`elimination`). If the minimiser fits, it is the optimum.
2. Otherwise price the rows (`lagrange`): the best bound L(p), and feasible choices met on the way.
3. Close what is left of the gap by growing labels with Pareto dominance (`labels`): exact, or a smaller proven gap when the
   work runs out.
Where some table would be too large, `minibucket` gives a bound and a decoded choice, and the status is "feasible".

Work unit: one table entry visited.
"""

from __future__ import annotations

import time

import numpy as np

from planner.problem import FORBIDDEN, Budget, Problem, Solution, evaluate
from planner.solvers.elimination import Tree, compile_tree
from planner.solvers.labels import close_gap
from planner.solvers.lagrange import Clock, Dual, cannot_fit, maximise
from planner.solvers.local import polish
from planner.solvers.model import INF_INT, Model, build

DEFAULT_WORK = 2e9
CAPS = (500, 20_000, 400_000)


def solve(problem: Problem, budget: Budget, start: tuple[int, ...] | None = None) -> Solution:
    """Solve exactly where the width allows. See `planner.problem.Solution` for the claims made."""
    deadline = None if budget.time_limit_s is None else time.monotonic() + budget.time_limit_s
    clock = Clock(float(budget.work or DEFAULT_WORK), deadline)
    if not len(problem.cost):
        return Solution((), "optimal", 0.0, "dp")
    return solve_model(problem, build(problem), clock, start)


def solve_model(problem: Problem, model: Model, clock: Clock, start: tuple[int, ...] | None = None) -> Solution:
    """`solve` for a problem whose model is at hand."""
    tree = compile_tree(model, integer=not model.exact)
    if tree is None:
        from planner.solvers.minibucket import bounded

        return bounded(problem, model, clock, start)
    assert model.exact or model.cost_int is not None
    value, x, _ = tree.run(model.cost if model.exact else model.cost_int)  # type: ignore[arg-type]
    clock.spend(tree.entries)
    if value >= (np.inf if model.exact else INF_INT / 2):
        return Solution((), "infeasible", None, "dp", int(clock.work))
    if model.memory is None or model.memory.load(x).max() <= model.memory.limit:
        return _claim(problem, x, float(value), clock)
    return _within_memory(problem, model, tree if model.exact else compile_tree(model), clock, start)


def _within_memory(problem: Problem, model: Model, tree: Tree | None, clock: Clock, start: tuple[int, ...] | None) -> Solution:
    assert tree is not None and model.memory is not None
    if (model.memory.extreme(False) > model.memory.limit).any():
        return Solution((), "infeasible", None, "dp", int(clock.work))
    dual = Dual(model, tree, clock)
    if start is not None:
        given = polish(model, np.asarray(start, np.int64))
        if given is not None:
            dual.offer(given)
    maximise(dual)
    if dual.best is None and cannot_fit(model, tree, clock):
        return Solution((), "infeasible", None, "dp", int(clock.work))
    for cap in CAPS:
        if dual.closed or clock.stopped:
            break
        before = dual.bound
        close_gap(dual, cap, clock)
        if dual.best is None and not clock.stopped and dual.bound == np.inf:
            return Solution((), "infeasible", None, "dp", int(clock.work))
        dual.bound = max(dual.bound, before)
    if dual.best is None:
        return Solution((), "none", dual.bound, "dp", int(clock.work), clock.stopped)  # type: ignore[arg-type]
    return _claim(problem, dual.best, dual.best_cost if dual.closed else dual.bound, clock)


def _claim(problem: Problem, x: np.ndarray, bound: float, clock: Clock) -> Solution:
    """A solution with its exact cost; optimal only when the bound meets it."""
    verdict = evaluate(problem, x)
    assert verdict.feasible and verdict.cost < FORBIDDEN
    gap = (verdict.cost - bound) / max(1.0, abs(verdict.cost))
    optimal = gap <= 1e-6
    stopped = "" if optimal else clock.stopped
    return Solution(tuple(x.tolist()), "optimal" if optimal else "feasible", min(bound, verdict.cost), "dp", int(clock.work), stopped)  # type: ignore[arg-type]
