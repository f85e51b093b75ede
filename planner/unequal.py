"""Pipeline stages that have no block in common: a graph cut at places in its order of nodes (ResNet, UNet), and where to cut it.

The graph is cut into chunks, one a stage, or under the interleaved schedule V a stage: chunk number c is on stage c mod S. Chunk c runs the nodes from its first
to that of the next chunk. What those read that was made before is handed over, by the chunks in between where the maker is further away (a UNet's long
skips): `entering[c]` is all that chunk c is given, whoever reads it. Values without a gradient are not handed over but made again, so a cut is only
possible where such values depend on nothing but the batch and constants; and no cut lies between two readers of one weight, so that every weight has one chunk.

A stage keeps what its chunks are given, and runs a chunk's forward pass again in its backward pass; the last chunk runs both at once. With f, b the seconds of a
microbatch's passes through a chunk and m microbatches on S stages a step takes

    (m V + S - 1) * (max f + max (f + b))        over chunks; the last has its f in its backward pass alone

at most (but under gpipe the last chunk waits in the last S V - 1 ticks, and of several a stage not all run in every tick), so cuts are sought that make the largest
2 f + b (of the last chunk f + b) small without handing much over: for some limits of what may be handed over the best cuts (dynamic programming over the
possible places), and of those the cheapest with the messages counted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from planner.errors import PlanError
from planner.layout import STAGE, Axes, Layout, Tree, distribute, local_shape
from planner.pipeline import Passing, needed
from planner.rule import Split

if TYPE_CHECKING:
    from planner.base import Base
    from planner.flow import Flow, Plan
    from planner.graph import Graph
    from planner.price import Pricer

MOST_CHUNKS = 16
"""Chunks, of all stages together, that a graph is cut into: every device's program holds the code of all of them."""
LIMITS = 8
"""Limits of what may be handed over that are tried."""


@dataclass(frozen=True)
class Stages:
    """A graph cut into chunks for pipeline stages. starts: the first node of every chunk, 0 first. results: what the last one has to make; grad: tensors with a
    gradient; virtual: chunks that a stage holds."""

    graph: Graph
    grad: frozenset[str]
    starts: tuple[int, ...]
    results: tuple[str, ...]
    virtual: int = 1

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return len(self.starts)

    def stage(self, k: int) -> int:
        """The stage that holds chunk k."""
        return k % (self.count // self.virtual)

    @cached_property
    def _parts(self) -> tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]:
        """Per chunk its nodes and what it is given, found from the last one on."""
        graph, again, found = self.graph, batch_only(self.graph), []
        wanted: tuple[str, ...] = self.results
        for start, end in reversed([*zip(self.starts, (*self.starts[1:], len(graph.nodes)), strict=True)]):
            nodes = tuple(needed(graph, again | set(range(start, end)), wanted))
            made = {o for i in nodes for o in graph.nodes[i].outputs if o}
            given = {n for n in (*wanted, *(n for i in nodes for n in graph.nodes[i].inputs)) if n in graph.producer and n not in made}
            wanted = tuple(sorted(given, key=lambda n: (graph.producer[n], n)))
            found.append((nodes, wanted))
        return tuple(reversed(found))

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Per chunk the nodes it runs, those it makes again included."""
        return tuple(nodes for nodes, _ in self._parts)

    @property
    def entering(self) -> tuple[tuple[str, ...], ...]:
        """Per chunk the tensors that it is given, in the order they are made in."""
        return tuple(given for _, given in self._parts)

    def leaving(self, k: int) -> tuple[str, ...]:
        """What chunk k hands on, of the last one the results."""
        return self.entering[k + 1] if k + 1 < self.count else self.results

    def weights(self, k: int) -> tuple[str, ...]:
        """Weights that chunk k reads."""
        read = {n for i in self.nodes[k] for n in self.graph.nodes[i].inputs}
        return tuple(n for n in self.graph.weights if n in read)

    def holder(self, i: int) -> int:
        """The stage of node i."""
        return self.stage(bisect_right(self.starts, i) - 1)


def stages_of(flow: Flow) -> Stages | None:
    """The unequal stages of a plan, None where it has none."""
    from planner.training import counted_rows

    if not flow.plan.cuts:
        return None
    counted = counted_rows(flow.graph)
    return Stages(flow.graph, flow.grad, (0, *flow.plan.cuts), (flow.graph.outputs[0], *([counted] if counted else [])), flow.plan.virtual)


def batch_only(graph: Graph) -> frozenset[int]:
    """Nodes that depend on the batch and on constants alone."""
    found, other = set[int](), set(graph.weights)
    for i, node in enumerate(graph.nodes):
        if any(n in other for n in node.inputs):
            other.update(o for o in node.outputs if o)
        else:
            found.add(i)
    return frozenset(found)


def stage_flow(flow: Flow, stages: Stages, k: int) -> Flow:
    """The flow inside chunk k: what it is given arrives in the layout that it travels in, and is brought from there to the chunk's readers alone."""
    own, entering, leaving = frozenset(stages.nodes[k]), stages.entering[k], stages.leaving(k)
    source, trees = dict(flow.source), dict(flow.trees)
    given = frozenset(entering)
    for name in given:
        source[name] = travels(flow, name)
    for name in dict.fromkeys((*entering, *leaving, *(n for i in sorted(own) for n in flow.graph.nodes[i].inputs if n))):
        places = flow.graph.consumers.get(name, ())
        if name in flow.graph.weights or (name not in given and name not in leaving and all(i in own for i, _ in places)):
            continue
        asked = [flow.need[i, slot] for i, slot in places if i in own]
        if name in leaving:
            asked.append(travels(flow, name) if k + 1 < stages.count else _result(flow, name))
        trees[name] = _tree(flow, name, source[name], asked)
    return replace(flow, source=source, trees=trees)


