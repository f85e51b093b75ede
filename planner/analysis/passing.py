"""Which gradients (of a forward pass alone, results) pass by which operators, and which operators
read each weight: what costmodels.liveness needs to know of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from costmodels.liveness import PassingGradients, WeightReaders
from planner.graph.ir import Graph
from planner.ops import operator_of

if TYPE_CHECKING:
    from planner.analysis.basics import BasicFacts


def find_passing(base: BasicFacts) -> PassingGradients:
    """What `GraphFacts.passing` holds: of a forward pass alone what its results pass by."""
    graph = base.graph
    rows, rows_of, nodes = list[tuple[int, int, int]](), list[int](), list[int]()
    for i, node in enumerate(graph.nodes):
        read = {
            j
            for name in node.outputs
            if name in base.grad or not base.training
            for j, _ in graph.consumers.get(name, ())
        }
        if read and max(read) > i + 1:
            inside = sorted(j for j in read if j < max(read))
            rows_of += [len(rows)] * len(inside)
            nodes += inside
            rows.append((i, i + 1, max(read) - 1))
    maker, first, last = (np.array([row[k] for row in rows], np.int64) for k in range(3))
    return PassingGradients(
        maker, first, last, (np.array(rows_of, np.int64), np.array(nodes, np.int64))
    )


def readers(
    graph: Graph, nodes_by_weight: Sequence[Sequence[int]], behind: int | None = None
) -> WeightReaders:
    """What the operators that read each weight are. behind: the first node of those whose gradients
    are all made before one is used, so that no kernel adds them to the sums of microbatches."""
    carried = [
        any(operator_of(graph.nodes[i].op).filling is not None for i in nodes)
        for nodes in nodes_by_weight
    ]
    reads_again = [
        any(operator_of(graph.nodes[i].op).kind != "lookup" for i in nodes if i < max(nodes))
        for nodes in nodes_by_weight
    ]
    first, last = (
        np.array([end(nodes) for nodes in nodes_by_weight], np.int64) for end in (min, max)
    )
    adding = range(len(graph.nodes) if behind is None else behind)
    product = [
        len(nodes) == 1
        and nodes[0] in adding
        and operator_of(graph.nodes[nodes[0]].op).kind == "product"
        for nodes in nodes_by_weight
    ]
    return WeightReaders(
        first, last, np.array(carried, bool), np.array(reads_again, bool), np.array(product, bool)
    )


def puts_off(base: BasicFacts, i: int) -> bool:
    """Whether node i is a product with a weight whose gradient compilers may put off: programs make
    that of a product behind their blocks at once."""
    node = base.graph.nodes[i]
    at_once = base.end_of_blocks is not None and i >= base.end_of_blocks
    possible = base.waiting or base.runs_of_units is None
    put_off = base.rules[i].flops > 0 and possible and not at_once
    return put_off and any(n in base.graph.weights and n in base.grad for n in node.inputs)


def waiting_products(base: BasicFacts) -> dict[int, bool]:
    """The products whose weights' gradients are all made behind the backward pass, and whether each
    is the first to read its operand, which waits once for all. Experts' gradients are made where
    their layer's are (planner.emit)."""
    nodes, read, result = base.graph.nodes, set[str](), dict[int, bool]()
    for i, node in enumerate(nodes if base.waiting else ()):
        if puts_off(base, i) and operator_of(node.op).kind == "product":
            operands = {n for n in node.inputs if n and n not in base.graph.weights}
            result[i] = not operands <= read
            read |= operands
    return result
