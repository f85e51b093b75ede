"""TODO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from costmodels.precision import Recipe
from planner.execution.layout_flow import Flow, cut_layout, stored_layout
from planner.sharding.layout import local_shape

if TYPE_CHECKING:
    from planner.execution.loops import RepeatedBlock
    from planner.pricing.pricer import Pricer
from planner.execution.weight_offload import parked, to_reduce


@dataclass(frozen=True)
class Ways:
    """Bytes of one weight on one device. each: over the host's link in every microbatch; added: of
    several microbatches, for the sum, in each; once: in every step."""

    each: float
    added: float
    once: float


def ways(
    kept: float,
    full: float,
    piece: float,
    level: int,
    pending: bool,
    recipe: Recipe,
    times: int = 2,
) -> Ways:
    """What a parked weight moves that is trained and brought so many times in a microbatch. kept,
    full, piece: elements of a device of what is stored, of the weight as its readers have it, and
    of the reduced gradient; level: of its optimizer sharding; pending: whether its gradient is to
    be reduced, or divided, after the last microbatch.
    """
    stored, size = kept * recipe.parameter_bytes, recipe.gradient_bytes
    left, summed = (piece if level == 3 else full) * size, (piece if level >= 2 else full) * size
    once = (
        (summed + piece * size if pending else 0.0)
        + piece * size
        + stored * (1 if recipe.master_bytes else 2)
    )
    return Ways(times * stored + left, 2 * summed + (left if times > 1 else -left), once)


@dataclass(frozen=True)
class Parked:
    """Bytes of a device, of all parked weights: `Ways` in sum, and the most that one repeat, or a
    table, has on the device, of weights and of gradients: a table comes when nothing is kept
    yet."""

    each: float
    added: float
    once: float
    weights: float
    gradients: float


def parked_ways(flow: Flow, runs: Sequence[RepeatedBlock], pricer: Pricer) -> Parked:
    """What a plan's parked weights move and take."""
    mesh, recipe, micro = dict(flow.plan.mesh), pricer.recipe, flow.plan.microbatches
    each = added = once = 0.0
    most = 0.0, 0.0
    away = parked(flow, runs)
    blocks = [
        (tuple(names[0] for names in run.weights if names[0] in away), run.repeats, 2)
        for run in runs
    ]
    stacked = {n for run in runs for names in run.weights for n in names}
    for names, repeats, times in (
        *blocks,
        *(((n,), 1, 1) for n in flow.weights if n in away - stacked),
    ):
        weights = gradients = 0.0
        for name in names:
            t, w, trained = flow.graph.tensors[name], flow.weights[name], name in flow.grad
            kept, full, piece = (
                float(prod(local_shape(t.shape, x, mesh)))
                for x in (stored_layout(w), w.layout, cut_layout(w))
            )
            stored = kept * (recipe.parameter_bytes if t.is_float else pricer.itemsize(t.dtype))
            level = w.zero if w.dim >= 0 else 0
            found = (
                ways(kept, full, piece, level, to_reduce(w, level, micro), recipe, times)
                if trained
                else Ways(times * stored, 0.0, 0.0)
            )
            each, added, once = (
                each + repeats * found.each,
                added + repeats * found.added,
                once + repeats * found.once,
            )
            weights, gradients = (
                weights + stored * (times > 1),
                gradients + trained * (piece if level == 3 else full) * recipe.gradient_bytes,
            )
        most = max(most, (weights, gradients), key=sum)
    return Parked(each, added * (micro > 1), once, *most)