def travels(flow: Flow, name: str) -> Layout:
    """The layout in which a tensor is handed from stage to stage."""
    hub = flow.trees[name].hub
    return hub.stored if hub.partial else hub


def _result(flow: Flow, name: str) -> Layout:
    """The layout of what the last chunk makes: the loss as it is made, the rows that count equal everywhere."""
    source = flow.source[name]
    return source.stored if source.partial else source if name == flow.graph.outputs[0] else Layout(())


def _tree(flow: Flow, name: str, source: Layout, targets: Sequence[Layout]) -> Tree:
    tree = distribute(flow.graph.tensors[name].shape, source, tuple(dict.fromkeys(targets)), flow.plan.mesh, name in flow.grad)
    if tree is None:
        raise AssertionError(f"{name}: no way from {source.spell()}")
    return tree


@dataclass(frozen=True)
class Handed:
    """A tensor in the buffers between two chunks. room: mesh axes over which its buffer differs; first: its place there, in elements; shape: a device's piece."""

    name: str
    layout: Layout
    room: Axes
    first: int
    shape: tuple[int, ...]


def handed(flow: Flow, stages: Stages) -> tuple[tuple[Handed, ...], ...]:
    """Per chunk what it is given, laid out one behind the other in a flat buffer for every set of axes that tensors differ over."""
    mesh, rows = dict(flow.plan.mesh), []
    for names in stages.entering:
        ends: dict[Axes, int] = {}
        row = []
        for name in names:
            layout = travels(flow, name)
            room = differs(layout, flow.plan.order)
            shape = local_shape(flow.graph.tensors[name].shape, layout, mesh)
            row.append(Handed(name, layout, room, ends.get(room, 0), shape))
            ends[room] = ends.get(room, 0) + prod(shape)
        rows.append(tuple(row))
    return tuple(rows)


def rooms(rows: Sequence[Sequence[Handed]]) -> dict[Axes, int]:
    """Elements of every buffer between stages: what the fullest boundary needs, the others leave the rest empty."""
    found: dict[Axes, int] = {}
    for h in (h for row in rows for h in row):
        found[h.room] = max(found.get(h.room, 0), h.first + prod(h.shape))
    return found


def differs(layout: Layout, order: Axes) -> Axes:
    """Mesh axes over which devices hold different pieces of a value, or different terms of its gradient, in mesh order."""
    own = {a for dim in layout.dims for a in dim} | set(layout.fan)
    return tuple(a for a in order if a in own)


