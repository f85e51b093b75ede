"""Annealing with exact tree moves (numba): how a search goes on from the best choice of its
descents.

Single changes, and exact minimisation over random induced trees under exponential noise and a
random multiple of the prices; overloads are repaired by cheap changes or the move is undone. Trees
of a thousand nodes cross from one way of laying out a part of the problem to another, which single
changes and small trees rarely do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from planner.solvers.bounds import messages_numba as kernels
from planner.solvers.neighbourhood import cutset, moves
from planner.solvers.neighbourhood.ground import Others, unit_of
from planner.solvers.neighbourhood.search import Search

TREES, TREE_PART = (100, 1000), 0.2
"""Most nodes of a tree move: a part of all, within bounds (below 1,024: `moves.grow_tree` counts a
node's neighbours in the tree up to that)."""
HEAT, HEATS, COOLER = 40.0, (0.01, 1.0), (1.0, 1.0, 1.0, 1.0, 0.5, 0.2)
"""Temperature of the first run per gap, its bounds, and that of each run by the first's."""
COOLING = 0.8
"""The part of a run's time that cooling takes; a descent has the rest."""


@dataclass
class Annealer:
    """Annealing from the incumbent in slices; `unit` is the temperature's unit, bound / nodes. own,
    own_cost: the best choice of the run under way."""

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
            s.flat,
            self.x,
            s.top,
            s.lazy,
            price,
            self.cost,
            self.own,
            self.own_cost,
            hot * self.unit,
            cold * self.unit,
            proposals,
            self.tree_share,
            min(self.tree_size, len(self.x)),
            self.mark,
            self.hits,
            self.stamp,
        )
        if self.own_cost < best.cost:
            best.offer(self.own.copy(), self.own_cost)
        return float(work)


def anneal_for(
    annealer: Annealer,
    hot: float,
    cold: float,
    done: Callable[[float], float],
    on_slice: Callable[[], None] | None = None,
    proposals: int = 0,
) -> None:
    """Geometric cooling from hot to cold as `done(work of the last slice)` goes from 0 to 1.

    Slices have `proposals` proposals, or with 0 as many as take a fifth of a second (not
    deterministic).
    """
    annealer.begin()
    fixed, proposals = bool(proposals), proposals or 2000
    at = done(0.0)
    ahead = 0.01
    while at < 1 and not annealer.search.best.closed:
        before = time.monotonic()
        work = annealer.run(
            hot * (cold / hot) ** at, hot * (cold / hot) ** min(1.0, at + ahead), proposals
        )
        if not fixed:
            proposals = max(
                200, int(proposals * min(4.0, 0.2 / max(time.monotonic() - before, 1e-4)))
            )
        after = done(work)
        ahead, at = max(1e-6, after - at), after
        if on_slice is not None:
            on_slice()


def anneal(
    state: Search,
    role: int,
    done: Callable[[float], float],
    others: Others,
    descent: cutset.Descent,
    proposals: int,
) -> None:
    """Runs of cooling, each from the incumbent: first hot ones, which find other ways of laying out
    the whole, then cooler ones.

    Temperatures follow the gap that the prices left: a loose start wants heat, a near-optimal one
    would only be spoilt by it. Under 1,000 nodes each run is from hot to cold: restarts.
    """
    best, n = state.best, state.model.nodes
    annealer = Annealer(state, unit_of(state), tree_size=int(np.clip(TREE_PART * n, *TREES)))
    gap = (best.cost - best.bound) / max(abs(best.bound), 1.0) if np.isfinite(best.bound) else 1.0
    base = float(np.clip(HEAT * gap, *HEATS))
    plan = (
        [(3.0, 0.05)] * len(COOLER)
        if n < 1000
        else [
            (base * c, base * c / 60) if role == 0 else (base * c / 2, base * c / 60)
            for c in COOLER
        ]
    )
    began = done(0.0)
    for part, (hot, cold) in enumerate(plan):
        low = began + (1.0 - began) * part / len(plan)
        width = (1.0 - began) / len(plan)

        def progress(work: float, low: float = low, width: float = width) -> float:
            return (done(work) - low) / (
                COOLING * width
            ) + 1e-9  # which ends at 1 whatever sums of parts are rounded to

        def go_on(work: float, end: float = low + width) -> bool:
            others.sync()
            return done(work) < end

        anneal_for(annealer, hot, cold, progress, others.sync, proposals)
        if best.closed or done(0.0) >= 1:
            return
        if np.isfinite(annealer.own_cost):
            others.share(descent.run(annealer.own, go_on))
        others.mix()
        others.sync()
