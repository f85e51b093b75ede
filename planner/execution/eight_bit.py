"""Which products programs run with float8 operands, where the precision asks for it: those of
linear layers.

Attention, norms and what lies between products stay as they are, and so do routed experts, whose
blocks of rows have kernels of their own, convolutions, and the head: the products that the loss (or
a result) is read from, whose rounding no later layer makes good. Extents are whole multiples of 16,
as tensor cores take them. Of a graph whose weights are kept in float8 (planner.serving.quantize)
they are those that it marks, routed experts among them.
"""

from __future__ import annotations

from planner.graph.ir import KEPT_FLOAT8, Graph
from planner.ops import operator_of

ALIGNED = 16


def eight_bit(graph: Graph) -> frozenset[int]:
    """Nodes that multiply activations by a weight of whole multiples of ALIGNED, but for the
    head; or those that are marked."""
    if "eight bit" not in graph.memo:
        marked = frozenset(i for i, n in enumerate(graph.nodes) if n.attrs.get(KEPT_FLOAT8))
        head = frozenset() if marked else heads(graph)
        graph.memo["eight bit"] = marked or frozenset(
            i for i in range(len(graph.nodes)) if i not in head and _is_linear(graph, i)
        )
    known: frozenset[int] = graph.memo["eight bit"]
    return known


def heads(graph: Graph) -> frozenset[int]:
    """The products that the losses are read from, or the results of a graph without one; behind
    them is what reads nothing but weights and constants beside."""
    losses = [n for n in graph.nodes if operator_of(n.op).kind == "loss"]
    waiting = [n.inputs[0] for n in losses] or list(graph.outputs)
    products = set[int]()
    while waiting:
        i = graph.producer.get(waiting.pop(), -1)
        if i < 0 or i in products:
            continue
        kind = operator_of(graph.nodes[i].op).kind
        operands = [n for n in graph.nodes[i].inputs if n in graph.producer]
        if kind == "product":
            products.add(i)
        elif not kind and len(operands) == 1:
            waiting += operands
    return frozenset(products)


def _is_linear(graph: Graph, i: int) -> bool:
    node = graph.nodes[i]
    operator = operator_of(node.op)
    if operator.float8 is None or not operator.float8(node):
        return False
    x, w = node.inputs[:2]
    shape = graph.tensors[w].shape
    return (
        w in graph.weights
        and x not in graph.weights
        and graph.tensors[x].is_float
        and graph.tensors[w].is_float
        and len(shape) == 2
        and not any(n % ALIGNED for n in shape)
    )
