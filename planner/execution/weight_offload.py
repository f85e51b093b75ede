"""Weights that wait in the host's memory, with their gradients, of repeated blocks and embedding
tables: which, and what a step moves over the host's link for them.

A block brings its weights when it begins, in the forward pass and again where the backward pass
recomputes the block, and sends their gradients back. Of one weight of which a device holds s bytes,
with a gradient of g bytes as its backward pass leaves it, a as it is added up over m microbatches
and r reduced, these bytes go over the link:

    each microbatch   2 s + g                                  and of several 2 a + g more: the sum
                      and the new gradient here, the sum back
    once a step       a + r   where anything is left to reduce or to divide r + s   and s more
                      without a master copy: the gradient and the old parameter here, the new one
                      back

A table is brought once in a microbatch, s instead of 2 s, where it is looked up: the backward pass
needs the numbers of its rows alone. Of several microbatches its gradient meets the sum on the
device: 2 a, not 2 a + 2 g. Looking rows up where the table lies would spare s, a small part of what
its update moves: AdamW moves every row's moments, looked up or not.

What does not change (adapters train beside it) is brought alike, and nothing goes back. Vectors
stay on the device: they save nothing that counts, and every transfer has a latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.execution.layout_flow import Flow
from planner.execution.plan import WeightPlan
from planner.graph.ir import Graph
from planner.ops import operator_of

if TYPE_CHECKING:
    from planner.execution.loops import RepeatedBlock


def can_offload(graph: Graph, name: str) -> bool:
    """Whether a weight of a repeated block may wait in the host's memory."""
    return len(graph.tensors[name].shape) > 1


def lookup_tables(graph: Graph) -> tuple[str, ...]:
    """Weights that a lookup reads and nothing else."""
    uses = {
        n: graph.consumers.get(n, ())
        for n in graph.weights
        if can_offload(graph, n) and n not in graph.host_tables
    }
    return tuple(
        n
        for n, by in uses.items()
        if len(by) == 1
        and by[0][1] == 0
        and operator_of(graph.nodes[by[0][0]].op).kind == "lookup"
        and graph.nodes[by[0][0]].attrs.get("axis") == 0
    )


def offloaded_names(flow: Flow, blocks: Sequence[RepeatedBlock]) -> frozenset[str]:
    """The weights, of all repeats, that wait in the host's memory under a plan."""
    in_blocks = {
        name
        for block in blocks
        for names in block.weights
        if can_offload(flow.graph, names[0])
        for name in names
    }
    return frozenset(
        (in_blocks if "parameters" in flow.plan.offload else set())
        | ({*lookup_tables(flow.graph)} - in_blocks if "embeddings" in flow.plan.offload else set())
    )


def gradient_pass_left(weight: WeightPlan, level: int, microbatches: int = 1) -> bool:
    """Whether a pass over the gradient is left after the last microbatch: it is a sum still
    pending, or to be divided."""
    return microbatches > 1 or (
        bool(set(weight.grad_partial) - set(weight.zero_axes))
        if level == 3
        else bool(weight.grad_partial)
    )
