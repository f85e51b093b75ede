"""What a plan's offloaded weights (planner.execution.weight_offload) move over the host's link and
take on the device: costmodels.host_link applied to every one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from costmodels.host_link import OffloadedBytes, offloaded_weight
from costmodels.trained_weight import TrainedWeight
from planner.execution.layout_flow import Flow
from planner.execution.weight_offload import gradient_pass_left, offloaded_names
from planner.pricing.device_weights import device_weights

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
    every_microbatch = added = once = 0.0
    most = 0.0, 0.0
    offloaded, elements = offloaded_names(flow, runs), device_weights(flow)
    blocks = [
        (tuple(names[0] for names in run.weights if names[0] in offloaded), run.repeats, 2)
        for run in runs
    ]
    stacked = {n for run in runs for names in run.weights for n in names}
    tables = [((n,), 1, 1) for n in flow.weights if n in offloaded - stacked]
    for names, repeats, times in (*blocks, *tables):
        weights = gradients = 0.0
        for name in names:
            moved, stored, gradient = _one(flow, name, elements[name], times, pricer)
            every_microbatch += repeats * moved.each
            added += repeats * moved.added
            once += repeats * moved.once
            weights += stored * (times > 1)
            gradients += gradient
        most = max(most, (weights, gradients), key=sum)
    return OffloadedWeights(every_microbatch, added * (flow.plan.microbatches > 1), once, *most)


def _one(
    flow: Flow, name: str, weight: TrainedWeight[float], times: int, pricer: Pricer
) -> tuple[OffloadedBytes, float, float]:
    """What one weight moves that is brought so many times in a microbatch, and bytes of what a
    device stores of it and of its gradient."""
    t, recipe = flow.graph.tensors[name], pricer.recipe
    stored = weight.stored * (recipe.parameter_bytes if t.is_float else pricer.itemsize(t.dtype))
    if name not in flow.grad:
        return OffloadedBytes(times * stored, 0.0, 0.0), stored, 0.0
    pending = gradient_pass_left(flow.weights[name], weight.zero_stage, flow.plan.microbatches)
    gradient = weight.gradient_bytes(recipe, looped=True)
    return offloaded_weight(weight, pending, recipe, times), stored, gradient
