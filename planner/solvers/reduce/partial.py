"""The problem under reduction: nodes, edges by table number, usage in rows. What may change it is
in planner.solvers.reduce.reductions and `steps`."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from planner.solvers.reduce.pool import Pool
from planner.solvers.reduce.usage import Usage


class Infeasible(Exception):
    """No choice is feasible."""


@dataclass
class State:
    """The problem under reduction. Alive nodes have a cost array; edges hold a table number in both
    directions."""

    pool: Pool
    cost: list[np.ndarray | None]
    near: list[dict[int, int]]
    usage: list[Usage | None]
    limit: int | None
    constant: float = 0.0
    base: np.ndarray = field(
        default_factory=lambda: np.zeros(0, np.int64)
    )  # [rows] usage that no choice changes, but for `rise`
    rise: np.ndarray = field(
        default_factory=lambda: np.zeros(1, np.int64)
    )  # [rows + 1] steps not yet added to it
    trail: list[tuple] = field(default_factory=list)
    queue: list[int] = field(default_factory=list)
    queued: set[int] = field(default_factory=set)
    unpruned: set[int] = field(default_factory=set)
    unread: list[list[int]] = field(
        default_factory=list
    )  # per node: neighbours whose table was set since `alive` read it

    def touch(self, i: int) -> None:
        """The node changed: it is looked at again."""
        if i not in self.queued:
            self.queued.add(i)
            heapq.heappush(self.queue, i)
        self.unpruned.add(i)

    def alive(self, i: int) -> np.ndarray | None:
        """The strategies of node i that have a finite cost and, in every table set since the last
        call, a finite partner; None when all have."""
        cost, near, pool = self.own(i), self.near[i], self.pool
        keep = np.isfinite(cost) if np.maximum.reduce(cost) == np.inf else None
        for j in self.unread[i]:
            t = near.get(j)
            some = None if t is None else pool.alive(t)
            if some is not None:
                keep = some if keep is None else keep & some
        self.unread[i] = []
        return None if keep is None else np.flatnonzero(keep)

    def own(self, i: int) -> np.ndarray:
        """Costs of an alive node's strategies. [strategies]"""
        cost = self.cost[i]
        assert cost is not None
        return cost

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
