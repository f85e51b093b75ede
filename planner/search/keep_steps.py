"""Recompute with saved collectives, as decisions: which conversions between layouts spare a node of
a block from running again, what they save of it, and what running it again costs."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from planner.space.variables import Space


@dataclass(frozen=True)
class Step:
    """What spares a variable: that a conversion of the link takes time forward (-1: whatever it
    is), or that `after`, -1 for none, is spared.

    bytes: of the tensor, whole, of all repeats in a microbatch; where the conversion spares the
    variable, a device keeps what the layout converted to leaves of it, and what is cut further
    after its last collective is no less. counted: bytes of it that what the problem counts of sums
    may stand for already (planner.analysis.saved_collectives).
    """

    variable: int
    link: int
    after: int
    bytes: float
    counted: float


def followed(space: Space) -> frozenset[int]:
    """Variables of demanded nodes whose every way of being spared is a step's. Kernels that
    exchange something themselves may keep that."""
    return frozenset(
        space.op_of[i] for i in space.base.demanded_alike if not space.base.rules[i].inner
    )


def steps_of(space: Space) -> tuple[Step, ...]:
    """Each demanded node's, and those of the hubs on their ways."""
    base, price, steps, known = space.base, space.pricer, list[Step](), followed(space)
    slack = 1 + price.runtime.memory_slack

    def size(name: str) -> float:
        tensor = base.graph.tensors[name]
        return slack * tensor.elements * price.itemsize(tensor.dtype)

    # Tensors that may be what is counted as kept of a sum, and how much of one that is.
    sums = {
        name: min(map(size, way)) / prod(price.sizes.values())
        for i, (_, ways) in base.saved_collective_ways.items()
        if space.op_of[i] not in known
        for way in ways
        for name in way
    }
    at = {(link.name, link.a, link.b): n for n, link in enumerate(space.links)}
    hubs = {v.name: k for k, v in enumerate(space.variables) if v.kind == "hub"}
    for i, (hops, share) in base.demanded_alike.items():
        hop, maker = hops[0], space.op_of[i]
        reader = space.op_of[base.shared[hop.reader]]
        hub = next((hubs[h.tensor] for h in hops if h.tensor in hubs), -1)
        after, times = reader if hop.again else -1, share * space.variables[maker].count
        # The hop itself, or over a hub that from the hub on and that to it.
        for variable, target, then in (
            ((hub, reader, after), (maker, hub, hub)) if hub >= 0 else ((maker, reader, after),)
        ):
            keys = [(h.tensor, variable, target) for h in hops]
            steps.append(
                Step(
                    variable,
                    next((at[key] for key in keys if key in at), -1),
                    then,
                    times * size(hop.tensor),
                    times * max(sums.get(h.tensor, 0.0) for h in hops),
                )
            )
    return tuple(steps)


def without_hubs(space: Space, steps: tuple[Step, ...]) -> tuple[tuple[Step, ...], frozenset[int]]:
    """The steps but those over hubs that spare no product, and the variables whose steps are left
    out."""
    products = {k for i, k in space.op_of.items() if space.base.rules[i].flops}
    before: dict[int, list[int]] = {}
    for step in steps:
        before.setdefault(step.after, []).append(step.variable)

    def spared_through(k: int) -> set[int]:
        return {k}.union(*(spared_through(v) for v in before.get(k, ())))

    groups = (
        spared_through(step.variable)
        for step in steps
        if space.variables[step.variable].kind == "hub"
    )
    left_out = frozenset[int]().union(*(group for group in groups if products.isdisjoint(group)))
    return tuple(step for step in steps if step.variable not in left_out), left_out


def charges(space: Space) -> np.ndarray:
    """Seconds of one node that running again adds to every option of every variable in a row, where
    it is not spared. [options]"""
    base, graph, known = space.base, space.base.graph, followed(space)
    # What a result is converted to for its own kind, or handed out in, stands with the node's time,
    # and collectives of that are kept.
    beside = {base.shared[graph.producer[o]] for o in graph.outputs if o in graph.producer}
    charged_s = [np.zeros(v.options) for v in space.variables]
    for i, (_, share) in base.demanded_alike.items():
        k = space.op_of[i]
        v = space.variables[k]
        if i not in beside and not any(
            base.shared[reader] == i
            for node in base.nodes_in_repeat[i]
            for o in graph.nodes[node].outputs
            if o
            for reader, _ in graph.consumers.get(o, ())
        ):
            charged_s[k] = share * np.where(
                np.isfinite(v.costs.forward_s),
                v.costs.forward_s - (0.0 if k in known else v.costs.not_recomputed_s),
                0.0,
            )
    return np.concatenate(charged_s)
