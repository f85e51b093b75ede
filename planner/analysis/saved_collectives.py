"""Results of collectives that a recomputed block surely keeps (recompute=block-keep), known before
any layout is chosen.

A product whose summed dims are cut leaves terms to be added up. Follow its result, inside one
repeat of a block, to a node whose gradient reads it and which takes no pending terms: on that path
some tensor is the first without pending terms, so a collective made it, and the backward pass finds
the last of such results on the path saved (planner.execution.recompute). Of which tensor depends on
the layouts; a device has at least its even share of the smallest one's elements. Paths that have no
tensor in common save one each, so that what is counted is below what the price of the whole plan
has (planner.pricing.saved_activations.saved_by_blocks_bytes).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from planner.ops.residuals import reads

if TYPE_CHECKING:
    from planner.analysis.basics import BasicFacts

Paths = tuple[tuple[str, ...], ...]
"""Tensors of each path, those of the first repeat."""


def find_saved_collectives(base: BasicFacts) -> Mapping[int, tuple[int, Paths]]:
    """Class of products in repeated blocks -> how many repeats there are, and the paths from its
    nodes of one repeat."""
    result: dict[int, tuple[int, Paths]] = {}
    for first, period, repeats in base.loops if base.training else ():
        taken = set[str]()
        for i in range(first, first + period):
            path = (
                _shortest_path(base, i, range(first, first + period), taken)
                if base.rules[i].flops
                else ()
            )
            if path:
                taken.update(path)
                result[base.shared[i]] = (
                    repeats,
                    (*result.get(base.shared[i], (repeats, ()))[1], path),
                )
    return result


def _shortest_path(base: BasicFacts, i: int, inside: range, taken: set[str]) -> tuple[str, ...]:
    """The fewest tensors from the result of node i on to one that a gradient reads without pending
    terms, none of them taken; () where there is no path."""
    graph = base.graph
    queue: deque[tuple[str, ...]] = deque(
        (o,) for o in graph.nodes[i].outputs[:1] if o in base.grad and o not in taken
    )
    seen = {path[0] for path in queue}
    while queue:
        path = queue.popleft()
        for reader, slot in graph.consumers.get(path[-1], ()):
            if reader not in inside:
                continue
            node = graph.nodes[reader]
            if slot not in base.rules[reader].linear and slot in reads(node, base.grad).slots:
                return path
            for o in node.outputs:
                if o in base.grad and o not in taken and o not in seen:
                    seen.add(o)
                    queue.append((*path, o))
    return ()
