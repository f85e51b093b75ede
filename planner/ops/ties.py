"""What a rule leaves unsaid about extents: how dims of a node's operands and results hang together
where they are no shared factor.

`D` is how a dim is named: (tensor, axis) where an operator says it, a class of equal extents where
extents are changed (planner.verify.extents).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from planner.graph.ir import Graph, Node

D = TypeVar("D")
Dim = tuple[str, int]


@dataclass(frozen=True)
class Sum(Generic[D]):
    """extent(whole) = sum of extent(parts)."""

    whole: D
    parts: tuple[D, ...]


@dataclass(frozen=True)
class Window(Generic[D]):
    """A slice along one axis: `bounds` = (start, end, step) of the whole graph."""

    source: D
    result: D
    bounds: tuple[int, int, int]


@dataclass(frozen=True)
class Shift(Generic[D]):
    """extent(result) = extent(source) + by."""

    source: D
    result: D
    by: int


@dataclass(frozen=True)
class Same(Generic[D]):
    """Dims of equal extents."""

    one: D
    other: D


@dataclass(frozen=True)
class Indexed:
    """Whole numbers that look up dims of a table. columns: the last dim of the indices holds one
    number for each dim from `axis` on; otherwise every value is one for `axis`."""

    table: str
    axis: int
    indices: str
    columns: bool = False


Tie = Sum[Dim] | Window[Dim] | Shift[Dim] | Same[Dim] | Indexed


def concatenated(node: Node, graph: Graph) -> Iterator[Tie]:
    """The result is as long as all operands."""
    axis = int(node.attrs["axis"])  # type: ignore[arg-type]
    yield Sum((node.outputs[0], axis), tuple((n, axis) for n in node.inputs))


def split_up(node: Node, graph: Graph) -> Iterator[Tie]:
    """All results are as long as the operand."""
    axis = int(node.attrs["axis"])  # type: ignore[arg-type]
    yield Sum((node.inputs[0], axis), tuple((o, axis) for o in node.outputs if o))


def sliced(node: Node, graph: Graph) -> Iterator[Tie]:
    """A window along each axis that is sliced."""
    for axis, *bounds in zip(
        *(node.attrs[k] for k in ("axes", "starts", "ends", "steps")),  # type: ignore[arg-type]
        strict=True,
    ):
        start, end, step = map(int, bounds)
        yield Window((node.inputs[0], axis), (node.outputs[0], axis), (start, end, step))


def padded(node: Node, graph: Graph) -> Iterator[Tie]:
    """So many elements more along each axis that is padded."""
    pads: tuple[int, ...] = node.attrs["pads"]  # type: ignore[assignment]
    rank = len(pads) // 2
    for axis in range(rank):
        if pads[axis] or pads[axis + rank]:
            by = pads[axis] + pads[axis + rank]
            yield Shift((node.inputs[0], axis), (node.outputs[0], axis), by)


def along_axis(node: Node, graph: Graph) -> Iterator[Tie]:
    """The result is as long as the operand along the axis."""
    axis = int(node.attrs["axis"])  # type: ignore[arg-type]
    yield Same((node.inputs[0], axis), (node.outputs[0], axis))


def masked_keys(node: Node, graph: Graph) -> Iterator[Tie]:
    """The keys of a mask are those of k."""
    if len(node.inputs) > 3 and node.inputs[3]:
        last = len(graph.tensors[node.inputs[3]].shape) - 1
        yield Same((node.inputs[3], last), (node.inputs[1], 2))


def looked_up(node: Node, graph: Graph) -> Iterator[Tie]:
    """Indices into one axis of a table."""
    yield Indexed(node.inputs[0], int(node.attrs["axis"]), node.inputs[1])  # type: ignore[arg-type]


def looked_up_in_columns(node: Node, graph: Graph) -> Iterator[Tie]:
    """Column c of the indices looks up dim batch_dims + c of the data."""
    first = int(node.attrs.get("batch_dims", 0))  # type: ignore[arg-type]
    yield Indexed(node.inputs[0], first, node.inputs[1], columns=True)
