"""Python's cycle collector, which a search would otherwise call a thousand times: it makes hundreds of thousands of small objects that live to its end and next to no cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = 50_000
"""New containers between two collections (Python's own default is 700): a fifth less CPU for a plan of an 8 B model, the same peak memory."""


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """While it is held (also as a decorator) the collector runs seldom; the caller's setting comes back after. A collector that is off, or seldomer, stays so."""
    before = gc.get_threshold()
    if 0 < before[0] < SELDOM:
        gc.set_threshold(SELDOM, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
