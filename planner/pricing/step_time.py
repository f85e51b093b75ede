"""The price of one whole plan, from its flow: time by part, memory by part, communication exactly.

Every printed figure comes from here, for our plans and for the baselines alike. With m
microbatches:

    step = m * (forward + backward + recomputed) + gradient reduction * (1 - overlap) + optimizer +
    bubble + pull and push of hosted tables

The optimizer's time includes, of several microbatches, what adding each one's gradients to their
sums moves.

The peak is planner.pricing.peak_memory's. With pipeline stages (planner.execution.pipeline) the
step takes m + stages - 1 ticks; the arithmetic of stages - 1 of them is the bubble.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

import numpy as np

from planner.analysis.facts import GraphFacts
from planner.execution import collectives
from planner.execution.collective import CollectiveUse
from planner.execution.even_collectives import weights_of_other_stages
from planner.execution.layout_flow import Flow, derive
from planner.execution.loops import (
    RepeatedBlock,
    looped_blocks,
    pipelined_block,
    repeated_blocks,
    stacked_weights,
)
from planner.execution.orthogonalising import orthogonalised
from planner.execution.pipeline import Pipeline, pipeline_of, pipeline_places
from planner.execution.plan import Plan
from planner.execution.recompute import recomputed_blocks
from planner.execution.techniques import WRITTEN_OUT
from planner.execution.weight_offload import offloaded_names
from planner.execution.weights_apart import waiting_share, weights_apart
from planner.pricing.add_up import add_up, communication_of
from planner.pricing.bucketing import launched, launching_s, seconds
from planner.pricing.cost import Communication, Cost, KernelSeconds, StepParts
from planner.pricing.device_weights import device_weights
from planner.pricing.frameworks.dispatch import dispatched
from planner.pricing.host_tables import pull_push_s
from planner.pricing.kernels import times_of_class
from planner.pricing.loop_copies import loop_copies_s
from planner.pricing.loop_overlap import hidden_beside_kernels
from planner.pricing.microbatch_overlap import hidden_shares, launch_bytes, per_launch
from planner.pricing.orthogonalising import newton_schulz_s
from planner.pricing.peak_memory import memory
from planner.pricing.pricer import Pricer
from planner.pricing.saved_activations import sent_activations
from planner.pricing.weight_offload import offloaded_weights


def derived(base: GraphFacts, plan: Plan) -> tuple[Flow, tuple[RepeatedBlock, ...]]:
    """The flow of a plan and its repeated blocks. Raises PlanError P068 where they cannot be
    assigned to pipeline stages."""
    flow = derive(base.graph, plan, training=base.training, rules=base.rules, grad=base.grad)
    if pipeline := pipeline_of(base.graph, plan):
        runs, reasons = repeated_blocks(flow)
        pipelined_block(flow, runs, pipeline, reasons)
        return flow, runs
    return flow, looped_blocks(flow)


def price(
    base: GraphFacts,
    flow: Flow,
    runs: tuple[RepeatedBlock, ...],
    pricer: Pricer,
    uses: tuple[CollectiveUse, ...] | None = None,
) -> Cost:
    """Price of a derived flow of the emitted program, its stages equal or none. uses: its
    collectives, where they are known."""
    uses = collectives.collectives(flow, runs, pricer.itemsize) if uses is None else uses
    return add_up(
        base,
        flow,
        uses,
        seconds=parts_of(base, flow, runs, uses, pricer),
        memory=memory(base, flow, pricer, runs),
    )


def parts_of(
    base: GraphFacts,
    flow: Flow,
    runs: tuple[RepeatedBlock, ...],
    uses: tuple[CollectiveUse, ...],
    pricer: Pricer,
) -> StepParts:
    """Seconds of the same by part. uses: its collectives."""
    pipeline = pipeline_of(flow.graph, flow.plan)
    optimizer = 0.0
    if base.training:
        optimizer = _optimizer_s(flow, runs, pipeline, pricer)
    if offloaded_names(flow, runs):
        moved = offloaded_weights(flow, runs, pricer)
        optimizer += pricer.host_s(flow.plan.microbatches * moved.added + moved.once)
    return StepParts(
        _kernels(base, flow, runs, pipeline, pricer),
        communication(base, flow, runs, uses, pricer),
        optimizer,
        _other_parts(base, flow, runs, pricer),
    )


def _other_parts(
    base: GraphFacts, flow: Flow, runs: tuple[RepeatedBlock, ...], pricer: Pricer
) -> dict[str, float]:
    """Seconds of planner.pricing.cost.OTHER_PARTS, and those of the optimizer that are told
    apart."""
    return {
        "tables_time_s": pull_push_s(flow, pricer),
        "loop_copy_time_s": loop_copies_s(base, flow, runs, pricer),
        "newton_schulz_time_s": _newton_schulz_s(flow, runs, pricer),
    }


def _kernels(
    base: GraphFacts,
    flow: Flow,
    runs: tuple[RepeatedBlock, ...],
    pipeline: Pipeline | None,
    pricer: Pricer,
) -> KernelSeconds:
    """Seconds of all kernels of a step. Nodes that are alike, split alike and run as often are
    priced once."""
    micro, recomputed = flow.plan.microbatches, recomputed_nodes(flow, runs)
    compute = recompute = bubble = 0.0
    nodes = range(len(flow.graph.nodes))
    places = pipeline_places(flow.graph, pipeline) if pipeline else (None,) * len(nodes)
    waiting = weights_apart(flow, pipeline)
    apart_shares = [
        waiting_share(node, flow.grad, waiting) if waiting else 0.0 for node in flow.graph.nodes
    ]
    # By id: splits of repeats are one object, and take long to hash.
    alike = list(
        zip(
            base.shared,
            map(id, flow.splits),
            map(recomputed.__contains__, nodes),
            places,
            apart_shares,
            strict=True,
        )
    )
    first = dict(zip(reversed(alike), reversed(nodes), strict=True))
    for key, count in Counter(alike).items():
        i, runs_twice = first[key], key[2]
        if pipeline:
            runs_twice |= pipeline.schedule == "gpipe" and pipeline.in_epilogue(i)
        forward, backward = times_of_class(base, i, flow.split(i), pricer)
        second = forward if runs_twice else 0.0
        all_passes = forward + backward + second
        one_pass = count * all_passes * (float(pipeline.stage_share(i)) if pipeline else 1.0)
        useful = pipeline.useful_passes(i) if pipeline else micro
        compute += useful * one_pass
        recompute += useful * one_pass * second / (all_passes or 1.0)
        if pipeline:
            share, schedule = float(pipeline.stage_share(i)), pipeline.microbatch_schedule
            bubble += float(pipeline.forward_passes(i) - useful) * one_pass
            fewer = schedule.ticks - schedule.weight_ticks
            bubble -= count * share * fewer * apart_shares[i] * backward
    return KernelSeconds(compute, recompute, bubble)


def communication(
    base: GraphFacts,
    flow: Flow,
    runs: tuple[RepeatedBlock, ...],
    uses: tuple[CollectiveUse, ...],
    pricer: Pricer,
) -> Communication:
    """Seconds of all collectives of a step by purpose, and of what does not hide."""
    if pricer.runtime.serves:
        uses = tuple(dispatched(base, flow, pricer, uses))
    sent, micro = sent_s(base, flow, runs, uses, pricer), flow.plan.microbatches
    result = communication_of(sent)
    exposed = result.exposed_s
    if away := sent_activations(base, flow, pricer, runs)[0]:  # out and in, every microbatch
        exposed += 2 * micro * pricer.host_s(away)
    if offloaded_names(flow, runs):
        exposed += micro * pricer.host_s(offloaded_weights(flow, runs, pricer).each)
    return replace(result, exposed_s=exposed, launching_s=launching_s(sent, pricer))


def sent_s(
    base: GraphFacts,
    flow: Flow,
    runs: tuple[RepeatedBlock, ...],
    uses: tuple[CollectiveUse, ...],
    pricer: Pricer,
) -> list[tuple[CollectiveUse, float, float]]:
    """Every collective with its seconds, and those of them that hide: of gradients under the
    backward pass, beside kernels of loops and updates, of a copy of the batch under other copies.
    """
    sizes = launched(uses, flow.plan.bucket_bytes)
    recomputed = recomputed_nodes(flow, runs)
    if flow.plan.overlapped_microbatches == 1:
        rows = seconds(uses, pricer, sizes)
        return hidden_beside_kernels(base, flow, runs, recomputed, rows, pricer)
    mesh = dict(flow.plan.mesh)
    largest = launch_bytes(uses, mesh)
    bucketed_ways = {(use.kind, use.axes) for use in uses if use.bucketed}
    rows = seconds(
        uses,
        pricer,
        {
            way: min(
                sizes.get(way, pricer.runtime.bucket_bytes),
                largest.get(way[0], np.inf) * per_launch(*way, mesh),
            )
            for way in bucketed_ways
        },
    )
    rows = hidden_beside_kernels(base, flow, runs, recomputed, rows, pricer)
    shares = hidden_shares(base, flow, runs, [(use, s) for use, s, _ in rows], recomputed, pricer)
    return [
        (use, s, hidden + share * (s - hidden))
        for (use, s, hidden), share in zip(rows, shares, strict=True)
    ]


def _optimizer_s(
    flow: Flow, runs: tuple[RepeatedBlock, ...], pipeline: Pipeline | None, pricer: Pricer
) -> float:
    """Seconds of a device's update, and of the sums of gradients over several microbatches: of
    pieces where the ZeRO stage cuts them first."""
    graph, steps, copies = (
        flow.graph,
        flow.plan.accumulation_steps,
        flow.plan.overlapped_microbatches,
    )
    elsewhere = weights_of_other_stages(graph, pipeline) if pipeline else frozenset[str]()
    waiting = weights_apart(flow, pipeline)
    updated = matrices = added = launches = 0.0
    blocks = flow.plan.repeated_blocks if flow.plan.blocks == WRITTEN_OUT else ()
    apart = stacked_weights(graph, blocks)
    for name, weight in device_weights(flow).items():
        if name in flow.grad and name not in elsewhere:
            updated += weight.piece
            matrices += weight.matrices
            if steps > 1:
                readers = (i for i, _ in graph.consumers[name])
                added += weight.summed * (
                    float(_additions(pipeline, readers, name in waiting)) if pipeline else steps
                )
            # The gradients of one turn's microbatches.
            added += weight.whole * steps * (copies - 1)
            if name in apart:
                launches += float(pricer.update_launch_s(weight.piece))
    sums = pricer.grad_accumulate_s(added * pricer.recipe.gradient_bytes)
    newton_schulz = _newton_schulz_s(flow, runs, pricer)
    passed = pricer.optimizer_s(updated, flow.plan.offload, matrices)
    return passed + newton_schulz + launches + sums + pricer.agreement_s


def _newton_schulz_s(flow: Flow, runs: tuple[RepeatedBlock, ...], pricer: Pricer) -> float:
    """Those of the optimizer's seconds in which it orthogonalises matrices."""
    return sum(newton_schulz_s(matrices, pricer) for _, matrices in orthogonalised(flow, runs))


def _additions(pipeline: Pipeline, readers: Iterable[int], apart: bool) -> Fraction:
    """How often a device adds to a weight's gradient in a step."""
    if apart:
        return Fraction(pipeline.microbatch_schedule.weight_ticks)
    return pipeline.gradient_additions(readers)


def recomputed_nodes(flow: Flow, runs: tuple[RepeatedBlock, ...]) -> frozenset[int]:
    """Nodes, of all repeats, whose kernels run a second time in the backward pass of recomputed
    blocks."""
    return frozenset(
        i + r * run.period
        for run, recomputed in recomputed_blocks(flow, runs)
        for i, result in recomputed.nodes.items()
        if result
        for r in range(run.repeats)
    )
