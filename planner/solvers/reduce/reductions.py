"""Exact reductions: a smaller problem with the same optimum, and the way back.

Every step keeps at least one optimal choice (proofs in a line each):

  support      a strategy without a finite partner in some edge, or forbidden itself, is in no
               feasible choice
  single       a node with one strategy adds its row to its neighbours' costs and its usage to a
               constant
  fold         if each strategy of u has exactly one finite partner in v, v is a function of u: v's
               cost, usage and tables move to u
  separate     a table that is row part + column part (+ rest) gives its parts to the nodes; a zero
               rest is no edge
  eliminate    a node of degree <= 2 whose usage does not depend on its strategy is minimised out
               exactly
  dominate     strategy a of node i goes if some b uses no more in any row and cost[a] - cost[b] +
               sum over edges min_y (table[a, y] - table[b, y]) >= 0: replacing a by b never hurts
  rows         only maximal time points are kept, and of those only the ones that some choice can
               exceed

`Reduction.problem` has constants as an extra one-strategy node, so that for every choice x of it
evaluate(reduced, x) = evaluate(original, expand(x)) in cost and feasibility (peak: over the kept
rows).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from planner.solvers.problem import FORBIDDEN, Problem
from planner.solvers.reduce.dominance import dominate
from planner.solvers.reduce.partial import Infeasible, State
from planner.solvers.reduce.pool import Pool
from planner.solvers.reduce.rows import add_rise, drop_rows, level, set_rows
from planner.solvers.reduce.steps import eliminate, fold, single


@dataclass(frozen=True)
class Reduction:
    """`problem` is None when the reduction proved that nothing is feasible."""

    problem: Problem | None
    trail: tuple[tuple, ...]
    kept: np.ndarray  # [reduced nodes] original node; the last reduced node may be the constant, -1
    nodes: int

    def expand(self, choice: Sequence[int] | np.ndarray) -> np.ndarray:
        """The original problem's choice for a choice of the reduced one. [nodes]"""
        x = np.zeros(self.nodes, np.int64)
        picked = np.asarray(choice, np.int64)
        real = self.kept >= 0
        x[self.kept[real]] = picked[real]
        for step in reversed(self.trail):
            if step[0] == "map":
                x[step[1]] = step[3][x[step[2]]]
            elif step[0] == "pair":
                x[step[1]] = step[4][x[step[2]], x[step[3]]]
            else:
                x[step[1]] = step[2]
        return x

    def restrict(self, choice: Sequence[int] | np.ndarray) -> np.ndarray | None:
        """The reduced choice that agrees with an original one on the kept nodes; None when one of
        its strategies was pruned."""
        original = np.asarray(choice, np.int64)
        where = {int(i): r for r, i in enumerate(self.kept) if i >= 0}
        x = np.zeros(len(self.kept), np.int64)
        x[list(where.values())] = original[list(where)]
        for step in self.trail:
            if step[0] == "map" and step[1] == step[2] and step[1] in where:
                matches = np.flatnonzero(step[3] == x[where[step[1]]])
                if not len(matches):
                    return None
                x[where[step[1]]] = int(matches[0])
        return x


def reduce(
    problem: Problem,
    rounds: int = 12,
    dominance: bool = True,
    only: Sequence[np.ndarray] | None = None,
) -> Reduction:
    """Reduce a problem exactly. Costs must add up below 2**52 (else only its copy is returned).
    only: per node the strategies to be looked at, where not all are."""
    count = len(problem.cost)
    unreduced = Reduction(problem, (), np.arange(count), count)
    if _magnitude(problem) >= 2.0**52:
        return unreduced
    state = start(problem)
    try:
        for i, keep in enumerate(only or ()):
            if len(keep) < len(problem.cost[i]):
                state.shrink(i, keep)
        drop_rows(state)
        _settle(state)
        for turn in range(rounds):
            if turn < 3:
                drop_rows(state)
            if not dominance or not dominate(state):
                break
            _settle(state, pairs=turn > 0 or len(state.cost) < 2000)
    except Infeasible:
        return Reduction(None, (), np.zeros(0, np.int64), count)
    return _finish(state, count)


