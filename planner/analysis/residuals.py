"""What the backward pass reads of the forward pass, and so is saved: which tensors, each because of
one use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from planner.ops import OPERATORS, operator_of
from planner.ops.residuals import reads

if TYPE_CHECKING:
    from planner.analysis.basics import BasicFacts


def find_residuals(base: BasicFacts) -> dict[tuple[int, int], str]:
    """(node, slot) -> tensor saved for the backward pass because of that use; each tensor once, at
    its first such use. Results have slot -1 - k. Of a forward pass alone: the graph's inputs and
    results, which have a place of their own from its beginning to its end."""
    graph = base.graph
    charged: dict[tuple[int, int], str] = {}
    # Weights and constants are there anyway; what is in gated units is recomputed.
    counted = {*graph.weights, *graph.constants, *base.gated.tensors}
    if not base.training:
        return at_both_ends(base, counted)
    saving_results = {op for op, operator in OPERATORS.items() if "out" in operator.saves.split()}
    for i, node in enumerate(graph.nodes):
        if node.op not in OPERATORS:
            continue
        for slot in reads(node, base.grad).in_order:
            name = node.inputs[slot]
            if name not in counted:
                counted.add(name)
                charged[i, slot] = name
        if node.op in saving_results and not base.grad.isdisjoint(node.outputs):
            for k, name in enumerate(o for o in node.outputs if o):
                if name not in counted:
                    counted.add(name)
                    charged[i, -1 - k] = name
    return without_derived(base, charged)


def find_gathered(
    base: BasicFacts, residuals: Mapping[tuple[int, int], str]
) -> dict[tuple[int, int], str]:
    """(node, slot) -> tensor of which an earlier use saves a device's own rows (residuals: what
    `find_residuals` says), and of which the node reads all rows where devices share its work so:
    the backward pass is handed these, too."""
    gathered = dict[tuple[int, int], str]()
    for i, node in enumerate(base.graph.nodes if base.training else ()):
        read = operator_of(node.op).gathers and 0 in reads(node, base.grad).slots
        if read and (i, 0) not in residuals:
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


def _recomputed_for(op: str) -> bool:
    """Whether the backward pass of an operator reads operands in kernels that recompute them."""
    operator = operator_of(op)
    return operator.fusible or operator.looks_again


def without_derived(
    base: BasicFacts, charged: Mapping[tuple[int, int], str]
) -> dict[tuple[int, int], str]:
    """What of `charged` a program saves outside loops: compilers recompute, inside the fusion that
    reads it, what elementwise operators and norms made of tensors that are saved anyway. Inside a
    loop the backward pass only has what the forward pass handed over, and what a loop reads is
    stored for it.

    A result that a product reads is stored for it, unless one comparison recomputes it (Relu) where
    that product is a matrix product.
    """
    graph, saved, looped = base.graph, set(charged.values()), base.looped
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
        cheap = operator.fusible or norm or operator.free
        if not cheap or not all(n in derived or n in saved for n in node.inputs if n):
            continue
        for name in node.outputs:
            read_by = readers.get(name, set())
            stored = {op for op in read_by if not _recomputed_for(op)}
            if (
                name in saved
                and name not in in_loops
                and (
                    not stored
                    or (
                        operator.compares
                        and node.inputs[0] in saved
                        and all(operator_of(op).kind == "product" for op in stored)
                    )
                )
            ):
                saved.discard(name)
            if name and name not in saved:
                derived.add(name)
    return {use: name for use, name in charged.items() if name in saved}