def places(base: Base) -> dict[int, float]:
    """Nodes before which the graph may be cut -> how many elements are handed over there (module docstring)."""
    graph, again, n = base.graph, batch_only(base.graph), len(base.graph.nodes)
    barred, over = np.zeros(n + 1, np.int64), np.zeros(n + 1)
    for name, readers in graph.consumers.items():
        ends = [i for i, _ in readers]
        made = graph.producer.get(name, -1)
        low = min(ends) if name in graph.weights else made
        high = max(ends, default=low)
        if high <= low or low < 0 or made in again:
            continue
        sums = over if name in base.grad and name not in graph.weights else barred
        size = graph.tensors[name].elements if sums is over else 1
        sums[low + 1] += size
        sums[high + 1] -= size
    crossing, closed = np.cumsum(over), np.cumsum(barred)
    return {i: float(crossing[i]) for i in range(1, n) if not closed[i] and i not in again and crossing[i] > 0}


def with_cuts(base: Base, plan: Plan, pricer: Pricer) -> Plan:
    """The plan, where it has stages and no repeated block is dealt out over them with its graph cut. Raises PlanError P068 where it cannot be."""
    unequal = plan.stages > 1 and base.dealt is None
    passing = Passing(plan.stages, plan.microbatches, plan.schedule, plan.virtual)
    return replace(plan, cuts=cuts(base, passing, pricer)) if unequal else plan


def cuts(base: Base, passing: Passing, pricer: Pricer) -> tuple[int, ...]:
    """First nodes of the chunks after the first (module docstring). base: of one microbatch. Raises PlanError P068 where there are too few places."""
    from planner.kernels import kernel_times

    chunks = passing.stages * passing.virtual
    key = ("cuts", id(base), chunks, passing.ticks)
    if key not in pricer.memo:
        over = base.places
        both, twice, known = [0.0], [0.0], dict[int, tuple[float, float]]()
        devices = prod(pricer.sizes.values())
        for i in range(len(base.graph.nodes)):
            c = base.shared[i]
            if c not in known:
                known[c] = kernel_times(base, c, Split(), pricer)
            f, b = (x / devices for x in known[c])
            both.append(both[-1] + f + b)
            twice.append(twice[-1] + 2 * f + b)
        best = None
        for limit in _limits(over, chunks):
            found = _balanced([i for i in over if over[i] <= limit], np.array(both), np.array(twice), chunks)
            if found is not None:
                sent = max(over[i] for i in found[1]) * pricer.itemsize("float32") / devices
                price = passing.ticks * (found[0] + 2 * pricer.collective_s("collective-permute", (STAGE,), sent))
                best = min(best, (price, found[1])) if best else (price, found[1])
        if best is None:
            raise PlanError("P068", f"{chunks} chunks of the model for pipeline stages are not possible: it can be cut at {len(over)} places", help=["fewer stages"])
        pricer.memo[key] = base, best[1]  # the base is kept, so that its id stays unique
    kept: tuple[int, ...] = pricer.memo[key][1]
    return kept


def _limits(over: Mapping[int, float], chunks: int) -> Iterator[float]:
    """Some sizes of what is handed over, the least first."""
    sizes = sorted(over.values())
    if len(sizes) >= chunks - 1:
        yield from sorted({sizes[round(q)] for q in np.linspace(chunks - 2, len(sizes) - 1, LIMITS)})


def _balanced(where: list[int], both: np.ndarray, twice: np.ndarray, chunks: int) -> tuple[float, tuple[int, ...]] | None:
    """(seconds of the longest chunk, first nodes of all but the first) such that it is the shortest; both, twice: seconds of all nodes before each."""
    if len(where) < chunks - 1:
        return None
    at = np.array(where)
    begin = [np.zeros(len(at), np.int64)]
    longest = twice[at]  # of the chunks before a cut, at their best
    for _ in range(chunks - 2):
        table = np.maximum(longest[:, None], twice[at][None, :] - twice[at][:, None])
        table[np.tril_indices(len(at))] = np.inf
        begin.append(np.argmin(table, 0))
        longest = table[begin[-1], np.arange(len(at))]
    whole = np.maximum(longest, both[-1] - both[at])
    k = int(np.argmin(whole))
    if not np.isfinite(whole[k]):
        return None
    found, seconds = [], float(whole[k])
    for row in reversed(begin):
        found.append(int(at[k]))
        k = int(row[k])
    return seconds, tuple(reversed(found))
