"""Repeated blocks: maximal runs of nodes that recur at a fixed distance with the same operators, shapes and wiring.

Node i matches node i + p when operator, attributes, shapes and constants agree, the same operands can carry gradients, and every operand is either
    made at the same distance before it (inside the block or in the repeat before; what enters the first repeat may come from anywhere earlier),
    a weight of its own (same shape), or
    the very same tensor (a mask, a rotary table) made before the run.
A run (first, p, repeats) is a stretch where nodes first .. first + p * (repeats - 1) - 1 all match. Runs are disjoint, longest coverage first.
Found from the distances between equal signatures, so the cost is linear in nodes times a handful of candidate periods.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from planner.graph import Graph, Node

MIN_REPEATS = 2
MIN_SAVED = 6  # nodes; folding less is not worth a function of its own
MAX_PERIODS = 12
UNMADE = -1, 0


def signature(node: Node, graph: Graph, trained: frozenset[str]) -> tuple:
    """What must agree for two nodes to be the same work: operator, attributes, shapes, dtypes and roles of operands and results.

    trained: what depends on something trainable (`downstream`). A block that reads data has less to do backward than one that reads activations.
    """
    cells: list[tuple | None] = []
    for name in node.inputs:
        t = graph.tensors[name] if name else None
        if t is None:
            cells.append(None)
            continue
        value = graph.constants[name].tobytes() if name in graph.constants else b""
        cells.append((t.shape, t.dtype, "weight" if name in graph.weights else "constant" if value else "value", value, name in trained))
    outs = tuple((graph.tensors[o].shape, graph.tensors[o].dtype) if o else None for o in node.outputs)
    return (node.op, tuple(sorted(node.attrs.items())), tuple(cells), outs)


def downstream(graph: Graph) -> frozenset[str]:
    """Trainable weights and everything made from them."""
    found = set(graph.trainable)
    for node in graph.nodes:
        if not found.isdisjoint(node.inputs):
            found.update(o for o in node.outputs if o)
    return frozenset(found)


def find_runs(graph: Graph) -> tuple[tuple[int, int, int], ...]:
    """Disjoint runs as (first node, period, repeats), in node order."""
    nodes = graph.nodes
    ids: dict[tuple, int] = {}
    trained = downstream(graph)
    kind = [ids.setdefault(signature(n, graph, trained), len(ids)) for n in nodes]
    places: dict[int, list[int]] = {}
    for i, k in enumerate(kind):
        places.setdefault(k, []).append(i)
    gaps = Counter(b - a for at in places.values() for a, b in pairwise(at))
    candidates = [p for p, _ in sorted(gaps.items(), key=lambda g: (-g[0] * g[1], g[0]))[:MAX_PERIODS]]
    made = {o: (i, k) for i, node in enumerate(nodes) for k, o in enumerate(node.outputs) if o}
    found: list[tuple[int, int, int, int]] = []
    for p in candidates:
        match = [_wired(graph, made, i, i + p) if a == b else None for i, (a, b) in enumerate(zip(kind, kind[p:], strict=False))]
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


@dataclass(frozen=True)
class _Match:
    """Where the operands of a matching node come from. entering: producers (-1: an input) of those that come from another relative place than
    in the next repeat, which only a first repeat may have. shared: latest producer of those that are the same tensor in both (-1: none)."""

    entering: tuple[int, ...] = ()
    shared: int = -1


def _stretches(match: list[_Match | None], p: int) -> list[tuple[int, int]]:
    """Maximal [start, end) of matching nodes that can be repeats of one block."""
    found: list[tuple[int, int]] = []
    i = 0
    while i < len(match):
        if match[i] is None:
            i += 1
            continue
        begin = i
        while i < len(match) and match[i] is not None:
            i += 1
        found += _runnable([m for m in match[begin:i] if m], begin, p)
    return found


def _runnable(match: list[_Match], begin: int, p: int) -> list[tuple[int, int]]:
    """Parts of a stretch of matches in which operands from elsewhere occur only in the first repeat, and all outside operands come from before it."""
    end = begin + len(match)
    entering = [begin + k for k, m in enumerate(match) if m.entering]
    start = max(begin, entering[-1] - p + 1) if entering else begin
    while start < end:
        late = [k for k in entering if k >= start and any(made >= start for made in match[k - begin].entering)]
        made = max((m.shared for m in match[start - begin :]), default=-1)
        if not late and made < start:
            break
        start = max(late[-1] if late else start, made) + 1
    found = [(start, end)] if start < end else []
    if begin < start < end:  # what lies before may hold runs of its own
        cuts = [begin, *(k + 1 for k in entering if k < start), start]
        for a, b in pairwise(cuts):
            if a < b:
                found += _runnable(match[a - begin : b - begin], a, p)
    return found


NEAR = _Match()


def _wired(graph: Graph, made: Mapping[str, tuple[int, int]], i: int, j: int) -> _Match | None:
    """How the operands of nodes i and j correspond; None when they are of different kinds. made: tensor -> the node that makes it, and which of its results."""
    elsewhere, shared = [], -1
    for a, b in zip(graph.nodes[i].inputs, graph.nodes[j].inputs, strict=True):
        if a == b:  # the same outside value, the same constant, or both absent
            shared = max(shared, made.get(a, UNMADE)[0])
            continue
        if a in graph.constants or (a in graph.weights and b in graph.weights):
            continue  # equal constants by signature; a weight each
        by_a, by_b = made.get(a), made.get(b)
        if by_b is None:
            return None
        if by_a is None:
            if a not in graph.inputs:
                return None
            elsewhere.append(-1)
        elif i - by_a[0] != j - by_b[0] or by_a[1] != by_b[1]:
            elsewhere.append(by_a[0])
    return _Match(tuple(elsewhere), shared) if elsewhere or shared >= 0 else NEAR


def classes(graph: Graph, runs: Sequence[tuple[int, int, int]]) -> list[int]:
    """Per node the index of the node whose decision it shares: its counterpart in the first repeat, or itself."""
    shared = list(range(len(graph.nodes)))
    for first, p, repeats in runs:
        for i in range(first, first + p * repeats):
            shared[i] = first + (i - first) % p
    return shared


def hoist(graph: Graph) -> Graph:
    """The same graph with work that training does not change (masks, positions) moved to the front, in order, so that it does not sit inside a block.

    What is made of frozen weights and read in one place only (a decay rate of one layer) stays: moved, it would break its layer off the others.
    """
    heavy, frozen = set(graph.trainable or graph.weights), set(graph.weights)
    early: list[int] = []
    for i, node in enumerate(graph.nodes):
        if any(n in heavy for n in node.inputs):
            heavy.update(o for o in node.outputs if o)
        else:
            early.append(i)
            if any(n in frozen for n in node.inputs):
                frozen.update(o for o in node.outputs if o)
    front = set(early)
    for i in reversed(early):
        outs = [o for o in graph.nodes[i].outputs if o]
        readers = [k for o in outs for k, _ in graph.consumers.get(o, ())]
        if len(readers) == 1 and readers[0] not in front and any(o in frozen for o in outs):
            front.discard(i)
    order = sorted(range(len(graph.nodes)), key=lambda i: i not in front)
    return replace(graph, nodes=tuple(graph.nodes[i] for i in order))
