"""Bytes that live only while one operator of a plan runs, with the weights that ZeRO stage 3
gathers for it and gradients that are not scattered yet (planner.pricing.peak_memory adds up)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from planner.analysis.facts import GraphFacts
from planner.execution.layout_flow import Flow
from planner.execution.plan import Plan
from planner.pricing.kernels import working_bytes
from planner.pricing.pricer import Pricer
from planner.pricing.saved_activations import repeat_is_apart
from planner.sharding.layout import Layout, local_shape

GATHERED_BLOCKS = 1
"""Whole weights of so many blocks are there at least under ZeRO stage 3, and gradients that are not
scattered yet among them: they are gathered one by one, a little before they are read, and gone when
they were."""


@dataclass(frozen=True)
class Pass:
    """Bytes of a device while node i runs, of one class of nodes. ins, outs: of operands that are
    no weights and of results; made: of results with a gradient."""

    i: int
    ins: float
    outs: float
    made: float
    work: float


def passes(
    base: GraphFacts, flow: Flow, pricer: Pricer, gathered: Mapping[int, float]
) -> Iterator[Pass]:
    """Every class of nodes while it runs, in all copies of the batch. gathered: nodes whose weights
    are counted by the caller."""
    graph, mesh, copies = base.graph, dict(flow.plan.mesh), flow.plan.overlapped_microbatches
    apart = repeat_is_apart(base, pricer, flow.plan.recompute, flow.plan.zero_stage)

    def local(name: str, layout: Layout) -> float:
        tensor = graph.tensors[name]
        return (1 if name in graph.weights else copies) * pricer.stored_bytes(
            local_shape(tensor.shape, layout, mesh), tensor.dtype, base.kind_of(tensor.shape)
        )

    for i, node in enumerate(graph.nodes):
        if base.shared[i] != i:
            continue
        sizes = [
            (name in graph.weights, local(name, flow.need[i, slot]))
            for slot, name in enumerate(node.inputs)
            if name
        ]
        results = [
            (name in base.grad, local(name, flow.source[name])) for name in node.outputs if name
        ]
        ins, outs = (
            sum(size for weight, size in sizes if not weight),
            sum(size for _, size in results),
        )
        weights = 0.0 if gathered else sum(size for weight, size in sizes if weight)
        yield Pass(
            i,
            ins,
            outs,
            sum(size for grad, size in results if grad),
            working_bytes(base, i, flow.split(i), ins, outs, weights, pricer, apart),
        )


def gathered_blocks(base: GraphFacts, pricer: Pricer, copies: int = 1) -> int:
    """Whole weights of how many blocks a loop has at a time under ZeRO stage 3 at least, gradients
    that are not scattered yet among them (docs/memory.md): on GPUs one more for each of so many
    microbatches that run at the same time, where experts' kernels make the gradients of all their
    weights together, beside those of the repeat before, which the compiler scatters while this one
    runs."""
    ours = pricer.topology.device.kind == "gpu" and not base.written_out
    return GATHERED_BLOCKS + copies * (base.loops_experts and ours)


def scatters_later(base: GraphFacts, pricer: Pricer, recompute: str) -> bool:
    """Whether a GPU's program scatters the gradients of a repeat while the next one runs, beside
    all weights of a block that is made again; of experts `gathered_blocks` counts them."""
    gpu = pricer.topology.device.kind == "gpu" and not base.written_out
    return gpu and recompute != "none" and gathered_blocks(base, pricer) == GATHERED_BLOCKS


def gathered_bytes(
    base: GraphFacts, plan: Plan, pricer: Pricer, gathered: Mapping[int, float]
) -> float:
    """Bytes of what is gathered of weights at a time, and of gradients before they are scattered:
    as much as the weights of so many of the largest block."""
    layer: dict[int, float] = {}
    for i, size in gathered.items():
        if (block := block_of(plan, i)) < 0:
            layer[block] = layer.get(block, 0.0) + size
    blocks = gathered_blocks(base, pricer, plan.overlapped_microbatches)
    return blocks * max(layer.values(), default=0.0)


def temporaries(
    base: GraphFacts, flow: Flow, pricer: Pricer, gathered: Mapping[int, float], gone: np.ndarray
) -> tuple[float, float]:
    """The largest workspace of one operator (planner.pricing.kernels), with what is gathered of
    weights: before the epilogue, as far as it is above activations that are gone by its turn, and
    in it. A loop gathers weights of its blocks as it runs; stages
    of a pipeline run both in one tick. Of a gathered weight in the epilogue every overlapped
    microbatch has a whole gradient beside it, until all are added up and scattered; on a TPU one
    alone has it, too, which is scattered while the operand's gradient is made."""
    largest, copies = {False: 0.0, True: 0.0}, flow.plan.overlapped_microbatches
    beside = copies > 1 or pricer.topology.device.kind == "tpu"
    terms = copies * pricer.recipe.gradient_bytes / pricer.recipe.parameter_bytes
    full = gathered_bytes(base, flow.plan, pricer, gathered)
    later = full * scatters_later(base, pricer, flow.plan.recompute)
    for p in passes(base, flow, pricer, gathered):
        beside_bytes = later if p.i in base.repeated else gathered.get(p.i, 0.0)
        behind = p.i in base.epilogue
        beside_bytes *= 1 + terms * (beside and behind)
        less = 0.0 if behind else float(gone[base.turns[p.i]])
        largest[behind] = max(largest[behind], p.work + beside_bytes - less)
    return largest[False] + full, largest[True] + full * (flow.plan.stages > 1)


def block_of(plan: Plan, i: int) -> int:
    """A number for the repeat a node is in; nodes outside runs are each their own."""
    for first, period, repeats in plan.repeated_blocks:
        if first <= i < first + period * repeats:
            return -1 - (first + (i - first) // period)
    return i
