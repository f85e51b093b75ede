"""Sequences (Python lists) and optionals (the value itself, or None)."""

from __future__ import annotations

import numpy as np

from planner.onnx_backend.table import Call, Refused, Value, as_array, handles


def _sequence(value: Value) -> list[Value]:
    if not isinstance(value, list):
        raise Refused("a sequence is needed")
    return value


def _position(call: Call, slot: int, size: int, end: bool = False) -> int:
    """Where in a sequence; without one, the end (or the last element)."""
    position = call.get(slot)
    if position is None:
        return size if end else size - 1
    index = int(as_array(position).reshape(-1)[0])
    if not -size <= index < size + end:
        raise Refused(f"position {index} of a sequence of {size}")
    return index % size if index < 0 else index


@handles("Identity", "Optional")
def same(call: Call) -> Value:
    """The value itself; an Optional of nothing is empty."""
    return call.get(0)


@handles("OptionalHasElement")
def has_element(call: Call) -> Value:
    """Whether there is a value."""
    return np.asarray(call.get(0) is not None)


@handles("OptionalGetElement")
def get_element(call: Call) -> Value:
    """The value of an optional that has one."""
    if call.get(0) is None:
        raise Refused("an empty optional has no element")
    return call.get(0)


@handles("SequenceConstruct")
def construct(call: Call) -> Value:
    """A sequence of the inputs."""
    return (list(call.inputs),)


@handles("SequenceEmpty")
def empty(call: Call) -> Value:
    """A sequence without elements."""
    return ([],)


@handles("SequenceLength")
def length(call: Call) -> Value:
    """Number of elements."""
    return np.asarray(len(_sequence(call.get(0))), np.int64)


@handles("SequenceAt")
def at(call: Call) -> Value:
    """An element of a sequence."""
    sequence = _sequence(call.get(0))
    return sequence[_position(call, 1, len(sequence))]


@handles("SequenceInsert")
def insert(call: Call) -> Value:
    """A sequence with an element more."""
    sequence = _sequence(call.get(0))
    where = _position(call, 2, len(sequence), end=True)
    return ([*sequence[:where], call.get(1), *sequence[where:]],)


@handles("SequenceErase")
def erase(call: Call) -> Value:
    """A sequence with an element less."""
    sequence = _sequence(call.get(0))
    where = _position(call, 1, len(sequence))
    return (sequence[:where] + sequence[where + 1 :],)


@handles("SequenceMap")
def over(call: Call) -> Value:
    """A subgraph on each element; other sequences go along, tensors are the same each time."""
    body, first = call.attr("body"), _sequence(call.get(0))
    rows: list[list[Value]] = [[] for _ in body.output]
    for k, element in enumerate(first):
        others = [v[k] if isinstance(v, list) else v for v in call.inputs[1:]]
        for column, value in zip(
            rows, call.machine.subgraph(call, body, [element, *others]), strict=True
        ):
            column.append(value)
    return tuple(rows)


@handles("ConcatFromSequence")
def concat(call: Call) -> Value:
    """All elements joined along an axis, which `new_axis` makes."""
    parts = [as_array(v) for v in _sequence(call.get(0))]
    join = np.stack if call.attr("new_axis", 0) else np.concatenate
    return join(parts, axis=int(call.attr("axis")))


@handles("SplitToSequence")
def split(call: Call) -> Value:
    """Pieces along an axis, of given lengths or of one each."""
    x, sizes = as_array(call.get(0)), call.get(1)
    axis = call.axis(x.ndim)
    size = x.shape[axis]
    if sizes is None:
        pieces = np.split(x, size, axis)
        return (pieces if call.attr("keepdims", 1) else [p.squeeze(axis) for p in pieces],)
    lengths = as_array(sizes)
    cuts = (
        np.arange(int(lengths), size, int(lengths))
        if lengths.ndim == 0
        else np.cumsum(lengths)[:-1]
    )
    return (np.split(x, cuts, axis),)
