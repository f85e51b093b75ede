"""Weights of pipeline stages whose gradients are made apart from the backward pass, in ticks of
their own (schedule zb-h1): those of blocks that products alone read. Gradients of norms and biases
cost next to nothing, and stay in it."""

from __future__ import annotations

from planner.execution.layout_flow import Flow
from planner.execution.pipeline import Pipeline
from planner.execution.techniques import ZB_H1
from planner.graph.ir import Graph, Node
from planner.ops import operator_of

APART = ("product", "convolution")
"""Kinds of operators that multiply two operands."""


def weights_apart(flow: Flow, pipeline: Pipeline | None) -> frozenset[str]:
    """The trained weights of all blocks whose gradients are made apart."""
    if pipeline is None or pipeline.schedule != ZB_H1:
        return frozenset()
    return products_weights(flow.graph, flow.grad, pipeline.nodes)


def products_weights(graph: Graph, grad: frozenset[str], blocks: range) -> frozenset[str]:
    """The trained weights of repeated blocks that products alone read. Worked out once a graph."""
    key = "weights of products", grad, blocks
    if key not in graph.memo:
        graph.memo[key] = frozenset(
            name
            for i in blocks
            for name in factors(graph.nodes[i])
            if name in graph.weights
            and name in grad
            and all(
                k in blocks and slot < len(factors(graph.nodes[k]))
                for k, slot in graph.consumers[name]
            )
        )
    known: frozenset[str] = graph.memo[key]
    return known


def waiting_share(node: Node, grad: frozenset[str], waiting: frozenset[str]) -> float:
    """What part of a node's backward pass are gradients of weights that are made apart."""
    trained = [name for name in factors(node) if name in grad]
    return sum(name in waiting for name in trained) / max(1, len(trained))


def factors(node: Node) -> tuple[str, ...]:
    """The two operands that a node multiplies, so that the gradient of each is one product; none of
    other nodes."""
    both = tuple(name for name in node.inputs[:2] if name)
    return both if operator_of(node.op).kind in APART and len(both) == 2 else ()
