"""The price of a plan with uneven pipeline stages (planner.execution.uneven_pipeline): time and
memory of a device, as planner.pricing.step_time and planner.pricing.peak_memory have them of other
plans.

    step = sum over the m V + S - 1 ticks with forward passes, and over as many with backward
    passes, of the longest pass of the chunks that run in it
           + handing on and back in each + reductions + optimizer
    peak = parameters + gradients (of a microbatch, and their sums) + optimizer state + what waits
    in the ring + the chunk that needs most

State that waits in the host's memory is on the device part by part, after the backward pass: it
takes room only where that is more than ring and chunk took before.

The first S - 1 forward passes and the last S - 1 backward ones are the bubble. The last chunk has
no forward pass of its own, and but under gpipe none backward once forward passes are through. A
chunk's forward pass cuts its weights out of the buffers they lie in, its backward pass does so
again and puts their gradients together: copies of the chunk's weights, in time and in memory. The
sums of gradients are those of all of a stage's chunks in every tick. While the backward pass of a
chunk runs it saves what a microbatch's passes need of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from costmodels.capacity import Breakdown
from costmodels.trained_weight import TrainedWeight
from planner.analysis.facts import GraphFacts
from planner.execution import collectives, uneven_collectives
from planner.execution.collective import CollectiveUse
from planner.execution.layout_flow import Flow
from planner.execution.orthogonalising import refuse_flat_buffers
from planner.execution.stage_buffers import PARTS, buffers
from planner.execution.uneven_pipeline import buffer_elements, handed_tensors
from planner.pricing.add_up import add_up, communication_of
from planner.pricing.cost import Cost, KernelSeconds, StepParts
from planner.pricing.kernels import times_of_class
from planner.pricing.pricer import Pricer
from planner.pricing.saved_activations import PARKED_ARRAYS, saved_tensors
from planner.pricing.workspaces import passes

SLOTS = 4
"""Buffers of what is handed on, beside the ring: what comes and goes, forward and backward."""


@dataclass(frozen=True)
class Pass:
    """One pass of one chunk in a tick: seconds of kernels, those of them that run a second time,
    its collectives, and all of it together."""

    kernels_s: float
    again_s: float
    uses: tuple[CollectiveUse, ...]
    seconds: float


def passes_of_chunks(
    base: GraphFacts, flow: Flow, pricer: Pricer
) -> tuple[tuple[Pass, ...], tuple[Pass, ...]]:
    """Forward passes of all chunks but the last, which has none, and backward passes of all."""
    stages = uneven_collectives.uneven_stages(flow)
    forward_passes, backward_passes = list[Pass](), list[Pass]()

    def pass_of(
        kernels_s: float, again_s: float, uses: tuple[CollectiveUse, ...], microbatches: int
    ) -> Pass:
        return Pass(
            kernels_s * microbatches,
            again_s * microbatches,
            uses,
            kernels_s * microbatches + sum(shown_s(u, flow, pricer) for u in uses),
        )

    for k, tick in enumerate(uneven_collectives.chunk_ticks(flow, pricer.itemsize)):
        forward = backward = recompute_s = 0.0
        for i in stages.nodes[k]:
            f, b = times_of_class(base, i, flow.split(i), pricer)
            forward, backward = forward + f, backward + b
            recompute_s += (
                f if tick.recomputed is not None and tick.recomputed.nodes.get(i) else 0.0
            )
        opened = pricer.kernel_s(
            0.0,
            2 * uneven_collectives.chunk_weight_bytes(flow, stages, k, pricer.itemsize),
            pricer.recipe.compute,
        )
        if tick.recomputed is None:
            kernels_s = forward + backward + 2 * opened
            backward_passes.append(pass_of(kernels_s, 0.0, tick.backward, tick.microbatches))
        else:
            forward_passes.append(pass_of(forward + opened, 0.0, tick.forward, tick.microbatches))
            kernels_s = recompute_s + backward + 2 * opened
            backward_passes.append(
                pass_of(kernels_s, recompute_s, tick.backward, tick.microbatches)
            )
    return tuple(forward_passes), tuple(backward_passes)


def shown_s(use: CollectiveUse, flow: Flow, pricer: Pricer) -> float:
    """Seconds of a collective that nothing hides."""
    return pricer.use_s(use, flow.plan.bucket_bytes) * (
        1 - (pricer.runtime.overlap if use.phase == "gradient" else 0.0)
    )


def longest(passes: Sequence[Pass], chunks: Sequence[int]) -> Pass:
    """The one of these chunks' passes that the others of a tick wait for."""
    return max((passes[k] for k in chunks if k < len(passes)), key=lambda p: p.seconds)


