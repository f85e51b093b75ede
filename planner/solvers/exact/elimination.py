"""Exact variable elimination (min-plus), the engine of `dp`.

Eliminating variable v with neighbours S(v) makes the message

    m_v(x_S) = min over x_v of [ unary_v(x_v) + sum over u in S(v) of table_vu(x_v, x_u) + messages
    received by v ]

which is added to the neighbour that is eliminated next (its parent). The last value is the optimum;
decoding in reverse order reads the minimisers. Axes of every table are ordered by elimination
position, so that adding a message is a reshape, never a transpose.

`Tree` is compiled once per model; `Tree.run` is repeated with other unary costs (memory prices
change only those).

Where tables would be too large, a variable is eliminated in parts
(`planner.solvers.exact.minibucket`): each minimises on its own, so that the value is a lower bound.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from planner.solvers.model import INF_INT, Model

SMALL = 4096
"""Pair tables are added up while their sum has no more entries."""
LARGE = 4096
"""Entries of a table from which on its parts are added up before they are as large as it."""
MOST_DIMS = 32
"""Of an array that numpy broadcasts: variables with one option add no entries to a table, but a dim
each."""
ORDERS = 256
"""Elimination orders that are remembered."""
PASSES, STEP, CLOSE = 8, 0.5, 1e-4
"""Of shifts between the parts of variables: passes at most, the part of what parts tell otherwise
that is shifted at once, and the gain (relatively) that is not worth another."""


def order_of(
    sizes: list[int], adjacent: list[set[int]], limit: float
) -> tuple[list[int], list[tuple[int, ...]], float] | None:
    """An elimination order by least (fill, table size), the scope of each step, and the entries of
    all tables together.

    Returns None when some table would have more than `limit` entries, or more dims than an array
    may. `adjacent` is consumed.
    """
    n = len(sizes)
    logs = [math.log(max(s, 1)) for s in sizes]

    def score(v: int) -> tuple[int, float]:
        near = adjacent[v]
        size = logs[v] + sum([logs[u] for u in near])
        if len(near) <= 1:
            return 0, size
        if len(near) == 2:  # most often
            a, b = near
            return int(b not in adjacent[a]), size
        if len(near) > 12:
            return len(near) ** 2, size
        return (
            sum([len(near - adjacent[u]) for u in near]) - len(near)
        ) // 2, size  # each pair is met twice, and each node misses itself

    now = [score(v) for v in range(n)]
    heap = [(seen, v) for v, seen in enumerate(now)]
    heapq.heapify(heap)
    done = [False] * n
    order: list[int] = []
    scopes: list[tuple[int, ...]] = []
    total, ceiling = 0.0, math.log(limit)
    while heap:
        seen, v = heapq.heappop(heap)
        if done[v] or seen is not now[v]:
            continue
        _, size = seen
        if size > ceiling or (ceiling < math.inf and len(adjacent[v]) >= MOST_DIMS):
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
        for u in touched:
            if (other := score(u)) != now[u]:
                now[u] = other
                heapq.heappush(heap, (other, u))
    return order, scopes, total


@lru_cache(maxsize=ORDERS)
def order_of_pairs(
    sizes: tuple[int, ...], pairs: tuple[tuple[int, int], ...], limit: float
) -> tuple[list[int], list[tuple[int, ...]], float] | None:
    """`order_of` variables of these sizes in these pairs: spaces of many meshes have the same."""
    adjacent: list[set[int]] = [set() for _ in sizes]
    for u, v in pairs:
        adjacent[u].add(v)
        adjacent[v].add(u)
    return order_of(list(sizes), adjacent, limit)


class Scratch:
    """Room for the tables of one run, lent to one tree after the other: many trees are compiled for
    a search, and one runs at a time."""

    def __init__(self) -> None:
        self._room = np.empty(0)
        self.work = 0
        """Entries lent so far: a measure of work that does not depend on the machine."""

    def tables(self, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
        """An array of each shape."""
        ends = np.cumsum([0, *map(math.prod, shapes)]).tolist()
        self.work += ends[-1]
        if len(self._room) < ends[-1]:
            self._room = np.empty(ends[-1])
        return [
            self._room[a:b].reshape(shape)
            for a, b, shape in zip(ends, ends[1:], shapes, strict=False)
        ]


@dataclass
class Tree:
    """A compiled elimination of tables ("buckets"): bucket v is that of variable v, those beyond
    are further parts of variables that were split.

    `scope[b]` is ordered by elimination position; `shape[b]` = (own strategies, scope's
    strategies...).
    """

    model: Model
    order: list[int]  # of variables
    scope: list[tuple[int, ...]]
    parent: list[int]  # the bucket that takes what a bucket sends, -1 where its scope is empty
    entries: float
    home: dict[tuple[int, int], int]  # the bucket of each pair's table
    base: list[
        list[np.ndarray]
        # per bucket: its pair tables, broadcastable to its shape; added up only where that makes
        # none larger
    ]
    shape: list[tuple[int, ...]]
    message_shape: list[
        tuple[int, ...]
    ]  # shape in which what a bucket sends is added to its parent's table
    children: list[list[int]]
    parts: dict[int, list[int]] = field(
        default_factory=dict
    )  # all buckets of each variable that was split
    shift: dict[int, np.ndarray] = field(
        default_factory=dict, repr=False
    )  # what `tighten` found best the last time
    integer: bool = False
    tables: list[np.ndarray] = field(
        default_factory=list, repr=False
    )  # of the last run; overwritten by the next
    scratch: Scratch | None = None
    """Where tables are lent (float costs only): they are of the last run of all trees that share
    it."""

    @property
    def exact(self) -> bool:
        """Whether no variable was split: the value is then the minimum, not a bound of it."""
        return not self.parts

    def run(self, unary: np.ndarray) -> tuple[float, np.ndarray, list[np.ndarray]]:
        """Minimum, a minimising choice, and every bucket's table, under flat unary costs
        [positions]; where variables were split a lower bound, and some choice.

        The tables are those of this run until the next one.

        The value is +inf (or >= INF_INT) when every choice is forbidden; the choice is then
        meaningless.
        """
        value, tables, _ = self._fill(unary)
        return value, self.decode(tables), tables

    def _fill(
        self, unary: np.ndarray, *, keep: bool = False, shift: dict[int, np.ndarray] | None = None
    ) -> tuple[float, list[np.ndarray], list[np.ndarray | None]]:
        """Minimum, every bucket's table, and the messages that were sent (keep: all of them, else
        those that nobody has read). shift: per variable that was split the costs that its parts
        have more than they are levelled to [parts, strategies]."""
        offset = self.model.offset.tolist()
        if self.scratch is not None:
            self.tables = self.scratch.tables(self.shape)
        elif not self.tables:
            self.tables.extend(
                np.empty(s, np.int64 if self.integer else np.float64) for s in self.shape
            )
        tables, least, parent = self.tables, np.minimum.reduce, self.parent
        messages: list[np.ndarray | None] = [None] * len(tables)
        value = 0 if self.integer else 0.0
        for v in self.order:
            same = self.parts.get(v, (v,))
            for b in same:
                own = unary[offset[v] : offset[v + 1]] if b == v else None
                sent = [messages[c].reshape(self.message_shape[c]) for c in self.children[b]]  # type: ignore[union-attr]
                _add_up(tables[b], own, [*self.base[b], *sent], self.integer)
                if not keep:
                    for c in self.children[b]:
                        messages[c] = None
            if len(same) > 1:
                _level([tables[b] for b in same], (shift or {}).get(v))
            for b in same:
                best = least(tables[b], axis=0)
                if parent[b] >= 0:
                    messages[b] = best
                else:
                    value += int(best) if self.integer else float(best)
        return value, tables, messages

    def marginals(self, unary: np.ndarray) -> tuple[float, np.ndarray]:
        """Minimum, and of the choices with each strategy the least cost [positions]: messages go
        back from parents to children. Float costs only.

        Where variables were split both are lower bounds: of a strategy the largest that a part of
        its variable tells.
        """
        value, least, _ = self._told(unary, {})
        return value, least

    def tighten(self, unary: np.ndarray, enough: float = np.inf) -> float:
        """Where variables were split a better bound than that of `run`: the best of some passes,
        each of which shifts costs between the parts of a variable towards telling the same. The
        first begins where the last call ended: costs that are near take few. enough: the value from
        which on none is needed.
        """
        best, shift, told, step = -np.inf, self.shift, dict[int, np.ndarray](), STEP
        for _ in range(PASSES):
            value, _, by_part = self._told(unary, shift)
            gain = value - best
            if gain > 0:
                best, self.shift, told = value, shift, by_part
            else:
                step /= 2
            if value >= enough or not np.isfinite(value) or abs(gain) <= CLOSE * abs(value):
                break
            shift = {
                v: _shifted(marginals, step, self.shift.get(v)) for v, marginals in told.items()
            }
        return best

    def _told(
        self, unary: np.ndarray, shift: dict[int, np.ndarray]
    ) -> tuple[float, np.ndarray, dict[int, np.ndarray]]:
        """`marginals`, and what each part of the variables that were split tells. [parts,
        strategies]"""
        value, tables, messages = self._fill(unary, keep=True, shift=shift)
        offset, least, told = (
            self.model.offset.tolist(),
            np.full(len(unary), np.inf),
            dict[int, np.ndarray](),
        )
        if not np.isfinite(value):
            return value, least, told
        for v in reversed(self.order):
            marginals = []
            for b in self.parts.get(v, (v,)):
                table, scope, parent = tables[b], self.scope[b], self.parent[b]
                if parent >= 0:
                    away = tuple(
                        axis
                        for axis, u in enumerate((scope[0], *self.scope[parent]))
                        if u not in scope
                    )
                    sent, rest = messages[b], tables[parent].min(axis=away)
                    assert sent is not None
                    table += np.subtract(
                        rest, sent, out=np.zeros_like(sent), where=np.isfinite(sent)
                    )
                else:
                    table += value - table.min()
                marginals.append(table.reshape(len(table), -1).min(axis=1))
            if len(marginals) > 1:
                told[v] = np.stack(marginals)
            least[offset[v] : offset[v + 1]] = np.maximum.reduce(marginals)
        return value, least, told

    def with_pairs(self, pairs: dict[tuple[int, int], np.ndarray]) -> Tree:
        """The same elimination with other tables of the same pairs."""
        model = replace(self.model, pairs=pairs)
        return replace(
            self, model=model, base=_bases(model, self.home, self.scope, self.integer), tables=[]
        )

    def decode(self, tables: list[np.ndarray]) -> np.ndarray:
        """The choice that reads each table's first minimum, last eliminated node first. [nodes]"""
        x = np.zeros(self.model.nodes, np.int64)
        for v in reversed(self.order):
            row = tables[v][(slice(None), *[x[u] for u in self.scope[v]])]
            for b in self.parts.get(v, ())[1:]:
                row = row + tables[b][(slice(None), *[x[u] for u in self.scope[b]])]
            x[v] = row.argmin()
        return x


