"""Nodes in an order in which repeated blocks are seen.

Blocks are found as nodes that recur at a fixed distance (planner.graph.repeats). A file may have
its nodes in any order that makes operands before they are read, and operands of a sum in either:
where tools that rewrote it put them differently in each layer, no distance is fixed. Such a graph
is also looked at in the order that its outputs ask for their operands, depth first, which follows
from its wiring alone, once with what is read all along the model before all else, and taken so
where more of it is in blocks then. All others keep the order of their file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.graph.ir import Graph, Node
from planner.graph.repeats import find_runs, hoist
from planner.ops import operator_of

ENOUGH = 1 / 2
"""Share of the nodes in repeats that are folded into the first, from which on nothing else is
looked at: a guess, models of two layers have somewhat less than half."""
WORTH = 1 / 10
"""More of the nodes that have to be folded for another order than the file's: a guess."""
WIDE = 1 / 3
"""Share of the way to the outputs that lies between readers of what is read all along a model, less
than that of one of two layers: a guess."""
NONE = -1


def in_blocks(graph: Graph) -> Graph:
    """The graph with work that training does not change moved to the front (`hoist`), and its
    nodes in an order that shows its blocks."""
    as_written = hoist(graph)
    folded = _folded(as_written)
    if folded >= ENOUGH:
        return as_written
    heights = _heights(graph)
    others = [hoist(_by_wiring(graph, heights, r)) for r in ([], _widely_read(graph, heights))]
    as_wired = max(others, key=_folded)
    return as_wired if _folded(as_wired) >= folded + WORTH else as_written


def _folded(graph: Graph) -> float:
    """The share of a graph's nodes that are in repeats behind the first of their block."""
    return sum(p * (repeats - 1) for _, p, repeats in find_runs(graph)) / max(len(graph.nodes), 1)


def _by_wiring(graph: Graph, heights: Mapping[str, int], first: Sequence[str]) -> Graph:
    """The graph in the order in which some results, one after the other, ask for their operands:
    the `first` ones, the outputs, and last what no output needs. Operands of sums and products come
    by how far from the inputs they are made."""
    nodes = [_ordered(node, graph, heights) for node in graph.nodes]
    roots = [graph.producer.get(name, NONE) for name in (*first, *graph.outputs)]
    placed, order = set[int](), list[int]()
    for root in (*roots, *range(len(nodes))):
        waiting = [(root, False)]
        while waiting:
            i, operands_placed = waiting.pop()
            if i == NONE or i in placed:
                continue
            if operands_placed:
                placed.add(i)
                order.append(i)
                continue
            waiting.append((i, True))
            waiting += [(graph.producer.get(n, NONE), False) for n in reversed(nodes[i].inputs)]
    return replace(graph, nodes=tuple(nodes[i] for i in order))


def _heights(graph: Graph) -> dict[str, int]:
    """tensor -> how many nodes lie between it and what is given at most."""
    heights: dict[str, int] = {}
    for node in graph.nodes:
        height = 1 + max((heights.get(n, 0) for n in node.inputs), default=0)
        heights.update(dict.fromkeys(filter(None, node.outputs), height))
    return heights


def _widely_read(graph: Graph, heights: Mapping[str, int]) -> list[str]:
    """Results with readers over much of what lies between them and the outputs (an encoder's, a
    condition), those nearest to the inputs first."""
    distance: dict[int, int] = {}  # node -> how many nodes lie between it and an output at most
    widely_read = []
    for i in reversed(range(len(graph.nodes))):
        distances = [
            [distance[k] for k, _ in graph.consumers.get(name, ())]
            for name in graph.nodes[i].outputs
        ]
        distance[i] = 1 + max(
            (max(of_readers) for of_readers in distances if of_readers), default=0
        )
        widely_read += [
            name
            for name, of_readers in zip(graph.nodes[i].outputs, distances, strict=True)
            if len(of_readers) > 1 and max(of_readers) - min(of_readers) > WIDE * max(of_readers)
        ]
    return sorted(widely_read, key=lambda name: heights[name])


def _ordered(node: Node, graph: Graph, heights: Mapping[str, int]) -> Node:
    """The node with its operands in one order where any will do: made ones first, those nearest to
    the inputs before others."""
    if node.attrs or (operator := operator_of(node.op)) is None or not operator.commutes:
        return node
    stored = graph.weights.keys() | graph.constants.keys()
    inputs = sorted(node.inputs, key=lambda n: (n in stored, heights.get(n, 0)))
    return replace(node, inputs=tuple(inputs))
