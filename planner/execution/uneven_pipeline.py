"""Pipeline stages that have no block in common: a graph cut at places in its order of nodes
(ResNet, UNet), and where to cut it.

The graph is cut into chunks, one a stage, or under the interleaved schedule V a stage: chunk number
c is on stage c mod S. Chunk c runs the nodes from its first to that of the next chunk. What those
read that was made before is handed over, by the chunks in between where the maker is further away
(a UNet's long skips): `entering[c]` is all that chunk c is given, whoever reads it. Values without
a gradient are not handed over but recomputed, so a cut is only possible where such values depend on
nothing but the batch and constants; and no cut lies between two readers of one weight, so that
every weight has one chunk.

A stage saves what its chunks are given, and runs a chunk's forward pass again in its backward pass;
the last chunk runs both at once. With f, b the seconds of a microbatch's passes through a chunk and
m microbatches on S stages a step takes

    (m V + S - 1) * (max f + max (f + b))        over chunks; the last has its f in its backward
                                                 pass alone

at most (but under gpipe the last chunk waits in the last S V - 1 ticks, and of several a stage not
all run in every tick). Where to cut: planner.search.stage_cuts.

With one chunk a stage, a stage may take two places along the mesh's axis "stage", and others one
(`stage_widths`): then two microbatches make a tick, a place of a wide stage runs one of them and a
place of the others both. A wide stage's weights lie at both of its places, which add up their
gradients once a step. Each microbatch of a tick has its path through the places (`paths`), along
which what stages hand on is sent.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from planner.errors import PlanError
from planner.execution.engine import Engine, engine_of
from planner.execution.pipeline import nodes_needed
from planner.execution.techniques import WIDEST
from planner.graph.ir import Graph
from planner.ops.loss import counted_rows
from planner.sharding.layout import Axes, Layout, ReshardTree, local_shape

if TYPE_CHECKING:
    from planner.execution.layout_flow import Flow

MOST_CHUNKS = 16
"""Chunks, of all stages together, that a graph is cut into: every device's program holds the code
of all of them."""


@dataclass(frozen=True)
class UnevenPipeline:
    """A graph cut into chunks for pipeline stages. starts: the first node of every chunk, 0 first.
    results: what the last one has to make; grad: tensors with a gradient; virtual_stages:
    chunks that a stage holds; stage_widths: places that each stage takes, () one each.
    """

    graph: Graph
    grad: frozenset[str]
    starts: tuple[int, ...]
    results: tuple[str, ...]
    virtual_stages: int = 1
    stage_widths: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return len(self.starts)

    def stage_of_chunk(self, k: int) -> int:
        """The stage that holds chunk k."""
        return k % (self.count // self.virtual_stages)

    @property
    def microbatches_per_tick(self) -> int:
        """Microbatches of a tick: as many as the widest stage has places."""
        return max(self.stage_widths, default=1)

    def microbatches_per_place(self, k: int) -> int:
        """Microbatches that a place with chunk k runs in a tick."""
        return self.microbatches_per_tick // self.stage_widths[k] if self.stage_widths else 1

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Per microbatch of a tick the place at which each stage runs it."""
        widths = self.stage_widths or (1,) * (self.count // self.virtual_stages)
        first = [sum(widths[:k]) for k in range(len(widths))]
        return tuple(
            tuple(
                place + u * w // self.microbatches_per_tick
                for place, w in zip(first, widths, strict=True)
            )
            for u in range(self.microbatches_per_tick)
        )

    @cached_property
    def _parts(self) -> tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]:
        """Per chunk its nodes and what it is given, from the last chunk back to the first."""
        graph, recomputable, parts = self.graph, batch_only(self.graph), []
        wanted: tuple[str, ...] = self.results
        for start, end in reversed(
            [*zip(self.starts, (*self.starts[1:], len(graph.nodes)), strict=True)]
        ):
            nodes = tuple(nodes_needed(graph, recomputable | set(range(start, end)), wanted))
            results = {o for i in nodes for o in graph.nodes[i].outputs if o}
            entering = {
                n
                for n in (*wanted, *(n for i in nodes for n in graph.nodes[i].inputs))
                if n in graph.producer and n not in results
            }
            wanted = tuple(sorted(entering, key=lambda n: (graph.producer[n], n)))
            parts.append((nodes, wanted))
        return tuple(reversed(parts))

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Per chunk the nodes it runs, those it recomputes included."""
        return tuple(nodes for nodes, _ in self._parts)

    @cached_property
    def entering(self) -> tuple[tuple[str, ...], ...]:
        """Per chunk the tensors that it is given, in the order they are made in."""
        return tuple(entering for _, entering in self._parts)

    def leaving(self, k: int) -> tuple[str, ...]:
        """What chunk k hands on, of the last one the results."""
        return self.entering[k + 1] if k + 1 < self.count else self.results

    def weights(self, k: int) -> tuple[str, ...]:
        """Weights that chunk k reads."""
        read = {n for i in self.nodes[k] for n in self.graph.nodes[i].inputs}
        return tuple(n for n in self.graph.weights if n in read)

    def stage_of(self, i: int) -> int:
        """The stage of node i."""
        return self.stage_of_chunk(bisect_right(self.starts, i) - 1)


def wrong_widths(widths: Sequence[int], places: int, microbatches: int, virtual: int) -> str:
    """What is wrong with the places that stages take, "" where nothing is."""
    if set(widths) != {1, WIDEST} or sum(widths) != places:
        return (
            f"widths {'+'.join(map(str, widths))} are not of 1 and {WIDEST}, both among them,"
            f" {places} in all (the stage axis)"
        )
    if microbatches % WIDEST:
        return (
            f"{microbatches} microbatches do not go by {WIDEST}, as stages of widths"
            f" {'+'.join(map(str, widths))} take them"
        )
    return (
        f"stages of {virtual} virtual stages take one position of the stage axis each"
        if virtual > 1
        else ""
    )


def uneven_pipeline_of(flow: Flow) -> UnevenPipeline | None:
    """The uneven stages of a plan, None where it has none; made once a flow."""
    if engine_of(flow.plan) is not Engine.UNEVEN:
        return None
    if "uneven stages" not in flow.memo:
        counted = counted_rows(flow.graph)
        flow.memo["uneven stages"] = UnevenPipeline(
            graph=flow.graph,
            grad=flow.grad,
            starts=(0, *flow.plan.stage_cuts),
            results=(flow.graph.outputs[0], *([counted] if counted else [])),
            virtual_stages=flow.plan.virtual_stages,
            stage_widths=flow.plan.stage_widths,
        )
    known: UnevenPipeline = flow.memo["uneven stages"]
    return known


def batch_only(graph: Graph) -> frozenset[int]:
    """Nodes that depend on the batch and on constants alone."""
    nodes, varying = set[int](), set(graph.weights)
    for i, node in enumerate(graph.nodes):
        if any(n in varying for n in node.inputs):
            varying.update(o for o in node.outputs if o)
        else:
            nodes.add(i)
    return frozenset(nodes)


def stage_flow(flow: Flow, stages: UnevenPipeline, k: int) -> Flow:
    """The flow inside chunk k: what it is given arrives in the layout that it travels in, and is
    brought from there to the chunk's readers alone.

    Raises PlanError P068 where one of them wants it as pending terms
    (planner.search.stage_cuts.unbroken).
    """
    inside, entering, leaving = frozenset(stages.nodes[k]), stages.entering[k], stages.leaving(k)
    source, trees = dict(flow.source), dict(flow.trees)
    handed = frozenset(entering)
    for name in handed:
        source[name] = handover_layout(flow, name)
    for name in dict.fromkeys(
        (*entering, *leaving, *(n for i in sorted(inside) for n in flow.graph.nodes[i].inputs if n))
    ):
        readers = flow.graph.consumers.get(name, ())
        if name in flow.graph.weights or (
            name not in handed and name not in leaving and all(i in inside for i, _ in readers)
        ):
            continue
        wanted = [flow.need[i, slot] for i, slot in readers if i in inside]
        if name in leaving:
            wanted.append(
                handover_layout(flow, name) if k + 1 < stages.count else _result_layout(flow, name)
            )
        trees[name] = _tree(flow, name, source[name], wanted)
    return replace(flow, source=source, trees=trees)


def handover_layout(flow: Flow, name: str) -> Layout:
    """The layout in which a tensor is handed from stage to stage."""
    shared = flow.trees[name].shared_layout
    return shared.stored if shared.partial else shared


def _result_layout(flow: Flow, name: str) -> Layout:
    """The layout of what the last chunk makes: the loss as it is made, the rows that count equal
    everywhere."""
    source = flow.source[name]
    return (
        source.stored if source.partial else source if name == flow.graph.outputs[0] else Layout(())
    )


def _tree(flow: Flow, name: str, source: Layout, targets: Sequence[Layout]) -> ReshardTree:
    tree = flow.cheapest_tree(name, source, targets)
    if tree is None:
        raise PlanError(
            "P068",
            f"{name!r} is read as pending terms behind a cut between pipeline stages, and nothing"
            " pending is handed on",
            help=["other cuts, or plan again"],
        )
    return tree


@dataclass(frozen=True)
class HandedTensor:
    """A tensor in the buffers between two chunks. room: mesh axes over which its buffer differs;
    first: its place there, in elements; shape: a device's piece."""

    name: str
    layout: Layout
    axes: Axes
    first: int
    shape: tuple[int, ...]


