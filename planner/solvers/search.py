"""Local search for large and tight problems: memory prices by message passing, then annealing with exact tree moves.

`prices`   raises the bound  L(p, m) = (tree-reweighted bound under unary costs cost + p . usage) - limit * sum p  by one sweep pair of
           messages and one Polyak step on p at a time (deflected subgradient); decoded choices are repaired and descended.
`Annealer` continues from the best choice: single changes, and exact minimisation over random induced trees under exponential noise
           and a random multiple of the prices; overloads are repaired by cheap changes or the move is undone.

Needs numba (the optional extra "fast"); `auto` does without where it is missing. Work unit: one table entry read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from planner.solvers import kernels
from planner.solvers.flat import Flat, flatten
from planner.solvers.model import Model


@dataclass
class Incumbent:
    """Best feasible choice, best bound, and who wants to know."""

    cost: float = np.inf
    x: np.ndarray | None = None
    bound: float = -np.inf
    price: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def closed(self) -> bool:
        """Nothing is left to prove: the gap is below the rounding of a bound."""
        return bool(np.isfinite(self.cost)) and self.cost - self.bound <= 1e-9 * max(1.0, abs(self.cost))


@dataclass
class Search:
    """Arrays of one model, the choice under way and the incumbent."""

    model: Model
    flat: Flat
    rows: int
    best: Incumbent
    top: np.ndarray
    lazy: np.ndarray

    def fit(self, x: np.ndarray, sweeps: int = 6) -> bool:
        """Repair and descend a copy of x; True when it fits. The incumbent keeps it when it is the best."""
        f, y = self.flat, x.copy()
        kernels.load_all(f, y, self.top, self.lazy)
        if self.rows and self.top[1] > f.limit:
            journal = np.empty((8 * len(y) + 256, 2), np.int64)
            out = np.empty(int(np.diff(f.offset).max()))
            fits, _, _ = kernels.repair(f, y, self.top, self.lazy, np.inf, len(journal), 256, journal, 0, out)
            if not fits:
                return False
        kernels.descend(f, y, self.top, self.lazy, sweeps)
        cost = kernels.total_cost(f, y)
        if cost < self.best.cost and cost < kernels.HIGH:
            self.best.cost, self.best.x = cost, y
        return cost < kernels.HIGH


def start(model: Model) -> Search:
    """A search over a model with exact costs."""
    flat = flatten(model)
    rows = 0 if model.memory is None else model.memory.rows
    best = Incumbent(price=np.zeros(rows))
    return Search(model, flat, rows, best, np.zeros(2 * flat.leaves), np.zeros(2 * flat.leaves))


def prices(search: Search, go_on: Callable[[float], bool], patience: int = 12, rounds: int = 100_000) -> None:
    """Raise the bound until `go_on(work)` says no or the steps get too short."""
    f, rows, best = search.flat, search.rows, search.best
    n = search.model.nodes
    earlier = np.zeros(n, np.int64)
    later = np.zeros(n, np.int64)
    own = np.repeat(np.arange(n), np.diff(f.first))
    np.add.at(earlier, own, f.other < own)
    np.add.at(later, own, f.other > own)
    share = 1.0 / np.maximum(1, np.maximum(earlier, later))
    message, unary = np.zeros(int(f.message[-1])), f.cost.copy()
    price, direction = np.zeros(rows), np.zeros(rows)
    gain, idle = 1.0, 0
    x = np.zeros(n, np.int64)
    entries = 2.0 * float(sum(len(search.model.node_cost(i)) for i in range(n)) + 2 * sum(t.size for t in search.model.pairs.values()))
    for turn in range(rounds):
        if rows:
            kernels.priced(f, price, unary)
        value = kernels.message_pass(f, unary, message, share, x) - (float(price.sum()) * f.limit if rows else 0.0)
        if value > best.bound + 1e-7 * abs(best.bound):
            idle = 0
        else:
            idle += 1
        if value > best.bound:
            best.bound, best.price = value, price.copy()
        if turn in (3, 10) or turn % 25 == 24:
            search.fit(x)
        if not go_on(entries) or best.closed:
            break
        if not rows:
            if idle > patience:
                break
            continue
        if idle > patience:
            gain, idle = gain * 0.8, 0
            if gain < 1e-4:
                break
        over = kernels.loads(f, x, rows) - f.limit
        direction = over + 0.9 * direction
        step = np.where((price <= 0) & (direction < 0), 0.0, direction)
        norm = float(step @ step)
        if norm > 0:
            target = best.cost if np.isfinite(best.cost) else best.bound + 0.1 * abs(best.bound) + 1.0
            price = np.maximum(0.0, price + gain * max(target - value, 1e-6 * abs(value)) / norm * step)
    search.fit(x)


@dataclass
class Annealer:
    """Annealing from the incumbent in slices; `unit` is the temperature's unit, bound / nodes."""

    search: Search
    unit: float
    tree_share: float = 0.05
    tree_size: int = 100
    stamp: int = 0
    x: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    cost: float = np.inf
    mark: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    hits: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def begin(self) -> None:
        """Continue from the incumbent."""
        assert self.search.best.x is not None
        self.x, self.cost = self.search.best.x.copy(), self.search.best.cost
        if not len(self.mark):
            self.mark, self.hits = np.zeros(len(self.x), np.int64), np.zeros(len(self.x), np.int64)
        kernels.load_all(self.search.flat, self.x, self.search.top, self.search.lazy)

    def run(self, hot: float, cold: float, moves: int) -> float:
        """One slice; returns the work done."""
        best, s = self.search.best, self.search
        assert best.x is not None
        price = best.price if len(best.price) else np.zeros(0)
        self.cost, best.cost, self.stamp, work = kernels.anneal(
            s.flat, self.x, s.top, s.lazy, price, self.cost, best.x, best.cost, hot * self.unit, cold * self.unit, moves,
            self.tree_share, min(self.tree_size, len(self.x)), self.mark, self.hits, self.stamp,
        )  # fmt: skip
        return float(work)


def anneal_for(annealer: Annealer, hot: float, cold: float, time_s: float, on_slice: Callable[[], None] | None = None) -> None:
    """Geometric cooling from hot to cold over wall time, in slices of about a fifth of a second."""
    annealer.begin()
    began, moves = time.monotonic(), 2000
    while True:
        done = (time.monotonic() - began) / time_s
        if done >= 1 or annealer.search.best.closed:
            return
        before = time.monotonic()
        now, then = hot * (cold / hot) ** done, hot * (cold / hot) ** min(1.0, done + 0.2 / time_s)
        annealer.run(now, then, moves)
        spent = time.monotonic() - before
        moves = max(200, int(moves * min(4.0, 0.2 / max(spent, 1e-4))))
        if on_slice is not None:
            on_slice()
