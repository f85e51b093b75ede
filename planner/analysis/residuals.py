"""What the backward pass reads of the forward pass, and so is kept: which tensors, each because of
one use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from planner.ops import OPERATORS, operator_of
from planner.ops.residuals import reads

if TYPE_CHECKING:
    from planner.analysis.basics import BasicFacts


def find_residuals(base: BasicFacts) -> dict[tuple[int, int], str]:
    """(node, slot) -> tensor kept for the backward pass because of that use; each tensor once, at
    its first such use. Results have slot -1 - k. Of a forward pass alone: the graph's inputs and
    results, which have a place of their own from its beginning to its end."""
    graph = base.graph
    charged: dict[tuple[int, int], str] = {}
    # Weights and constants are there anyway; what is in gated units is made again.
    seen = {*graph.weights, *graph.constants, *base.gated.tensors}
    if not base.training:
        return at_both_ends(base, seen)
    returning = {op for op, operator in OPERATORS.items() if "out" in operator.saves.split()}
    for i, node in enumerate(graph.nodes):
        if node.op not in OPERATORS:
            continue
        for slot in reads(node, base.grad).in_order:
            name = node.inputs[slot]
            if name not in seen:
                seen.add(name)
                charged[i, slot] = name
        if node.op in returning and not base.grad.isdisjoint(node.outputs):
            for k, name in enumerate(o for o in node.outputs if o):
                if name not in seen:
                    seen.add(name)
                    charged[i, -1 - k] = name
    return without_derived(base, charged)


def find_gathered(
    base: BasicFacts, kept: Mapping[tuple[int, int], str]
) -> dict[tuple[int, int], str]:
    """(node, slot) -> tensor that an earlier use keeps a device's own rows of (`find_residuals`),
    and that the node reads all rows of where devices share its work so: the backward pass is handed
    these, too."""
    gathered = dict[tuple[int, int], str]()
    for i, node in enumerate(base.graph.nodes if base.training else ()):
        read = operator_of(node.op).gathers and 0 in reads(node, base.grad).slots
        if read and (i, 0) not in kept:
            gathered[i, 0] = node.inputs[0]
    return gathered


def at_both_ends(base: BasicFacts, elsewhere: set[str]) -> dict[tuple[int, int], str]:
    """(node, slot) -> input of the graph that the node is the first to read, or result of the graph
    that it makes. Programs that serve write what they make into their caches, and hand out the next
    tokens alone. elsewhere: what is counted as a weight."""
    graph, charged = base.graph, dict[tuple[int, int], str]()
    inputs, results = set(graph.inputs) - elsewhere, set(graph.outputs) - elsewhere
    for i, node in enumerate(() if graph.unstacked else graph.nodes):
        for slot, name in enumerate(node.inputs):
            if name in inputs:
                inputs.discard(name)
                charged[i, slot] = name
        for k, name in enumerate(o for o in node.outputs if o):
            if name in results:
                charged[i, -1 - k] = name
    return charged


def _made_again_for(op: str) -> bool:
    """Whether the backward pass of an operator reads operands in kernels that make them again."""
    operator = operator_of(op)
    return operator.fusible or operator.looks_again


def without_derived(
    base: BasicFacts, charged: Mapping[tuple[int, int], str]
) -> dict[tuple[int, int], str]:
    """What of `charged` a program keeps outside loops: compilers make again, inside the fusion that
    reads it, what elementwise operators and norms made of tensors that are kept anyway. Inside a
    loop the backward pass only has what the forward pass handed over, and what a loop reads is
    stored for it.

    A result that a product reads is stored for it, unless one comparison makes it again (Relu)
    where that product is a matrix product.
    """
    graph, kept, looped = base.graph, set(charged.values()), base.looped
    readers: dict[str, set[str]] = {}
    in_loops = set[str]()
    for i, node in enumerate(graph.nodes):
        if i in looped:
            in_loops.update(node.inputs)
        for slot in reads(node, base.grad).slots:
            readers.setdefault(node.inputs[slot], set()).add(node.op)
    derived = {*graph.inputs, *graph.constants, *graph.weights}
    for i, node in enumerate(graph.nodes):
        if i in looped:
            continue
        operator = operator_of(node.op)
        norm = operator.kind == "norm" and not operator.lays_out_anew
        plain = operator.fusible or norm or operator.free
        if not plain or not all(n in derived or n in kept for n in node.inputs if n):
            continue
        for name in node.outputs:
            by = readers.get(name, set())
            stored = {op for op in by if not _made_again_for(op)}
            if (
                name in kept
                and name not in in_loops
                and (
                    not stored
                    or (
                        operator.compares
                        and node.inputs[0] in kept
                        and all(operator_of(op).kind == "product" for op in stored)
                    )
                )
            ):
                kept.discard(name)
            if name and name not in kept:
                derived.add(name)
    return {use: name for use, name in charged.items() if name in kept}
