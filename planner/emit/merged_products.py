"""Products that GPU compilers make one product of, because they read one operand.

XLA merges products of one operand as long as each with its operands is below 32 MiB, and copies
their weights beside one another for it. In loops over blocks weights are copied out of their stacks
anyway, and put where they are wanted; elsewhere all copies are there at once. A DiT's 28
modulations of one vector are a third of its weights, which are there a second time so, and take
longer to copy than to read (benchmarks/RESULTS.md, "Peaks of forward passes").
"""

from __future__ import annotations

from math import prod

from planner.emit.writer import Writer
from planner.ops import operator_of
from planner.sharding.layout import local_shape

MERGED_ELEMENTS = (32 << 20) // 2
"""Elements up to which a product is merged with others, in two bytes each."""


def merges_at_a_loss(w: Writer) -> bool:
    """Whether the weights that the compiler of a forward pass would copy take more memory than the
    largest product with its operand has anyway."""
    graph, flow, mesh = w.flow.graph, w.flow, dict(w.flow.plan.mesh)
    loops = () if w.unroll else w.blocks
    looped = {i for run in loops for i in range(run.first, run.end)}
    copied, largest = dict[str, list[int]](), 0
    for i, node in enumerate(graph.nodes):
        if operator_of(node.op).kind != "product":
            continue
        read, stored, written = (
            prod(local_shape(graph.tensors[n].shape, layout, mesh))
            for n, layout in (
                (node.inputs[0], flow.need[i, 0]),
                (node.inputs[1], flow.need[i, 1]),
                (node.outputs[0], flow.source[node.outputs[0]]),
            )
        )
        largest = max(largest, read + written)
        merged = i not in looped and read + stored + written <= MERGED_ELEMENTS
        if merged and node.inputs[1] in graph.weights:
            copied.setdefault(node.inputs[0], []).append(stored)
    return any(len(sizes) > 1 and sum(sizes) > largest for sizes in copied.values())