def _add_up(
    table: np.ndarray, own: np.ndarray | None, parts: list[np.ndarray], integer: bool
) -> None:
    """Write the sum of a variable's own costs and of parts into a table, added up in this order."""
    total, *others = parts
    if own is not None:
        others.insert(0, own.reshape(-1, *(1,) * (table.ndim - 1)))
    if table.size < LARGE:
        table[...] = total
        total = table
    for part in others:
        # Most pairs lack a dim of the table: until one has it, a sum is as small as what is in it.
        whole = total is table or np.broadcast_shapes(total.shape, part.shape) == table.shape
        total = np.add(total, part, out=table if whole else None)
        if integer:
            np.minimum(total, INF_INT, out=total)
    if total is not table:
        table[...] = total


def _level(tables: list[np.ndarray], shift: np.ndarray | None) -> None:
    """Shift costs between the parts of a variable so that each finds a strategy equally dear, but
    for what is known to be better: that raises the sum of their minima most where nothing else is
    known of what they send. By whole units, so that integers stay exact. shift: [parts,
    strategies], of no sum.
    """
    least = np.stack([table.reshape(len(table), -1).min(axis=1) for table in tables])
    total = least.sum(axis=0)
    wanted = np.broadcast_to(np.floor(total / len(tables)), least.shape).copy()
    possible = np.isfinite(total)
    wanted[0, possible] = total[possible] - (len(tables) - 1) * wanted[0, possible]
    if shift is not None:
        wanted += shift
    more = np.subtract(wanted, least, out=np.zeros_like(least), where=np.isfinite(least))
    for table, missing in zip(tables, more, strict=True):
        table += missing.reshape(-1, *(1,) * (table.ndim - 1))


