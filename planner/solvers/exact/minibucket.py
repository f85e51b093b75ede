"""A bound where exact elimination would need too large a table: mini-bucket elimination.

The functions that meet in a variable's bucket are split into parts whose joint tables stay small,
and each part is minimised on its own. Minimising a sum term by term can only lower it, so the
result is a lower bound. Before, costs are shifted between the parts of a variable until all find
its strategies equally dear (moment matching: Ihler, Flerova, Dechter, Otten, Join-graph based
cost-shifting schemes, UAI 2012), which makes the bound tighter. The choice is decoded from all
parts together.
"""

from __future__ import annotations

import math

import numpy as np

from planner.solvers.bounds.lagrangian import Clock, Dual, maximise
from planner.solvers.exact.elimination import MOST_DIMS, PASSES, Tree, assembled, order_of_pairs
from planner.solvers.model import Model
from planner.solvers.neighbourhood.local import polish

MOST, TIMES = 4e6, 4.0
"""Entries that all tables may have together, be it so many times those of the pairs; above that the
limit of each is smaller, by that factor."""


def split_tree(model: Model, limit: float = 2e5) -> Tree:
    """The elimination of a model with tables of at most `limit` entries (pairs' own tables may be
    larger), smaller ones where all together would have too many."""
    order = order_of_pairs(tuple(model.sizes), tuple(model.pairs), math.inf)
    assert order is not None
    most = max(MOST, TIMES * sum(table.size for table in model.pairs.values()))
    while (tree := _split(model, order[0], limit, most if limit > TIMES else math.inf)) is None:
        limit /= TIMES
    return tree


def _split(model: Model, order: list[int], limit: float, most_entries: float) -> Tree | None:
    """None where all tables together would have more than `most_entries`."""
    sizes, n = model.sizes, model.nodes
    position = [0] * n
    for p, v in enumerate(order):
        position[v] = p
    # What each variable's parts are made of: variables (itself first), entries, and the pair or the
    # bucket that it comes from.
    functions: list[list[tuple[tuple[int, ...], int, tuple[int, int] | int]]] = [
        [] for _ in range(n)
    ]
    home: dict[tuple[int, int], int] = {}
    for u, v in model.pairs:
        first, second = (u, v) if position[u] < position[v] else (v, u)
        functions[first].append(((first, second), sizes[u] * sizes[v], (u, v)))
    scope: list[tuple[int, ...]] = [()] * n
    parent = [-1] * n
    parts: dict[int, list[int]] = {}
    entries = 0.0
    for v in order:
        groups: list[tuple[set[int], list[tuple[int, int] | int]]] = []
        for scope_of_function, size, source in sorted(
            functions[v], key=lambda f: (-f[1], [position[u] for u in f[0]])
        ):
            for variables, sources in groups:
                joined = variables.union(scope_of_function)
                if len(joined) <= MOST_DIMS and math.prod(sizes[u] for u in joined) <= max(
                    limit, size
                ):
                    variables.update(scope_of_function)
                    sources.append(source)
                    break
            else:
                groups.append((set(scope_of_function), [source]))
        buckets = [v, *range(len(scope), len(scope) + len(groups) - 1)]
        if len(groups) > 1:
            parts[v] = buckets
            scope += [()] * (len(groups) - 1)
            parent += [-1] * (len(groups) - 1)
        for b, (variables, sources) in zip(
            buckets, groups, strict=False
        ):  # a variable without any functions has a bucket all the same
            scope[b] = tuple(sorted(variables - {v}, key=position.__getitem__))
            size = math.prod(sizes[u] for u in scope[b])
            entries += size * sizes[v]
            if entries > most_entries:
                return None
            for source in sources:
                if isinstance(source, tuple):
                    home[source] = b
                else:
                    parent[source] = b
            if scope[b]:
                functions[scope[b][0]].append((scope[b], size, b))
    return assembled(model, order, scope, parent, home, entries, parts)


def bounded(
    model: Model,
    clock: Clock,
    start: tuple[int, ...] | np.ndarray | None,
    limit: float = 2e5,
    below: float = np.inf,
) -> tuple[np.ndarray | None, float]:
    """Best choice (or None) and lower bound without exact tables; a bound of +inf proves that
    nothing is feasible. below: as in `Budget`."""
    tree = split_tree(model, limit)
    dual = Dual(model, tree, clock, best_cost=below)
    if start is not None:
        _offer(dual, np.asarray(start, np.int64))
    if model.memory is not None:
        if (model.memory.extreme(False) > model.memory.limit).any():
            return None, np.inf
        maximise(dual, 12)
    else:
        dual.bound = tree.tighten(model.cost, below)
        clock.spend(2 * PASSES * tree.entries)
        if dual.bound < below:
            _offer(dual, tree.run(model.cost)[1])
    return dual.best, dual.bound


def _offer(dual: Dual, x: np.ndarray) -> None:
    polished = polish(dual.model, x)
    if polished is not None:
        dual.offer(polished)
