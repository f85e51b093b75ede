"""Which operands the gradient of an operator reads: the table of derivatives that says what is
saved from the forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

from planner.graph.ir import Node
from planner.ops import OPERATORS

BILINEAR = frozenset({"MatMul", "Einsum", "Mul", "Conv", "ConvTranspose", "RotaryEmbedding"})


NORMS = frozenset(
    {
        "LayerNormalization",
        "RMSNormalization",
        "InstanceNormalization",
        "GroupNormalization",
        "BatchNormalization",
    }
)


@dataclass(frozen=True)
class Reads:
    """Operand slots whose values the gradient needs, and whether it needs what only the kernel
    knows (its result, row sums)."""

    slots: frozenset[int] = frozenset()
    inside: bool = False

    @cached_property
    def in_order(self) -> tuple[int, ...]:
        """The slots, ascending."""
        return tuple(sorted(self.slots))


NOTHING = Reads()


def reads(node: Node, grad: frozenset[str]) -> Reads:
    """What the gradients of a node's operands in `grad` need."""
    if grad.isdisjoint(node.outputs):
        return NOTHING
    return _reads(
        node.op, tuple(map(bool, node.inputs)), tuple(map(grad.__contains__, node.inputs))
    )


@cache
def _reads(op: str, given: tuple[bool, ...], trained: tuple[bool, ...]) -> Reads:
    """`reads` of all nodes of an operator with the same operands, and the same of them with
    gradients."""
    used, hot = (frozenset(i for i, yes in enumerate(each) if yes) for each in (given, trained))
    if not hot:
        return NOTHING
    if op in BILINEAR:
        return Reads(frozenset(i for i in used if hot - {i}))
    if op == "Div":
        return Reads(frozenset({1} | ({0} if 1 in hot else set())))
    if op in NORMS:
        scale = {0} if hot & {0, 1} else set()
        return Reads(
            frozenset(scale | ({1} if 0 in hot else set()) | {i for i in used if i > 2}),
            bool(hot & {0, 1}),
        )
    operator = OPERATORS.get(op)
    words = operator.saves.split() if operator else ["in"]
    slots = (
        used if "in" in words else {int(w[2:]) for w in words if w.startswith("in") and w != "in"}
    )
    return Reads(frozenset(used & slots), "out" in words or op == "CrossEntropyLoss")
