"""Local steps on a complete choice: marginal costs, repair of an overload, and descent one node at
a time; of problems of many nodes by `changes`.

The marginal of (i, k) is node i's cost with strategy k while every other node keeps its strategy.
"""

from __future__ import annotations

import numpy as np

from planner.solvers.model import Model
from planner.solvers.neighbourhood.changes import changes_of


def marginals(model: Model, x: np.ndarray, i: int) -> np.ndarray:
    """Cost of each strategy of node i given its neighbours. [strategies]"""
    total = model.node_cost(i).copy()
    for u, table in model.adjacent[i].items():
        total += table[:, x[u]]
    return total


MANY = 400
"""Nodes above which array operations over all of them are faster than steps node by node."""


class Loads:
    """Row loads of a changing choice."""

    def __init__(self, model: Model, x: np.ndarray) -> None:
        assert model.memory is not None
        self.memory, self.of_node = model.memory, model.memory.of_node(model.nodes)
        self.load = model.memory.load(x)

    def overload_if(self, i: int, now: int) -> tuple[np.ndarray, np.ndarray]:
        """Per strategy of node i: total overload over the rows it covers, and the worst row's.
        [strategies] each"""
        total = worst = np.zeros(1)
        for j in self.of_node[i]:
            a, b, use = self.memory.row_lo[j], self.memory.row_hi[j], self.memory.matrix(j)
            over = self.load[a:b, None] + (use - use[now])[None] - self.memory.limit
            total = total + np.maximum(over, 0).sum(0)
            worst = np.maximum(worst, over.max(0))
        return total, worst

    def move(self, i: int, old: int, new: int) -> None:
        """Account for node i going from `old` to `new`."""
        for j in self.of_node[i]:
            use = self.memory.matrix(j)
            self.load[self.memory.row_lo[j] : self.memory.row_hi[j]] += use[new] - use[old]

    @property
    def excess(self) -> float:
        """Overload of the worst row (<= 0: it fits)."""
        return float(self.load.max() - self.memory.limit)


def polish(model: Model, x: np.ndarray, sweeps: int = 4) -> np.ndarray | None:
    """Repair the memory overload greedily, then descend; None when the repair gets stuck or an
    entry is forbidden."""
    if model.nodes > MANY and model.searchable:
        wide = changes_of(model).repaired(x, sweeps)
        return wide if wide is not None and np.isfinite(model.total(wide)) else None
    x = x.copy()
    loads = Loads(model, x) if model.memory is not None else None
    if loads is not None and loads.excess > 0 and not _repair(model, x, loads):
        return None
    descend(model, x, loads, sweeps)
    return x if np.isfinite(model.total(x)) else None


def descend(model: Model, x: np.ndarray, loads: Loads | None, sweeps: int = 4) -> None:
    """Iterated conditional modes in place, never leaving the memory limit."""
    active = range(model.nodes)
    for _ in range(sweeps):
        touched: set[int] = set()
        for i in active:
            cost = marginals(model, x, i)
            if loads is not None and loads.of_node[i]:
                _, worst = loads.overload_if(i, int(x[i]))
                cost = np.where(worst > 0, np.inf, cost) if len(worst) > 1 else cost
                if not np.isfinite(cost).any():
                    continue
            k = int(cost.argmin())
            if cost[k] < marginal_of(model, x, i):
                if loads is not None:
                    loads.move(i, int(x[i]), k)
                x[i] = k
                touched.update(model.adjacent[i])
                touched.add(i)
        if not touched:
            return
        active = sorted(touched)  # type: ignore[assignment]


def marginal_of(model: Model, x: np.ndarray, i: int) -> float:
    """Marginal cost of node i's present strategy."""
    value = float(model.cost[model.offset[i] + x[i]])
    for u, table in model.adjacent[i].items():
        value += float(table[x[i], x[u]])
    return value


def _repair(model: Model, x: np.ndarray, loads: Loads) -> bool:
    """Best overload saved per cost added, node by node over the worst row, until every row fits."""
    memory = loads.memory
    for _ in range(4 * model.nodes + 8):
        row = int(loads.load.argmax())
        if loads.load[row] <= memory.limit:
            return True
        live = np.flatnonzero((memory.row_lo <= row) & (memory.row_hi > row))
        best, move = 0.0, None
        for i in np.unique(memory.node[live]).tolist():
            now = int(x[i])
            total, _ = loads.overload_if(i, now)
            saved = total[now] - total
            if saved.max() <= 0:
                continue
            cost, here = marginals(model, x, i), marginal_of(model, x, i)
            added = (
                np.maximum(cost - here, 1e-9)
                if np.isfinite(here)
                else np.where(np.isfinite(cost), 1e-9, np.inf)
            )  # out of what is forbidden at no price
            rate = np.where(saved > 0, saved / added, 0.0)
            k = int(rate.argmax())
            if rate[k] > best:
                best, move = float(rate[k]), (i, now, k)
        if move is None:
            return False
        i, now, k = move
        loads.move(i, now, k)
        x[i] = k
    return False
