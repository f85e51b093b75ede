"""What a plan's offloaded weights (planner.execution.weight_offload) move over the host's link and
take on the device: costmodels.host_link applied to every one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from costmodels.host_link import OffloadedBytes, offloaded_weight
from planner.execution.layout_flow import Flow, cut_layout, stored_layout
from planner.execution.weight_offload import gradient_pass_left, offloaded_names
from planner.sharding.layout import local_shape

if TYPE_CHECKING:
    from planner.execution.loops import RepeatedBlock
    from planner.pricing.pricer import Pricer


@dataclass(frozen=True)
class OffloadedWeights:
    """Bytes of a device, of all offloaded weights: `OffloadedBytes` in sum, and the most that one
    repeat, or a table, has on the device, of weights and of gradients: a table comes when nothing
    is saved yet."""

    each: float
    added: float
    once: float
    weights: float
    gradients: float


def offloaded_weights(
    flow: Flow, runs: Sequence[RepeatedBlock], pricer: Pricer
) -> OffloadedWeights:
    """What a plan's offloaded weights move and take."""
    each = added = once = 0.0
    most = 0.0, 0.0
    offloaded = offloaded_names(flow, runs)
    blocks = [
        (tuple(names[0] for names in run.weights if names[0] in offloaded), run.repeats, 2)
        for run in runs
    ]
    stacked = {n for run in runs for names in run.weights for n in names}
    tables = [((n,), 1, 1) for n in flow.weights if n in offloaded - stacked]
    for names, repeats, times in (*blocks, *tables):
        weights = gradients = 0.0
        for name in names:
            moved, stored, gradient = _one(flow, name, times, pricer)
            each += repeats * moved.each
            added += repeats * moved.added
            once += repeats * moved.once
            weights += stored * (times > 1)
            gradients += gradient
        most = max(most, (weights, gradients), key=sum)
    return OffloadedWeights(each, added * (flow.plan.microbatches > 1), once, *most)


def _one(flow: Flow, name: str, times: int, pricer: Pricer) -> tuple[OffloadedBytes, float, float]:
    """What one weight moves that is brought so many times in a microbatch, and bytes of what a
    device stores of it and of its gradient."""
    mesh, recipe, micro = dict(flow.plan.mesh), pricer.recipe, flow.plan.microbatches
    t, w = flow.graph.tensors[name], flow.weights[name]
    stored, full, piece = (
        float(prod(local_shape(t.shape, layout, mesh)))
        for layout in (stored_layout(w), w.layout, cut_layout(w))
    )
    stored_bytes = stored * (recipe.parameter_bytes if t.is_float else pricer.itemsize(t.dtype))
    if name not in flow.grad:
        return OffloadedBytes(times * stored_bytes, 0.0, 0.0), stored_bytes, 0.0
    zero_stage = w.zero_stage if w.zero_dim >= 0 else 0
    pending = gradient_pass_left(w, zero_stage, micro)
    return (
        offloaded_weight(stored, full, piece, zero_stage, pending, recipe, times),
        stored_bytes,
        (piece if zero_stage == 3 else full) * recipe.gradient_bytes,
    )
