"""What the gradients of a node read of its forward pass, as its operator says."""

from __future__ import annotations

from functools import cache

from planner.graph.ir import Node
from planner.ops import operator_of
from planner.ops.cost import Reads

NOTHING = Reads()


def reads(node: Node, grad: frozenset[str]) -> Reads:
    """What the gradients of a node's operands in `grad` need."""
    if grad.isdisjoint(node.outputs):
        return NOTHING
    return _reads(
        node.op, tuple(map(bool, node.inputs)), tuple(map(grad.__contains__, node.inputs))
    )


@cache
def _reads(op: str, present: tuple[bool, ...], trained: tuple[bool, ...]) -> Reads:
    """`reads` of all nodes of an operator with the same operands, and the same of them with
    gradients. An unknown operator reads all operands."""
    there, hot = (
        frozenset(i for i, yes in enumerate(slots) if yes) for slots in (present, trained)
    )
    if not hot:
        return NOTHING
    return operator_of(op).reads(there, hot)
