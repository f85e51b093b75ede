"""What a search does once prices have brought a first choice: descents by neighbourhoods of nearly
every choice (`cutset`).

    lines   of descents, each from the first choice and then from the line's best where costs have
            some noise: they end in some of a problem's few ways of laying out the whole
    after   them descents from the best choice so far where costs have some noise

What each ends with is shared, and mixtures of that are tried between (`fuse`, by the first of two
processes).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from planner.solvers.neighbourhood import cutset
from planner.solvers.neighbourhood.search import Others, Search, unit_of

MIXED = 4
"""After how many descents mixtures are tried."""
LINE, LINES, APART = 6, 8, 0.5
"""Descents of a line, most lines, and the part of the time that they have."""


def descend(search: Search, done: Callable[[float], float], others: Others, seed: int) -> None:
    """Descents until `done(work)`, the share of the whole budget used, is 1."""
    best, descent = search.best, cutset.start(search, seed)
    assert best.x is not None
    first = line = best.x if search.own.x is None else search.own.x
    began = done(0.0)
    lines_end = began + APART * (1.0 - began)

    def go_on(work: float) -> bool:
        others.sync()
        return done(work) < 1

    for turn in count():
        in_line = turn < LINE * LINES and done(0.0) < lines_end
        fresh = in_line and turn % LINE == 0
        if fresh:
            end = line = descent.run(first, go_on)
        else:
            noisy = descent.with_noise(line if in_line else best.x, unit_of(search))
            end = descent.run(noisy, go_on)
            if search.cost(end) < search.cost(line):
                line = end
        others.share(end)
        if turn % MIXED == MIXED - 1:
            others.mix()
        if best.closed or done(0.0) >= 1:
            break
    others.mix()
