"""What a compiled search does once prices have brought a first choice: descents, then annealing.

    lines      of descents (`cutset`), each from the first choice and then from the line's best where costs have some noise: they end in some of a problem's few ways of
               laying out the whole
    descents   from the best choice so far where costs have some noise
    annealing  runs from there (`search`), each followed by a descent

What each ends with is shared, and mixtures of that are tried between (`fuse`, by the first of two processes).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np

from planner.solvers import cutset
from planner.solvers.search import TREE_PART, TREES, Annealer, Search, anneal_for

HEAT, HEATS, COOLER = 40.0, (0.01, 1.0), (1.0, 1.0, 1.0, 1.0, 0.5, 0.2)
"""Temperature of the first run per gap, its bounds, and that of each run by the first's."""
COOLING = 0.8
"""The part of a run's time that cooling takes; a descent has the rest."""
FIRST, FRUITLESS, MIXED = (0.3, 0.9), 16, 4
"""The part of the time for descents, of role 0 and of role 1; how many in a row from the best choice may bring nothing; and after how many mixtures are tried."""
LINE, LINES, APART = 6, 8, 0.5
"""Descents of a line, most lines, and the part of the time for descents that they have."""


@dataclass(frozen=True)
class Others:
    """What is done with the rest of the portfolio: take over what it found, tell it what a run ended with, and try mixtures."""

    sync: Callable[[], None]
    share: Callable[[np.ndarray], None]
    mix: Callable[[], None]


def rounds(state: Search, role: int, done: Callable[[float], float], others: Others, seed: int, proposals: int = 0) -> None:
    """Descents and runs of annealing until `done(work)`, the share of the whole budget used, is 1. role: 0 anneals more, and hotter, than 1."""
    best, began, descent = state.best, done(0.0), cutset.start(state, seed)
    assert best.x is not None
    first = best.x if state.own.x is None else state.own.x
    line, reached, idle, until = first, best.cost, 0, began + FIRST[role] * (1.0 - began)
    apart = began + APART * (until - began)

    def go_on(work: float) -> bool:
        others.sync()
        return done(work) < until

    for turn in count():
        lines = turn < LINE * LINES and done(0.0) < apart
        fresh = lines and turn % LINE == 0
        line = first if fresh else line if lines else best.x
        found = descent.run(line if fresh else descent.kicked(line, unit_of(state)), go_on)
        line = found if fresh or state.cost(found) < state.cost(line) else line
        others.share(found)
        if turn % MIXED == MIXED - 1:
            others.mix()
        idle, reached = (0, best.cost) if lines or best.cost < reached else (idle + 1, reached)
        if best.closed or done(0.0) >= until or idle >= FRUITLESS:
            break
    others.mix()
    if not best.closed:
        anneal(state, role, done, others, descent, proposals)


def unit_of(state: Search) -> float:
    """What a node costs at least, about."""
    return max(abs(state.best.bound), 1e-3 * abs(state.best.cost), 1.0) / state.model.nodes


def anneal(state: Search, role: int, done: Callable[[float], float], others: Others, descent: cutset.Descent, proposals: int) -> None:
    """Runs of cooling, each from the incumbent: first hot ones, which find other ways of laying out the whole, then cooler ones.

    Temperatures follow the gap that the prices left: a loose start wants heat, a near-optimal one would only be spoilt by it.
    Under 1,000 nodes each run is from hot to cold: restarts.
    """
    best, n = state.best, state.model.nodes
    annealer = Annealer(state, unit_of(state), tree_size=int(np.clip(TREE_PART * n, *TREES)))
    gap = (best.cost - best.bound) / max(abs(best.bound), 1.0) if np.isfinite(best.bound) else 1.0
    base = float(np.clip(HEAT * gap, *HEATS))
    plan = [(3.0, 0.05)] * len(COOLER) if n < 1000 else [(base * c, base * c / 60) if role == 0 else (base * c / 2, base * c / 60) for c in COOLER]
    began = done(0.0)
    for part, (hot, cold) in enumerate(plan):
        low = began + (1.0 - began) * part / len(plan)
        width = (1.0 - began) / len(plan)

        def progress(work: float, low: float = low, width: float = width) -> float:
            return (done(work) - low) / (COOLING * width) + 1e-9  # which ends at 1 whatever sums of parts are rounded to

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
