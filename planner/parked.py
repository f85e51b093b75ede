"""Weights that wait in the host's memory, with their gradients, of repeated blocks and embedding tables: which, and what a step moves over the host's link for them.

A block brings its weights when it begins, in the forward pass and again where the backward pass makes the block anew, and sends their gradients back. Of one weight
of which a device holds s bytes, with a gradient of g bytes as its backward pass leaves it, a as it is added up over m microbatches and r reduced, the ways are

    each microbatch   2 s + g                                  and of several 2 a + g more: the sum and the new gradient here, the sum back
    once a step       a + r   where anything is left to reduce or to divide
                      r + s   and s more without a master copy: the gradient and the old parameter here, the new one back

A table is brought once in a microbatch, s instead of 2 s, where it is looked up: the backward pass needs the numbers of its rows alone. Of several microbatches its
gradient meets the sum on the device: 2 a, not 2 a + 2 g. Looking rows up where the table lies would spare s, a small part of what its update moves: AdamW moves every row's
moments, looked up or not.

What does not change (adapters train beside it) is brought alike, and nothing goes back. Vectors stay on the device: they save nothing that counts, and a way is a latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from planner.flow import Flow, WeightPlan, cut_layout, stored_layout
from planner.graph import Graph
from planner.layout import local_shape

if TYPE_CHECKING:
    from costmodels.precision import Recipe
    from planner.emit.runs import Run
    from planner.price import Pricer


def parks(graph: Graph, name: str) -> bool:
    """Whether a weight of a repeated block is one that waits in the host's memory."""
    return len(graph.tensors[name].shape) > 1


def tables(graph: Graph) -> tuple[str, ...]:
    """Weights that a lookup reads and nothing else."""
    uses = {n: graph.consumers.get(n, ()) for n in graph.weights if parks(graph, n) and n not in graph.hosted}
    return tuple(n for n, by in uses.items() if len(by) == 1 and by[0][1] == 0 and graph.nodes[by[0][0]].op == "Gather" and graph.nodes[by[0][0]].attrs["axis"] == 0)


def parked(flow: Flow, runs: Sequence[Run]) -> frozenset[str]:
    """The weights, of all repeats, that wait in the host's memory under a plan."""
    stacks = [names for run in runs for names in run.weights if parks(flow.graph, names[0])]
    found = {n for names in stacks for n in names} if "parameters" in flow.plan.offload else set()
    return frozenset(found | ({*tables(flow.graph)} - {n for names in stacks for n in names} if "embeddings" in flow.plan.offload else set()))


@dataclass(frozen=True)
class Ways:
    """Bytes of one weight on one device. each: over the host's link in every microbatch; added: of several microbatches, for the sum, in each; once: in every step."""

    each: float
    added: float
    once: float


def ways(kept: float, full: float, piece: float, level: int, pending: bool, recipe: Recipe, times: int = 2) -> Ways:
    """What a parked weight moves that is trained and brought so many times in a microbatch. kept, full, piece: elements of a device of what is stored, of the weight as its
    readers have it, and of the reduced gradient; level: of its optimizer sharding; pending: whether its gradient is to be reduced, or divided, after the last microbatch."""
    stored, size = kept * recipe.parameter_bytes, recipe.gradient_bytes
    left, summed = (piece if level == 3 else full) * size, (piece if level >= 2 else full) * size
    once = (summed + piece * size if pending else 0.0) + piece * size + stored * (1 if recipe.master_bytes else 2)
    return Ways(times * stored + left, 2 * summed + (left if times > 1 else -left), once)


@dataclass(frozen=True)
class Parked:
    """Bytes of a device, of all parked weights: `Ways` in sum, and the most that one repeat, or a table, has on the device, of weights and of gradients: a table
    comes when nothing is kept yet."""

    each: float
    added: float
    once: float
    weights: float
    gradients: float


def parked_ways(flow: Flow, runs: Sequence[Run], pricer: Pricer) -> Parked:
    """What a plan's parked weights move and take."""
    mesh, recipe, micro = dict(flow.plan.mesh), pricer.recipe, flow.plan.microbatches
    each = added = once = 0.0
    most = 0.0, 0.0
    away = parked(flow, runs)
    blocks = [(tuple(names[0] for names in run.weights if names[0] in away), run.repeats, 2) for run in runs]
    stacked = {n for run in runs for names in run.weights for n in names}
    for names, repeats, times in (*blocks, *(((n,), 1, 1) for n in flow.weights if n in away - stacked)):
        weights = gradients = 0.0
        for name in names:
            t, w, trained = flow.graph.tensors[name], flow.weights[name], name in flow.grad
            kept, full, piece = (float(prod(local_shape(t.shape, x, mesh))) for x in (stored_layout(w), w.layout, cut_layout(w)))
            stored = kept * (recipe.parameter_bytes if t.is_float else pricer.itemsize(t.dtype))
            level = w.zero if w.dim >= 0 else 0
            found = ways(kept, full, piece, level, to_reduce(w, level, micro), recipe, times) if trained else Ways(times * stored, 0.0, 0.0)
            each, added, once = each + repeats * found.each, added + repeats * found.added, once + repeats * found.once
            weights, gradients = weights + stored * (times > 1), gradients + trained * (piece if level == 3 else full) * recipe.gradient_bytes
        most = max(most, (weights, gradients), key=sum)
    return Parked(each, added * (micro > 1), once, *most)


def to_reduce(weight: WeightPlan, level: int, microbatches: int = 1) -> bool:
    """Whether a pass over the gradient is left after the last microbatch: it is a sum still pending, or to be divided."""
    return microbatches > 1 or (bool(set(weight.fan) - set(weight.axes)) if level == 3 else bool(weight.fan))
