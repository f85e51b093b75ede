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

from planner.solvers.exact.passes import Group, Sent, alike, fill, read_back, shifted, steps_of
from planner.solvers.model import INF_INT, Model

SMALL = 4096
"""Pair tables are added up while their sum has no more entries."""
MOST_DIMS = 32
"""Of an array that numpy broadcasts: variables with one option add no entries to a table, but a dim
each."""
ORDERS = 256
"""Elimination orders that are remembered."""
TABLE_LIMIT, TOTAL_LIMIT = 3e7, 6e7
"""Entries of one table, and of all tables of an elimination, at most."""
OWN = (-1, 0, 1)
"""Orders that are tried: powers of a variable's own size beside those of its neighbours. By the
least message to those less what leaves, by the message, and by the table. No one is the best of
all spaces; the least of the three has 0.4 to 1.0 of the entries that the least fill has."""
PASSES, STEP, CLOSE = 8, 0.5, 1e-4
"""Of shifts between the parts of variables: passes at most, the part of what parts tell otherwise
that is shifted at once, and the gain (relatively) that is not worth another."""


def order_of(
    sizes: list[int], adjacent: list[set[int]], limit: float
) -> tuple[list[int], list[tuple[int, ...]], float] | None:
    """An elimination order, the scope of each step, and the entries of all tables together: the
    least of `OWN` orders.

    Returns None when each of them has a table of more than `limit` entries, or of more dims than an
    array may have.
    """
    best: tuple[list[int], list[tuple[int, ...]], float] | None = None
    for power in OWN:
        order = _greedy(sizes, list(map(set, adjacent)), limit, power)
        if order is not None and (best is None or order[2] < best[2]):
            best = order
    return best


