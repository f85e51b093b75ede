"""Neighbourhoods in numpy (`cutset`): which nodes keep their options, and the elimination of all
others. The twin of the compiled `cuts`."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from planner.solvers.exact.elimination import MOST_DIMS, Scratch, Tree, tree_of
from planner.solvers.model import Model
from planner.solvers.neighbourhood.changes import Changes
from planner.solvers.neighbourhood.flat import Flat


@dataclass(frozen=True)
class Cut:
    """Nodes that are eliminated beside some that are kept."""

    changes: Changes
    free: np.ndarray  # [free nodes]
    positions: np.ndarray  # [positions of free nodes]
    beside: np.ndarray  # [values] what conditioned nodes add to free ones, see `Changes`
    tree: Tree

    def eliminate(self, unary: np.ndarray, x: np.ndarray) -> None:
        """Set all nodes of x that are not kept to what is least under unary costs [positions]."""
        costs = unary + self.changes.beside(x, self.beside)
        x[self.free] = self.tree.run(costs[self.positions])[1]

    @property
    def work(self) -> float:
        """The work of one elimination."""
        return self.tree.entries


def drawn(
    model: Model,
    changes: Changes,
    limit: float,
    room: float,
    random: np.random.Generator,
    scratch: Scratch,
) -> Cut:
    """A random cut under which no table has more than `limit` entries, nor all of them more than
    `room`."""
    order, scopes, entries = draw(
        changes.flat, limit, room, random.random(model.nodes) ** 3, random.random(model.nodes)
    )
    free = np.sort(np.array(order, np.int64))
    place = np.full(model.nodes, -1, np.int64)
    place[free] = np.arange(len(free))
    flat, crossing = changes.flat, place[changes.owner[changes.entry]] >= 0
    crossing &= place[flat.other[changes.entry]] < 0
    positions = np.flatnonzero(np.repeat(place >= 0, changes.sizes))
    offset, new = np.concatenate(([0], np.cumsum(changes.sizes[free]))), place.tolist()
    pairs = {
        (new[u], new[v]): t for (u, v), t in model.pairs.items() if new[u] >= 0 and new[v] >= 0
    }
    rest = Model(offset, flat.cost[positions], pairs, None)
    tree = tree_of(
        rest,
        [new[v] for v in order],
        [tuple(new[u] for u in s if new[u] >= 0) for s in scopes],
        entries,
    )
    tree.scratch = scratch
    return Cut(changes, free, positions, np.flatnonzero(crossing), tree)


def draw(
    flat: Flat, limit: float, room: float, luck: np.ndarray, tie: np.ndarray
) -> tuple[list[int], list[tuple[int, ...]], float]:
    """Free nodes in the order of their elimination, the nodes that each table has axes for (some of
    which are kept later), and the entries of all tables. As `cuts.draw`: nodes go in the order of
    their tables' sizes; where a table is too large, the node or neighbour with most neighbours
    times `luck` is kept. tie: of equal sizes, the least goes first.
    """
    ends, other, chance = flat.first.tolist(), flat.other.tolist(), luck.tolist()
    neighbours = [set(other[a:b]) for a, b in zip(ends, ends[1:], strict=False)]
    logs, most, total = np.log(np.diff(flat.offset)).tolist(), math.log(limit) + 1e-9, 0.0
    size = [logs[v] + sum(logs[u] for u in row) for v, row in enumerate(neighbours)]
    first = tie.tolist()
    heap = [(size[v] + first[v], v) for v in range(len(neighbours))]
    heapq.heapify(heap)
    order, scopes, gone = list[int](), list[tuple[int, ...]](), [False] * len(neighbours)
    while heap:
        score, v = heapq.heappop(heap)
        if gone[v] or score != size[v] + first[v]:
            continue
        table = math.exp(min(size[v], 700.0))
        fits = size[v] <= most and total + table <= room and len(neighbours[v]) < MOST_DIMS
        if fits:
            node = v
            order.append(v)
            scopes.append(tuple(neighbours[v]))
            total += table
        else:
            node = max((v, *neighbours[v]), key=lambda u: len(neighbours[u]) * chance[u])
        gone[node], around = True, neighbours[node]
        for u in around:
            row = neighbours[u]
            row.discard(node)
            size[u] -= logs[node]
            if fits:
                fresh = around - row
                fresh.discard(u)
                row |= fresh
                size[u] += sum([logs[w] for w in fresh])
            heapq.heappush(heap, (size[u] + first[u], u))
    return order, scopes, total