def _shifted(told: np.ndarray, step: float, shift: np.ndarray | None) -> np.ndarray:
    """A shift towards parts that all tell the same of each strategy. told, shift: [parts,
    strategies]"""
    possible = np.isfinite(told).all(axis=0)
    more = np.zeros_like(told)
    known = told[:, possible]
    more[1:, possible] = np.rint(step * (known.mean(axis=0) - known)[1:])
    more[0] = -more[1:].sum(axis=0)
    return more if shift is None else shift + more


def compile_tree(
    model: Model, table_limit: float = 3e7, total_limit: float = 6e7, integer: bool = False
) -> Tree | None:
    """An elimination tree, or None when its tables would pass the limits (in entries of 8 bytes,
    checked before any allocation)."""
    order = order_of_pairs(tuple(model.sizes), tuple(model.pairs), table_limit)
    if order is None or order[2] > total_limit:
        return None
    return tree_of(model, *order, integer)


def tree_of(
    model: Model,
    order: list[int],
    near: list[tuple[int, ...]],
    entries: float,
    integer: bool = False,
) -> Tree:
    """The tree of an elimination order, as `order_of` gives it."""
    n = model.nodes
    position = [0] * n
    for p, v in enumerate(order):
        position[v] = p
    scope: list[tuple[int, ...]] = [()] * n
    for v, s in zip(order, near, strict=True):
        scope[v] = tuple(sorted(s, key=position.__getitem__))
    home = {(u, v): u if position[u] < position[v] else v for u, v in model.pairs}
    return assembled(
        model, order, scope, [s[0] if s else -1 for s in scope], home, entries, integer=integer
    )


