"""The solvers' own view of a `Problem`: parallel edges merged, memory written as rows, arrays laid
out flat.

    strategies of node i   flat positions offset[i] .. offset[i + 1] - 1
    pair (u, v), u < v     one table, the exact sum of all parallel edges, with FORBIDDEN entries as
                           +inf
    memory row r           one maximal time point; only rows that can exceed the limit are kept
    interval j             covers rows row_lo[j] .. row_hi[j] - 1; flat entries of its usage are
                           `use_value`; those of a node are disjoint

A set of live intervals that is contained in another time point's set can never be the worse one, so
only time points just before some interval ends (with a start since the last end) matter; the others
are dropped (`maximal_times`).

Costs are float64: every sum of finite costs below 2**53 is exact. `Model.exact` says whether that
holds; where it does not, `Model.as_int` gives the same arrays as int64 with `INF_INT` for +inf.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from planner.solvers.problem import FORBIDDEN, Problem

INF_INT = 1 << 60
"""+inf of the int64 arrays: two of them still add without overflow."""
SEARCHABLE = 1e14
"""The largest costs of all nodes and edges must add up below this: a forbidden entry stands as a
number far above any choice."""


@dataclass(frozen=True)
class Memory:
    """Usage by rows. All arrays refer to intervals that cover at least one kept row."""

    limit: float
    rows: int
    node: np.ndarray  # [intervals] node of each interval
    row_lo: np.ndarray  # [intervals]
    row_hi: np.ndarray  # [intervals]
    start: np.ndarray  # [intervals + 1] first flat entry of each interval
    use_value: np.ndarray  # [entries] usage of one strategy, float64
    use_at: np.ndarray  # [entries] flat strategy position of that entry

    def load(self, x: np.ndarray) -> np.ndarray:
        """Usage of every row under the choice x. [rows]"""
        picked = self.use_value[self.start[:-1] + x[self.node]]
        steps = np.bincount(self.row_lo, picked, self.rows + 1) - np.bincount(
            self.row_hi, picked, self.rows + 1
        )
        return steps.cumsum()[: self.rows]

    def priced(self, price: np.ndarray, positions: int) -> np.ndarray:
        """Cost of memory of every flat strategy position under a price per row. [positions]"""
        total = np.concatenate(([0.0], np.cumsum(price)))
        interval_price = total[self.row_hi] - total[self.row_lo]
        return np.bincount(
            self.use_at, self.use_value * np.repeat(interval_price, np.diff(self.start)), positions
        )

    def extreme(self, largest: bool) -> np.ndarray:
        """Sum over nodes of the smallest (or largest) usage, per row. [rows]"""
        if not len(self.node):
            return np.zeros(self.rows)
        pick = np.maximum if largest else np.minimum
        ends = pick.reduceat(self.use_value, self.start[:-1])
        steps = np.bincount(self.row_lo, ends, self.rows + 1) - np.bincount(
            self.row_hi, ends, self.rows + 1
        )
        return steps.cumsum()[: self.rows]

    def of_node(self, count: int) -> list[list[int]]:
        """Interval indices of each node."""
        intervals: list[list[int]] = [[] for _ in range(count)]
        for j, i in enumerate(self.node.tolist()):
            intervals[i].append(j)
        return intervals

    def matrix(self, j: int) -> np.ndarray:
        """Usage of interval j by strategy. [strategies]"""
        return self.use_value[self.start[j] : self.start[j + 1]]


@dataclass(frozen=True)
class Model:
    """A problem in the form the solvers work on. `pairs[(u, v)]` has u < v and shape [strategies of
    u, strategies of v]."""

    offset: np.ndarray  # [nodes + 1]
    cost: np.ndarray  # [positions] float64, +inf when forbidden
    pairs: dict[tuple[int, int], np.ndarray]
    memory: Memory | None
    exact: bool = True
    cost_int: np.ndarray | None = None
    pairs_int: dict[tuple[int, int], np.ndarray] | None = field(default=None, repr=False)
    memo: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """What neighbourhoods derive once per model."""

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.offset) - 1

    @cached_property
    def sizes(self) -> list[int]:
        """Strategies per node."""
        return [int(s) for s in np.diff(self.offset)]

    @cached_property
    def adjacent(self) -> list[dict[int, np.ndarray]]:
        """Per node: neighbour -> table with this node's strategies as rows."""
        neighbours: list[dict[int, np.ndarray]] = [{} for _ in range(self.nodes)]
        for (u, v), table in self.pairs.items():
            neighbours[u][v] = table
            neighbours[v][u] = table.T
        return neighbours

    @cached_property
    def searchable(self) -> bool:
        """True when costs add up exactly, and to far less than what stands for a forbidden
        entry."""
        cost = np.where(np.isfinite(self.cost), np.abs(self.cost), 0.0)
        tables = sum(
            float(np.where(np.isfinite(t), np.abs(t), 0.0).max(initial=0.0))
            for t in self.pairs.values()
        )
        return (
            self.exact
            and float(np.maximum.reduceat(cost, self.offset[:-1]).sum()) + tables < SEARCHABLE
        )

    def node_cost(self, i: int) -> np.ndarray:
        """Own cost of node i's strategies. [strategies]"""
        return self.cost[self.offset[i] : self.offset[i + 1]]

    def total(self, x: np.ndarray) -> float:
        """Cost of a choice, +inf when forbidden."""
        value = float(self.cost[self.offset[:-1] + x].sum())
        for (u, v), table in self.pairs.items():
            value += float(table[x[u], x[v]])
        return value


