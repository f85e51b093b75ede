"""Closing the Lagrangian gap exactly: all choices whose priced cost stays under the best known
cost.

After an elimination under prices p, the table of node v tells, for any partial choice made from the
root down, how much the priced cost must rise at least when v takes strategy k: regret(v, k) =
T_v[k, scope] - min_k T_v[k, scope]. A complete choice has

    cost(x) >= cost(x) + sum_r p_r (load_r(x) - limit) = L(p) + sum of regrets        for every x
        that fits.

So partial choices (labels) are grown node by node, parents first, and dropped when
  1. L(p) + regrets so far cannot beat the best known cost,
  2. a row must overflow even with the least usage of all nodes still open, or
  3. another label with the same values of the still-needed nodes costs no more and uses no more in
     every tracked row.
Rule 3 keeps a Pareto front of (cost, usage) per state. When more than `cap` labels remain, those of
largest regret are dropped and the bound falls to the least one dropped: the result is then a beam
search with a proven bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planner.solvers.bounds.lagrangian import Clock, Dual, slack
from planner.solvers.exact.elimination import Tree

SORTED = 20
"""Work of sorting a label, in table entries visited."""
FIRST = 4
"""Of more labels than so many times the cap those of least regret are looked at first."""


@dataclass
class Labels:
    """All partial choices that are still open after some nodes."""

    cost: np.ndarray  # [labels] exact cost so far
    regret: np.ndarray  # [labels]
    load: np.ndarray  # [labels, tracked rows]
    column: dict[int, np.ndarray]  # node still needed -> its strategy [labels]

    def keep(self, which: np.ndarray) -> Labels:
        """The labels at these positions."""
        return Labels(
            self.cost[which],
            self.regret[which],
            self.load[which],
            {v: c[which] for v, c in self.column.items()},
        )


def close_gap(dual: Dual, cap: int, clock: Clock) -> None:
    """Enumerate below the best known cost; updates the dual's best choice and bound (equal to the
    cost when proven)."""
    memory = dual.model.memory
    assert memory is not None
    value, x, tables = dual.tree.run(
        dual.model.cost + memory.priced(dual.price, len(dual.model.cost))
    )
    load = (
        memory.load(x) if dual.best is None else np.maximum(memory.load(x), memory.load(dual.best))
    )
    tracked = np.flatnonzero((dual.price > 0) | (load > memory.limit))
    if not len(tracked):
        tracked = np.array([int(load.argmax())])
    # Regrets count from the value under these prices: the best bound may be above it, from labels
    # grown before.
    start, steps = value - float(dual.price.sum()) * memory.limit, _steps(dual.tree)
    for _ in range(memory.rows):
        choice, floor, violated = _grow(dual, tables, steps, tracked, start, cap, clock)
        if choice is not None:
            dual.offer(choice)
        bound = min(floor, dual.best_cost)
        if violated is None or clock.stopped:
            dual.bound = max(dual.bound, bound)
            return
        tracked = np.unique(np.append(tracked, violated))


def _steps(tree: Tree) -> tuple[list[int], list[list[int]]]:
    """Depth-first order from the roots (few states open at once), and which nodes are no longer
    needed after each step."""
    children = {
        step.bucket: [c for c, _ in step.children] for _, steps in tree.groups for step in steps
    }
    order: list[int] = []
    stack = [v for v in tree.order if not tree.scope[v]]
    while stack:
        v = stack.pop()
        order.append(v)
        stack.extend(sorted(children[v], key=lambda c: (tree.entries if children[c] else 0, c)))
    last = {v: p for p, v in enumerate(order)}
    for p, v in enumerate(order):
        for u in tree.scope[v]:
            last[u] = max(last[u], p)
    leaves: list[list[int]] = [[] for _ in order]
    for v, p in sorted(last.items()):
        leaves[p].append(v)
    return order, leaves


def _grow(
    dual: Dual,
    tables: list[np.ndarray],
    steps: tuple[list[int], list[list[int]]],
    tracked: np.ndarray,
    start: float,
    cap: int,
    clock: Clock,
) -> tuple[np.ndarray | None, float, int | None]:
    """Best fitting choice met, a floor on all choices not met, and an untracked row that the
    cheapest choice overflows."""
    model, tree, memory = dual.model, dual.tree, dual.model.memory
    assert memory is not None
    order, leaves = steps
    usage = _usage_columns(dual, tracked)
    least = np.array([u.min(0) for u in usage]).reshape(len(usage), len(tracked))
    rest = (
        least[order][::-1].cumsum(0)[::-1] - least[order]
    )  # usage the nodes after each step cannot avoid
    floor = np.inf
    labels = Labels(np.zeros(1), np.zeros(1), np.zeros((1, len(tracked))), {})
    trail: list[tuple[np.ndarray, np.ndarray]] = []
    for p, v in enumerate(order):
        scope = tree.scope[v]
        table = (
            tables[v][(slice(None), *(labels.column[u] for u in scope))]  # type: ignore[arg-type]
            if scope
            else tables[v][:, None]
        )
        regret = labels.regret[None] + (table - table.min(0))
        room = dual.best_cost - 1 + slack(dual.best_cost) - start
        strategy, parent = np.nonzero(regret <= room if np.isfinite(room) else np.isfinite(regret))
        load = labels.load[parent] + usage[v][strategy]
        fits = np.flatnonzero((load <= memory.limit - rest[p]).all(1))
        strategy, parent, load = strategy[fits], parent[fits], load[fits]
        # a label is copied with all that it carries, and sorted by it
        if not clock.spend(regret.size + len(fits) * (len(tracked) + len(labels.column) + SORTED)):
            return None, start, None
        before, regret = labels, regret[strategy, parent]
        for some in _least_first(regret, cap):
            labels = _extended(
                dual, before, v, leaves[p], (strategy[some], parent[some], regret[some], load[some])
            )
            undominated = _pareto(labels, model.sizes)
            if len(undominated) > cap:
                break
        if len(undominated) > cap:
            by = np.argsort(labels.regret[undominated], kind="stable")
            floor = min(floor, start + float(labels.regret[undominated[by[cap]]]))
            undominated = np.sort(undominated[by[:cap]])
        labels = labels.keep(undominated)
        undominated = some[undominated]
        trail.append((strategy[undominated].astype(np.int32), parent[undominated].astype(np.int32)))
        if not len(undominated):
            return None, floor, None
    return _read(dual, labels, order, trail, floor)


def _least_first(regret: np.ndarray, cap: int) -> Iterator[np.ndarray]:
    """Positions of the labels of least regret, more of them each time, ascending; all of them last.
    Of labels of one state regrets differ by cost and priced usage, so that whatever beats a label
    has no more regret than it: among these alone each is beaten or not as among all."""
    some = FIRST * cap
    while some < len(regret):
        yield np.flatnonzero(regret <= np.partition(regret, some)[some])
        some *= FIRST
    yield np.arange(len(regret))


def _extended(
    dual: Dual,
    labels: Labels,
    v: int,
    leaves: list[int],
    grown: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> Labels:
    """Labels with a strategy for node v. leaves: nodes that are needed no longer; grown: of each
    its strategy, the label it is grown from, its regret and load."""
    strategy, parent, regret, load = grown
    cost, none = dual.model.node_cost(v)[strategy], np.zeros(1, np.int64)
    for pair in dual.tree.base[v]:
        columns = tuple(
            labels.column[u][parent] if pair.shape[a + 1] > 1 else none
            for a, u in enumerate(dual.tree.scope[v])
        )
        cost = cost + pair[(strategy if pair.shape[0] > 1 else none, *columns)]
    column = {u: c[parent] for u, c in labels.column.items()}
    column[v] = strategy
    for u in leaves:
        column.pop(u, None)
    return Labels(labels.cost[parent] + cost, regret, load, column)


def _read(
    dual: Dual,
    labels: Labels,
    order: list[int],
    trail: list[tuple[np.ndarray, np.ndarray]],
    floor: float,
) -> tuple[np.ndarray | None, float, int | None]:
    """The cheapest complete label that fits in every row; the first misfit's worst row when a
    cheaper one does not fit."""
    memory = dual.model.memory
    assert memory is not None
    violated = None
    for label in np.argsort(labels.cost, kind="stable")[:64].tolist():
        x = np.zeros(dual.model.nodes, np.int64)
        k = label
        for v, (strategy, parent) in zip(reversed(order), reversed(trail), strict=True):
            x[v] = strategy[k]
            k = int(parent[k])
        load = memory.load(x)
        if load.max() <= memory.limit:
            return x, floor, violated
        if violated is None:
            violated = int(load.argmax())
    return None, floor, violated


def _usage_columns(dual: Dual, tracked: np.ndarray) -> list[np.ndarray]:
    """Per node its usage in the tracked rows. [strategies, tracked]"""
    memory, sizes = dual.model.memory, dual.model.sizes
    assert memory is not None
    columns = [np.zeros((s, len(tracked))) for s in sizes]
    for j, i in enumerate(memory.node.tolist()):
        covered = (tracked >= memory.row_lo[j]) & (tracked < memory.row_hi[j])
        if covered.any():
            columns[i][:, covered] += memory.matrix(j)[:, None]
    return columns


def _pareto(labels: Labels, sizes: list[int]) -> np.ndarray:
    """Positions of labels that no other label of the same state beats, ascending."""
    count = len(labels.cost)
    if count <= 1:
        return np.arange(count)
    key, span = np.zeros(count, np.int64), 1
    for v in sorted(labels.column):
        if span > (1 << 62) // sizes[v]:
            key = np.unique(key, return_inverse=True)[1]
            span = int(key.max()) + 1
        key = key * sizes[v] + labels.column[v]
        span *= sizes[v]
    by = np.lexsort((labels.load.sum(1), labels.cost, key))
    key, load = key[by], labels.load[by]
    fresh = np.append(True, key[1:] != key[:-1])
    group = np.cumsum(fresh) - 1
    if load.shape[1] == 1:
        rank = np.unique(load[:, 0], return_inverse=True)[1]
        level = rank - group * (
            count + 1
        )  # a later group lies below every earlier one, so that one running minimum serves all
        before = np.append(np.iinfo(np.int64).max, np.minimum.accumulate(level)[:-1])
        return np.sort(by[fresh | (level < before)])
    alive = np.ones(count, bool)
    for leader in (np.flatnonzero(fresh), _least(load.max(1), group), _least(load.sum(1), group)):
        lead = leader[group]
        # sorted by cost within a state: whatever comes after its leader costs no less
        beaten = (np.arange(count) > lead) & alive[lead] & (load >= load[lead]).all(1)
        alive &= ~beaten
    return np.sort(by[alive])


def _least(value: np.ndarray, group: np.ndarray) -> np.ndarray:
    """First position of the least value in every group (groups are consecutive). [groups]"""
    by = np.lexsort((value, group))
    first = np.append(True, group[by][1:] != group[by][:-1])
    return by[first]
