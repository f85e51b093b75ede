"""What a search does once prices have brought a first choice: descents, then annealing where it is
compiled.

    lines      of descents (`cutset`), each from the first choice and then from the line's best
               where costs have some noise: they end in some of a problem's few ways of laying out
               the whole
    descents   from the best choice so far where costs have some noise
    annealing  runs from there (`annealing`), each followed by a descent

What each ends with is shared, and mixtures of that are tried between (`fuse`, by the first of two
processes).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from planner.solvers.neighbourhood import cutset
from planner.solvers.neighbourhood.ground import Ground, Others, unit_of
from planner.solvers.neighbourhood.search_numpy import PlainSearch

FIRST, FRUITLESS, MIXED = (0.3, 0.9), 16, 4
"""The part of the time for descents, of role 0 and of role 1; how many in a row from the best
choice may bring nothing; and after how many mixtures are tried."""
LINE, LINES, APART = 6, 8, 0.5
"""Descents of a line, most lines, and the part of the time for descents that they have."""


def rounds(
    state: Ground,
    role: int,
    done: Callable[[float], float],
    others: Others,
    seed: int,
    proposals: int = 0,
) -> None:
    """Descents and runs of annealing until `done(work)`, the share of the whole budget used, is 1;
    without numba descents alone. role: 0 anneals more, and hotter, than 1."""
    best, began, descent = state.best, done(0.0), cutset.start(state, seed)
    assert best.x is not None
    plain = isinstance(state, PlainSearch)
    first = best.x if state.own.x is None else state.own.x
    line, reached, idle, until = (
        first,
        best.cost,
        0,
        began + (1.0 if plain else FIRST[role]) * (1.0 - began),
    )
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
        if best.closed or done(0.0) >= until or (idle >= FRUITLESS and not plain):
            break
    others.mix()
    if not best.closed and not plain:
        from planner.solvers.neighbourhood.annealing import anneal

        anneal(state, role, done, others, descent, proposals)  # type: ignore[arg-type]
