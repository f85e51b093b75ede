"""Bounds of plans whose recomputed blocks keep results of collectives, whichever those are (planner.kept).

The search goes by the problem of plans that keep sums alone, as no other is solved: it never solves what it has no bytes for. What its bounds of such leaves say is
therefore said of those plans, and what holds for all is worked out when it ends, for as few leaves as settle it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from planner.assemble import Techniques, dealt_parts, least_usage
from planner.kept import KeptAgain, kept_again
from planner.leaf import Leaf
from planner.relax import Relaxed
from planner.space import Space


def spare(space: Space, techniques: Techniques) -> KeptAgain:
    """Nodes that may run again, with seconds and bytes of a device as in the uncut problem of the techniques."""
    found = kept_again(space)
    runs, keeps = dealt_parts(space, techniques, found.variable)
    return replace(found, seconds=found.seconds * space.parts * runs, bytes=found.bytes * space.parts / techniques.microbatches * keeps)


def charges(space: Space, techniques: Techniques) -> np.ndarray:
    """Seconds that running again adds to every option of every variable in a row, before anything is spared. [options]"""
    sizes = [len(v.kept_bytes) for v in space.variables]
    runs, _ = dealt_parts(space, techniques, np.arange(len(sizes)))
    charged: np.ndarray = space.parts * np.repeat(runs * [v.count for v in space.variables], sizes) * kept_again(space).charge_s
    return charged


def surely(relaxed: Relaxed, techniques: Techniques, limit_bytes: float, enough_s: float = np.inf) -> float:
    """A bound (seconds) under a memory limit, or one of at least `enough_s`."""
    kept, more = spare(relaxed.space, techniques), charges(relaxed.space, techniques)
    found, (most, size) = relaxed.free(replace(techniques, recompute="none"), techniques.microbatches, more), kept.spared(0.0)
    if found is None:
        return np.inf
    bound, usage = max(0.0, found[1] - most), relaxed.usage(techniques, found[0]) + size
    if usage <= limit_bytes or bound >= enough_s:
        return bound
    return relaxed.limited(techniques, limit_bytes, (bound, usage), enough_s, (kept, more))


def least_surely(leaves: Iterable[tuple[float, Leaf, Relaxed]], limit_bytes: float, bound: float) -> float:
    """The bound, or less where one of the leaves, each with what is known of it, proves no more: the least is raised until it is one that was."""
    known = [(least, leaf, relaxed, False) for least, leaf, relaxed in leaves if least < bound]
    heap = [(row[0], k) for k, row in enumerate(known)]
    heapq.heapify(heap)
    while heap and heap[0][0] < bound:
        least, k = heapq.heappop(heap)
        _, leaf, relaxed, raised = known[k]
        if raised:
            return least
        if least_usage(relaxed.space, leaf.techniques, uncut=True) <= limit_bytes:
            known[k] = least, leaf, relaxed, True
            heapq.heappush(heap, (max(least, surely(relaxed, leaf.techniques, limit_bytes, bound)), k))
    return bound
