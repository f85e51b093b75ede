"""Python's cycle collector, which a search would otherwise call a thousand times: it makes hundreds of thousands of small objects that live to its end and next to no cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = 1_000_000
"""New containers between two collections (Python's own default is 700; a plan of an 8 B model has half a million at once). Next to no cycles: the same peak memory as with
50,000, measured up to GPT-3 on 1,024 devices, and a twenty-fifth of the time less."""


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
