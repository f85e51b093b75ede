"""Exact reductions: a smaller problem with the same optimum, and the way back.

Every step keeps at least one optimal choice (proofs in a line each):

  support      a strategy without a finite partner in some edge, or forbidden itself, is in no feasible choice
  single       a node with one strategy adds its row to its neighbours' costs and its usage to a constant
  fold         if each strategy of u has exactly one finite partner in v, v is a function of u: v's cost, usage and tables move to u
  separate     a table that is row part + column part (+ rest) gives its parts to the nodes; a zero rest is no edge
  eliminate    a node of degree <= 2 whose usage does not depend on its strategy is minimised out exactly
  dominate     strategy a of node i goes if some b uses no more in any row and
               cost[a] - cost[b] + sum over edges min_y (table[a, y] - table[b, y]) >= 0: replacing a by b never hurts
  rows         only maximal time points are kept, and of those only the ones that some choice can exceed

`Reduction.problem` has constants as an extra one-strategy node, so that for every choice x of it
evaluate(reduced, x) = evaluate(original, expand(x)) in cost and feasibility (peak: over the kept rows).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from planner.problem import FORBIDDEN, Problem
from planner.solvers.model import maximal_times
from planner.solvers.pool import Pool
from planner.solvers.usage import Usage


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
        """The reduced choice that agrees with an original one on the kept nodes; None when one of its strategies was pruned."""
        original = np.asarray(choice, np.int64)
        where = {int(i): r for r, i in enumerate(self.kept) if i >= 0}
        x = np.zeros(len(self.kept), np.int64)
        x[list(where.values())] = original[list(where)]
        for step in self.trail:
            if step[0] == "map" and step[1] == step[2] and step[1] in where:
                found = np.flatnonzero(step[3] == x[where[step[1]]])
                if not len(found):
                    return None
                x[where[step[1]]] = int(found[0])
        return x


class _Infeasible(Exception):
    pass


@dataclass
class _State:
    """The problem under reduction. Alive nodes have a cost array; edges hold a table number in both directions."""

    pool: Pool
    cost: list[np.ndarray | None]
    near: list[dict[int, int]]
    usage: list[Usage | None]
    limit: int | None
    constant: float = 0.0
    base: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # [rows] usage that no choice changes
    trail: list[tuple] = field(default_factory=list)
    queue: list[int] = field(default_factory=list)
    queued: set[int] = field(default_factory=set)
    unpruned: set[int] = field(default_factory=set)

    def touch(self, i: int) -> None:
        if i not in self.queued:
            self.queued.add(i)
            heapq.heappush(self.queue, i)
        self.unpruned.add(i)

    def own(self, i: int) -> np.ndarray:
        found = self.cost[i]
        assert found is not None
        return found

    def set_edge(self, u: int, v: int, t: int) -> None:
        """Set the table of (u, v), splitting off what belongs to the nodes; no rest, no edge."""
        parts = self.pool.parts(t)
        if parts is not None:
            row, column, t = parts
            self.cost[u] = self.own(u) + row
            self.cost[v] = self.own(v) + column
        if t < 0:
            self.near[u].pop(v, None)
            self.near[v].pop(u, None)
        else:
            self.near[u][v] = t
            self.near[v][u] = self.pool.turn(t)

    def cut(self, i: int) -> dict[int, int]:
        """Detach node i; returns its former edges."""
        edges = self.near[i]
        for j in edges:
            del self.near[j][i]
            self.touch(j)
        self.near[i] = {}
        return edges

    def drop(self, i: int) -> None:
        self.cost[i] = None
        self.usage[i] = None
        self.unpruned.discard(i)

    def shrink(self, i: int, keep: np.ndarray) -> None:
        """Keep only these strategies of node i."""
        if not len(keep):
            raise _Infeasible
        self.trail.append(("map", i, i, keep))
        self.cost[i] = self.own(i)[keep]
        m = self.pool.map(keep)
        for j, t in list(self.near[i].items()):
            self.set_edge(i, j, self.pool.take(t, m))
            self.touch(j)
        usage = self.usage[i]
        if usage is not None:
            self.usage[i] = Usage(usage.spans, usage.use[:, keep])
        self.touch(i)


def reduce(problem: Problem, rounds: int = 12, dominance: bool = True) -> Reduction:
    """Reduce a problem exactly. Costs must add up below 2**52 (else only its copy is returned)."""
    count = len(problem.cost)
    whole = Reduction(problem, (), np.arange(count), count)
    if _magnitude(problem) >= 2.0**52:
        return whole
    state = _start(problem)
    try:
        _drop_rows(state)
        _settle(state)
        for turn in range(rounds):
            if turn < 3:
                _drop_rows(state)
            if not dominance or not _dominate(state):
                break
            _settle(state, pairs=turn > 0 or len(state.cost) < 2000)
    except _Infeasible:
        return Reduction(None, (), np.zeros(0, np.int64), count)
    return _finish(state, count)


def _magnitude(problem: Problem) -> float:
    """An upper bound on the absolute value of any finite cost."""
    high = [float(np.abs(np.where(t >= FORBIDDEN, 0, t)).max(initial=0)) for t in problem.tables]
    total = sum(float(np.abs(np.where(c >= FORBIDDEN, 0, c)).max(initial=0)) for c in problem.cost)
    return total + sum(high[t] for t in problem.edge_table.tolist())


def _start(problem: Problem) -> _State:
    pool = Pool()
    cost: list[np.ndarray | None] = [np.where(c >= FORBIDDEN, np.inf, c) for c in problem.cost]
    near: list[dict[int, int]] = [{} for _ in cost]
    state = _State(pool, cost, near, [None] * len(cost), problem.usage_limit)
    number = [pool.table(np.where(t >= FORBIDDEN, np.inf, t)) for t in problem.tables]
    pairs: dict[tuple[int, int], int] = {}
    for (u, v), raw in zip(problem.edges.tolist(), problem.edge_table.tolist(), strict=True):
        key, t = ((u, v), number[raw]) if u < v else ((v, u), pool.turn(number[raw]))
        pairs[key] = pool.add(pairs[key], t) if key in pairs else t
    for (u, v), t in pairs.items():
        state.set_edge(u, v, t)
    if problem.usage_limit is not None and len(problem.live_node):
        _rows(state, problem)
    for i in range(len(cost)):
        state.touch(i)
    return state


def _rows(state: _State, problem: Problem) -> None:
    """Usage by maximal time points."""
    lo, hi = problem.live_span[:, 0], problem.live_span[:, 1]
    real = np.flatnonzero(hi > lo)
    if not len(real):
        return
    times = maximal_times(lo[real], hi[real])
    first, last = np.searchsorted(times, lo), np.searchsorted(times, hi)
    state.base = np.zeros(len(times), np.int64)
    by: dict[int, list[int]] = {}
    for j in real.tolist():
        if last[j] > first[j] and problem.live_usage[j].any():
            by.setdefault(int(problem.live_node[j]), []).append(j)
    for i, listed in by.items():
        spans = np.stack([first[listed], last[listed]], axis=1)
        state.usage[i] = Usage(spans, np.stack([problem.live_usage[j] for j in listed]).astype(np.int64))


def _drop_rows(state: _State, turns: int = 4) -> None:
    """Forget rows that no choice can exceed, and rows that a neighbour row always exceeds; a row above its least use is a proof."""
    limit = state.limit
    nodes = [i for i, usage in enumerate(state.usage) if usage is not None]
    for i in nodes:
        _level(state, i)
    listed = [(i, usage) for i in nodes if (usage := state.usage[i]) is not None]
    if limit is None or not len(state.base):
        return
    single = [(i, u) for i, u in listed if len(u.spans) == 1]
    several = [(i, u) for i, u in listed if len(u.spans) > 1]
    spans = np.concatenate([u.spans for _, u in single]) if single else np.zeros((0, 2), np.int64)
    peak = np.array([int(u.use.max()) for _, u in single], np.int64)
    for _ in range(turns):
        rows = len(state.base)
        top, low, grow, fall = (np.zeros(rows + 1, np.int64) for _ in range(4))
        for total, sign, at in ((top, 1, 0), (top, -1, 1), (grow, 1, 0), (fall, 1, 1)):
            np.add.at(total, spans[:, at], sign * peak)
        for _, usage in several:
            usage.count(top, low, grow, fall)
        high, least = top[:rows].cumsum() + state.base, low[:rows].cumsum() + state.base
        if (least > limit).any():
            raise _Infeasible
        step = np.diff(state.base)
        # boundary b lies between rows b - 1 and b
        below_next = np.append(fall[1:rows] <= step, False)  # row r never exceeds row r + 1
        below_last = np.append(False, grow[1:rows] <= -step)
        keep = (high > limit) & ~below_next & ~(below_last & ~np.append(False, below_next[:-1]))
        if keep.all():
            break
        place = np.concatenate(([0], np.cumsum(keep)))
        state.base = state.base[keep]
        spans = place[spans]
        some = spans[:, 1] > spans[:, 0]
        for (i, usage), span, live in zip(single, spans, some.tolist(), strict=True):
            usage.spans = span[None]
            if not live:
                state.usage[i] = None
                state.touch(i)
        single = [pair for pair, live in zip(single, some.tolist(), strict=True) if live]
        spans, peak = spans[some], peak[some]
        listed, several = several, []
        for i, usage in listed:
            fresh = state.usage[i] = usage.moved(place)
            if fresh is None or len(fresh.spans) != len(usage.spans):
                state.touch(i)
            if fresh is not None:
                several.append((i, fresh))
        if not len(state.base) or keep.mean() > 0.97:
            break


def _settle(state: _State, pairs: bool = True) -> None:
    """Apply all steps but dominance until nothing changes. `pairs`: also eliminate nodes of degree 2."""
    while state.queue:
        i = heapq.heappop(state.queue)
        state.queued.discard(i)
        if state.cost[i] is None:
            continue
        keep = np.isfinite(state.own(i))
        for t in state.near[i].values():
            alive = state.pool.alive(t)
            if alive is not None:
                keep = keep & alive
        if not keep.all():
            state.shrink(i, np.flatnonzero(keep))
            continue
        _level(state, i)
        if len(state.own(i)) == 1:
            _single(state, i)
        elif not _fold(state, i) and state.usage[i] is None and len(state.near[i]) <= (2 if pairs else 1):
            _eliminate(state, i)


def _level(state: _State, i: int) -> None:
    """Usage that all strategies share becomes a constant."""
    usage = state.usage[i]
    if usage is None:
        return
    least = usage.use.min(axis=1)
    if least.any():
        steps = np.zeros(len(state.base) + 1, np.int64)
        np.add.at(steps, usage.spans[:, 0], least)
        np.subtract.at(steps, usage.spans[:, 1], least)
        state.base = state.base + steps.cumsum()[:-1]
        usage.use = usage.use - least[:, None]
    some = usage.use.any(axis=1)
    if not some.all():
        state.usage[i] = Usage(usage.spans[some], usage.use[some]) if some.any() else None


def _single(state: _State, i: int) -> None:
    state.trail.append(("value", i, 0))
    state.constant += float(state.own(i)[0])
    for j, t in state.cut(i).items():
        state.cost[j] = state.own(j) + state.pool.tables[t][0]
    state.drop(i)


def _fold(state: _State, u: int) -> bool:
    """Fold one neighbour that is a function of u into u (of a bijection, the one with fewer edges). True when something changed."""
    pool = state.pool
    for v, t in state.near[u].items():
        f = pool.function(t)
        if f is None:
            continue
        back = pool.function(pool.turn(t))
        if back is not None and len(state.near[v]) > len(state.near[u]):
            _absorb(state, v, u, back)
        else:
            _absorb(state, u, v, f)
        return True
    return False


def _absorb(state: _State, u: int, v: int, f: np.ndarray) -> None:
    """v = f(u): move v's cost, usage and edges to u."""
    pool = state.pool
    table = pool.tables[state.near[u][v]]
    state.trail.append(("map", v, u, f))
    edges = state.cut(v)
    del edges[u]
    state.cost[u] = state.own(u) + table[np.arange(len(f)), f] + state.own(v)[f]
    m = pool.map(f)
    for w, t in edges.items():
        t = pool.take(t, m)
        state.set_edge(u, w, pool.add(state.near[u][w], t) if w in state.near[u] else t)
        state.touch(w)
    moved, present = state.usage[v], state.usage[u]
    if moved is not None:
        moved = Usage(moved.spans, moved.use[:, f])
        state.usage[u] = moved if present is None else present.joined(moved)
    state.drop(v)
    state.touch(u)