def build(problem: Problem) -> Model:
    """The model of a problem; every array is new or read-only, the problem is not touched."""
    sizes = np.fromiter((len(c) for c in problem.cost), np.int64, len(problem.cost))
    offset = np.concatenate(([0], np.cumsum(sizes)))
    raw = (
        np.concatenate(problem.cost).astype(np.int64)
        if len(problem.cost)
        else np.zeros(0, np.int64)
    )
    forbidden = raw >= FORBIDDEN
    bound = (
        float(np.maximum.reduceat(np.abs(np.where(forbidden, 0, raw)), offset[:-1]).sum())
        if len(raw)
        else 0.0
    )
    floats: dict[int, np.ndarray] = {}
    high: dict[int, float] = {}
    pairs: dict[tuple[int, int], np.ndarray] = {}
    for (u, v), t in zip(problem.edges.tolist(), problem.edge_table.tolist(), strict=True):
        if t not in floats:
            table = np.asarray(problem.tables[t])
            bad = table >= FORBIDDEN
            some = bool(bad.any())
            floats[t] = np.where(bad, np.inf, table) if some else table.astype(np.float64)
            high[t] = float(np.abs(np.where(bad, 0, table) if some else table).max(initial=0))
        bound += high[t]
        key, table = ((u, v), floats[t]) if u < v else ((v, u), floats[t].T)
        pairs[key] = pairs[key] + table if key in pairs else table
    cost = np.where(forbidden, np.inf, raw)
    memory = rows_of(problem, offset)
    if bound < 2.0**52:
        return Model(offset, cost, pairs, memory)
    return Model(
        offset, cost, pairs, memory, False, np.where(forbidden, INF_INT, raw), _int_pairs(problem)
    )


def _int_pairs(problem: Problem) -> dict[tuple[int, int], np.ndarray]:
    pairs: dict[tuple[int, int], np.ndarray] = {}
    for (u, v), t in zip(problem.edges.tolist(), problem.edge_table.tolist(), strict=True):
        table = np.where(problem.tables[t] >= FORBIDDEN, INF_INT, problem.tables[t])
        key, table = ((u, v), table) if u < v else ((v, u), table.T)
        pairs[key] = np.minimum(pairs[key] + table, INF_INT) if key in pairs else table
    return pairs