def handed_tensors(flow: Flow, stages: UnevenPipeline) -> tuple[tuple[HandedTensor, ...], ...]:
    """Per chunk what it is given, laid out one behind the other in a flat buffer for every set of
    axes that tensors differ over."""
    mesh, rows = dict(flow.plan.mesh), []
    for names in stages.entering:
        ends: dict[Axes, int] = {}
        row = []
        for name in names:
            layout = handover_layout(flow, name)
            room = differing_axes(layout, flow.plan.order)
            shape = local_shape(flow.graph.tensors[name].shape, layout, mesh)
            row.append(HandedTensor(name, layout, room, ends.get(room, 0), shape))
            ends[room] = ends.get(room, 0) + prod(shape)
        rows.append(tuple(row))
    return tuple(rows)


def buffer_elements(rows: Sequence[Sequence[HandedTensor]]) -> dict[Axes, int]:
    """Elements of every buffer between stages: what the fullest boundary needs, the others leave
    the rest empty."""
    elements: dict[Axes, int] = {}
    for tensor in (tensor for row in rows for tensor in row):
        elements[tensor.axes] = max(elements.get(tensor.axes, 0), tensor.first + prod(tensor.shape))
    return elements


def differing_axes(layout: Layout, order: Axes) -> Axes:
    """Mesh axes over which devices hold different pieces of a value, or different terms of its
    gradient, in mesh order."""
    differing = {a for dim in layout.dims for a in dim} | set(layout.grad_partial)
    return tuple(a for a in order if a in differing)
