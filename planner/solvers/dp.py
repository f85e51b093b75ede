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
from dataclasses import dataclass

import numpy as np

from planner.problem import Budget, Problem, Solution, evaluate
from planner.solvers.elimination import Tree, compile_tree
from planner.solvers.labels import close_gap
from planner.solvers.lagrange import Clock, Dual, cannot_fit, maximise
from planner.solvers.local import polish
from planner.solvers.model import INF_INT, Model, build

DEFAULT_WORK = 2e9
CAPS = (500, 20_000, 400_000)


@dataclass(frozen=True)
class Outcome:
    """What a solve of a model found: `choice` None with `infeasible` is a proof, without it nothing was found."""

    choice: np.ndarray | None
    bound: float
    infeasible: bool = False


def solve(problem: Problem, budget: Budget, start: tuple[int, ...] | None = None) -> Solution:
    """Solve exactly where the width allows. See `planner.problem.Solution` for the claims made."""
    clock = clock_of(budget, DEFAULT_WORK)
    if not len(problem.cost):
        return Solution((), "optimal", 0.0, "dp")
    model = build(problem)
    return claim(problem, solve_model(model, clock, start), clock, "dp")


def clock_of(budget: Budget, work: float) -> Clock:
    """A running clock for this budget; `work` where it names none."""
    return Clock(float(budget.work or work), None if budget.time_limit_s is None else time.monotonic() + budget.time_limit_s)


def solve_model(model: Model, clock: Clock, start: tuple[int, ...] | np.ndarray | None = None, caps: tuple[int, ...] = CAPS,
                tree: Tree | None = None) -> Outcome:  # fmt: skip
    """Optimum of a model, or the best choice and bound within the clock's limits. tree: the model's elimination where it is compiled already."""
    tree = tree or compile_tree(model, integer=not model.exact and model.cost_int is not None)
    if tree is None:
        from planner.solvers.minibucket import bounded

        choice, bound = bounded(model, clock, start)
        return Outcome(choice, bound, bound == np.inf)
    value, x, _ = tree.run(model.cost_int if tree.integer else model.cost)  # type: ignore[arg-type]
    clock.spend(tree.entries)
    if value >= (INF_INT / 2 if tree.integer else np.inf):
        return Outcome(None, np.inf, True)
    if model.memory is None or model.memory.load(x).max() <= model.memory.limit:
        return Outcome(x, float(value))
    if tree.integer:
        tree = compile_tree(model)
        assert tree is not None
    return _within_memory(model, tree, clock, start, caps)


def _within_memory(model: Model, tree: Tree, clock: Clock, start: tuple[int, ...] | np.ndarray | None, caps: tuple[int, ...]) -> Outcome:
    assert model.memory is not None
    if (model.memory.extreme(False) > model.memory.limit).any():
        return Outcome(None, np.inf, True)
    dual = Dual(model, tree, clock)
    if start is not None:
        given = polish(model, np.asarray(start, np.int64))
        if given is not None:
            dual.offer(given)
    try:
        return _close(model, tree, dual, clock, caps)
    except KeyboardInterrupt:
        clock.stopped = "interrupt"
        return Outcome(dual.best, dual.bound)


def _close(model: Model, tree: Tree, dual: Dual, clock: Clock, caps: tuple[int, ...]) -> Outcome:
    """Prices, then labels, until the gap is closed or the clock stops."""
    assert model.memory is not None
    maximise(dual)
    if dual.best is None:
        mended = polish(model, tree.run(model.cost + model.memory.priced(dual.price, len(model.cost)))[1])
        if mended is not None:
            dual.offer(mended)
    if dual.best is None and cannot_fit(model, tree, clock):
        return Outcome(None, np.inf, True)
    for cap in caps:
        if dual.closed or clock.stopped:
            break
        before = dual.bound
        close_gap(dual, cap, clock)
        if dual.best is None and not clock.stopped and dual.bound == np.inf:
            return Outcome(None, np.inf, True)
        dual.bound = max(dual.bound, before)
    return Outcome(dual.best, dual.best_cost if dual.best is not None and dual.closed else dual.bound)


def claim(problem: Problem, found: Outcome, clock: Clock, name: str) -> Solution:
    """A solution with its exact cost; optimal only when the bound meets it."""
    work = int(clock.work)
    if found.choice is None:
        if found.infeasible:
            return Solution((), "infeasible", None, name, work)
        return Solution((), "none", found.bound if np.isfinite(found.bound) else None, name, work, clock.stopped)
    verdict = evaluate(problem, found.choice)
    assert verdict.feasible, "a solver's choice must fit"
    optimal = verdict.cost - found.bound <= 1e-6 * max(1.0, abs(verdict.cost))
    bound = min(found.bound, float(verdict.cost)) if np.isfinite(found.bound) else None
    return Solution(tuple(found.choice.tolist()), "optimal" if optimal else "feasible", bound, name, work, clock.stopped if not optimal or clock.stopped == "interrupt" else "")