def price(
    base: GraphFacts, flow: Flow, pricer: Pricer, uses: tuple[CollectiveUse, ...] | None = None
) -> Cost:
    """Price of a derived flow. uses: its collectives, where they are known. Raises PlanError P068
    for an optimizer that orthogonalises matrices."""
    refuse_flat_buffers(flow.graph, flow.plan)
    forward_passes, backward_passes = passes_of_chunks(base, flow, pricer)
    slowest = [
        (longest(forward_passes if row.forward else backward_passes, row.chunks), row)
        for row in uneven_collectives.tick_groups(uneven_collectives.uneven_schedule(flow))
    ]
    compute, bubble = (
        sum(p.kernels_s * row.ticks for p, row in slowest if row.bubble is idle)
        for idle in (False, True)
    )
    recompute_s = sum(p.again_s * row.ticks for p, row in slowest if not row.bubble)
    between = uneven_collectives.collectives_between_stages(flow, pricer.itemsize)
    sent = (
        *((row.ticks, use) for p, row in slowest for use in p.uses),
        *((1, use) for use in between),
    )
    rows = []
    for times, use in sent:
        seconds, shown = pricer.use_s(use, flow.plan.bucket_bytes), shown_s(use, flow, pricer)
        rows.append((use, times * seconds, times * (seconds - shown)))
    return add_up(
        base,
        flow,
        collectives.collectives(flow, (), pricer.itemsize) if uses is None else uses,
        seconds=StepParts(
            KernelSeconds(compute, recompute_s, bubble),
            communication_of(rows),
            _optimizer_s(flow, pricer),
        ),
        memory=memory(base, flow, pricer),
    )


def trained_weights(flow: Flow) -> list[TrainedWeight[float]]:
    """The buffers of a device that hold weights with gradients."""
    mesh = dict(flow.plan.mesh)
    return [
        TrainedWeight(float(b.length), float(b.state_length(mesh)), b.zero_stage)
        for b in buffers(flow, uneven_collectives.uneven_stages(flow))
        if b.trained
    ]


def _optimizer_s(flow: Flow, pricer: Pricer) -> float:
    """Seconds of the update, and of adding each microbatch's gradients to their sums."""
    weights, together = (
        trained_weights(flow),
        uneven_collectives.uneven_stages(flow).microbatches_per_tick,
    )
    within = sum(w.whole for w in weights) if together > 1 else 0.0
    added = sum(w.summed for w in weights) + together * within
    sums = pricer.grad_accumulate_s(
        uneven_collectives.uneven_schedule(flow).ticks * added * pricer.recipe.gradient_bytes
    )
    updated = pricer.optimizer_s(sum(w.piece for w in weights), flow.plan.offload)
    return updated + sums + pricer.agreement_s


def memory(base: GraphFacts, flow: Flow, pricer: Pricer) -> Breakdown:
    """Peak memory by part, in bytes of the recipe."""
    recipe, stages = pricer.recipe, uneven_collectives.uneven_stages(flow)
    state = on_way = 0.0
    parameters = sum(
        b.length
        * (
            recipe.parameter_bytes
            if b.dtype.startswith(("float", "bfloat"))
            else pricer.itemsize(b.dtype)
        )
        for b in buffers(flow, stages)
    )
    weights = trained_weights(flow)
    gradients = sum(
        w.gradient_bytes(recipe, looped=True) + w.accumulator_bytes(recipe, looped=True)
        for w in weights
    )
    for w in weights:
        if "optimizer" in flow.plan.offload:
            on_way = max(on_way, PARKED_ARRAYS * w.optimizer_bytes(recipe) / PARTS)
        else:
            state += w.optimizer_bytes(recipe)
    boundary = (
        sum(buffer_elements(handed_tensors(flow, stages)).values())
        * stages.microbatches_per_tick
        * pricer.itemsize("float32")
    )
    waiting = uneven_collectives.uneven_schedule(flow).in_flight
    slack, of_chunk = 1 + pricer.runtime.memory_slack, dict[int, list[float]]()
    saved, working = dict[int, float](), {p.i: p.work for p in passes(base, flow, pricer, {})}
    for i, _, size in saved_tensors(base, flow, pricer):
        saved[i] = saved.get(i, 0.0) + size
    for k in range(stages.count):
        opened = uneven_collectives.chunk_weight_bytes(flow, stages, k, pricer.itemsize)
        of_chunk[k] = [
            sum(saved.get(i, 0.0) for i in stages.nodes[k]),
            max(working[base.shared[i]] for i in stages.nodes[k]) + opened,
        ]
    saved_most, work = max(of_chunk.values(), key=sum)
    saved_bytes, temporary = (
        (waiting * boundary + saved_most) * slack,
        (work + SLOTS * boundary) * slack,
    )
    return Breakdown(
        int(parameters),
        int(gradients),
        int(state + max(0.0, on_way - saved_bytes - temporary)),
        int(saved_bytes),
        int(temporary),
    )
