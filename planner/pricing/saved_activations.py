"""Bytes of activations that the backward pass reads, of one whole plan on one device: what every
node saves, what enters repeats of blocks that are made again and what they save beside it, and what
one repeat has at once (planner.pricing.peak_memory adds up)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from planner.analysis.basics import repeat_starts, saved_in
from planner.analysis.facts import GraphFacts
from planner.execution.block_values import offloaded_by_name
from planner.execution.layout_flow import Flow
from planner.execution.loops import RepeatedBlock
from planner.execution.pipeline import pipeline_of
from planner.execution.recompute import Recomputed, recomputed_blocks
from planner.pricing.handed_on import handed_on
from planner.pricing.kernels import named_beside, reads_whole, saved_beside
from planner.pricing.pricer import Pricer
from planner.pricing.split_arrays import SplitArrays
from planner.sharding.layout import group, local_shape

PARKED_ARRAYS = 2
"""Parameters (of blocks those of one repeat) whose new state is on its way to the host's memory at
the same time: one that is written, one that is made. The GPU compiler's schedule of a step with
twelve equal parameters has two."""


def saved_by_blocks_bytes(
    base: GraphFacts, flow: Flow, runs: tuple[RepeatedBlock, ...], pricer: Pricer
) -> Iterator[tuple[int, float]]:
    """(node of the first repeat, bytes of the named values and results of collectives that
    recomputed blocks save on the device, of all repeats)."""
    away = offloaded_by_name(flow)
    for run, replay in recomputed_blocks(flow, runs):
        saved = saved_by_blocks(base, flow, run, replay, pricer)
        yield run.first, sum(size for name, size in saved if name not in away)


def saved_by_blocks(
    base: GraphFacts, flow: Flow, run: RepeatedBlock, replay: Recomputed, pricer: Pricer
) -> Iterator[tuple[str, float]]:
    """(tensor, bytes of all repeats and of all overlapped microbatches) of each named value or
    result of a collective that a recomputed block saves."""
    pipeline = pipeline_of(flow.graph, flow.plan)
    times = (
        run.repeats
        if pipeline is None
        else pipeline.saved_ticks
        * (pipeline.blocks_per_tick if run.first == pipeline.first else run.repeats)
    )
    for name, size in saved_in_repeat(base, flow, replay, pricer):
        yield name, times * size * flow.plan.overlapped_microbatches


def saved_in_repeat(
    base: GraphFacts, flow: Flow, replay: Recomputed, pricer: Pricer
) -> Iterator[tuple[str, float]]:
    """(tensor, bytes of one repeat and one microbatch) of each named value or result of a
    collective that a recomputed block saves; with the former what its kernel saves beside it."""
    mesh, graph = dict(flow.plan.mesh), flow.graph
    for name, way in replay.saved:
        if not way:
            tensor, i = graph.tensors[name], graph.producer[name]
            shape = local_shape(tensor.shape, flow.source[name], mesh)
            size = pricer.stored_bytes(shape, tensor.dtype, base.kind_of(tensor.shape))
            yield name, size + named_beside(base, i, flow.split(i), pricer)
            continue
        step = way[-1]
        size = step.forward_elements * pricer.itemsize(flow.graph.tensors[name].dtype)
        yield name, size / (group(step.axes, mesh) if step.forward == "reduce-scatter" else 1)


@dataclass(frozen=True)
class SavedActivations:
    """Bytes that the backward pass reads. bytes: when it enters the last repeated blocks, which
    have one_repeat of them at once; epilogue: what that saved, gone by then; gone: how much less
    there is in each turn (GraphFacts.turns) of those before them. [turns]"""

    bytes: float
    epilogue: float
    one_repeat: float
    gone: np.ndarray


def activation_bytes(
    base: GraphFacts, flow: Flow, pricer: Pricer, runs: tuple[RepeatedBlock, ...]
) -> SavedActivations:
    """Bytes of saved activations: what waits in the host's memory is on its way, what recomputed
    blocks save beside it comes on top."""
    offloaded = "activations" in flow.plan.offload
    entering = frozenset(n for run in runs for c in run.carries for n in (c.enters, *c.leaves))
    saved = saved_activations(base, flow, pricer, entering if offloaded else frozenset())
    added, gone = 0.0, saved.gone.copy()
    added += (
        PARKED_ARRAYS
        * flow.plan.overlapped_microbatches
        * sent_activations(base, flow, pricer, runs)[1]
    )
    for first, size in saved_by_blocks_bytes(base, flow, runs, pricer):
        added += size
        gone[: base.turns[first]] += size * (flow.plan.stages == 1)
    added += sum(size for _, size in handed_on(base, flow, runs, pricer))
    return replace(saved, bytes=saved.bytes + added, gone=gone)


def saved_tensors(base: GraphFacts, flow: Flow, pricer: Pricer) -> Sequence[tuple[int, str, float]]:
    """(node, tensor, bytes) of what nodes are the first to save for their backward pass, with what
    their kernels save beside it; of all microbatches that run at the same time. Worked out once a
    flow and pricer."""
    known = flow.memo.get("saved tensors")
    if known is None or known[0] is not base or known[1] is not pricer:
        known = flow.memo["saved tensors"] = base, pricer, _saved_tensors(base, flow, pricer)
    saved: Sequence[tuple[int, str, float]] = known[2]
    return saved


def _saved_tensors(
    base: GraphFacts, flow: Flow, pricer: Pricer
) -> Sequence[tuple[int, str, float]]:
    graph, mesh, saved = base.graph, dict(flow.plan.mesh), list[tuple[int, str, float]]()
    # Nodes that are alike and split alike save as much. By id: repeats share layouts and splits.
    sizes: dict[tuple[int, int, int, int], float] = {}
    need, source, shared, splits = flow.need, flow.source, base.shared, flow.splits
    for (i, slot), name in (base.residuals | base.gathered).items():
        layout = need[i, slot] if slot >= 0 else source[name]
        key = shared[i], slot, id(layout), id(splits[i])
        size = sizes.get(key)
        if size is None:
            tensor = graph.tensors[name]
            size = pricer.stored_bytes(
                local_shape(tensor.shape, layout, mesh), tensor.dtype, base.kind_of(tensor.shape)
            ) + saved_beside(base, i, slot, splits[i], pricer)
            if (i, slot) in base.gathered:
                size *= float(reads_whole(base, i, SplitArrays.of((splits[i],), pricer.sizes))[0])
            size = sizes[key] = flow.plan.overlapped_microbatches * size
        saved.append((i, name, size))
    return saved


def saved_activations(
    base: GraphFacts, flow: Flow, pricer: Pricer, sent: frozenset[str] = frozenset()
) -> SavedActivations:
    """Bytes the backward pass reads: every saved tensor once, in the layout in which the first
    operator that saves it needs it.

    Under recompute a repeated block saves what enters each repeat, and one repeat's own activations
    at a time. Where only weights are gathered again, it saves all, and cuts them out of the stacks
    of all repeats before its backward pass begins (`takes_repeats_whole`). A pipeline stage saves
    for its part of the blocks, and for what comes before them, of all microbatches that wait for
    their backward pass. sent: what enters repeats and waits in the host's memory.
    """
    graph, plan = base.graph, flow.plan
    pipeline, turns, nothing = pipeline_of(graph, plan), base.turns, np.zeros(base.last_run + 2)
    if not base.training:
        kept = sum(size for _, _, size in saved_tensors(base, flow, pricer))
        return SavedActivations(kept, 0.0, 0.0, nothing)
    starts = repeat_starts(plan.repeated_blocks)
    again = plan.recompute != "none" or takes_repeats_whole(base, pricer, plan.zero_stage)
    epilogue, by_turn, one_repeat = 0.0, nothing.tolist(), nothing.tolist()
    microbatches = (
        {
            block: pipeline.saved_microbatches(i) * float(pipeline.stage_share(i))
            for block, i in ((True, pipeline.first), (False, pipeline.end))
        }
        if pipeline
        else {}
    )
    for i, name, size in saved_tensors(base, flow, pricer):
        times = microbatches[i in pipeline.nodes] if pipeline else 1.0
        if i in base.epilogue:
            epilogue += size
            continue
        repeat = saved_in(graph, starts, i, name) if i in starts else -1
        if plan.recompute == "none" or i not in starts:
            by_turn[turns[i]] += size * times
        elif repeat < 0:
            by_turn[turns[i]] += size * times * (name not in sent)
        if repeat == 0 and again:
            one_repeat[turns[i]] += size
    total = sum(by_turn)
    if plan.stages > 1:
        most = max(one_repeat)
        return SavedActivations(total + most, epilogue, most, nothing)
    last = one_repeat[base.last_run]
    gone = total - np.cumsum(by_turn) + last - np.array(one_repeat)
    return SavedActivations(total + last, epilogue, last, gone)


def takes_repeats_whole(base: GraphFacts, pricer: Pricer, zero_stage: int) -> bool:
    """Whether plans without recomputation wrap their blocks all the same, to gather weights again
    (planner.execution.recompute, mode "part"): the wrapped backward pass takes everything that its
    repeat saved at once, where others cut each value out of the stacks when they need it. Uneven
    pipeline stages have no loops."""
    runtime, uneven = pricer.runtime, pricer.mesh.stages > 1 and base.dealt is None
    ours = runtime.kernels is None and not runtime.partitioned
    return zero_stage == 3 and ours and not base.written_out and not uneven


def repeat_is_apart(base: GraphFacts, pricer: Pricer, recompute: str, zero_stage: int) -> bool:
    """Whether what one repeat of a block has at once is counted by itself (`one_repeat`), beside
    workspaces that are gradients alone. What frameworks take was fitted to runs without it. So was
    what programs for one GPU alone take: with no collectives to schedule the compiler makes room
    for stacks of gradients early, beside the logits."""
    uneven = pricer.mesh.stages > 1 and base.dealt is None
    alone = pricer.topology.device.kind == "gpu" and prod(n for _, n in pricer.mesh.shape) == 1
    if pricer.runtime.kernels is not None or base.written_out or uneven or alone:
        return False
    return recompute != "none" or takes_repeats_whole(base, pricer, zero_stage)


def entering_bytes(flow: Flow, pricer: Pricer, run: RepeatedBlock) -> float:
    """Bytes of what enters one repeat of a block, of one microbatch."""
    mesh, tensors = dict(flow.plan.mesh), flow.graph.tensors
    return sum(
        prod(local_shape(tensors[c.enters].shape, c.layout, mesh))
        * pricer.itemsize(tensors[c.enters].dtype)
        for c in run.carries
    )


def sent_activations(
    base: GraphFacts, flow: Flow, pricer: Pricer, runs: tuple[RepeatedBlock, ...]
) -> tuple[float, float]:
    """Bytes of what recomputed blocks send to the host's memory, what enters them and values by
    name, of one microbatch: of all repeats, and the most of one."""
    entering, away = "activations" in flow.plan.offload, offloaded_by_name(flow)
    sent = [(r, entering_bytes(flow, pricer, r)) for r in runs] if entering else []
    for run, replay in recomputed_blocks(flow, runs) if away else ():
        values = saved_in_repeat(base, flow, replay, pricer)
        sent.append((run, sum(size for name, size in values if name in away)))
    of_block = dict[int, float]()
    for run, size in sent:
        of_block[run.first] = of_block.get(run.first, 0.0) + size
    return sum(run.repeats * size for run, size in sent), max(of_block.values(), default=0.0)
