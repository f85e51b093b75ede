"""What routers send to experts: how even it is, what the busiest device gets of it, and what a
capacity drops.

A node's attributes say what the user knows (planner.workload.routing): "imbalance", rows of the
busiest device over the mean; or "counts", of a router, one for each expert; and "capacity".
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import ceil

from costmodels.routing import (
    USUAL_IMBALANCE,
    busiest,
    dropped_of_counts,
    dropped_of_spread,
    mean_ceiling,
)
from planner.graph.ir import Graph, Node
from planner.ops.base import operator_of
from planner.ops.expert_capacity import capacity_of
from planner.support.text import count as short

EXACT = 1e-9
"""Part of a block that is none: rounding of floats."""


ROUTED_EXPERTS = "RoutedExperts"


def expert_nodes(graph: Graph) -> Iterator[tuple[int, int]]:
    """(place in the graph, experts) of its routed experts."""
    for i, node in enumerate(graph.nodes):
        if node.op == ROUTED_EXPERTS:
            yield i, graph.tensors[node.inputs[4]].shape[0]


def counts_of(node: Node) -> tuple[int, ...]:
    """A router's counts, () where nobody gave them."""
    counts = node.attrs.get("counts", ())
    return tuple(int(n) for n in counts) if isinstance(counts, tuple) else ()


def imbalance_of(node: Node) -> float:
    """Rows of the busiest device over the mean, where there are no counts."""
    imbalance = node.attrs.get("imbalance", USUAL_IMBALANCE)
    assert isinstance(imbalance, float)
    return imbalance


def busiest_blocks(node: Node, mean: Fraction, rows: int, experts: int, pieces: int) -> float:
    """Blocks that the busiest of the devices runs, that each have an equal run of the experts.

    mean: rows of an expert at balance; rows: of a block; experts: of a device. Where all experts
    are on every device none is busier than others, and experts that are evenly spread fill blocks.
    """
    counts = counts_of(node)
    if not counts:
        most = _within(imbalance_of(node), pieces) * float(mean) / rows
        least = max(0.0, 2 * float(mean) / rows - most)
        return experts * (mean_ceiling(least, most) if pieces == 1 else max(1, ceil(most - EXACT)))
    per_piece, share = len(counts) // pieces, mean * len(counts) / sum(counts)
    blocks = [ceil(share * n / rows) for n in counts]
    return max(sum(blocks[k * per_piece : (k + 1) * per_piece]) for k in range(pieces))


def busiest_rows(node: Node, pieces: int) -> float:
    """Rows of the busiest device over the mean."""
    counts = counts_of(node)
    return busiest(counts, pieces) if counts else _within(imbalance_of(node), pieces)


def _within(imbalance: float, pieces: int) -> float:
    """What one of several devices can have at most is all rows."""
    return min(imbalance, pieces) if pieces > 1 else imbalance


def dropped(node: Node) -> float:
    """Part of the choices that find no place."""
    if not (factor := capacity_of(node)):
        return 0.0
    counts = counts_of(node)
    return (
        dropped_of_counts(counts, factor)
        if counts
        else dropped_of_spread(imbalance_of(node), factor)
    )


def dropped_choices(graph: Graph) -> float:
    """Part of all choices of a graph that find no place."""
    asked = lost = 0.0
    for i, _ in expert_nodes(graph):
        choices = graph.tensors[graph.nodes[i].inputs[1]].elements
        asked, lost = asked + choices, lost + choices * dropped(graph.nodes[i])
    return lost / asked if asked else 0.0


def said(graph: Graph) -> tuple[str, ...]:
    """What a plan takes for granted about routed experts, a phrase for each size of them."""
    layers_by_size: dict[tuple[int, int], int] = {}
    idle: Fraction = Fraction(0)
    for i, count in expert_nodes(graph):
        node = graph.nodes[i]
        top = graph.tensors[node.inputs[1]].shape[-1]
        layers_by_size[count, top] = layers_by_size.get((count, top), 0) + 1
        stacks = sum(graph.tensors[n].elements for n in node.inputs[3:] if n)
        idle += stacks * (1 - Fraction(min(top, count), count))
    if not layers_by_size:
        return ()
    caches = {name for n in graph.nodes for name in operator_of(n.op).cached(n)}
    every = graph.parameters - sum(graph.tensors[name].elements for name in caches)
    active = f"{short(every - int(idle))} of {short(every)} parameters work on a token"
    phrases = [
        f"experts: {count}, top {top}, {layers} layers"
        for (count, top), layers in layers_by_size.items()
    ]
    return (f"{'; '.join(phrases)}; {active}; {_load(node)}",)


def _load(node: Node) -> str:
    """How the router's choices are taken to spread."""
    counts, factor = counts_of(node), capacity_of(node)
    spread = (
        f"a router's counts (busiest expert {max(counts) * len(counts) / sum(counts):.3g} times the"
        " mean)"
        if counts
        else f"imbalance {imbalance_of(node):g}"
        + ("" if "imbalance" in node.attrs else " (a guess: --imbalance)")
    )
    if not factor:
        return f"priced at {spread}, nothing dropped"
    return f"capacity {factor:g}: {dropped(node):.1%} of choices dropped at {spread}"
