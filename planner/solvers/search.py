"""Local search for large and tight problems, compiled: passes of messages for `prices`, then annealing with exact tree moves.

`Search`   one model's messages, choice and incumbent; decoded choices are repaired and descended.
`Annealer` continues from the best choice: single changes, and exact minimisation over random induced trees under exponential noise
           and a random multiple of the prices; overloads are repaired by cheap changes or the move is undone. Trees of a thousand nodes
           cross from one way of laying out a part of the problem to another, which single changes and small trees rarely do.

Needs numba (the optional extra "fast"); `auto` does without where it is missing. Work unit: one table entry read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from planner.solvers import kernels, moves
from planner.solvers.flat import Flat, flatten, high_of
from planner.solvers.model import Model
from planner.solvers.prices import Incumbent

TREES, TREE_PART = (100, 1000), 0.2
"""Most nodes of a tree move: a part of all, within bounds (below 1,024: `moves.grow_tree` counts a node's neighbours in the tree up to that)."""


@dataclass
class Search:
    """Arrays of one model, the choice under way and the incumbent: the compiled `prices.Passes`."""

    model: Model
    flat: Flat
    rows: int
    best: Incumbent
    top: np.ndarray
    lazy: np.ndarray
    unary: np.ndarray  # [positions] costs under the prices of the last pass
    message: np.ndarray
    share: np.ndarray  # [nodes] weight of a node in each chain through it
    x: np.ndarray
    regret: np.ndarray
    high: float  # what stands for a forbidden entry
    own: Incumbent = field(default_factory=Incumbent)
    """The best that was found here, not by another process: its choice and cost."""

    def sweep(self, price: np.ndarray) -> float:
        """See `prices.Passes`."""
        f = self.flat
        if self.rows:
            kernels.priced(f, price, self.unary)
        value = kernels.message_pass(f, self.unary, self.message, self.share, self.x, self.regret)
        return value - float(price.sum()) * f.limit if self.rows else value

    def cost(self, x: np.ndarray) -> float:
        """Of a choice, far above all others where it is forbidden."""
        return float(kernels.total_cost(self.flat, x))

    def mended(self, x: np.ndarray, sweeps: int = 6) -> tuple[np.ndarray | None, float]:
        """A copy of x repaired and descended, and its cost; None where it cannot be made to fit. The incumbent keeps it when it is the best."""
        f, y = self.flat, x.copy()
        kernels.load_all(f, y, self.top, self.lazy)
        if self.rows and self.top[1] > f.limit:
            journal = np.empty((8 * len(y) + 256, 2), np.int64)
            out = np.empty(int(np.diff(f.offset).max()))
            fits, _, _ = moves.repair(f, y, self.top, self.lazy, np.inf, len(journal), 256, journal, 0, out)
            if not fits:
                return None, np.inf
        moves.descend(f, y, self.top, self.lazy, sweeps)
        cost = self.cost(y)
        if cost >= self.high:
            return None, np.inf
        for known in (self.own, self.best):
            if cost < known.cost:
                known.cost, known.x = cost, y
        return y, cost

    def fit(self, x: np.ndarray) -> bool:
        """Repair and descend a copy of x; True when it fits. The incumbent keeps it when it is the best."""
        return self.mended(x)[0] is not None


def start(model: Model) -> Search:
    """A search over a model with exact costs."""
    f, n = flatten(model), model.nodes
    rows = 0 if model.memory is None else model.memory.rows
    own = np.repeat(np.arange(n), np.diff(f.first))
    earlier, later = np.bincount(own, f.other < own, n), np.bincount(own, f.other > own, n)
    share = 1.0 / np.maximum(1, np.maximum(earlier, later))
    top, lazy = np.zeros(2 * f.leaves), np.zeros(2 * f.leaves)
    best, message = Incumbent(price=np.zeros(rows)), np.zeros(int(f.message[-1]))
    return Search(model, f, rows, best, top, lazy, f.cost.copy(), message, share, np.zeros(n, np.int64), np.zeros(len(f.cost)), high_of(model))


@dataclass
class Annealer:
    """Annealing from the incumbent in slices; `unit` is the temperature's unit, bound / nodes. own, own_cost: the best choice of the run under way."""

    search: Search
    unit: float
    tree_share: float = 0.05
    tree_size: int = TREES[0]
    stamp: int = 0
    x: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    cost: float = np.inf
    own: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    own_cost: float = np.inf
    mark: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    hits: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def begin(self) -> None:
        """Start a run from the incumbent, which is no result of it."""
        assert self.search.best.x is not None
        self.x, self.cost = self.search.best.x.copy(), self.search.best.cost
        self.own, self.own_cost = self.x.copy(), np.inf
        if not len(self.mark):
            self.mark, self.hits = np.zeros(len(self.x), np.int64), np.zeros(len(self.x), np.int64)
        kernels.load_all(self.search.flat, self.x, self.search.top, self.search.lazy)

    def run(self, hot: float, cold: float, proposals: int) -> float:
        """One slice; returns the work done."""
        best, s = self.search.best, self.search
        price = best.price if len(best.price) else np.zeros(0)
        self.cost, self.own_cost, self.stamp, work = moves.anneal(
            s.flat, self.x, s.top, s.lazy, price, self.cost, self.own, self.own_cost, hot * self.unit, cold * self.unit, proposals,
            self.tree_share, min(self.tree_size, len(self.x)), self.mark, self.hits, self.stamp,
        )  # fmt: skip
        if self.own_cost < best.cost:
            best.cost, best.x = self.own_cost, self.own.copy()
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
