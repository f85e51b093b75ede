"""Exact variable elimination (min-plus), the engine of `dp`.

Eliminating variable v with neighbours S(v) makes the message

    m_v(x_S) = min over x_v of [ unary_v(x_v) + sum over u in S(v) of table_vu(x_v, x_u) + messages received by v ]

which is added to the neighbour that is eliminated next (its parent). The last value is the optimum; decoding in reverse order
reads the minimisers. Axes of every table are ordered by elimination position, so that adding a message is a reshape, never a transpose.

`Tree` is compiled once per model; `Tree.run` is repeated with other unary costs (memory prices change only those).
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field, replace

import numpy as np

from planner.solvers.model import INF_INT, Model

SMALL = 4096
"""Pair tables are added up while their sum has no more entries."""


def order_of(sizes: list[int], adjacent: list[set[int]], limit: float) -> tuple[list[int], list[tuple[int, ...]], float] | None:
    """An elimination order by least (fill, table size), the scope of each step, and the entries of all tables together.

    Returns None when some table would have more than `limit` entries. `adjacent` is consumed.
    """
    n = len(sizes)
    logs = [math.log(max(s, 1)) for s in sizes]

    def score(v: int) -> tuple[int, float]:
        near = adjacent[v]
        size = logs[v] + sum(logs[u] for u in near)
        if len(near) <= 1:
            return 0, size
        if len(near) > 12:
            return len(near) ** 2, size
        listed = sorted(near)
        fill = sum(1 for a, u in enumerate(listed) for w in listed[a + 1 :] if w not in adjacent[u])
        return fill, size

    stamp = [0] * n
    heap = [(*score(v), v, 0) for v in range(n)]
    heapq.heapify(heap)
    done = [False] * n
    order: list[int] = []
    scopes: list[tuple[int, ...]] = []
    total, ceiling = 0.0, math.log(limit)
    while heap:
        _, size, v, seen = heapq.heappop(heap)
        if done[v] or seen != stamp[v]:
            continue
        if size > ceiling:
            return None
        total += math.exp(min(size, 700.0))
        done[v] = True
        near = sorted(adjacent[v])
        order.append(v)
        scopes.append(tuple(near))
        touched = set(near)
        for u in near:
            adjacent[u].discard(v)
            if len(near) > 1:
                adjacent[u].update(near)
                adjacent[u].discard(u)
        if len(near) > 2:
            for u in near:
                if len(adjacent[u]) <= 12:
                    touched |= adjacent[u]
        for u in sorted(touched):
            stamp[u] += 1
            heapq.heappush(heap, (*score(u), u, stamp[u]))
    return order, scopes, total


class Scratch:
    """Room for the tables of one run, lent to one tree after the other: many trees are compiled for a search, and one runs at a time."""

    def __init__(self) -> None:
        self._room = np.empty(0)

    def tables(self, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
        """An array of each shape."""
        ends = np.cumsum([0, *map(math.prod, shapes)]).tolist()
        if len(self._room) < ends[-1]:
            self._room = np.empty(ends[-1])
        return [self._room[a:b].reshape(shape) for a, b, shape in zip(ends, ends[1:], shapes, strict=False)]


@dataclass
class Tree:
    """A compiled elimination. `scope[v]` is ordered by elimination position; `shape[v]` = (own strategies, scope's strategies...)."""

    model: Model
    order: list[int]
    scope: list[tuple[int, ...]]
    entries: float
    base: list[list[np.ndarray]]  # per node: pair tables of its bucket, broadcastable to its shape; added up only where that makes none larger
    shape: list[tuple[int, ...]]
    message_shape: list[tuple[int, ...]]  # shape in which v's message is added to its parent's table
    children: list[list[int]]
    integer: bool = False
    tables: list[np.ndarray] = field(default_factory=list, repr=False)  # of the last run; overwritten by the next
    scratch: Scratch | None = None
    """Where tables are lent (float costs only): they are of the last run of all trees that share it."""

    def run(self, unary: np.ndarray) -> tuple[float, np.ndarray, list[np.ndarray]]:
        """Minimum, a minimising choice, and every node's table, under flat unary costs [positions].

        The tables are those of this run until the next one.

        The value is +inf (or >= INF_INT) when every choice is forbidden; the choice is then meaningless.
        """
        value, tables, _ = self._fill(unary)
        return value, self.decode(tables), tables

    def _fill(self, unary: np.ndarray, *, keep: bool = False) -> tuple[float, list[np.ndarray], list[np.ndarray | None]]:
        """Minimum, every node's table, and the messages that were sent (keep: all of them, else those that nobody has read)."""
        offset, n = self.model.offset.tolist(), self.model.nodes
        if self.scratch is not None:
            self.tables = self.scratch.tables(self.shape)
        elif not self.tables:
            self.tables.extend(np.empty(s, np.int64 if self.integer else np.float64) for s in self.shape)
        tables, least = self.tables, np.minimum.reduce
        messages: list[np.ndarray | None] = [None] * n
        value = 0 if self.integer else 0.0
        for v in self.order:
            own = unary[offset[v] : offset[v + 1]]
            depth = len(self.shape[v]) - 1
            table = tables[v]
            first, *others = self.base[v]
            np.add(first, own.reshape(-1, *(1,) * depth), out=table)
            if self.integer:
                np.minimum(table, INF_INT, out=table)
            for c in self.children[v]:
                others.append(messages[c].reshape(self.message_shape[c]))  # type: ignore[union-attr]
                if not keep:
                    messages[c] = None
            for part in others:
                np.add(table, part, out=table)
                if self.integer:
                    np.minimum(table, INF_INT, out=table)
            best = least(table, axis=0)
            if depth:
                messages[v] = best
            else:
                value += int(best) if self.integer else float(best)
        return value, tables, messages

    def marginals(self, unary: np.ndarray) -> tuple[float, np.ndarray]:
        """Minimum, and of the choices with each strategy the least cost [positions]: messages go back from parents to children. Float costs only."""
        value, tables, messages = self._fill(unary, keep=True)
        offset, least = self.model.offset.tolist(), np.full(len(unary), np.inf)
        if not np.isfinite(value):
            return value, least
        for v in reversed(self.order):
            table, scope = tables[v], self.scope[v]
            if scope:
                parent = scope[0]
                away = tuple(axis for axis, u in enumerate((parent, *self.scope[parent])) if u not in scope)
                sent, rest = messages[v], tables[parent].min(axis=away)
                assert sent is not None
                table += np.subtract(rest, sent, out=np.zeros_like(sent), where=np.isfinite(sent))
            else:
                table += value - table.min()
            least[offset[v] : offset[v + 1]] = table.reshape(len(table), -1).min(axis=1)
        return value, least

    def with_pairs(self, pairs: dict[tuple[int, int], np.ndarray]) -> Tree:
        """The same elimination with other tables of the same pairs."""
        found = tree_of(replace(self.model, pairs=pairs), self.order, [self.scope[v] for v in self.order], self.entries, self.integer)
        found.scratch = self.scratch
        return found

    def decode(self, tables: list[np.ndarray]) -> np.ndarray:
        """The choice that reads each table's first minimum, last eliminated node first. [nodes]"""
        x = np.zeros(self.model.nodes, np.int64)
        for v in reversed(self.order):
            x[v] = tables[v][(slice(None), *[x[u] for u in self.scope[v]])].argmin()
        return x


def compile_tree(model: Model, table_limit: float = 3e7, total_limit: float = 6e7, integer: bool = False) -> Tree | None:
    """An elimination tree, or None when its tables would pass the limits (in entries of 8 bytes, checked before any allocation)."""
    adjacent: list[set[int]] = [set() for _ in range(model.nodes)]
    for u, v in model.pairs:
        adjacent[u].add(v)
        adjacent[v].add(u)
    found = order_of(model.sizes, adjacent, table_limit)
    if found is None or found[2] > total_limit:
        return None
    return tree_of(model, *found, integer)


def tree_of(model: Model, order: list[int], near: list[tuple[int, ...]], entries: float, integer: bool = False) -> Tree:
    """The tree of an elimination order, as `order_of` gives it."""
    n = model.nodes
    position = [0] * n
    for p, v in enumerate(order):
        position[v] = p
    scope: list[tuple[int, ...]] = [()] * n
    for v, s in zip(order, near, strict=True):
        scope[v] = tuple(sorted(s, key=position.__getitem__))
    shape = [(model.sizes[v], *(model.sizes[u] for u in scope[v])) for v in range(n)]
    pairs = model.pairs_int if integer else model.pairs
    assert pairs is not None
    base = _bases(model, pairs, scope, position, integer)
    message_shape: list[tuple[int, ...]] = [()] * n
    children: list[list[int]] = [[] for _ in range(n)]
    for v in order:
        if scope[v]:
            parent = scope[v][0]
            inside = set(scope[v])
            message_shape[v] = tuple(model.sizes[u] if u in inside else 1 for u in (parent, *scope[parent]))
            children[parent].append(v)
    return Tree(model, order, scope, entries, base, shape, message_shape, children, integer)


def _bases(
    model: Model, pairs: dict[tuple[int, int], np.ndarray], scope: list[tuple[int, ...]], position: list[int], integer: bool
) -> list[list[np.ndarray]]:
    """Per node the pair tables to later nodes, in the axes of its table (size 1 where a pair does not reach). Each joins the first one as large as their
    sum: all together would be as large as the node's own table."""
    dtype = np.int64 if integer else np.float64
    base = [[np.zeros((1,) * (1 + len(s)), dtype)] for s in scope]
    for (u, v), table in pairs.items():
        first, other, t = (u, v, table) if position[u] < position[v] else (v, u, table.T)
        axis = scope[first].index(other)
        t = t.reshape(t.shape[0], *(t.shape[1] if a == axis else 1 for a in range(len(scope[first]))))
        parts = base[first]
        for k, part in enumerate(parts):
            if math.prod(np.broadcast_shapes(part.shape, t.shape)) <= max(part.size, t.size, SMALL):
                parts[k] = np.minimum(part + t, INF_INT) if integer else part + t
                break
        else:
            parts.append(t)
    return base
