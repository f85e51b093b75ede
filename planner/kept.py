"""What a recomputed block runs again where it keeps results of collectives (recompute=block-keep), as far as pairs of layouts say it.

A node runs again where its result, or what is made of it, is read backward and no collective lies on the way: what a collective made is kept, and nothing asks for what
was before it (planner.emit.replay). Of each node one way is looked at, the shortest inside its repeat to an operand that a gradient reads (`find_demanded`): the node is
spared only if some hop of it has a collective, a hop being the conversion of one tensor from the layout that it is made in to the one that its next reader needs. So

    spared(node) <= its first hop has a collective, or the next node of its way runs again for its own readers and is spared

and which conversions have a collective forward the links of a space say. One over a hub is two hops; one that no link has may have a collective whatever the layouts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from planner.emit.replay import reads

if TYPE_CHECKING:
    from planner.base import Base
    from planner.variables import Space


class Hop(NamedTuple):
    """A tensor on its way to a node that reads it; again: that node runs again if it is not spared, else its gradient reads it."""

    tensor: str
    reader: int
    again: bool


def find_demanded(base: Base) -> Mapping[int, Hop]:
    """Node of a first repeat -> the first hop of a shortest way, inside the repeat, from its result to an operand that a gradient reads. Readers come before what they read."""
    graph, found = base.graph, dict[int, Hop]()
    for first, period, _ in base.loops if base.training else ():
        made = {o: i for i in range(first, first + period) for o in graph.nodes[i].outputs if o}
        queue = deque(Hop(graph.nodes[i].inputs[slot], i, False) for i in range(first, first + period) for slot in sorted(reads(graph.nodes[i], base.grad).slots))
        while queue:
            hop = queue.popleft()
            i = made.get(hop.tensor, -1)
            if i >= 0 and i not in found:
                found[i] = hop
                queue.extend(Hop(n, i, True) for n in graph.nodes[i].inputs if n)
    return found


@dataclass(frozen=True)
class Step:
    """What spares a variable: that a conversion of the link takes time forward (-1: whatever it is), or that `after`, -1 for none, is spared.

    bytes: what a device keeps at least of all repeats, in a microbatch, where the conversion spares it.
    """

    variable: int
    link: int
    after: int
    bytes: float


def steps_of(space: Space) -> tuple[Step, ...]:
    """Each demanded node's, and those of the hubs on their ways."""
    base, price, found = space.base, space.pricer, list[Step]()
    share = (1 + price.runtime.memory_slack) / prod(price.sizes.values())
    counted = {name for _, ways in base.collected.values() for way in ways for name in way}  # as results of sums (planner.collected)
    at = {(link.name, link.a, link.b): n for n, link in enumerate(space.links)}
    hubs = {v.name: k for k, v in enumerate(space.variables) if v.kind == "hub"}
    for i, hop in base.demanded.items():
        maker, reader, hub = space.op_of[i], space.op_of[base.shared[hop.reader]], hubs.get(hop.tensor, -1)
        after, tensor = reader if hop.again else -1, base.graph.tensors[hop.tensor]
        size = 0.0 if hop.tensor in counted else space.variables[maker].count * share * tensor.elements * price.itemsize(tensor.dtype)
        if hub >= 0:
            found.append(Step(hub, at.get((hop.tensor, hub, reader), -1), after, size))
            found.append(Step(maker, at.get((hop.tensor, maker, hub), -1), hub, size))
        else:
            found.append(Step(maker, at.get((hop.tensor, maker, reader), -1), after, size))
    return tuple(found)


def charges(space: Space) -> np.ndarray:
    """Seconds of one node that running again adds to every option of every variable in a row, where it is not spared. [options]"""
    base, graph = space.base, space.base.graph
    # What a result is converted to for its own kind, or handed out in, stands with the node's time, and collectives of that are kept.
    beside = {base.shared[graph.producer[o]] for o in graph.outputs if o in graph.producer}
    found = [np.zeros(len(v.kept_bytes)) for v in space.variables]
    for i in base.demanded:
        v = space.variables[space.op_of[i]]
        if i not in beside and not any(base.shared[reader] == i for o in graph.nodes[i].outputs if o for reader, _ in graph.consumers.get(o, ())):
            found[space.op_of[i]] = np.where(np.isfinite(v.forward_s), v.forward_s - v.spared_s, 0.0)
    return np.concatenate(found)
