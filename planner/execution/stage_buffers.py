"""How uneven pipeline stages keep their weights: a flat buffer per kind of weight, as long as the
fullest stage needs, of which every device has its stage's part.

Weights are of one kind where devices of a stage hold different pieces of them over the same mesh
axes, and terms of their gradients over the same others (and where they are of one type). A buffer
is an array [stages, devices along each of those axes, elements]; the optimizer's state is cut along
its elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from planner.execution.layout_flow import Flow
from planner.execution.uneven_pipeline import UnevenPipeline
from planner.graph.ir import FLOATS
from planner.sharding.layout import STAGE, Axes, Layout, group, local_shape

PARTS = 16
"""What a device holds of a trained buffer's state divides into so many equal parts: those that are
updated one by one where state waits in the host's memory."""


@dataclass(frozen=True)
class Piece:
    """A weight in a buffer: its tensor, the number of the chunk that reads it, place (in elements),
    and the shape of a device's piece (padded where its dims are)."""

    name: str
    chunk: int
    first: int
    shape: tuple[int, ...]
    layout: Layout

    @property
    def end(self) -> int:
        """Place after its last element."""
        return self.first + prod(self.shape)


@dataclass(frozen=True)
class Buffer:
    """Weights of one kind. axes: over which devices of a stage differ; grad_partial: over which
    gradients are partial; zero_stage: over `zero_axes`; length: elements a device holds."""

    key: str
    dtype: str
    trained: bool
    axes: Axes
    grad_partial: Axes
    zero_stage: int
    zero_axes: Axes
    length: int
    pieces: tuple[Piece, ...]

    @property
    def rest(self) -> Axes:
        """Axes over which gradients are summed once they are scattered."""
        return tuple(a for a in self.grad_partial if a not in self.zero_axes)

    @property
    def dims(self) -> tuple[Axes, ...]:
        """Mesh axes of each dim."""
        return ((STAGE,), *((a,) for a in self.axes), ())

    def state_length(self, mesh: dict[str, int]) -> int:
        """Elements whose optimizer state a device holds."""
        return self.length // group(self.zero_axes, mesh)


def buffers(flow: Flow, stages: UnevenPipeline) -> tuple[Buffer, ...]:
    """The buffers of all weights of a plan, in the order in which the stages read the first of
    each. stages: the flow's, for which they are worked out once."""
    if "buffers" not in flow.memo:
        flow.memo["buffers"] = _buffers(flow, stages)
    known: tuple[Buffer, ...] = flow.memo["buffers"]
    return known


def _buffers(flow: Flow, stages: UnevenPipeline) -> tuple[Buffer, ...]:
    graph, mesh, order = flow.graph, dict(flow.plan.mesh), flow.plan.order
    kinds: dict[tuple[bool, str, Axes, Axes], list[Piece]] = {}
    ends: dict[tuple[int, tuple[bool, str, Axes, Axes]], int] = {}
    for k in range(stages.count):
        for name in stages.weights(k):
            w, trained = flow.weights[name], name in flow.grad
            cut = {a for dim in w.layout.dims for a in dim}
            kind = (
                trained,
                "float" if graph.tensors[name].dtype in FLOATS else graph.tensors[name].dtype,
                tuple(a for a in order if a in cut),
                w.grad_partial,
            )
            piece = Piece(
                name,
                k,
                ends.get((stages.stage_of_chunk(k), kind), 0),
                local_shape(graph.tensors[name].shape, w.layout, mesh),
                w.layout,
            )
            kinds.setdefault(kind, []).append(piece)
            ends[stages.stage_of_chunk(k), kind] = piece.end
    return tuple(
        _buffer(flow, kind, tuple(pieces), key)
        for (kind, pieces), key in zip(kinds.items(), _keys(list(kinds)), strict=True)
    )


def _buffer(
    flow: Flow, kind: tuple[bool, str, Axes, Axes], pieces: tuple[Piece, ...], key: str
) -> Buffer:
    trained, dtype, axes, grad_partial = kind
    plan, mesh = flow.plan, dict(flow.plan.mesh)
    zero_axes = (
        tuple(a for a in grad_partial if a in plan.zero_axes) if trained and plan.zero_stage else ()
    )
    even = group(zero_axes, mesh) * (PARTS if trained else 1)
    length = -(-max(p.end for p in pieces) // even) * even
    dtype = dtype if dtype != "float" else flow.graph.tensors[pieces[0].name].dtype
    return Buffer(
        key=key,
        dtype=dtype,
        trained=trained,
        axes=axes,
        grad_partial=grad_partial,
        zero_stage=plan.zero_stage if zero_axes else 0,
        zero_axes=zero_axes,
        length=length,
        pieces=pieces,
    )


def _keys(kinds: list[tuple[bool, str, Axes, Axes]]) -> Iterator[str]:
    """What buffers are called: what sets them apart, in a word where that does."""
    names = [
        " ".join(
            [
                "stage",
                "weights" if trained else "frozen",
                *([] if dtype == "float" else [dtype]),
                *(["over", *axes] if axes else []),
                *(["pending", *grad_partial] if grad_partial else []),
            ]
        )
        for trained, dtype, axes, grad_partial in kinds
    ]
    for k, ((trained, *_), name) in enumerate(zip(kinds, names, strict=True)):
        short = f"stage {'weights' if trained else 'frozen'}"
        yield (
            name
            if len(kinds) > 2 or short in names or trained in [kind[0] for kind in kinds[:k]]
            else short
        )