def _eliminate(state: _State, i: int) -> None:
    """Minimise out a memory-neutral node of degree <= 2."""
    pool, own = state.pool, state.own(i)
    around = list(state.near[i].items())
    if not around:
        state.trail.append(("value", i, int(own.argmin())))
        state.constant += float(own.min())
    elif len(around) == 1:
        (u, t), = around
        total = own[:, None] + pool.tables[t]
        state.cut(i)
        state.trail.append(("map", i, u, total.argmin(axis=0)))
        state.cost[u] = state.own(u) + total.min(axis=0)
    else:
        (u, t), (w, s) = around
        if u > w:
            (u, t), (w, s) = (w, s), (u, t)
        total = own[:, None, None] + pool.tables[t][:, :, None] + pool.tables[s][:, None, :]
        state.cut(i)
        state.trail.append(("pair", i, u, w, total.argmin(axis=0)))
        joined = pool.table(total.min(axis=0))
        state.set_edge(u, w, pool.add(state.near[u][w], joined) if w in state.near[u] else joined)
        state.touch(u)
        state.touch(w)
    state.drop(i)


def _dominate(state: _State) -> bool:
    """One pass of dominance over the nodes that changed since the last. True when a strategy went."""
    changed = False
    listed = sorted(state.unpruned)
    state.unpruned = set()
    for i in listed:
        if state.cost[i] is None:
            continue
        own = state.own(i)
        k = len(own)
        if k < 2:
            continue
        # the tables have a zero in every row, so each edge can only lower the lead of one strategy over another
        a, b = np.nonzero(own[:, None] >= own)
        usage = state.usage[i]
        fine = a != b
        if usage is not None:
            fine &= (usage.use[:, a] >= usage.use[:, b]).all(axis=0)
        a, b = a[fine], b[fine]
        lead = own[a] - own[b]
        for t in state.near[i].values():
            if not len(a):
                break
            lead = lead + state.pool.lead(t, a, b)
            fine = lead >= 0
            a, b, lead = a[fine], b[fine], lead[fine]
        if not len(a):
            continue
        beats = np.zeros((k, k), bool)
        beats[a, b] = True
        # of two that beat each other the first stays
        gone = (beats & ~(beats.T & np.tri(k, k, -1, dtype=bool).T)).any(axis=1)
        if gone.any():
            state.shrink(i, np.flatnonzero(~gone))
            changed = True
    return changed


