"""Operators that draw. What they draw is a hash of a seed and the global index, equal under any
split."""

from __future__ import annotations

from math import prod

from planner.graph.ir import Graph, Node
from planner.ops.base import Call, NoRule, Operator, register
from planner.ops.pointwise import letters
from planner.sharding.rule import KernelCollective, Rule, parse


def _dropout_rule(node: Node, graph: Graph) -> Rule:
    """Every dim splits. Operands: x and a scalar seed (planner.workload.train_eval_mode); results:
    y and the next seed, which is whole on every device."""
    shapes = graph.shapes(node.inputs)
    if len(shapes) != 2 or graph.tensors[node.inputs[1]].is_float:
        raise NoRule("a mask as output")
    factors = letters(len(shapes[0]))
    names = " ".join(factors)
    # An KernelCollective that never runs says that a result lacking the factor is complete, not a term of a  # noqa: E501
    # sum.
    inner = tuple(KernelCollective(f, "all-reduce", (), 0, 0) for f in factors)
    live = [i for i, o in enumerate(node.outputs) if o]
    return parse(
        f"{names}, -> {', '.join((names, '')[i] for i in live)}",
        shapes,
        tuple((shapes[0], ())[i] for i in live),
        inner=inner,
    )


def _dropout(call: Call) -> str:
    if len(call.args) < 2:
        raise NoRule("no seed: the graph is in neither mode (planner.workload.train_eval_mode)")
    shape = call.global_in[0]
    starts = ", ".join(call.start(f) for f in letters(len(shape)))
    strides = ", ".join(str(prod(shape[d + 1 :]) % 2**32) for d in range(len(shape)))
    text = (
        f"{call.use('dropout')}({call.args[0]}, {call.args[1]}, {call.attr('ratio')!r}, [{starts}],"
        f" [{strides}])"
    )
    live = [i for i, o in enumerate(call.node.outputs) if o]
    return text if len(live) == 2 else f"{text}[{live[0]}]"


register(
    Operator(
        "Dropout",
        _dropout_rule,
        _dropout,
        saves="",
        fusible=True,
        index_limit=lambda node, graph, slot: 2**31 - 1 if slot == 1 else 0,  # any seed will do
    )
)
