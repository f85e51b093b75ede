"""Repeated blocks: maximal runs of nodes that recur at a fixed distance with the same operators,
shapes and wiring.

Node i matches node i + p when operator, attributes, shapes and constants agree, the same operands
can carry gradients, and every operand is either
    made at the same distance before it (inside the block or in the repeat before; what enters the
    first repeat may come from anywhere earlier), a weight of its own (same shape), or the very same
    tensor (a mask, a rotary table) made before the run.
A run (first, p, repeats) is a stretch where nodes first .. first + p * (repeats - 1) - 1 all match.
A single layer before a run that begins as its blocks do is a run of one.
Runs are disjoint, longest coverage first. Found from the distances between equal signatures, so the
cost is linear in nodes times a handful of candidate periods: those between neighbours, and those
over several where a layer in four has less in it than the others (no rotary embedding) and nothing
of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, pairwise

import numpy as np

from planner.graph.ir import Graph
from planner.graph.value_digest import value_bytes

MIN_REPEATS = 2
MIN_SAVED = 6  # nodes; folding less is not worth a function of its own
MAX_PERIODS = 12
FARTHEST, WIDE_PERIODS = 8, 4
"""Layers of a period at most that nothing in them marks, and such periods that are tried: guesses
(published ones have four layers)."""
NONE = -1


def _numbered(keys: Iterable[Hashable]) -> list[int]:
    """Per key a number, the same for equal keys, in order of first appearance."""
    numbers: defaultdict[Hashable, int] = defaultdict(count().__next__)
    return list(map(numbers.__getitem__, keys))


@dataclass(frozen=True)
class _Wiring:
    """Nodes and their operands by number, so that a whole graph is compared with itself a period on
    in a few array operations."""

    kind: np.ndarray  # [nodes] equal numbers: the same work
    first: np.ndarray  # [nodes + 1] first of its operands
    operand: np.ndarray  # [operands] which tensor; 0: absent
    maker: np.ndarray  # [tensors] the node that makes it; -1: none
    result: np.ndarray  # [tensors] which of that node's results
    constant: np.ndarray  # [tensors]
    weight: np.ndarray  # [tensors]
    is_input: np.ndarray  # [tensors] whether it is an input of the graph

    @classmethod
    def of(cls, graph: Graph) -> _Wiring:
        """Two nodes are of a kind when operator, attributes, shapes, dtypes, constants and roles of
        operands and results agree.

        A block that reads data has less to do backward than one that reads activations: what
        depends on something trainable is another role.
        """
        trained, nodes = graph.reached(graph.trainable), graph.nodes
        inputs, outputs = [node.inputs for node in nodes], [node.outputs for node in nodes]
        names = list(dict.fromkeys(chain([""], *inputs, *outputs)))
        number = dict(zip(names, range(len(names)), strict=True))
        value = {
            name: value_bytes(array) for name, array in graph.constants.items() if name in number
        }
        tensors = zip(names[1:], map(graph.tensors.__getitem__, names[1:]), strict=True)
        cells = _numbered(
            [
                (t.shape, t.dtype, name in graph.weights, value.get(name), name in trained)
                for name, t in tensors
            ]
        )
        cell = dict(zip(names, [NONE, *cells], strict=True)).__getitem__
        kind = _numbered(
            [
                (
                    node.op,
                    frozenset(node.attrs.items()) if node.attrs else None,
                    *map(cell, node.inputs),
                    None,
                    *map(cell, node.outputs),
                )
                for node in nodes
            ]
        )
        first_in, first_out = (np.cumsum([0, *map(len, each)]) for each in (inputs, outputs))
        operand, result_tensors = (
            np.array(list(map(number.__getitem__, chain(*each))), np.int64)
            for each in (inputs, outputs)
        )
        by, result = np.full((2, len(names)), NONE)
        by[result_tensors] = np.repeat(np.arange(len(nodes)), np.diff(first_out))
        result[result_tensors] = np.arange(len(result_tensors)) - first_out[by[result_tensors]]
        by[0] = result[0] = NONE  # an output that is absent

        def among(some: Iterable[str]) -> np.ndarray:
            chosen = np.zeros(len(names), bool)
            chosen[[number[name] for name in some if name in number]] = True
            return chosen

        return cls(
            np.array(kind, np.int64),
            first_in,
            operand,
            by,
            result,
            among(graph.constants),
            among(graph.weights),
            among(graph.inputs),
        )

    def match(self, p: int) -> _Match:
        """How each node corresponds to the one p further on."""
        same = self.kind[:-p] == self.kind[p:]
        nodes = np.flatnonzero(same)
        count = self.first[nodes + 1] - self.first[nodes]
        node = np.repeat(nodes, count)  # per operand of those
        slots = np.arange(len(node)) + np.repeat(
            self.first[nodes] - np.cumsum(count) + count, count
        )
        a, b = (
            self.operand[slots],
            self.operand[slots + np.repeat(self.first[nodes + p] - self.first[nodes], count)],
        )
        equal = a == b  # the same outside value, the same constant, or both absent
        open_ = ~(
            equal | self.constant[a] | (self.weight[a] & self.weight[b])
        )  # equal constants by their kind; a weight each
        by_a, by_b = self.maker[a], self.maker[b]
        same[node[open_ & ((by_b < 0) | ((by_a < 0) & ~self.is_input[a]))]] = False
        enters = open_ & (
            (by_a < 0) | (node - by_a != node + p - by_b) | (self.result[a] != self.result[b])
        )
        shared = np.full(len(same), NONE)
        np.maximum.at(shared, node[equal], by_a[equal])
        return _Match(same, node[enters], by_a[enters], shared)


@dataclass(frozen=True)
class _Match:
    """Where the operands of matching nodes come from. fits: whether a node matches. entering,
    maker: nodes with operands that come from another relative place than in the next repeat, which
    only a first repeat may have, an entry an operand, and their producers (-1: an input). shared:
    latest producer of operands that are the same tensor in both (-1: none)."""

    fits: np.ndarray  # [nodes]
    entering: np.ndarray  # ascending
    maker: np.ndarray
    shared: np.ndarray  # [nodes]


def find_runs(graph: Graph) -> tuple[tuple[int, int, int], ...]:
    """Disjoint runs as (first node, period, repeats), in node order."""
    wiring = _Wiring.of(graph)
    candidates: list[tuple[int, int, int, int]] = []
    for p in _periods(wiring.kind):
        match = wiring.match(p)
        bounds = np.flatnonzero(np.diff(match.fits, prepend=False, append=False)).tolist()
        for start, end in (
            part
            for a, b in zip(bounds[::2], bounds[1::2], strict=True)
            for part in _runnable(match, a, b, p)
        ):
            repeats, spare = divmod(end - start, p)
            if repeats + 1 >= MIN_REPEATS and p * repeats >= MIN_SAVED:
                start += _least_handed_on(graph, start, p, spare)
                apart = _first_apart(graph, start, p, repeats + 1)
                candidates.append(
                    ((repeats - apart) * p, start + apart * p, p, repeats + 1 - apart)
                )
    runs: list[tuple[int, int, int]] = []
    # The most work saved wins; among equals the shorter block (a block of two layers saves less
    # than one of one).
    for _, start, p, repeats in sorted(candidates, key=lambda f: (-f[0], f[2], f[1])):
        if all(start + p * repeats <= a or start >= a + q * r for a, q, r in runs):
            runs.append((start, p, repeats))
    runs.sort()
    return tuple(sorted([*_leading_layers(graph, wiring.kind, runs), *runs]))


def _leading_layers(
    graph: Graph, kind: np.ndarray, runs: Sequence[tuple[int, int, int]]
) -> list[tuple[int, int, int]]:
    """Single layers right before runs that begin as theirs do and end otherwise (a dense layer
    before those with experts), each as a run of one: they are recomputed as the others are. Only
    what one tensor goes through, and leaves in the same shape, is such a layer."""
    layers = list[tuple[int, int, int]]()
    behind = 0
    for first, p, repeats in runs if graph.trainable else ():
        alike = {
            s: _same_for(kind[s:first], kind[first : first + p])
            for s in range(behind, first)
            if kind[s] == kind[first]
        }
        start = max(alike, key=lambda s: (alike[s], s), default=first)
        if alike.get(start, 0) >= MIN_SAVED and passed_through(graph, start, first):
            layers.append((start, first - start, 1))
        behind = first + p * repeats
    return layers


def _same_for(a: np.ndarray, b: np.ndarray) -> int:
    """How many nodes are alike from the beginning of both on."""
    n = min(len(a), len(b))
    other = np.flatnonzero(a[:n] != b[:n])
    return int(other[0]) if len(other) else n


def passed_through(graph: Graph, start: int, end: int) -> tuple[str, str] | None:
    """The tensor that goes through a stretch of nodes, as it enters and as it leaves: the only one
    with a gradient that they read from outside, and the only result that is read behind them, in
    one shape. None where there is more than that."""
    nodes, trained = graph.nodes[start:end], graph.reached(graph.trainable)
    results = {o for node in nodes for o in node.outputs if o}
    read = {name for node in nodes for name in node.inputs}
    entering = [n for n in read - results if n in trained and n not in graph.weights]
    leaving = [
        name
        for name in results
        if name in graph.outputs or any(k >= end for k, _ in graph.consumers.get(name, ()))
    ]
    if len(entering) != 1 or len(leaving) != 1:
        return None
    a, b = graph.tensors[entering[0]], graph.tensors[leaving[0]]
    return (a.name, b.name) if (a.shape, a.dtype) == (b.shape, b.dtype) else None


def _periods(kind: np.ndarray) -> list[int]:
    """Periods that are tried: the distances between neighbours of a kind that most nodes lie
    between, and the most frequent of those over several neighbours."""
    order = np.argsort(kind, kind="stable")
    sorted_kind = kind[order]

    def frequent(apart: Iterable[int]) -> list[tuple[int, int]]:
        """Distances between nodes of a kind with so many steps from one to the other, and how often
        they occur."""
        distances = [(order[k:] - order[:-k])[sorted_kind[k:] == sorted_kind[:-k]] for k in apart]
        values, times = np.unique(np.concatenate(distances), return_counts=True)
        return list(zip(values.tolist(), times.tolist(), strict=True))

    near = sorted(frequent((1,)), key=lambda g: (-g[0] * g[1], g[0]))[:MAX_PERIODS]
    wide = sorted(frequent(range(2, FARTHEST + 1)), key=lambda g: (-g[1], g[0]))[:WIDE_PERIODS]
    return list(dict.fromkeys(p for p, _ in (*near, *wide)))


def _runnable(match: _Match, begin: int, end: int, p: int) -> list[tuple[int, int]]:
    """Parts of a stretch of matches in which operands from elsewhere occur only in the first
    repeat, and all outside operands come from before it."""
    if end - begin < p:
        return []  # no second repeat
    within = slice(*np.searchsorted(match.entering, (begin, end)))
    entering, makers = match.entering[within], match.maker[within]
    start = max(begin, int(entering[-1]) - p + 1) if len(entering) else begin
    while start < end:
        late, shared = (
            entering[(entering >= start) & (makers >= start)],
            int(match.shared[start:end].max()),
        )
        if not len(late) and shared < start:
            break
        start = max(int(late[-1]) if len(late) else start, shared) + 1
    parts = [(start, end)] if start < end else []
    if begin < start < end:  # what lies before may hold runs of its own
        cuts = [begin, *(entering[entering < start] + 1).tolist(), start]
        for a, b in pairwise(cuts):
            if a < b:
                parts += _runnable(match, a, b, p)
    return parts


def _least_handed_on(graph: Graph, start: int, p: int, spare: int) -> int:
    """How many nodes later a run of equal length best begins, of as many as can be spared: where
    the fewest elements cross from its first repeat to its second, the earliest of such places.

    A residual Add that happens to match the one of the repeat before would otherwise begin the
    blocks, which then hand on both of its operands instead of their sum.
    """
    crossing = np.zeros(spare + 2, np.int64)  # per place, as differences
    for i in range(start, start + p + spare):
        for name in graph.nodes[i].outputs:
            readers = [k for k, _ in graph.consumers.get(name, ()) if k < start + 2 * p + spare]
            first, last = max(i + 1 - start - p, 0), min(max(readers, default=0) - start - p, spare)
            if first <= last:
                crossing[first] += graph.tensors[name].elements
                crossing[last + 1] -= graph.tensors[name].elements
    return int(np.argmin(np.cumsum(crossing)[:-1]))


def _first_apart(graph: Graph, start: int, p: int, repeats: int) -> bool:
    """Whether the first repeat makes something that is read behind the run, as no other repeat does
    (a condition that exporters merge with the last layer's): apart from it, the others are alike
    and can be a loop."""

    def read_behind(repeat: int) -> list[bool]:
        results = (o for i in range(p) for o in graph.nodes[start + repeat * p + i].outputs if o)
        readers = (graph.consumers.get(name, ()) for name in results)
        return [bool(r) and r[-1][0] >= start + p * repeats for r in readers]

    return repeats > MIN_REPEATS and read_behind(0) != read_behind(1) and any(read_behind(0))


def classes(graph: Graph, runs: Sequence[tuple[int, int, int]]) -> list[int]:
    """Per node the index of the node whose decision it shares: its counterpart in the first repeat,
    or itself."""
    shared = list(range(len(graph.nodes)))
    for first, p, repeats in runs:
        for i in range(first, first + p * repeats):
            shared[i] = first + (i - first) % p
    return shared


def hoist(graph: Graph) -> Graph:
    """The same graph with work that training does not change (masks, positions) moved to the front,
    in order, so that it does not sit inside a block.

    What is made of frozen weights and read in one place only (a decay rate of one layer) stays:
    moved, it would break its layer off the others.
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
