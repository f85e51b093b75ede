"""What loops over repeated blocks copy out of stacks and into them.

A program keeps the weights of all repeats in one array, and what the backward pass reads of each
repeat likewise. Compilers cut a repeat's part out and put its results in by copies: kernels of
their own that read and write memory and nothing else, on GPUs and CPUs (by the compiled text;
benchmarks/RESULTS.md, "Copies of loops"). On TPUs most kernels put their results into stacks and
read operands there: copied is what norms, attention and experts' kernels read or make, and what
enters a repeat ("Kernels of TPUs").
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.analysis.basics import repeat_starts, saved_in
from planner.analysis.facts import GraphFacts
from planner.execution.block_values import offloaded_by_name
from planner.execution.layout_flow import Flow
from planner.execution.loops import RepeatedBlock
from planner.execution.pipeline import pipeline_of
from planner.execution.recompute import recomputed_blocks
from planner.execution.weight_offload import offloaded_names
from planner.execution.weights_apart import weights_apart
from planner.ops.residuals import reads
from planner.pricing.device_weights import device_weights
from planner.pricing.handed_on import handed_on
from planner.pricing.pricer import Pricer
from planner.pricing.saved_activations import saved_in_repeat, saved_tensors


def loop_copies_s(
    base: GraphFacts, flow: Flow, runs: tuple[RepeatedBlock, ...], pricer: Pricer
) -> float:
    """Seconds of a device's copies in a step."""
    if not runs or flow.graph.unstacked:
        return 0.0
    pipeline = pipeline_of(flow.graph, flow.plan)

    def passes(i: int) -> float:
        """How often a device copies what nodes like node i have."""
        times = pipeline.forward_passes(i) if pipeline else flow.plan.microbatches
        return float(times * pipeline.stage_share(i) if pipeline else times)

    seconds = 0.0
    waiting = weights_apart(flow, pipeline)
    weights, offloaded = device_weights(flow), offloaded_names(flow, runs)
    for run in runs:
        for names in run.weights:
            weight, name = weights[names[0]], names[0]
            if name in offloaded:
                continue
            read_backward = any(
                slot in reads(flow.graph.nodes[i], flow.grad).slots
                for i, slot in flow.graph.consumers[name]
            )
            cut, put = weight.loop_copies(pricer.recipe)
            put = put if name in flow.grad else 0.0
            times = passes(run.first) * len(names)
            if name in waiting and pipeline:
                share = pipeline.microbatch_schedule.weight_ticks / pipeline.ticks
                seconds += times * share * float(pricer.weight_copy_s(0.0, 0, put))
                put = 0.0
            seconds += times * float(pricer.weight_copy_s(cut, 1 + read_backward, put))
    for i, size in stacked_activations(base, flow, runs, pricer):
        seconds += passes(i) * pricer.loop_copy_s(size, size)
    if pipeline:
        ticks_each = pipeline.ticks / pipeline.microbatch_schedule.handed_in_flight
        for _, size in handed_on(base, flow, runs, pricer):
            seconds += ticks_each * pricer.loop_copy_s(size, size)
    away = offloaded_by_name(flow)
    for run, recomputed in recomputed_blocks(flow, runs):
        size = run.repeats * sum(
            size
            for name, size in saved_in_repeat(base, flow, recomputed, pricer)
            if name not in away and copied(base, name, pricer)
        )
        seconds += passes(run.first) * pricer.loop_copy_s(size, size)
    return seconds


def copied(base: GraphFacts, name: str, pricer: Pricer) -> bool:
    """Whether a value that a recomputed block saves is copied into its stack and out of it by
    kernels of its own."""
    i = base.graph.producer[name]
    key = base.shared[i], -1 - base.graph.nodes[i].outputs.index(name)
    return not pricer.fills_stacks or key in base.copied_apart


def stacked_activations(
    base: GraphFacts, flow: Flow, runs: tuple[RepeatedBlock, ...], pricer: Pricer
) -> Iterator[tuple[int, float]]:
    """(node, bytes) of what is copied of that which nodes inside loops save for their backward
    pass, of one microbatch; of recomputed blocks what enters each repeat, unless that waits in the
    host's memory."""
    plan, starts = flow.plan, repeat_starts(tuple((r.first, r.period, r.repeats) for r in runs))
    for i, name, size in saved_tensors(base, flow, pricer):
        if i not in starts:
            continue
        node = flow.graph.nodes[i]
        slot = node.inputs.index(name) if name in node.inputs else -1 - node.outputs.index(name)
        if pricer.fills_stacks and (base.shared[i], slot) not in base.copied_apart:
            continue
        enters = saved_in(flow.graph, starts, i, name) < 0
        if plan.recompute == "none" or (enters and "activations" not in plan.offload):
            # Sizes are of all microbatches that run at the same time.
            yield i, size / plan.overlapped_microbatches
