"""The rule of a node as its operator gives it, and the tensors that gradients flow through."""

from __future__ import annotations

from planner.graph.ir import Graph, Node
from planner.ops.base import OPERATORS, NoRule, operator_of
from planner.sharding.rule import Dim, Rule


def rule_of(node: Node, graph: Graph) -> tuple[Rule, str]:
    """The node's rule and "" - or the all-whole rule (planned replicated) and the reason."""
    operator = OPERATORS.get(node.op)
    reason = f"no rule for {node.op}"
    if operator is not None:
        try:
            return operator.rule(node, graph), ""
        except NoRule as e:
            reason = f"{node.op}: {e}"
            if e.whole is not None:
                return e.whole, reason
    shapes = graph.shapes(node.inputs)
    outs = graph.shapes(tuple(o for o in node.outputs if o))
    sizes: dict[str, int] = {}

    def names(side: str, i: int, shape: tuple[int, ...]) -> tuple[Dim, ...]:
        dims = []
        for d, n in enumerate(shape):
            sizes[f"{side}{i}_{d}"] = n
            dims.append((f"{side}{i}_{d}",))
        return tuple(dims)

    operands = tuple(names("i", i, s) for i, s in enumerate(shapes))
    results = tuple(names("o", i, s) for i, s in enumerate(outs))
    return Rule(operands, results, sizes, frozenset(sizes)), reason


def starts_at_one(graph: Graph, name: str) -> bool:
    """Whether a weight's fresh values are near 1: scales and variances of norms, and of what else
    multiplies as it is the vectors and lone numbers."""
    vector = sum(n > 1 for n in graph.tensors[name].shape) <= 1
    readers = ((operator_of(graph.nodes[k].op), slot) for k, slot in graph.consumers.get(name, ()))
    return any(
        slot in operator.starts_at_one and (vector or operator.kind == "norm")
        for operator, slot in readers
    )


def gradient_tensors(graph: Graph) -> frozenset[str]:
    """Tensors through which a gradient flows: downstream of a trainable weight and upstream of the
    (scalar, first) output."""
    down, tensors = set(graph.trainable), graph.tensors
    for node in graph.nodes:
        if operator_of(node.op).differentiable and not down.isdisjoint(node.inputs):
            down.update([o for o in node.outputs if o and tensors[o].is_float])
    up = {name for name in graph.outputs[:1] if name in down}  # and downstream
    for node in reversed(graph.nodes):
        if not up.isdisjoint(node.outputs):
            up.update(down.intersection(node.inputs))
    return frozenset(up)


def unread_gradients(graph: Graph, grad: frozenset[str]) -> frozenset[str]:
    """Tensors with a gradient that a node reads which hands none back, worked out once a graph."""
    key = "unread gradients", grad
    if key not in graph.memo:
        graph.memo[key] = frozenset(
            name
            for node in graph.nodes
            if grad.isdisjoint(node.outputs)
            for name in node.inputs
            if name in grad
        )
    known: frozenset[str] = graph.memo[key]
    return known
