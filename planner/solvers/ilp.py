"""`ilp`: the problem as a 0/1 program, given to HiGHS as sparse arrays.

    x[i, k] in {0, 1}          sum_k x[i, k] = 1                                   one strategy per
                               node
    y[e, a, b] >= 0            sum_b y[e, a, b] = x[u, a],  sum_a y = x[v, b]      one entry per
                               pair (marginals, integral for integral x)
    row r of memory            sum of usage x <= limit                             maximal time
                               points only
    minimise                   cost x + table y,  divided by a common scale

Forbidden entries have no variable. A table that is row + column sums needs no y at all: its parts
go to the nodes. HiGHS works in doubles with tolerances, so the choice is judged by `evaluate`; one
that overloads a row by rounding is cut off (the strategies chosen in that row cannot all be chosen
together) and the program is solved again. Memory rows are lazy: some 200 to begin with, then those
that a choice overloads. The bound is HiGHS' dual bound times the scale; with rows missing it is a
bound all the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from planner.solvers.bounds.lagrangian import Clock
from planner.solvers.bounds.messages import Incumbent, Rising, raise_bound
from planner.solvers.dp import Outcome, claim
from planner.solvers.model import Model, build
from planner.solvers.neighbourhood import search
from planner.solvers.neighbourhood.local import polish
from planner.solvers.partner import Partner
from planner.solvers.problem import Budget, Problem, Solution, evaluate
from planner.solvers.reduce.reductions import reduce

LARGE = 250_000
"""Largest sum of edge tables (in entries) whose program is solved in this process where there is a
time limit."""


@dataclass
class Program:
    """Arrays of the 0/1 program; rows as triplets. The first `positions` columns are x, the others
    y."""

    cost: np.ndarray
    positions: int
    upper: np.ndarray
    row: np.ndarray
    column: np.ndarray
    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    constant: float
    scale: float


def solve(problem: Problem, budget: Budget, start: tuple[int, ...] | None = None) -> Solution:
    """Reduce, then solve with HiGHS; optimal only with a proven relative gap of at most 1e-6."""
    if not len(problem.cost):
        return Solution((), "optimal", 0.0, "ilp")
    began, reduction = time.monotonic(), reduce(problem)
    if reduction.problem is None:
        return Solution((), "infeasible", None, "ilp")
    known = None if start is None else reduction.restrict(start)
    if budget.time_limit_s is None:
        solution = solve_reduced(reduction.problem, budget, known)
    else:
        budget = replace(
            budget, time_limit_s=max(0.05, budget.time_limit_s - (time.monotonic() - began))
        )
        large = (
            sum(reduction.problem.tables[t].size for t in reduction.problem.edge_table.tolist())
            > LARGE
        )
        solution = (_apart if large else solve_reduced)(reduction.problem, budget, known)
    if not solution.choice:
        return solution
    choice = reduction.expand(solution.choice)
    if (
        start is not None
        and evaluate(problem, start).feasible
        and evaluate(problem, start).cost < evaluate(problem, choice).cost
    ):
        choice = np.asarray(start)
    return replace(solution, choice=tuple(choice.tolist()))


def _apart(problem: Problem, budget: Budget, start: np.ndarray | None) -> Solution:
    """HiGHS in another process: in a large program it looks at no clock and hears no Ctrl-C.
    Meanwhile prices of memory bring a choice and a bound here."""
    assert budget.time_limit_s is not None
    model, clock = (
        build(problem),
        Clock(np.inf, time.monotonic() + max(0.9 * budget.time_limit_s, budget.time_limit_s - 1.0)),
    )
    partner = Partner(
        problem, "ilp", max(0.8 * budget.time_limit_s, budget.time_limit_s - 3.0), budget.seed
    )  # in time to tell, where it keeps to that
    passes = search.in_numpy(model) if model.searchable else None
    best = Incumbent() if passes is None else passes.best
    rising = Rising(best, 0.5 * budget.time_limit_s)

    def go_on(_: float) -> bool:
        partner.collect(best)
        return partner.alive() and clock.spend(0)

    try:
        if start is not None and evaluate(problem, start).feasible:
            best.x, best.cost = np.asarray(start, np.int64), float(evaluate(problem, start).cost)
        if passes is not None:
            raise_bound(passes, lambda work: go_on(work) and rising.worthwhile())
        while go_on(0.0) and not best.closed:
            time.sleep(0.02)
        partner.collect(best)
    except KeyboardInterrupt:
        clock.stopped = "interrupt"
    finally:
        partner.close()
    return claim(
        problem, Outcome(best.x, best.bound, partner.infeasible and best.x is None), clock, "ilp"
    )


def solve_reduced(
    problem: Problem, budget: Budget, start: tuple[int, ...] | np.ndarray | None = None
) -> Solution:
    """`solve` without the reduction."""
    model = build(problem)
    deadline = None if budget.time_limit_s is None else time.monotonic() + budget.time_limit_s
    known = (
        np.asarray(start, np.int64)
        if start is not None and evaluate(problem, start).feasible
        else None
    )
    program = linearise(model)
    if program is None:
        return Solution((), "infeasible", None, "ilp")
    rows = _first_rows(model, known)
    cuts: list[np.ndarray] = []
    bound, work = -np.inf, 0
    x: np.ndarray | None = None
    while True:
        left_s = None if deadline is None else max(0.1, deadline - time.monotonic())
        x, dual, infeasible, spent = _highs(model, program, sorted(rows), cuts, left_s, budget)
        work += spent
        if infeasible:
            return _infeasible_or(problem, known, bound, work)
        bound = max(bound, dual * program.scale + program.constant)
        if x is None or evaluate(problem, x).feasible:
            break
        assert model.memory is not None
        if not _add_rows(model, rows, x):
            cuts.append(_cover(model, x))
        if deadline is not None and time.monotonic() > deadline:
            x = polish(model, x)
            break
    known = _better(problem, known, x)
    if known is None:
        return Solution(
            (),
            "none",
            bound if np.isfinite(bound) else None,
            "ilp",
            work,
            "time" if deadline is not None else "work",
        )
    cost = evaluate(problem, known).cost
    optimal = cost - bound <= 1e-6 * max(1.0, abs(cost))
    stop: Literal["", "time", "work"] = (
        "" if optimal else ("time" if deadline is not None else "work")
    )
    status: Literal["optimal", "feasible"] = "optimal" if optimal else "feasible"
    return Solution(
        tuple(known.tolist()),
        status,
        min(bound, float(cost)) if np.isfinite(bound) else None,
        "ilp",
        work,
        stop,
    )


def _first_rows(model: Model, known: np.ndarray | None, most_rows: int = 200) -> set[int]:
    """All memory rows when they are few; else evenly spread ones and those nearest to the limit."""
    memory = model.memory
    if memory is None or memory.rows <= most_rows:
        return set(range(0 if memory is None else memory.rows))
    load = memory.extreme(True) if known is None else memory.load(known)
    spread = np.linspace(0, memory.rows - 1, most_rows // 2).astype(int).tolist()
    return {*spread, *np.argsort(-load, kind="stable")[: most_rows // 2].tolist()}


def _add_rows(model: Model, rows: set[int], x: np.ndarray, most_rows: int = 40) -> bool:
    """Add the worst overloaded rows that the program does not hold yet, one per stretch of
    overload; False when there is none."""
    memory = model.memory
    assert memory is not None
    overload = memory.load(x) - memory.limit
    stretch = np.flatnonzero(overload > 0)
    pieces = np.split(stretch, np.flatnonzero(np.diff(stretch) > 1) + 1)
    peaks = sorted((int(p[overload[p].argmax()]) for p in pieces), key=lambda r: (-overload[r], r))
    fresh = [r for r in peaks if r not in rows][:most_rows]
    rows.update(fresh)
    return bool(fresh)


def _infeasible_or(problem: Problem, known: np.ndarray | None, bound: float, work: int) -> Solution:
    """HiGHS says infeasible. That is a proof for the program; a known choice can only contradict it
    through tolerances."""
    if known is None:
        return Solution((), "infeasible", None, "ilp", work)
    return Solution(
        tuple(known.tolist()), "feasible", bound if np.isfinite(bound) else None, "ilp", work
    )


def _better(problem: Problem, a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
    if a is None or b is None:
        return b if a is None else a
    return b if evaluate(problem, b).cost < evaluate(problem, a).cost else a


def _cover(model: Model, x: np.ndarray) -> np.ndarray:
    """Positions chosen in the worst row: together they exceed the limit."""
    memory = model.memory
    assert memory is not None
    row = int(memory.load(x).argmax())
    here = np.flatnonzero((memory.row_lo <= row) & (memory.row_hi > row))
    here = here[memory.use_value[memory.start[here] + x[memory.node[here]]] > 0]
    nodes = np.unique(memory.node[here])
    return model.offset[nodes] + x[nodes]


class _Constraints:
    """Rows of the program as triplets, and the costs of y, as pairs are added."""

    def __init__(self, model: Model) -> None:
        n, positions = model.nodes, len(model.cost)
        self.row = [np.repeat(np.arange(n), np.diff(model.offset))]
        self.column, self.value = [np.arange(positions)], [np.ones(positions)]
        self.side = [np.ones(n)]  # what each row is equal to
        self.y_cost: list[np.ndarray] = []
        self.rows, self.columns = n, positions

    def add_pair(self, firsts: tuple[int, int], rest: np.ndarray, finite: np.ndarray) -> None:
        """A variable for each finite entry of a table, and rows that say which options it goes
        with. at: positions of the first options of both nodes."""
        a, b = np.nonzero(finite)
        y = self.columns + np.arange(len(a))
        self.y_cost.append(rest[a, b])
        ku, kv = rest.shape
        u, v = self.rows + np.arange(ku), self.rows + ku + np.arange(kv)
        self.row += [self.rows + a, u, self.rows + ku + b, v]
        self.column += [y, firsts[0] + np.arange(ku), y, firsts[1] + np.arange(kv)]
        self.value += [np.ones(len(a)), -np.ones(ku), np.ones(len(a)), -np.ones(kv)]
        self.side.append(np.zeros(ku + kv))
        self.rows, self.columns = self.rows + ku + kv, self.columns + len(a)


def linearise(model: Model) -> Program | None:
    """The program, or None when some node has no strategy left or a pair no entry."""
    cost = model.cost.copy()
    upper = np.where(np.isfinite(cost), 1.0, 0.0)
    constraints = _Constraints(model)
    for (u, v), table in model.pairs.items():
        at_u, at_v = int(model.offset[u]), int(model.offset[v])
        finite = (
            np.isfinite(table)
            & np.isfinite(model.node_cost(u))[:, None]
            & np.isfinite(model.node_cost(v))[None]
        )
        if not finite.any():
            return None
        part_u, part_v, rest = separate(table, finite)
        cost[at_u : at_u + len(part_u)] += part_u
        cost[at_v : at_v + len(part_v)] += part_v
        if not finite.all() or rest.any():
            constraints.add_pair((at_u, at_v), rest, finite)
    # What every choice pays goes to the constant: the program keeps differences only, where doubles
    # are good.
    possible = np.where(upper > 0, np.where(np.isfinite(cost), cost, 0.0), np.inf)
    least = np.minimum.reduceat(possible, model.offset[:-1])
    if np.isinf(least).any():
        return None
    cost = np.where(upper > 0, possible - np.repeat(least, np.diff(model.offset)), 0.0)
    full = np.concatenate([cost, *constraints.y_cost])
    scale = max(1.0, float(np.abs(full).max(initial=0)) / 1e6)
    return Program(
        cost=full / scale,
        positions=len(cost),
        upper=np.concatenate([upper, np.ones(len(full) - len(cost))]),
        row=np.concatenate(constraints.row),
        column=np.concatenate(constraints.column),
        value=np.concatenate(constraints.value),
        low=np.concatenate(constraints.side),
        high=np.concatenate(constraints.side),
        constant=float(least.sum()),
        scale=scale,
    )


def separate(table: np.ndarray, finite: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """table = part_u[:, None] + part_v[None] + rest with rest >= 0, on the finite entries; all
    integers stay integers."""
    t = np.where(finite, table, np.inf)
    part_u = t.min(1)
    part_u = np.where(np.isfinite(part_u), part_u, 0.0)
    t = t - part_u[:, None]
    part_v = t.min(0)
    part_v = np.where(np.isfinite(part_v), part_v, 0.0)
    return part_u, part_v, np.where(finite, t - part_v[None], 0.0)


def _memory_rows(
    model: Model, rows: list[int], first: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Triplets of the given memory rows, numbered from `first`, divided by the limit; and the
    right-hand side."""
    memory = model.memory
    if memory is None or not rows:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), 1.0
    unit = memory.limit if memory.limit > 0 else 1.0
    listed = np.array(rows)
    row, column, value = [], [], []
    for j in range(len(memory.node)):
        a, b = np.searchsorted(listed, [memory.row_lo[j], memory.row_hi[j]])
        if a < b:
            use = memory.matrix(j)
            some = np.flatnonzero(use)
            row.append(first + np.repeat(np.arange(a, b), len(some)))
            column.append(np.tile(memory.use_at[memory.start[j] + some], b - a))
            value.append(np.tile(use[some] / unit, b - a))
    return np.concatenate(row), np.concatenate(column), np.concatenate(value), memory.limit / unit