def _finish(state: _State, count: int) -> Reduction:
    alive = [i for i in range(count) if state.cost[i] is not None]
    place = {i: r for r, i in enumerate(alive)}
    cost = [np.where(np.isfinite(state.own(i)), state.own(i), FORBIDDEN).astype(np.int64) for i in alive]
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
    live = [(place[i], s, u) for i in alive if (n := state.usage[i]) is not None for s, u in zip(n.spans.tolist(), n.use, strict=True)]
    kept = np.array(alive, np.int64)
    if state.constant or state.base.any() or not alive:
        cuts = np.flatnonzero(np.diff(state.base, prepend=-1, append=-1)).tolist()
        live += [(len(alive), [a, b], state.base[a : a + 1]) for a, b in pairwise(cuts) if state.base[a]]
        cost.append(np.array([int(state.constant)], np.int64))
        kept = np.append(kept, -1)
    problem = Problem(
        tuple(cost), np.array(ends, np.int64).reshape(-1, 2), np.array(picked, np.int64), tuple(tables),
        np.array([n for n, _, _ in live], np.int64), np.array([s for _, s, _ in live], np.int64).reshape(-1, 2),
        tuple(u.astype(np.int64) for _, _, u in live), state.limit,
    )  # fmt: skip
    return Reduction(problem, tuple(state.trail), kept, count)