def maximal_times(lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """Time points whose set of live intervals is contained in no other's, ascending. Intervals are
    half-open and not empty."""
    starts, ends = (
        np.unique(x, return_counts=True)[0] for x in (lo, hi)
    )  # numpy loads its masked arrays where counts are not asked for
    following = np.append(starts[1:], np.iinfo(np.int64).max)
    ended = np.searchsorted(ends, following, "right") > np.searchsorted(ends, starts, "right")
    return starts[ended]


def rows_of(problem: Problem, offset: np.ndarray) -> Memory | None:
    """Memory rows that some choice can exceed, or None when there are none."""
    if problem.usage_limit is None or not len(problem.live_node):
        return None
    lo, hi = problem.live_span[:, 0], problem.live_span[:, 1]
    peak = np.fromiter(
        (int(u.max(initial=0)) for u in problem.live_usage), np.int64, len(problem.live_usage)
    )
    real = np.flatnonzero((hi > lo) & (peak > 0))
    if not len(real):
        return None
    lo, hi, peak = lo[real], hi[real], peak[real]
    times = maximal_times(lo, hi)
    a, b = np.searchsorted(times, lo), np.searchsorted(times, hi)
    top = np.zeros(len(times) + 1, np.int64)
    np.add.at(top, a, peak)
    np.subtract.at(top, b, peak)
    tight = top.cumsum()[: len(times)] > problem.usage_limit
    if not tight.any():
        return None
    kept = np.concatenate(([0], np.cumsum(tight)))
    a, b = kept[a], kept[b]
    covers = np.flatnonzero(b > a)
    real, a, b = real[covers], a[covers], b[covers]
    node, a, b, usage = disjoint(
        problem.live_node[real], a, b, [problem.live_usage[j] for j in real.tolist()]
    )
    sizes = offset[node + 1] - offset[node]
    start = np.concatenate(([0], np.cumsum(sizes)))
    value = np.concatenate(usage).astype(np.float64)
    use_at = np.arange(len(value)) - np.repeat(start[:-1] - offset[node], sizes)
    return Memory(float(problem.usage_limit), int(tight.sum()), node, a, b, start, value, use_at)


def disjoint(
    node: np.ndarray, lo: np.ndarray, hi: np.ndarray, usage: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
    """The same usage with each node's intervals made disjoint (overlaps add up), ordered by node,
    then by first row."""
    by = np.lexsort((hi, lo, node))
    node, lo, hi = node[by], lo[by], hi[by]
    usage = [usage[j] for j in by.tolist()]
    clash = (node[1:] == node[:-1]) & (lo[1:] < hi[:-1])
    if not clash.any():
        return node, lo, hi, usage
    pieces: list[tuple[int, int, int, np.ndarray]] = []
    first = np.flatnonzero(np.append(True, node[1:] != node[:-1])).tolist()
    for p, q in zip(first, [*first[1:], len(node)], strict=True):
        if not clash[p : q - 1].any():
            pieces += [(int(node[j]), int(lo[j]), int(hi[j]), usage[j]) for j in range(p, q)]
            continue
        cuts = sorted({*lo[p:q].tolist(), *hi[p:q].tolist()})
        for a, b in pairwise(cuts):
            live = [usage[j] for j in range(p, q) if lo[j] <= a and hi[j] >= b]
            if live:
                pieces.append((int(node[p]), a, b, np.sum(live, axis=0)))
    ends = np.array([f[:3] for f in pieces], np.int64)
    return ends[:, 0], ends[:, 1], ends[:, 2], [f[3] for f in pieces]


def restrict(model: Model, keep: list[np.ndarray]) -> Model:
    """The model with only these strategies per node (ascending or not; the new index is the place
    in `keep`)."""
    sizes = np.fromiter((len(k) for k in keep), np.int64, len(keep))
    offset = np.concatenate(([0], np.cumsum(sizes)))
    flat = np.concatenate(keep)
    taken = flat + np.repeat(model.offset[:-1], sizes)
    pairs = {(u, v): t[keep[u][:, None], keep[v]] for (u, v), t in model.pairs.items()}
    memory = None if model.memory is None else _restrict_memory(model.memory, flat, offset)
    return Model(offset, model.cost[taken], pairs, memory, model.exact)


def _restrict_memory(memory: Memory, flat: np.ndarray, offset: np.ndarray) -> Memory:
    sizes = offset[memory.node + 1] - offset[memory.node]
    start = np.concatenate(([0], np.cumsum(sizes)))
    use_at = np.arange(start[-1]) - np.repeat(start[:-1] - offset[memory.node], sizes)
    value = memory.use_value[flat[use_at] + np.repeat(memory.start[:-1], sizes)]
    return Memory(
        memory.limit, memory.rows, memory.node, memory.row_lo, memory.row_hi, start, value, use_at
    )