def _highs(
    model: Model,
    program: Program,
    rows: list[int],
    cuts: list[np.ndarray],
    time_s: float | None,
    budget: Budget,
) -> tuple[np.ndarray | None, float, bool, int]:
    """Choice (or None), dual bound in program units, whether it is infeasible, and nodes of the
    search tree."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csc_array

    base = len(program.low)
    memory_rows = _memory_rows(model, rows, base)
    count = base + len(rows)
    row = np.concatenate(
        [program.row, memory_rows[0], *(np.full(len(c), count + n) for n, c in enumerate(cuts))]
    )
    column = np.concatenate([program.column, memory_rows[1], *cuts])
    value = np.concatenate([program.value, memory_rows[2], *(np.ones(len(c)) for c in cuts)])
    matrix = csc_array((value, (row, column)), shape=(count + len(cuts), len(program.cost)))
    low = np.concatenate([program.low, np.full(len(rows) + len(cuts), -np.inf)])
    high = np.concatenate(
        [program.high, np.full(len(rows), memory_rows[3]), [len(c) - 1.0 for c in cuts]]
    )
    kind = np.zeros(len(program.cost))
    kind[: program.positions] = 1
    options: dict[str, float | int] = {"mip_rel_gap": 1e-9}
    if time_s is not None:
        options["time_limit"] = time_s
    if budget.work is not None:
        options["node_limit"] = budget.work
    result = milp(
        program.cost,
        integrality=kind,
        bounds=Bounds(0, program.upper),
        constraints=LinearConstraint(matrix, low, high),
        options=options,
    )
    dual = (
        -np.inf if getattr(result, "mip_dual_bound", None) is None else float(result.mip_dual_bound)
    )
    work = int(getattr(result, "mip_node_count", None) or 0)
    if result.status == 2:
        return None, dual, True, work
    if result.x is None:
        return None, dual, False, work
    picks = result.x[: program.positions]
    x = np.array(
        [int(picks[a:b].argmax()) for a, b in zip(model.offset[:-1], model.offset[1:], strict=True)]
    )
    return x, dual, False, work
