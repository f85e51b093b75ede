"""A bound where exact elimination would need too large a table: mini-bucket elimination.

The functions that meet in a variable's bucket are split into groups whose joint tables stay small, and each group is minimised
on its own. Minimising a sum term by term can only lower it, so the result is a lower bound; the choice is decoded greedily from
the groups and polished. `MiniBuckets.run` has the face of `Tree.run`, so that memory prices work on it unchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from planner.solvers.elimination import Tree, order_of
from planner.solvers.lagrange import Clock, Dual, maximise
from planner.solvers.local import polish
from planner.solvers.model import Model

Function = tuple[tuple[int, ...], np.ndarray]  # scope by elimination position, table


@dataclass
class MiniBuckets:
    """Elimination with tables of at most `limit` entries."""

    model: Model
    order: list[int]
    position: list[int]
    limit: float
    entries: float = 1e6

    @classmethod
    def of(cls, model: Model, limit: float = 2e5) -> MiniBuckets:
        """Of a model, in the order of an elimination whose tables may be of any size."""
        adjacent: list[set[int]] = [set() for _ in range(model.nodes)]
        for u, v in model.pairs:
            adjacent[u].add(v)
            adjacent[v].add(u)
        found = order_of(model.sizes, adjacent, math.inf)
        assert found is not None
        position = [0] * model.nodes
        for p, v in enumerate(found[0]):
            position[v] = p
        return cls(model, found[0], position, limit)

    def run(self, unary: np.ndarray) -> tuple[float, np.ndarray, list[np.ndarray]]:
        """A lower bound on the minimum, and a decoded choice. The third part is empty: there are no exact tables."""
        model, sizes, pos = self.model, self.model.sizes, self.position
        buckets: list[list[Function]] = [[] for _ in range(model.nodes)]
        for (u, v), table in model.pairs.items():
            if pos[u] < pos[v]:
                buckets[u].append(((u, v), table))
            else:
                buckets[v].append(((v, u), table.T))
        value, entries = 0.0, 0.0
        groups: list[list[Function]] = [[] for _ in range(model.nodes)]
        for v in self.order:
            own: Function = ((v,), unary[model.offset[v] : model.offset[v + 1]])
            for scope, table in self._split(v, [own, *buckets[v]]):
                groups[v].append((scope, table))
                entries += table.size
                best = table.min(axis=0)
                if len(scope) == 1:
                    value += float(best)
                else:
                    buckets[scope[1]].append((scope[1:], best))
        self.entries = entries
        x = np.zeros(model.nodes, np.int64)
        for v in reversed(self.order):
            total = np.zeros(sizes[v])
            for scope, table in groups[v]:
                total += table[(slice(None), *[x[u] for u in scope[1:]])]
            x[v] = total.argmin()
        return value, x, []

    def with_pairs(self, pairs: dict[tuple[int, int], np.ndarray]) -> MiniBuckets:
        """The same elimination with other tables of the same pairs."""
        return replace(self, model=replace(self.model, pairs=pairs))

    def _split(self, v: int, functions: list[Function]) -> list[Function]:
        """Greedy groups, largest scope first; each joined into one table whose first axis is v."""
        sizes, pos = self.model.sizes, self.position
        scopes: list[set[int]] = []
        members: list[list[Function]] = []
        for f in sorted(functions, key=lambda f: (-f[1].size, [pos[u] for u in f[0]])):
            for s, m in zip(scopes, members, strict=True):
                if math.prod(sizes[u] for u in s.union(f[0])) <= max(self.limit, f[1].size):
                    s.update(f[0])
                    m.append(f)
                    break
            else:
                scopes.append(set(f[0]))
                members.append([f])
        found: list[Function] = []
        for s, m in zip(scopes, members, strict=True):
            scope = tuple(sorted(s, key=pos.__getitem__))
            table = np.zeros([sizes[u] for u in scope])
            for inner, t in m:
                table += t.reshape([sizes[u] if u in inner else 1 for u in scope])
            found.append((scope, table))
        return found


def bounded(model: Model, clock: Clock, start: tuple[int, ...] | np.ndarray | None, limit: float = 2e5) -> tuple[np.ndarray | None, float]:
    """Best choice (or None) and lower bound without exact tables; a bound of +inf proves that nothing is feasible."""
    buckets = MiniBuckets.of(model, limit)
    tree: Tree = buckets  # type: ignore[assignment]
    dual = Dual(model, tree, clock)
    if start is not None:
        _offer(dual, np.asarray(start, np.int64))
    if model.memory is not None:
        if (model.memory.extreme(False) > model.memory.limit).any():
            return None, np.inf
        maximise(dual, 12)
    else:
        value, x, _ = buckets.run(model.cost)
        clock.spend(buckets.entries)
        dual.bound = value
        _offer(dual, x)
    return dual.best, dual.bound


def _offer(dual: Dual, x: np.ndarray) -> None:
    found = polish(dual.model, x)
    if found is not None:
        dual.offer(found)