def _greedy(
    sizes: list[int], adjacent: list[set[int]], limit: float, power: float
) -> tuple[list[int], list[tuple[int, ...]], float] | None:
    """The order by the least product of the sizes of a variable's neighbours and of its own to the
    power of `power`. `adjacent` is consumed."""
    logs = [math.log(max(s, 1)) for s in sizes]

    def score(v: int) -> float:
        return power * logs[v] + sum([logs[u] for u in adjacent[v]])

    scores = list(map(score, range(len(sizes))))
    heap = [(known_score, v) for v, known_score in enumerate(scores)]
    heapq.heapify(heap)
    done = [False] * len(sizes)
    order: list[int] = []
    scopes: list[tuple[int, ...]] = []
    total, ceiling = 0.0, math.log(limit)
    while heap:
        known_score, v = heapq.heappop(heap)
        if done[v] or known_score != scores[v]:
            continue
        neighbours, size = adjacent[v], known_score + (1 - power) * logs[v]
        if size > ceiling or (ceiling < math.inf and len(neighbours) >= MOST_DIMS):
            return None
        total += math.exp(min(size, 700.0))
        done[v] = True
        order.append(v)
        scopes.append(tuple(sorted(neighbours)))
        for u in neighbours:
            others = adjacent[u]
            others.discard(v)
            others |= neighbours
            others.discard(u)
            if (other := score(u)) != scores[u]:
                scores[u] = other
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
    groups: list[Group]  # what each table is the sum of, in the order of elimination
    kinds: list[int | None]  # of `alike`
    roots: list[int]  # buckets that send to none
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
        tables, sent = self._lend(), Sent(len(self.shape))
        fill(self.groups, self.kinds, tables, self.base, unary, sent)
        value = self._sum(sent.messages)
        return value, self.decode(tables), tables

    def _lend(self) -> list[np.ndarray]:
        """Room for every bucket's table."""
        if self.scratch is not None:
            self.tables = self.scratch.tables(self.shape)
        elif not self.tables:
            self.tables.extend(
                np.empty(s, np.int64 if self.integer else np.float64) for s in self.shape
            )
        return self.tables

    def _sum(self, messages: list[np.ndarray | None]) -> float:
        """The value: what no table takes."""
        sent = [messages[b] for b in self.roots]
        return sum(map(int if self.integer else float, sent))  # type: ignore[arg-type]

    def marginals(self, unary: np.ndarray) -> tuple[float, np.ndarray]:
        """Minimum, and of the choices with each strategy the least cost [positions]: messages go
        back from parents to children. Float costs only.

        Where variables were split both are lower bounds: of a strategy the largest that a part of
        its variable tells.
        """
        offset, least = self.model.offset.tolist(), np.full(len(unary), np.inf)
        tables, sent = self._lend(), Sent(len(self.shape))
        fill(self.groups, self.kinds, tables, self.base, unary, sent, keep=True)
        value = self._sum(sent.messages)
        if np.isfinite(value):
            for v, by_part in read_back(self.groups, tables, sent.messages, value):
                least[offset[v] : offset[v + 1]] = np.maximum.reduce(by_part)
        return value, least

    def tighten(self, unary: np.ndarray, enough: float = np.inf) -> float:
        """Where variables were split a better bound than that of `run`: the best of some passes,
        each of which shifts costs between the parts of a variable towards telling the same. The
        first begins where the last call ended: costs that are near take few. enough: the value from
        which on none is needed.
        """
        best, shift, of_strategies, step = -np.inf, self.shift, dict[int, np.ndarray](), STEP
        tables, sent, groups, kinds = self._lend(), Sent(len(self.shape)), self.groups, self.kinds
        above, kinds_above = self._above_parts()
        for passes_left in reversed(range(PASSES)):
            fill(groups, kinds, tables, self.base, unary, sent, shift, keep=True)
            groups, kinds = above, kinds_above  # no other table is another under other shifts
            value = self._sum(sent.messages)
            gain = value - best
            if gain > 0:
                best, self.shift = value, shift
            else:
                step /= 2
            close = value >= enough or not np.isfinite(value) or abs(gain) <= CLOSE * abs(value)
            if close or not passes_left:
                break
            if gain > 0:
                read = read_back(above, tables, sent.messages, value)
                of_strategies = {v: np.stack(by_part) for v, by_part in read if len(by_part) > 1}
            shift = {
                v: shifted(costs, step, self.shift.get(v)) for v, costs in of_strategies.items()
            }
        return best

    def _above_parts(self) -> tuple[list[Group], list[int | None]]:
        """The variables that were split, and those whose tables take what these send; their
        kinds."""
        inside: set[int] = set()
        groups: list[Group] = []
        kinds = []
        for (v, steps), kind in zip(self.groups, self.kinds, strict=True):
            if len(steps) > 1 or any(c in inside for c, _ in steps[0].children):
                inside.update(step.bucket for step in steps)
                groups.append((v, steps))
                kinds.append(kind)
        return groups, kinds

    def with_pairs(self, pairs: dict[tuple[int, int], np.ndarray]) -> Tree:
        """The same elimination with other tables of the same pairs."""
        model = replace(self.model, pairs=pairs)
        base = _bases(model, self.home, self.scope, self.integer)
        return replace(self, model=model, base=base, kinds=alike(self.groups, base), tables=[])

    def decode(self, tables: list[np.ndarray]) -> np.ndarray:
        """The choice that reads each table's first minimum, last eliminated node first. [nodes]"""
        x = np.zeros(self.model.nodes, np.int64)
        for v in reversed(self.order):
            row = tables[v][(slice(None), *[x[u] for u in self.scope[v]])]
            for b in self.parts.get(v, ())[1:]:
                row = row + tables[b][(slice(None), *[x[u] for u in self.scope[b]])]
            x[v] = row.argmin()
        return x


def compile_tree(
    model: Model,
    table_limit: float = TABLE_LIMIT,
    total_limit: float = TOTAL_LIMIT,
    integer: bool = False,
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
    neighbours: list[tuple[int, ...]],
    entries: float,
    integer: bool = False,
) -> Tree:
    """The tree of an elimination order, as `order_of` gives it."""
    n = model.nodes
    position = [0] * n
    for p, v in enumerate(order):
        position[v] = p
    scope: list[tuple[int, ...]] = [()] * n
    for v, s in zip(order, neighbours, strict=True):
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
    base = _bases(model, home, scope, integer)
    buckets = [(v, (parts or {}).get(v, (v,))) for v in order]
    groups = steps_of(buckets, model.offset.tolist(), owner, scope, parent, base)
    roots = [b for _, same in buckets for b in same if parent[b] < 0]
    return Tree(
        model,
        order,
        scope,
        parent,
        entries,
        home,
        base,
        shape,
        groups,
        alike(groups, base),
        roots,
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
