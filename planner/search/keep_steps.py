"""Recompute with saved collectives, as decisions: which reshards spare a node of a block from being
recomputed, what they save of it, and what recomputing it costs."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from planner.space.variables import Space


@dataclass(frozen=True)
class Step:
    """What spares a variable: that a reshard of the link takes time forward (-1: whatever it is),
    or that `after`, -1 for none, is spared. variable, after: places among the space's variables;
    link: a place among its links.

    bytes: of the tensor, whole, of all repeats in a microbatch; where the reshard spares the
    variable, a device saves what the layout resharded to leaves of it, and what is cut further
    after its last collective is no less. counted: bytes of it that what the problem counts of sums
    may stand for already (planner.analysis.saved_collectives).
    """

    variable: int
    link: int
    after: int
    bytes: float
    counted: float


def followed(space: Space) -> frozenset[int]:
    """Variables of demanded nodes that nothing but a step can spare. Kernels that exchange
    something themselves may save that."""
    return frozenset(
        space.op_of[i] for i in space.base.demanded_alike if not space.base.rules[i].inner
    )


def steps_of(space: Space) -> tuple[Step, ...]:
    """The steps of each demanded node, and of the shared layouts on their paths."""
    base, price, steps, stepped = space.base, space.pricer, list[Step](), followed(space)
    slack = 1 + price.runtime.memory_slack

    def size(name: str) -> float:
        tensor = base.graph.tensors[name]
        return slack * tensor.elements * price.itemsize(tensor.dtype)

    # Tensors that may be what is counted as saved of a sum, and how many bytes of one that is.
    sums = {
        name: min(map(size, tensors)) / prod(price.sizes.values())
        for i, (_, paths) in base.saved_collective_paths.items()
        if space.op_of[i] not in stepped
        for tensors in paths
        for name in tensors
    }
    link_at = {(link.name, link.a, link.b): n for n, link in enumerate(space.links)}
    shared = {v.name: k for k, v in enumerate(space.variables) if v.kind == "shared_layout"}
    for i, (first_reads, share) in base.demanded_alike.items():
        read, maker = first_reads[0], space.op_of[i]
        reader = space.op_of[base.shared[read.reader]]
        middle = next((shared[r.tensor] for r in first_reads if r.tensor in shared), -1)
        after, times = reader if read.again else -1, share * space.variables[maker].count
        # One reshard from maker to reader; with a shared layout in the middle, that from it and
        # that to it.
        for variable, target, then in (
            ((middle, reader, after), (maker, middle, middle))
            if middle >= 0
            else ((maker, reader, after),)
        ):
            keys = [(r.tensor, variable, target) for r in first_reads]
            steps.append(
                Step(
                    variable,
                    next((link_at[key] for key in keys if key in link_at), -1),
                    then,
                    times * size(read.tensor),
                    times * max(sums.get(r.tensor, 0.0) for r in first_reads),
                )
            )
    return tuple(steps)


def without_shared_layouts(
    space: Space, steps: tuple[Step, ...]
) -> tuple[tuple[Step, ...], frozenset[int]]:
    """The steps but those over shared layouts that spare no product, and the variables whose steps
    are left out."""
    products = {k for i, k in space.op_of.items() if space.base.rules[i].flops}
    before: dict[int, list[int]] = {}
    for step in steps:
        before.setdefault(step.after, []).append(step.variable)

    def spared_through(k: int) -> set[int]:
        return {k}.union(*(spared_through(v) for v in before.get(k, ())))

    groups = (
        spared_through(step.variable)
        for step in steps
        if space.variables[step.variable].kind == "shared_layout"
    )
    left_out = frozenset[int]().union(*(group for group in groups if products.isdisjoint(group)))
    return tuple(step for step in steps if step.variable not in left_out), left_out


def charges(space: Space) -> np.ndarray:
    """Seconds that recomputing one node adds to every option of every variable in a row, where it
    is not spared. [options]"""
    base, graph, stepped = space.base, space.base.graph, followed(space)
    # The reshard of a result for a reader of its own class, or to be handed out, stands with the
    # node's time, and results of its collectives are saved.
    priced_together = {base.shared[graph.producer[o]] for o in graph.outputs if o in graph.producer}
    charged_s = [np.zeros(v.options) for v in space.variables]
    for i, (_, share) in base.demanded_alike.items():
        k = space.op_of[i]
        v = space.variables[k]
        if i not in priced_together and not any(
            base.shared[reader] == i
            for node in base.nodes_in_repeat[i]
            for o in graph.nodes[node].outputs
            if o
            for reader, _ in graph.consumers.get(o, ())
        ):
            charged_s[k] = share * np.where(
                np.isfinite(v.costs.forward_s),
                v.costs.forward_s - (0.0 if k in stepped else v.costs.not_recomputed_s),
                0.0,
            )
    return np.concatenate(charged_s)
