"""Repeated blocks: maximal runs of nodes that recur at a fixed distance with the same operators, shapes and wiring.

Node i matches node i + p when operator, attributes, shapes and constants agree and every operand is either
    made at the same distance before it (inside the block or in the repeat before; what enters the first repeat may come from anywhere earlier),
    a weight of its own (same shape), or
    the very same tensor (a mask, a rotary table) made outside.
A run (first, p, repeats) is a stretch where nodes first .. first + p * (repeats - 1) - 1 all match. Runs are disjoint, longest coverage first.
Found from the distances between equal signatures, so the cost is linear in nodes times a handful of candidate periods.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from planner.graph import Graph, Node

MIN_REPEATS = 2
MIN_SAVED = 6  # nodes; folding less is not worth a function of its own
MAX_PERIODS = 12


def signature(node: Node, graph: Graph) -> tuple:
    """What must agree for two nodes to be the same work: operator, attributes, shapes, dtypes and roles of operands and results."""
    cells: list[tuple | None] = []
    for name in node.inputs:
        t = graph.tensors[name] if name else None
        if t is None:
            cells.append(None)
            continue
        value = graph.constants[name].tobytes() if name in graph.constants else b""
        cells.append((t.shape, t.dtype, "weight" if name in graph.weights else "constant" if value else "value", value, name in graph.trainable))
    outs = tuple((graph.tensors[o].shape, graph.tensors[o].dtype) if o else None for o in node.outputs)
    return (node.op, tuple(sorted(node.attrs.items())), tuple(cells), outs)


def find_runs(graph: Graph) -> tuple[tuple[int, int, int], ...]:
    """Disjoint runs as (first node, period, repeats), in node order."""
    nodes = graph.nodes
    ids: dict[tuple, int] = {}
    kind = [ids.setdefault(signature(n, graph), len(ids)) for n in nodes]
    places: dict[int, list[int]] = {}
    for i, k in enumerate(kind):
        places.setdefault(k, []).append(i)
    gaps = Counter(b - a for at in places.values() for a, b in zip(at, at[1:], strict=False))
    candidates = [p for p, _ in sorted(gaps.items(), key=lambda g: (-g[0] * g[1], g[0]))[:MAX_PERIODS]]
    found: list[tuple[int, int, int, int]] = []
    for p in candidates:
        # Per node: None no match, () a match, or the outside producers of operands that enter a first repeat from elsewhere.
        match = [_wired(graph, i, i + p) if i + p < len(nodes) and kind[i] == kind[i + p] else None for i in range(len(nodes))]
        for start, end in _stretches(match, p):
            repeats = (end - start) // p + 1
            if repeats >= MIN_REPEATS and p * (repeats - 1) >= MIN_SAVED:
                found.append((repeats * p - p, start, p, repeats))
    runs: list[tuple[int, int, int]] = []
    # The most work saved wins; among equals the shorter block (a block of two layers saves less than one of one).
    for _, start, p, repeats in sorted(found, key=lambda f: (-f[0], f[2], f[1])):
        if all(start + p * repeats <= a or start >= a + q * r for a, q, r in runs):
            runs.append((start, p, repeats))
    return tuple(sorted(runs))


def _stretches(match: list[tuple[int, ...] | None], p: int) -> list[tuple[int, int]]:
    """Maximal [start, end) of matching nodes in which operands that enter from elsewhere occur only in the first repeat, and come from before it."""
    found = []
    i = 0
    while i < len(match):
        if match[i] is None:
            i += 1
            continue
        begin = i
        while i < len(match) and match[i] is not None:
            i += 1
        entering = [k for k in range(begin, i) if match[k]]
        last = entering[-1] if entering else begin
        start = max(begin, last - p + 1)
        while start < i:
            late = [k for k in entering if k >= start and any(made >= start for made in match[k] or ())]
            if not late:
                break
            start = late[-1] + 1
        found.append((start, i))
        if start > begin:  # what lies before may hold a run of its own
            earlier = [k for k in entering if k < start]
            for a, b in zip([begin, *[k + 1 for k in earlier]], [*earlier, start], strict=True):
                if b > a:
                    found.append((a, b))
    return found


def _wired(graph: Graph, i: int, j: int) -> tuple[int, ...] | None:
    """None when operands of nodes i and j are of different kinds; else the producers of those operands of i that come from another
    relative place than j's (allowed where a run begins), () when all agree."""
    elsewhere = []
    for a, b in zip(graph.nodes[i].inputs, graph.nodes[j].inputs, strict=True):
        if a == b:
            continue  # the same outside value, the same constant, or both absent
        made_a, made_b = graph.producer.get(a), graph.producer.get(b)
        if a in graph.constants or (a in graph.weights and b in graph.weights):
            continue  # equal constants by signature; a weight each
        if made_b is None:
            return None
        if made_a is None:
            if a not in graph.inputs:
                return None
            elsewhere.append(-1)
        elif i - made_a != j - made_b or graph.nodes[made_a].outputs.index(a) != graph.nodes[made_b].outputs.index(b):
            elsewhere.append(made_a)
    return tuple(elsewhere)


def classes(graph: Graph, runs: Sequence[tuple[int, int, int]]) -> list[int]:
    """Per node the index of the node whose decision it shares: its counterpart in the first repeat, or itself."""
    shared = list(range(len(graph.nodes)))
    for first, p, repeats in runs:
        for i in range(first, first + p * repeats):
            shared[i] = first + (i - first) % p
    return shared


def hoist(graph: Graph) -> Graph:
    """The same graph with nodes that depend on no weight (masks, positions) moved to the front, in order, so that they do not sit inside a block."""
    heavy = set(graph.trainable or graph.weights)
    early, late = [], []
    for node in graph.nodes:
        if any(n in heavy for n in node.inputs):
            heavy.update(o for o in node.outputs if o)
            late.append(node)
        else:
            early.append(node)
    return replace(graph, nodes=(*early, *late))
