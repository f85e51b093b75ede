"""The exact communication, arithmetic and bytes of an emitted program, read from its flow (never
from a cost model).

One `CollectiveUse` per collective: kind, axes, payload of one device, how often it runs in an
optimizer step, and why. Payload is what semantics call it: operand bytes for all-reduce,
reduce-scatter, all-to-all and collective-permute, result bytes for all-gather. Programs with
uneven stages, and all others, are read by the modules behind; here it is chosen which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from itertools import chain
from math import prod

from costmodels.optimizers import MOMENT_BYTES, OPTIMIZERS, Optimizer
from planner.execution import even_collectives, even_flops, uneven_collectives
from planner.execution.collective import CollectiveUse, ItemSize, float32_sizes
from planner.execution.engine import Engine, engine_of
from planner.execution.even_collectives import weights_of_other_stages
from planner.execution.layout_flow import Flow, cut_layout, stored_layout
from planner.execution.loops import RepeatedBlock, repeated_blocks
from planner.execution.orthogonalising import exchanges, orthogonalised
from planner.execution.pipeline import pipeline_of
from planner.execution.techniques import WRITTEN_OUT
from planner.sharding.layout import Layout, local_shape


def collectives(
    flow: Flow, blocks: Iterable[RepeatedBlock] = (), itemsize: ItemSize | None = None
) -> tuple[CollectiveUse, ...]:
    """Every collective of one optimizer step (training) or one forward pass. blocks: the loops of
    the program (none: every node by itself). Blocks that are written out are no loops, but one
    function that is called for each repeat: what enters it is converted in every call, also where
    the first repeat could have read what the operator before it made."""
    size = itemsize or float32_sizes
    if flow.plan.blocks == WRITTEN_OUT:
        blocks = repeated_blocks(flow)[0]
    if engine_of(flow.plan) is Engine.UNEVEN:
        uses = uneven_collectives.collectives(flow, size)
    else:
        blocks = tuple(blocks)
        uses = chain(
            even_collectives.collectives(flow, blocks, size), exchanges(flow, blocks, size)
        )
    return tuple(u for u in uses if u.payload_bytes and u.count)


def dot_flops(flow: Flow, blocks: Iterable[RepeatedBlock] = (), *, as_compiled: bool = True) -> int:
    """2MNK of every product per device and step: forward and backward. as_compiled: with what
    kernels and repeated blocks recompute, without what is multiplied, and with the products of the
    optimizer."""
    blocks, optimizer = tuple(blocks), 0
    if as_compiled:
        optimizer = sum(matrices.flops for _, matrices in orthogonalised(flow, blocks))
    return _summed(flops_by_index(flow, blocks, as_compiled=as_compiled)) + optimizer


def dot_flops_of_own_parts(flow: Flow) -> int:
    """As `dot_flops`, without what is recomputed, as frameworks run a plan: a pipeline stage
    does its own part alone and waits where it has no microbatch. The mean over stages."""
    if pipeline := pipeline_of(flow.graph, flow.plan):
        return _summed(even_flops.flops_of_own_parts(flow, pipeline.stages))
    return dot_flops(flow, as_compiled=False)


def _summed(by_index: Mapping[int, Fraction]) -> int:
    flops = by_index.values()
    alike, times = {id(f): f for f in flops}, Counter(map(id, flops))  # of repeats one term
    return int(sum((alike[key] * n for key, n in times.items()), Fraction(0)))


def flops_by_index(
    flow: Flow, blocks: Iterable[RepeatedBlock] = (), *, as_compiled: bool = True
) -> dict[int, Fraction]:
    """2MNK per node, as in `dot_flops`; of blocks on pipeline stages what one stage runs, spread
    over all repeats."""
    if engine_of(flow.plan) is Engine.UNEVEN:
        return uneven_collectives.flops_by_index(flow, as_compiled=as_compiled)
    return even_flops.flops_by_index(flow, blocks, as_compiled=as_compiled)


STEP_COUNT_BYTES = 4
"""Of the number of the step, where an optimizer reads it."""


def argument_bytes(flow: Flow, optimizer: str = "", size: ItemSize = float32_sizes) -> int:
    """Bytes of what one device passes to the step (training) or the forward pass: parameters,
    optimizer state, batch, step count."""
    graph, mesh = flow.graph, dict(flow.plan.mesh)
    used = {n for node in graph.nodes for n in node.inputs}

    def local(name: str, layout: Layout, itemsize: float) -> int:
        return int(prod(local_shape(graph.tensors[name].shape, layout, mesh)) * itemsize)

    pipeline = pipeline_of(graph, flow.plan)
    elsewhere = weights_of_other_stages(graph, pipeline) if pipeline else frozenset()
    optimizer_state = OPTIMIZERS[optimizer] if flow.training and optimizer else Optimizer(0, False)
    total = STEP_COUNT_BYTES if optimizer_state.counts_steps else 0
    uneven = engine_of(flow.plan) is Engine.UNEVEN
    if uneven:
        total += uneven_collectives.parameter_bytes(flow, size)
        total += optimizer_state.moment_bytes * uneven_collectives.state_elements(flow)
    for name, plan in flow.weights.items() if not uneven else ():
        if name in used and name not in elsewhere:
            total += local(name, stored_layout(plan), size(graph.tensors[name].dtype))
            if flow.training and name in flow.grad:
                fewer = optimizer_state.matrix_moments_less * (name in graph.orthogonalised)
                total += (optimizer_state.moments - fewer) * local(
                    name, cut_layout(plan), MOMENT_BYTES
                )
    for name in graph.inputs:
        if name in used:
            total += local(name, flow.source[name], size(graph.tensors[name].dtype)) * (
                flow.plan.device_microbatches if flow.training else 1
            )
    return total
