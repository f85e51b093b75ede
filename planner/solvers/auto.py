"""`auto`: the portfolio. Exact elimination where the width allows, else two processes on the
exactly reduced problem.

1. Elimination (`dp`) on the problem as it is, when its tables are small; most planning problems end
   here.
2. Exact reduction (`reduce`), and elimination again when the rest is narrow enough.
3. Options that no better choice has are left out (`narrow`), and elimination again.
4. Else, with a time limit, two processes:
     here        memory prices by message passing, then descents by neighbourhoods of nearly every
                 choice (`descents`)
     the other   HiGHS (`ilp`) while the rest is small enough for it to prove the optimum, else a
                 second search with other random numbers
     between     the choices that descents of both ended with are mixed (`fuse`), and both go on
                 from the best mixture
   Without a time limit the same parts run one after the other under a work limit: same seed and
   work, same result.
Where numba is missing and there is no time limit, `recursive` and HiGHS replace the search.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count
from typing import Literal

import numpy as np

from planner.solvers import dp, ilp, recursive
from planner.solvers.bounds import messages
from planner.solvers.bounds.lagrangian import Clock
from planner.solvers.bounds.messages import Incumbent
from planner.solvers.exact import narrow
from planner.solvers.exact.elimination import compile_tree
from planner.solvers.model import Model, build
from planner.solvers.neighbourhood import descents, search
from planner.solvers.neighbourhood.fuse import Pool
from planner.solvers.partner import Partner
from planner.solvers.problem import Budget, Problem, Solution, evaluate
from planner.solvers.reduce.reductions import reduce

DEFAULT_WORK = 1e10
NARROW = 6e7
"""Largest sum of elimination tables (in entries) worth an exact solve."""
PROVABLE = 250_000
"""Largest sum of edge tables (in entries) given to HiGHS."""
NARROWING, FEWER = 2e9, 0.8
"""Work given to leaving options out, and to eliminating the rest: some seconds; and the share of
options left with which it is worth starting anew."""
FUSING, FUSED = 1e9, 0.03
"""Work of solving one mixture at most, and the part of the whole budget that it may take."""

Stop = Literal["", "time", "work", "interrupt"]


def solve(problem: Problem, budget: Budget, start: tuple[int, ...] | None = None) -> Solution:
    """The best of the portfolio within the budget; see the module."""
    began = time.monotonic()
    if not len(problem.cost):
        return Solution((), "optimal", 0.0, "auto")
    best = Solution((), "none", None, "auto")
    if budget.time_limit_s is not None:
        # what is left to do after the search: the way back, the exact cost
        budget = replace(
            budget,
            time_limit_s=max(
                0.95 * budget.time_limit_s, budget.time_limit_s - 0.3 - 3e-5 * len(problem.cost)
            ),
        )
    if start is not None and evaluate(problem, start).feasible:
        best = Solution(tuple(start), "feasible", None, "auto")
    try:
        if len(problem.cost) <= 5000:
            best = _merge(
                problem, best, _eliminated(problem, build(problem), _left(budget, began), start)
            )
            if best.status != "none" and (best.status in ("optimal", "infeasible") or best.stopped):
                return best
        reduction = reduce(problem)
        if reduction.problem is None:
            return Solution((), "infeasible", None, "auto")
        known = None if not best.choice else reduction.restrict(best.choice)
        solution = _reduced(
            reduction.problem,
            _left(budget, began),
            None if known is None else tuple(known.tolist()),
            best.bound,
        )
        if solution.choice:
            solution = replace(solution, choice=tuple(reduction.expand(solution.choice).tolist()))
        return _merge(problem, best, solution)
    except KeyboardInterrupt:
        return replace(best, stopped="interrupt")


def _left(budget: Budget, began: float) -> Budget:
    if budget.time_limit_s is None:
        return budget
    return replace(budget, time_limit_s=max(0.05, budget.time_limit_s - (time.monotonic() - began)))


def _merge(problem: Problem, a: Solution, b: Solution) -> Solution:
    """The cheaper choice with the higher bound."""
    if b.status == "infeasible" and not a.choice:
        return replace(b, solver="auto")
    listed = [s for s in (a, b) if s.choice]
    bound = max((s.bound for s in (a, b) if s.bound is not None), default=None)
    if not listed:
        return replace(b, bound=bound, solver="auto", work=a.work + b.work)
    best = min(listed, key=lambda s: evaluate(problem, s.choice).cost)
    cost = evaluate(problem, best.choice).cost
    optimal = bound is not None and cost - bound <= 1e-6 * max(1.0, abs(cost))
    status: Literal["optimal", "feasible"] = "optimal" if optimal else "feasible"
    bound = None if bound is None else min(bound, float(cost))
    return Solution(
        best.choice,
        status,
        bound,
        "auto",
        a.work + b.work,
        b.stopped if not optimal or b.stopped == "interrupt" else "",
    )


def _eliminated(
    problem: Problem, model: Model, budget: Budget, start: tuple[int, ...] | None
) -> Solution:
    """`dp` when the tables are small, else nothing."""
    tree = compile_tree(model, total_limit=NARROW)
    if tree is None:
        return Solution((), "none", None, "dp")
    clock = dp.clock_of(budget, dp.DEFAULT_WORK)
    return dp.claim(problem, dp.solve_model(model, clock, start), clock, "dp")


def _reduced(
    problem: Problem,
    budget: Budget,
    start: tuple[int, ...] | None,
    bound: float | None,
    exact: bool = False,
) -> Solution:
    """Solve what the reduction left. exact: by elimination and leaving options out, no further."""
    began = time.monotonic()
    model = build(problem)
    eliminated = (
        _eliminated(problem, model, budget, start)
        if bound is None
        else Solution((), "none", bound, "dp")
    )
    if eliminated.status in ("optimal", "infeasible") or eliminated.stopped:
        return eliminated
    start = eliminated.choice or start
    provable = sum(t.size for t in model.pairs.values()) <= PROVABLE
    if not model.searchable:
        if exact:
            return eliminated
        return _merge(
            problem, eliminated, _without_search(problem, _left(budget, began), start, provable)
        )
    state = search.start(model)
    if start is not None:
        state.fit(np.asarray(start, np.int64))
    remaining = _left(budget, began)
    clock = Clock(
        min(NARROWING, 0.3 * float(budget.work or DEFAULT_WORK)),
        None if remaining.time_limit_s is None else time.monotonic() + 0.3 * remaining.time_limit_s,
    )
    open_options = narrow.close(state, dp.exact(clock), NARROW / 3, clock)
    solution = _answer(problem, state.best, "", int(clock.work))
    if solution.status == "optimal":
        return _merge(problem, eliminated, solution)
    remaining = replace(
        _left(budget, began),
        work=None if budget.work is None else max(1, int(budget.work - clock.work)),
    )
    if open_options is not None and sum(map(len, open_options)) < FEWER * len(model.cost):
        return _merge(
            problem, eliminated, _fewer(problem, open_options, remaining, solution, exact)
        )
    if exact:
        return _merge(problem, eliminated, solution)
    if not (state.compiled or remaining.time_limit_s):
        return _merge(
            problem,
            eliminated,
            _merge(
                problem,
                solution,
                _without_search(problem, remaining, solution.choice or None, provable),
            ),
        )
    return _merge(problem, eliminated, _searched(problem, state, remaining, provable))


def _fewer(
    problem: Problem, open_options: list[np.ndarray], budget: Budget, known: Solution, exact: bool
) -> Solution:
    """Solve with the options that may be in a choice better than the known one: of all others no
    bound is needed beyond its cost."""
    reduction = reduce(problem, only=open_options)
    if reduction.problem is None:
        return known
    start = reduction.restrict(known.choice)
    solution = _reduced(
        reduction.problem,
        budget,
        None if start is None else tuple(start.tolist()),
        known.bound,
        exact,
    )
    if solution.choice:
        solution = replace(solution, choice=tuple(reduction.expand(solution.choice).tolist()))
    cost = float(evaluate(problem, known.choice).cost)
    return _merge(
        problem,
        known,
        replace(
            solution,
            bound=(
                cost
                if solution.status == "infeasible"
                else None
                if solution.bound is None
                else min(solution.bound, cost)
            ),
        ),
    )


def _without_search(
    problem: Problem, budget: Budget, start: tuple[int, ...] | None, provable: bool
) -> Solution:
    """Without a search: `recursive`, then HiGHS for the rest of the time."""
    began = time.monotonic()
    quick = _merge(problem, Solution((), "none", None), recursive.solve(problem, budget, start))
    if quick.status in ("optimal", "infeasible") or not (provable or budget.time_limit_s):
        return quick
    remaining = _left(budget, began)
    return _merge(
        problem,
        quick,
        ilp.solve_reduced(
            problem,
            remaining if remaining.time_limit_s else replace(remaining, work=2000),
            quick.choice or None,
        ),
    )


def _searched(problem: Problem, state: search.Search, budget: Budget, provable: bool) -> Solution:
    """The search here; with a time limit HiGHS or a second search in another process."""
    if budget.time_limit_s is not None:
        return _together(problem, state, budget, provable)
    work = float(budget.work or DEFAULT_WORK)
    if provable:
        _by_work(problem, state, replace(budget, work=int(work / 4)))
        known = None if state.best.x is None else state.best.x
        exact = ilp.solve_reduced(problem, replace(budget, work=max(1, int(work / 5e6))), known)
        return _merge(problem, _answer(problem, state.best, "work", int(work / 4)), exact)
    _by_work(problem, state, replace(budget, work=int(work)))
    return _answer(problem, state.best, "work", int(work))


def _mixing(problem: Problem, budget: Budget) -> Pool:
    """What runs end with, and how mixtures of it are solved: within a part of the budget each."""
    work, limit = (
        min(FUSING, FUSED * float(budget.work or DEFAULT_WORK)),
        (None if budget.time_limit_s is None else FUSED * budget.time_limit_s),
    )
    small, seeds = (
        replace(budget, work=max(1, int(work)), time_limit_s=limit),
        count(budget.seed + 2),
    )  # other random numbers after each
    return Pool(
        problem,
        lambda rest, start: _reduced(
            rest, replace(small, seed=next(seeds)), start, None, exact=True
        ),
    )


def _by_work(problem: Problem, state: search.Search, budget: Budget) -> None:
    """Prices for 30 % of the work, descents for the rest."""
    assert budget.work is not None
    spent, work, pool = 0.0, float(budget.work), _mixing(problem, budget)

    def go_on(more: float) -> bool:
        nonlocal spent
        spent += more
        return spent < 0.3 * work

    def done(more: float) -> float:
        nonlocal spent
        spent += more
        return min(1.0, spent / work)

    def mix() -> None:
        nonlocal spent
        spent += FUSED * work
        pool.fuse(state.best)

    messages.raise_bound(state, go_on)
    if state.best.x is not None and not state.best.closed:
        descents.descend(state, done, search.Others(lambda: None, pool.add, mix), budget.seed)


def _together(problem: Problem, state: search.Search, budget: Budget, provable: bool) -> Solution:
    assert budget.time_limit_s is not None
    began, limit = time.monotonic(), budget.time_limit_s
    best, stopped = state.best, "time"
    partner, pool = (
        Partner(problem, "ilp" if provable else "search", limit, budget.seed + 1),
        _mixing(problem, budget),
    )
    try:

        def sync() -> None:
            for x in partner.collect(best):
                pool.add(x)

        def mix() -> None:
            sync()
            if time.monotonic() - began + pool.took_s < limit:
                pool.fuse(best)
                partner.send(best)

        rising = messages.Rising(best, min(60.0, 0.3 * limit))

        def go_on(_: float) -> bool:
            sync()
            return rising.worthwhile()

        messages.raise_bound(state, go_on)
        if best.x is not None and not best.closed:
            descents.descend(
                state,
                lambda _: (time.monotonic() - began) / limit,
                search.Others(sync, pool.add, mix),
                budget.seed,
            )
        while not best.closed and time.monotonic() - began < limit and partner.alive():
            time.sleep(0.02)
            sync()
        sync()
    except KeyboardInterrupt:
        stopped = "interrupt"
    finally:
        partner.close()
    if partner.infeasible and best.x is None:
        return Solution((), "infeasible", None, "auto")
    return _answer(problem, best, stopped, 0)  # type: ignore[arg-type]


def _answer(problem: Problem, best: Incumbent, stopped: Stop, work: int) -> Solution:
    bound = best.bound if np.isfinite(best.bound) else None
    if best.x is None:
        return Solution((), "none", bound, "auto", work, stopped)
    cost = evaluate(problem, best.x).cost
    optimal = bound is not None and cost - bound <= 1e-6 * max(1.0, abs(cost))
    return Solution(
        tuple(best.x.tolist()),
        "optimal" if optimal else "feasible",
        bound,
        "auto",
        work,
        stopped if not optimal or stopped == "interrupt" else "",
    )