def _magnitude(problem: Problem) -> float:
    """An upper bound on the absolute value of any finite cost."""
    if not problem.cost:
        return 0.0
    flat = np.concatenate(problem.cost)
    flat = np.abs(np.where(flat >= FORBIDDEN, 0, flat)).astype(np.float64)
    size = np.fromiter((len(c) for c in problem.cost), np.int64, len(problem.cost))
    high = [float(np.abs(np.where(t >= FORBIDDEN, 0, t)).max(initial=0)) for t in problem.tables]
    return float(np.maximum.reduceat(flat, np.cumsum(size) - size).sum()) + sum(
        high[t] for t in problem.edge_table.tolist()
    )


def start(problem: Problem) -> State:
    """The state of a problem nothing has been done to."""
    pool = Pool()
    flat = np.concatenate([np.zeros(0, np.int64), *problem.cost])
    flat = np.where(flat >= FORBIDDEN, np.inf, flat)
    ends = np.cumsum([0] + [len(c) for c in problem.cost]).tolist()
    cost: list[np.ndarray | None] = [flat[p:q] for p, q in pairwise(ends)]
    count = len(cost)
    state = State(
        pool,
        cost,
        [{} for _ in cost],
        [None] * count,
        problem.usage_limit,
        unread=[[] for _ in cost],
    )
    number = [pool.table(np.where(t >= FORBIDDEN, np.inf, t)) for t in problem.tables]
    pairs: dict[tuple[int, int], int] = {}
    for (u, v), raw in zip(problem.edges.tolist(), problem.edge_table.tolist(), strict=True):
        key, t = ((u, v), number[raw]) if u < v else ((v, u), pool.turn(number[raw]))
        pairs[key] = pool.add(pairs[key], t) if key in pairs else t
    for (u, v), t in pairs.items():
        state.set_edge(u, v, t)
    if problem.usage_limit is not None and len(problem.live_node):
        set_rows(state, problem)
    state.queue, state.queued, state.unpruned = (
        list(range(count)),
        set(range(count)),
        set(range(count)),
    )
    return state


def _settle(state: State, pairs: bool = True) -> None:
    """Apply all steps but dominance until nothing changes. `pairs`: also eliminate nodes of degree
    2."""
    while state.queue:
        i = heapq.heappop(state.queue)
        state.queued.discard(i)
        if state.cost[i] is None:
            continue
        keep = state.alive(i)
        if keep is not None:
            state.shrink(i, keep)
            continue
        if len(state.own(i)) == 1:
            level(state, i)
            single(state, i)
        elif not fold(state, i):
            level(state, i)
            if state.usage[i] is None and len(state.near[i]) <= (2 if pairs else 1):
                eliminate(state, i)


def _finish(state: State, count: int) -> Reduction:
    add_rise(state)
    alive = [i for i in range(count) if state.cost[i] is not None]
    place = {i: r for r, i in enumerate(alive)}
    cost = [
        np.where(np.isfinite(state.own(i)), state.own(i), FORBIDDEN).astype(np.int64) for i in alive
    ]
    ends, picked = [], []
    number: dict[int, int] = {}
    tables: list[np.ndarray] = []
    for i in alive:
        for j, t in state.near[i].items():
            if i < j:
                if t not in number:
                    number[t] = len(tables)
                    table = state.pool.tables[t]
                    tables.append(np.where(np.isfinite(table), table, FORBIDDEN).astype(np.int64))
                ends.append((place[i], place[j]))
                picked.append(number[t])
    live = [
        (place[i], s, u)
        for i in alive
        if (n := state.usage[i]) is not None
        for s, u in zip(n.spans.tolist(), n.use, strict=True)
    ]
    original = np.array(alive, np.int64)
    if state.constant or state.base.any() or not alive:
        cuts = np.flatnonzero(np.diff(state.base, prepend=-1, append=-1)).tolist()
        live += [
            (len(alive), [a, b], state.base[a : a + 1]) for a, b in pairwise(cuts) if state.base[a]
        ]
        cost.append(np.array([int(state.constant)], np.int64))
        original = np.append(original, -1)
    problem = Problem(
        tuple(cost),
        np.array(ends, np.int64).reshape(-1, 2),
        np.array(picked, np.int64),
        tuple(tables),
        np.array([n for n, _, _ in live], np.int64),
        np.array([s for _, s, _ in live], np.int64).reshape(-1, 2),
        tuple(u.astype(np.int64) for _, _, u in live),
        state.limit,
    )
    return Reduction(problem, tuple(state.trail), original, count)
