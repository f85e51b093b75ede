"""What a recomputed block runs again at least where it keeps results of collectives (recompute=block-keep), known before any layout is chosen.

A node runs again where its result, or what is made of it, is read backward and no collective lies on the way: what a collective made is kept, and nothing asks for what
was before it (planner.emit.replay). Of each node one way is looked at, the shortest inside its repeat to an operand that a gradient reads (`find_demanded`). The node runs
again, or a collective made some tensor of the way into what a device keeps: at least its even share of that tensor's elements (planner.memory.kept_collectives). One tensor
spares all nodes whose ways lead over it. Ways that meet go on alike, so they are a forest, and what is spared at most at a price of a byte is the sum over its trees of

    spared(node) = max(seconds of the nodes up to here - price * bytes of the node's result, sum of spared(nodes that lead here))

Nodes are charged no more than their cheapest split that takes any time, so that what is spared does not depend on splits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from planner.emit.replay import reads

if TYPE_CHECKING:
    from planner.base import Base
    from planner.variables import Space

Hop = tuple[str, int]
"""A tensor, and the node that runs again if it is read there; -1 where a gradient reads it."""


def find_demanded(base: Base) -> Mapping[int, Hop]:
    """Node of a first repeat -> the first hop of a shortest way, inside the repeat, from its result to an operand that a gradient reads. Readers come before what they read."""
    graph, found = base.graph, dict[int, Hop]()
    for first, period, _ in base.loops if base.training else ():
        made = {o: i for i in range(first, first + period) for o in graph.nodes[i].outputs if o}
        queue = deque((graph.nodes[i].inputs[slot], -1) for i in range(first, first + period) for slot in sorted(reads(graph.nodes[i], base.grad).slots))
        while queue:
            name, reader = queue.popleft()
            i = made.get(name, -1)
            if i >= 0 and i not in found:
                found[i] = name, reader
                queue.extend((n, i) for n in graph.nodes[i].inputs if n)
    return found


@dataclass(frozen=True)
class KeptAgain:
    """Nodes of blocks that may run again, one of all repeats, each behind the one that its way leads to. Figures are of all repeats, in a microbatch.

    charge_s: seconds of one node [options of all variables in a row]. variable, after: of each node its variable and which of the nodes its way leads to, -1 for none.
    seconds: what it takes; bytes: what a device keeps of its result, where a collective makes that into what is read. [nodes]
    """

    charge_s: np.ndarray
    variable: np.ndarray
    after: np.ndarray
    seconds: np.ndarray
    bytes: np.ndarray

    def spared(self, price: float) -> tuple[float, float]:
        """What is spared at most, less the price (seconds a byte) of what is kept for it; and the bytes of that."""
        whole, spared, kept = self.seconds.tolist(), [0.0] * len(self.after), [0.0] * len(self.after)
        total = bytes_ = 0.0
        for k in range(len(whole) - 1, -1, -1):  # what leads here comes later
            own = whole[k] - price * float(self.bytes[k])
            if own >= spared[k]:
                spared[k], kept[k] = own, float(self.bytes[k])
            to = int(self.after[k])
            if to >= 0:
                whole[to], spared[to], kept[to] = whole[to] + whole[k], spared[to] + spared[k], kept[to] + kept[k]
            else:
                total, bytes_ = total + spared[k], bytes_ + kept[k]
        return total, bytes_


def kept_again(space: Space) -> KeptAgain:
    """Of a space, worked out once."""
    if "kept again" not in space.memo:
        space.memo["kept again"] = _kept_again(space)
    found: KeptAgain = space.memo["kept again"]
    return found


def _kept_again(space: Space) -> KeptAgain:
    base, price, tensors = space.base, space.pricer, space.base.graph.tensors
    charge_s = [np.zeros(len(v.kept_bytes)) for v in space.variables]
    share = (1 + price.runtime.memory_slack) / prod(price.sizes.values())
    rows, place = list[tuple[int, int, float, float]](), dict[int, int]()
    for i, (name, reader) in base.demanded.items():
        k = space.op_of[i]
        v = space.variables[k]
        again = np.where(np.isfinite(v.forward_s), v.forward_s - v.spared_s, 0.0)
        least = float(again[again > 0].min()) if (again > 0).any() else 0.0
        charge_s[k], place[i] = np.minimum(again, least), len(rows)
        rows.append((k, place.get(reader, -1), v.count * least, v.count * share * tensors[name].elements * price.itemsize(tensors[name].dtype)))
    found = np.array(rows, np.float64).reshape(-1, 4).T
    return KeptAgain(np.concatenate(charge_s), found[0].astype(np.int64), found[1].astype(np.int64), found[2], found[3])
