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
from itertools import count

import numpy as np

from planner.solvers import kernels, moves
from planner.solvers.flat import HIGH, Flat, flatten
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
            fits, _, _ = moves.repair(f, y, self.top, self.lazy, np.inf, len(journal), 256, journal, 0, out)
            if not fits:
                return False
        moves.descend(f, y, self.top, self.lazy, sweeps)
        cost = kernels.total_cost(f, y)
        if cost < self.best.cost and cost < HIGH:
            self.best.cost, self.best.x = cost, y
        return cost < HIGH


def start(model: Model) -> Search:
    """A search over a model with exact costs."""
    flat = flatten(model)
    rows = 0 if model.memory is None else model.memory.rows
    best = Incumbent(price=np.zeros(rows))
    return Search(model, flat, rows, best, np.zeros(2 * flat.leaves), np.zeros(2 * flat.leaves))


def regrets(search: Search, passes: int = 60) -> np.ndarray:
    """How much the bound rises at least, above the incumbent's bound, when a strategy is forced; at the incumbent's prices. [positions]

    A strategy with bound + regret > cost of the incumbent is in no better choice.
    """
    f, best = search.flat, search.best
    message, unary, share = np.zeros(int(f.message[-1])), f.cost.copy(), _shares(search)
    x, regret, found = np.zeros(search.model.nodes, np.int64), np.zeros(len(f.cost)), np.zeros(len(f.cost))
    constant = 0.0
    if search.rows:
        kernels.priced(f, best.price, unary)
        constant = float(best.price.sum()) * f.limit
    value = -np.inf
    for _ in range(passes):
        fresh = kernels.message_pass(f, unary, message, share, x, regret) - constant
        if np.isfinite(value):
            best.bound = max(best.bound, value)
            found = np.maximum(found, value + regret)
        value = fresh
    return found - best.bound


def _shares(search: Search) -> np.ndarray:
    """Weight of a node in each chain through it. [nodes]"""
    f, n = search.flat, search.model.nodes
    own = np.repeat(np.arange(n), np.diff(f.first))
    earlier, later = np.bincount(own, f.other < own, n), np.bincount(own, f.other > own, n)
    return 1.0 / np.maximum(1, np.maximum(earlier, later))


def prices(search: Search, go_on: Callable[[float], bool], patience: int = 12) -> None:
    """Raise the bound until `go_on(work)` says no; without memory until it stands still."""
    f, rows, best = search.flat, search.rows, search.best
    n = search.model.nodes
    share = _shares(search)
    message, unary = np.zeros(int(f.message[-1])), f.cost.copy()
    price, direction = np.zeros(rows), np.zeros(rows)
    gain, idle, mark, cycle = 1.0, 0, -1e300, 0
    x, regret = np.zeros(n, np.int64), np.zeros(len(f.cost))
    entries = 2.0 * float(sum(len(search.model.node_cost(i)) for i in range(n)) + 2 * sum(t.size for t in search.model.pairs.values()))
    for turn in count():
        if rows:
            kernels.priced(f, price, unary)
        value = kernels.message_pass(f, unary, message, share, x, regret) - (float(price.sum()) * f.limit if rows else 0.0)
        if value > best.bound:
            best.bound, best.price = value, price.copy()
        if turn in (3, 10) or turn % 25 == 24:
            search.fit(x)
        if not go_on(entries) or best.closed:
            break
        idle = 0 if best.bound > mark + 1e-7 * abs(mark) else idle + 1
        mark = best.bound
        if idle > patience:
            gain, idle = gain * 0.8, 0
            if gain < 1e-4:
                # once more from the best prices, now far, now near: the messages have settled since
                gain, price, cycle = (0.3, 0.02)[cycle % 2], best.price.copy(), cycle + 1
                direction[:] = 0.0
        if not rows:
            if cycle:
                break
            continue
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

    def run(self, hot: float, cold: float, proposals: int) -> float:
        """One slice; returns the work done."""
        best, s = self.search.best, self.search
        assert best.x is not None
        price = best.price if len(best.price) else np.zeros(0)
        self.cost, best.cost, self.stamp, work = moves.anneal(
            s.flat, self.x, s.top, s.lazy, price, self.cost, best.x, best.cost, hot * self.unit, cold * self.unit, proposals,
            self.tree_share, min(self.tree_size, len(self.x)), self.mark, self.hits, self.stamp,
        )  # fmt: skip
        return float(work)


def anneal_for(
    annealer: Annealer, hot: float, cold: float, done: Callable[[float], float], on_slice: Callable[[], None] | None = None, proposals: int = 0
) -> None:
    """Geometric cooling from hot to cold as `done(work of the last slice)` goes from 0 to 1.

    Slices have `proposals` proposals, or with 0 as many as take a fifth of a second (not deterministic).
    """
    annealer.begin()
    fixed, proposals = bool(proposals), proposals or 2000
    at = done(0.0)
    ahead = 0.01
    while at < 1 and not annealer.search.best.closed:
        before = time.monotonic()
        work = annealer.run(hot * (cold / hot) ** at, hot * (cold / hot) ** min(1.0, at + ahead), proposals)
        if not fixed:
            proposals = max(200, int(proposals * min(4.0, 0.2 / max(time.monotonic() - before, 1e-4))))
        after = done(work)
        ahead, at = max(1e-6, after - at), after
        if on_slice is not None:
            on_slice()


def rounds(
    state: Search,
    role: int,
    done: Callable[[float], float],
    sync: Callable[[], None],
    share: Callable[[], None] | None = None,
    proposals: int = 0,
) -> None:
    """Two rounds of cooling from the incumbent, the second cooler; role 0 starts hotter than role 1.

    Temperatures follow the gap that the prices left: a loose start wants heat, a near-optimal one would only be spoilt by it.
    Under 1,000 nodes the rounds are shorter and more, each from hot to cold: restarts.
    `done(work)` is the share of the whole budget used; `share` is called after each round (to exchange the incumbent).
    """
    best, n = state.best, state.model.nodes
    annealer = Annealer(state, max(abs(best.bound), 1e-3 * abs(best.cost), 1.0) / n)
    gap = (best.cost - best.bound) / max(abs(best.bound), 1.0) if np.isfinite(best.bound) else 1.0
    base = float(np.clip(3.0 * gap, 0.01, 0.3))
    if n < 1000:
        plan = [(3.0, 0.05)] * 6
    elif role == 0:
        plan = [(base, base / 50), (base / 5, base / 200)]
    else:
        plan = [(base / 8, base / 80), (base / 20, base / 300)]
    began = done(0.0)
    for part, (hot, cold) in enumerate(plan):
        low = began + (1.0 - began) * part / len(plan)
        width = (1.0 - began) / len(plan)

        def progress(work: float, low: float = low, width: float = width) -> float:
            return (done(work) - low) / width

        anneal_for(annealer, hot, cold, progress, sync, proposals)
        if share is not None:
            share()
        sync()
        if best.closed:
            return
