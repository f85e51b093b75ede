"""The problem under reduction: nodes, edges by table number, usage in rows. What may change it is in planner.solvers.reduce and `steps`."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from planner.problem import FORBIDDEN, Problem
from planner.solvers.model import maximal_times
from planner.solvers.pool import Pool
from planner.solvers.usage import Usage


class Infeasible(Exception):
    """No choice is feasible."""


@dataclass
class State:
    """The problem under reduction. Alive nodes have a cost array; edges hold a table number in both directions."""

    pool: Pool
    cost: list[np.ndarray | None]
    near: list[dict[int, int]]
    usage: list[Usage | None]
    limit: int | None
    constant: float = 0.0
    base: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # [rows] usage that no choice changes, but for `rise`
    rise: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))  # [rows + 1] steps not yet added to it
    trail: list[tuple] = field(default_factory=list)
    queue: list[int] = field(default_factory=list)
    queued: set[int] = field(default_factory=set)
    unpruned: set[int] = field(default_factory=set)
    unread: list[list[int]] = field(default_factory=list)  # per node: neighbours whose table was set since `alive` read it

    def touch(self, i: int) -> None:
        """The node changed: it is looked at again."""
        if i not in self.queued:
            self.queued.add(i)
            heapq.heappush(self.queue, i)
        self.unpruned.add(i)

    def alive(self, i: int) -> np.ndarray:
        """Which strategies of node i have a finite cost and, in every table set since the last call, a finite partner. [strategies]"""
        keep = np.isfinite(self.own(i))
        near = self.near[i]
        for j in self.unread[i]:
            t = near.get(j)
            some = None if t is None else self.pool.alive(t)
            if some is not None:
                keep = keep & some
        self.unread[i] = []
        return keep

    def own(self, i: int) -> np.ndarray:
        """Costs of an alive node's strategies. [strategies]"""
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
            self.unread[u].append(v)
            self.unread[v].append(u)

    def cut(self, i: int) -> dict[int, int]:
        """Detach node i; returns its former edges."""
        edges = self.near[i]
        for j in edges:
            del self.near[j][i]
            self.touch(j)
        self.near[i] = {}
        return edges

    def drop(self, i: int) -> None:
        """The node is gone."""
        self.cost[i] = None
        self.usage[i] = None
        self.unpruned.discard(i)

    def shrink(self, i: int, keep: np.ndarray) -> None:
        """Keep only these strategies of node i."""
        if not len(keep):
            raise Infeasible
        self.trail.append(("map", i, i, keep))
        self.cost[i] = self.own(i)[keep]
        m = self.pool.map(keep)
        for j, t in list(self.near[i].items()):
            self.set_edge(i, j, self.pool.take(t, m))
            self.touch(j)
        usage = self.usage[i]
        if usage is not None:
            self.usage[i] = usage.take(keep)
        self.touch(i)


def start(problem: Problem) -> State:
    """The state of a problem nothing has been done to."""
    pool = Pool()
    cost: list[np.ndarray | None] = [np.where(c >= FORBIDDEN, np.inf, c) for c in problem.cost]
    near: list[dict[int, int]] = [{} for _ in cost]
    state = State(pool, cost, near, [None] * len(cost), problem.usage_limit, unread=[[] for _ in cost])
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


def _rows(state: State, problem: Problem) -> None:
    """Usage by maximal time points."""
    lo, hi = problem.live_span[:, 0], problem.live_span[:, 1]
    real = np.flatnonzero(hi > lo)
    if not len(real):
        return
    times = maximal_times(lo[real], hi[real])
    spans = np.stack([np.searchsorted(times, lo), np.searchsorted(times, hi)], axis=1)
    empty = spans[:, 1] <= spans[:, 0]
    state.base, state.rise = np.zeros(len(times), np.int64), np.zeros(len(times) + 1, np.int64)
    by: dict[int, list[int]] = {}
    for j in real.tolist():
        if not empty[j] and problem.live_usage[j].any():
            by.setdefault(int(problem.live_node[j]), []).append(j)
    for i, listed in by.items():
        use = [problem.live_usage[j] for j in listed]
        state.usage[i] = Usage(spans[listed], np.concatenate(use).reshape(len(use), -1).astype(np.int64))


def drop_rows(state: State, turns: int = 4) -> None:
    """Forget rows that no choice can exceed, and rows that a neighbour row always exceeds; a row above its least use is a proof."""
    limit = state.limit
    nodes = [i for i, usage in enumerate(state.usage) if usage is not None]
    for i in nodes:
        level(state, i)
    listed = [(i, usage) for i in nodes if (usage := state.usage[i]) is not None]
    if limit is None or not len(state.base):
        return
    add_rise(state)
    single = [(i, u) for i, u in listed if len(u.spans) == 1]
    several = [(i, u) for i, u in listed if len(u.spans) > 1]
    spans = np.concatenate([u.spans for _, u in single]) if single else np.zeros((0, 2), np.int64)
    peak = np.array([u.use.max() for _, u in single], np.int64)
    moved = several
    base = state.base
    for _ in range(turns):
        rows = len(base)
        top, low, grow, fall = (np.zeros(rows + 1, np.int64) for _ in range(4))
        for total, sign, at in ((top, 1, 0), (top, -1, 1), (grow, 1, 0), (fall, 1, 1)):
            np.add.at(total, spans[:, at], sign * peak)
        for _, usage in moved:
            usage.count(top, low, grow, fall)
        high, least = top[:rows].cumsum() + base, low[:rows].cumsum() + base
        if (least > limit).any():
            raise Infeasible
        step = np.diff(base)
        # boundary b lies between rows b - 1 and b
        below_next = np.append(fall[1:rows] <= step, False)  # row r never exceeds row r + 1
        below_last = np.append(False, grow[1:rows] <= -step)
        keep = (high > limit) & ~below_next & ~(below_last & ~np.append(False, below_next[:-1]))
        if keep.all():
            break
        place = np.concatenate(([0], np.cumsum(keep)))
        base, spans = base[keep], place[spans]
        peak = np.where(spans[:, 1] > spans[:, 0], peak, 0)  # what is live in no row that is left
        moved = [(i, fresh) for i, usage in moved if (fresh := usage.moved(place)) is not None]
        if not len(base) or keep.mean() > 0.97:
            break
    if len(base) == len(state.base):
        return
    state.base, state.rise = base, np.zeros(len(base) + 1, np.int64)
    left = dict(moved)
    for i, usage in several:
        fresh = state.usage[i] = left.get(i)
        if fresh is None or len(fresh.spans) != len(usage.spans):
            state.touch(i)
    for (i, usage), span, live in zip(single, spans, (peak > 0).tolist(), strict=True):
        state.usage[i] = Usage(span[None], usage.use, usage.flat) if live else None
        if not live:
            state.touch(i)


def add_rise(state: State) -> None:
    """Bring `base` up to date."""
    state.base = state.base + state.rise.cumsum()[:-1]
    state.rise[:] = 0


def level(state: State, i: int) -> None:
    """Usage that all strategies share becomes a constant."""
    usage = state.usage[i]
    if usage is None or usage.flat:
        return
    spans, use = usage.spans, usage.use
    least = use.min(axis=1)
    if least.any():
        np.add.at(state.rise, spans[:, 0], least)
        np.subtract.at(state.rise, spans[:, 1], least)
        use = use - least[:, None]
    some = use.any(axis=1)
    if some.all():
        state.usage[i] = Usage(spans, use, flat=True)
    else:
        state.usage[i] = Usage(spans[some], use[some], flat=True) if some.any() else None
