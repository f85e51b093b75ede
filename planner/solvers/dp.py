"""`dp`: the exact optimum by variable elimination, memory limit included.

1. Eliminate without memory (`elimination`). If the minimiser fits, it is the optimum. Where options
   that fit beside the smallest of all others fit in any combination (a limit that nothing but the
   smallest choice keeps), eliminate those alone.
2. Otherwise price the rows (`lagrange`): the best bound L(p), and feasible choices met on the way.
   Options whose least cost under these prices is above the best known one are left out, and the
   prices found again.
3. Close what is left of the gap by growing a few labels with Pareto dominance (`labels`).
4. Else by branch and bound on memory (`branch`): exact, or a smaller proven gap when the work runs
   out.
Where some table would be too large, the problem is reduced (`reduce`), and options that no better
choice has are left out (`narrow`); where tables are too large even then, `minibucket` gives a bound
and a decoded choice, and the status is "feasible".

Work unit: one table entry visited.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from planner.solvers.bounds import messages as prices
from planner.solvers.bounds.lagrangian import Clock, Dual, cannot_fit, maximise
from planner.solvers.exact import narrow
from planner.solvers.exact.branch import branch
from planner.solvers.exact.elimination import TOTAL_LIMIT, Tree, compile_tree
from planner.solvers.exact.labels import close_gap
from planner.solvers.exact.minibucket import bounded
from planner.solvers.model import INF_INT, Model, build, restrict
from planner.solvers.neighbourhood import search
from planner.solvers.neighbourhood.local import polish
from planner.solvers.problem import Budget, Problem, Solution, evaluate
from planner.solvers.reduce.reductions import reduce

DEFAULT_WORK = 6e9
CAPS = (500,)
"""Labels grown before branching, one number after the other. More of them close gaps that prices
and a few options of much memory leave (experts' weights) slower than halves of those options do."""
ROOM, LARGE = 2e7, 1e5
"""Sums of elimination tables (in entries): the largest of what `narrow` leaves, and the least where
looking for options to leave out pays."""
EXACT = 5e6
"""Entries of elimination tables up to which none is left out, however little work is allowed."""
MANY, FEW = 0.9, 0.5
"""Shares of options that are solved anew where no more may be in a better choice: before prices are
looked for, and after, when they would be looked for again."""


@dataclass(frozen=True)
class Outcome:
    """What a solve of a model found: `choice` None with `infeasible` is a proof, without it nothing
    was found."""

    choice: np.ndarray | None
    bound: float
    infeasible: bool = False


def solve(problem: Problem, budget: Budget, start: tuple[int, ...] | None = None) -> Solution:
    """Solve exactly where the width allows. See `planner.solvers.problem.Solution` for the claims
    made."""
    clock = clock_of(budget, DEFAULT_WORK)
    if not len(problem.cost):
        return Solution((), "optimal", 0.0, "dp")
    model = build(problem)
    tree = _compiled(model, clock)
    if tree is None and narrow.worthwhile(model, clock):
        reduction = reduce(problem)
        if reduction.problem is None:
            return Solution((), "infeasible", None, "dp")
        outcome = solve_model(
            build(reduction.problem), clock, None if start is None else reduction.restrict(start)
        )
        return claim(
            problem,
            (
                outcome
                if outcome.choice is None
                else replace(outcome, choice=reduction.expand(outcome.choice))
            ),
            clock,
            "dp",
        )
    return claim(
        problem, solve_model(model, clock, start, tree=tree, below=budget.below), clock, "dp"
    )


def clock_of(budget: Budget, work: float) -> Clock:
    """A running clock for this budget; `work` where it names none."""
    return Clock(
        float(budget.work or work),
        None if budget.time_limit_s is None else time.monotonic() + budget.time_limit_s,
    )


def solve_model(
    model: Model,
    clock: Clock,
    start: tuple[int, ...] | np.ndarray | None = None,
    caps: tuple[int, ...] = CAPS,
    prove: bool = True,
    tree: Tree | None = None,
    below: float = np.inf,
) -> Outcome:
    """Optimum of a model, or the best choice and bound within the clock's limits. caps: labels
    grown, one number after the other; prove: branch on what they leave. tree: the model's
    elimination where it is compiled already; below: as in `Budget`."""
    tree = tree or _compiled(model, clock)
    if tree is None:
        return _too_wide(model, clock, start, caps, prove, below)
    value, x, _ = tree.run(model.cost_int if tree.integer else model.cost)  # type: ignore[arg-type]
    clock.spend(tree.entries)
    if value >= (INF_INT / 2 if tree.integer else np.inf):
        return Outcome(None, np.inf, True)
    if model.memory is None or model.memory.load(x).max() <= model.memory.limit:
        return Outcome(x, float(value))
    if tree.integer:
        tree = compile_tree(model)
        assert tree is not None
    return _within_memory(model, tree, clock, start, caps, prove, below)


def _compiled(model: Model, clock: Clock) -> Tree | None:
    """The elimination of a model, in integers where costs are; None where it has no room."""
    integer = not model.exact and model.cost_int is not None
    return compile_tree(model, total_limit=_room(clock), integer=integer)


def _room(clock: Clock) -> float:
    """Entries of elimination tables: no more than the work of the whole solve, but for few."""
    return min(TOTAL_LIMIT, max(EXACT, clock.work_limit))


def exact(
    clock: Clock, caps: tuple[int, ...] = CAPS, prove: bool = True, below: float = np.inf
) -> narrow.Exact:
    """The solver that `narrow` asks about what is left."""

    def solved(model: Model, start: np.ndarray | None) -> tuple[np.ndarray | None, float]:
        outcome = solve_model(model, clock, start, caps, prove, below=below)
        return outcome.choice, np.inf if outcome.infeasible else outcome.bound

    return solved


def _too_wide(
    model: Model,
    clock: Clock,
    start: tuple[int, ...] | np.ndarray | None,
    caps: tuple[int, ...],
    prove: bool,
    below: float,
) -> Outcome:
    """Narrowed until its elimination has room; where it never has, a choice and a bound."""
    floor = -np.inf
    if model.searchable and narrow.worthwhile(model, clock):
        passes = search.in_numpy(model)
        passes.best.cost = below
        try:
            if start is not None:
                passes.fit(np.asarray(start, np.int64))
            narrow.close(passes, exact(clock, caps, prove, below), min(ROOM, _room(clock)), clock)
        except KeyboardInterrupt:
            clock.stopped = "interrupt"
        start, floor = passes.best.x if passes.best.x is not None else start, passes.best.bound
        if passes.best.closed or clock.stopped:
            return Outcome(passes.best.x, floor)
    choice, bound = bounded(model, clock, start, below=below)
    return Outcome(choice, max(bound, floor), bound == np.inf)


def _within_memory(
    model: Model,
    tree: Tree,
    clock: Clock,
    start: tuple[int, ...] | np.ndarray | None,
    caps: tuple[int, ...],
    prove: bool,
    below: float,
) -> Outcome:
    assert model.memory is not None
    if (model.memory.extreme(False) > model.memory.limit).any():
        return Outcome(None, np.inf, True)
    affordable_options = affordable(model)
    if not all(map(len, affordable_options)):
        return Outcome(None, np.inf, True)
    restricted = restrict(model, affordable_options)
    if (restricted.memory.extreme(True) <= restricted.memory.limit).all():  # type: ignore[union-attr]
        outcome = solve_model(restricted, clock)
        return (
            outcome
            if outcome.choice is None
            else replace(outcome, choice=narrow.chosen(affordable_options, outcome.choice))
        )
    dual = Dual(model, tree, clock, best_cost=below)
    if start is not None:
        polished = polish(model, np.asarray(start, np.int64))
        if polished is not None:
            dual.offer(polished)
    try:
        fewer = _fewer(model, tree, dual, clock, caps, prove, MANY)
        return fewer or _close(model, tree, dual, clock, caps, prove)
    except KeyboardInterrupt:
        clock.stopped = "interrupt"
        return Outcome(dual.best, dual.bound)


def affordable(model: Model) -> list[np.ndarray]:
    """Per node the options that some choice within the memory limit may have: those that fit beside
    the smallest of every other node."""
    memory = model.memory
    assert memory is not None
    room = np.append(memory.limit - memory.extreme(False), np.inf)
    least = np.minimum.reduceat(room, np.ravel([memory.row_lo, memory.row_hi], "F"))[
        ::2
    ]  # [intervals] over the rows of each
    excess = memory.use_value - np.repeat(
        np.minimum.reduceat(memory.use_value, memory.start[:-1]), np.diff(memory.start)
    )
    fits = np.ones(len(model.cost), bool)
    fits[memory.use_at[excess > np.repeat(least, np.diff(memory.start))]] = False
    return [np.flatnonzero(row) for row in np.split(fits, model.offset[1:-1])]


def _close(
    model: Model, tree: Tree, dual: Dual, clock: Clock, caps: tuple[int, ...], prove: bool
) -> Outcome:
    """Prices, then labels, then halves, until the gap is closed or the clock stops."""
    assert model.memory is not None
    maximise(dual)
    if dual.best is None and dual.closed:
        return Outcome(None, dual.bound)
    if dual.best is None:
        mended = polish(
            model, tree.run(model.cost + model.memory.priced(dual.price, len(model.cost)))[1]
        )
        if mended is not None:
            dual.offer(mended)
    if dual.best is None and cannot_fit(model, tree, clock):
        return Outcome(None, np.inf, True)
    if (outcome := _fewer(model, tree, dual, clock, caps, prove, FEW)) is not None:
        return outcome
    for cap in caps:
        if dual.closed or clock.stopped:
            break
        before = dual.bound
        close_gap(dual, cap, clock)
        if dual.best is None and not clock.stopped and dual.bound == np.inf:
            return Outcome(None, np.inf, True)
        dual.bound = max(dual.bound, before)
    if prove and not dual.closed and not clock.stopped:
        branch(dual)
        if dual.best is None and dual.bound == np.inf:
            return Outcome(None, np.inf, True)
    return Outcome(
        dual.best, dual.best_cost if dual.best is not None and dual.closed else dual.bound
    )


def _fewer(
    model: Model,
    tree: Tree,
    dual: Dual,
    clock: Clock,
    caps: tuple[int, ...],
    prove: bool,
    most_share: float,
) -> Outcome | None:
    """Solved with the options that may be in a better choice by what is least with each under the
    best prices; None where these are more than `most_share` of all."""
    if not np.isfinite(dual.best_cost) or dual.closed or clock.stopped or tree.entries < LARGE:
        return None
    assert model.memory is not None
    price = dual.price if len(dual.price) else np.zeros(model.memory.rows)
    least = (
        tree.marginals(model.cost + model.memory.priced(price, len(model.cost)))[1]
        - float(price.sum()) * model.memory.limit
    )
    clock.spend(2 * tree.entries)
    open_options = narrow.options(model, least, dual.best_cost + prices.rounding(dual.best_cost))
    if sum(map(len, open_options)) > most_share * len(model.cost):
        return None
    if not all(map(len, open_options)):
        return Outcome(dual.best, dual.best_cost)
    outcome = solve_model(
        restrict(model, open_options),
        clock,
        None if dual.best is None else narrow.places(open_options, dual.best),
        caps,
        prove,
        below=dual.best_cost,
    )
    if outcome.choice is not None:
        dual.offer(narrow.chosen(open_options, outcome.choice))
    return Outcome(dual.best, max(dual.bound, min(outcome.bound, dual.best_cost)))


def claim(problem: Problem, outcome: Outcome, clock: Clock, name: str) -> Solution:
    """A solution with its exact cost; optimal only when the bound meets it."""
    work = int(clock.work)
    if outcome.choice is None:
        if outcome.infeasible:
            return Solution((), "infeasible", None, name, work)
        return Solution(
            (),
            "none",
            outcome.bound if np.isfinite(outcome.bound) else None,
            name,
            work,
            clock.stopped,
        )
    verdict = evaluate(problem, outcome.choice)
    assert verdict.feasible, "a solver's choice must fit"
    optimal = verdict.cost - outcome.bound <= 1e-6 * max(1.0, abs(verdict.cost))
    bound = min(outcome.bound, float(verdict.cost)) if np.isfinite(outcome.bound) else None
    return Solution(
        tuple(outcome.choice.tolist()),
        "optimal" if optimal else "feasible",
        bound,
        name,
        work,
        clock.stopped if not optimal or clock.stopped == "interrupt" else "",
    )