def assembled(
    model: Model,
    order: list[int],
    scope: list[tuple[int, ...]],
    parent: list[int],
    home: dict[tuple[int, int], int],
    entries: float,
    parts: dict[int, list[int]] | None = None,
    integer: bool = False,
) -> Tree:
    """The tree of buckets: what each has in its scope, which one takes what it sends, and which has
    each pair's table."""
    owner = list(range(model.nodes)) + [0] * (len(scope) - model.nodes)
    for v, same in (parts or {}).items():
        for b in same:
            owner[b] = v
    shape = [
        (model.sizes[v], *(model.sizes[u] for u in s)) for v, s in zip(owner, scope, strict=True)
    ]
    message_shape: list[tuple[int, ...]] = [()] * len(scope)
    children: list[list[int]] = [[] for _ in scope]
    for v in order:
        for b in (parts or {}).get(v, (v,)):
            if (to := parent[b]) >= 0:
                inside = set(scope[b])
                message_shape[b] = tuple(
                    model.sizes[u] if u in inside else 1 for u in (owner[to], *scope[to])
                )
                children[to].append(b)
    return Tree(
        model,
        order,
        scope,
        parent,
        entries,
        home,
        _bases(model, home, scope, integer),
        shape,
        message_shape,
        children,
        parts or {},
        integer=integer,
    )


def _bases(
    model: Model, home: dict[tuple[int, int], int], scope: list[tuple[int, ...]], integer: bool
) -> list[list[np.ndarray]]:
    """Per bucket its pair tables, in the axes of its table (size 1 where a pair does not reach).
    Each joins the first one as large as their sum: all together would be as large as the bucket's
    own table."""
    pairs = model.pairs_int if integer else model.pairs
    assert pairs is not None
    dtype = np.int64 if integer else np.float64
    base = [[np.zeros((1,) * (1 + len(s)), dtype)] for s in scope]
    for (u, v), table in pairs.items():
        b = home[u, v]
        other, t = (u, table.T) if u in scope[b] else (v, table)
        axis = scope[b].index(other)
        t = t.reshape(t.shape[0], *(t.shape[1] if a == axis else 1 for a in range(len(scope[b]))))
        parts = base[b]
        for k, part in enumerate(parts):
            if math.prod(np.broadcast_shapes(part.shape, t.shape)) <= max(part.size, t.size, SMALL):
                parts[k] = np.minimum(part + t, INF_INT) if integer else part + t
                break
        else:
            parts.append(t)
    return base
