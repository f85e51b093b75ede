"""Bytes that a backward pass hands on to gradients of weights that are made apart from it
(planner.execution.weights_apart): the gradient of every product's result, and operands that only a
recomputed block has."""

from __future__ import annotations

from collections.abc import Iterator

from planner.analysis.facts import GraphFacts
from planner.execution.layout_flow import Flow
from planner.execution.loops import RepeatedBlock
from planner.execution.pipeline import pipeline_of
from planner.execution.recompute import recomputed_in_block
from planner.execution.weights_apart import factors, weights_apart
from planner.pricing.pricer import Pricer
from planner.sharding.layout import Layout, local_shape


def handed_on(
    base: GraphFacts, flow: Flow, runs: tuple[RepeatedBlock, ...], pricer: Pricer
) -> Iterator[tuple[int, float]]:
    """(node of the first repeat, bytes that a device saves of its results' gradients and of
    operands, of all that it holds and all microbatches that wait), without what an allocator leaves
    unused."""
    graph, pipeline = flow.graph, pipeline_of(flow.graph, flow.plan)
    waiting = weights_apart(flow, pipeline)
    if pipeline is None or not waiting:
        return
    run = next(run for run in runs if run.first == pipeline.first)
    recomputed, mesh = recomputed_in_block(flow, run), dict(flow.plan.mesh)
    saved = (
        {c.enters for c in run.carries} | {n for n, _ in recomputed.saved} if recomputed else set()
    )
    times = pipeline.blocks_per_stage * pipeline.microbatch_schedule.handed_in_flight
    counted = set[tuple[str, Layout]]()
    for i in range(run.first, run.first + run.period):
        both = factors(graph.nodes[i])
        if waiting.isdisjoint(both):
            continue
        result = graph.nodes[i].outputs[0]
        operands = [
            (name, flow.need[i, slot])
            for slot, name in enumerate(both if recomputed else ())
            if name not in waiting and name not in saved and name not in graph.weights
        ]
        for name, layout in ((result, flow.source[result]), *operands):
            if (name, layout) in counted:
                continue
            counted.add((name, layout))
            tensor = graph.tensors[name]
            shape = local_shape(tensor.shape, layout, mesh)
            yield i, times * pricer.stored_bytes(shape, tensor.dtype, base.kind_of(tensor.shape))
