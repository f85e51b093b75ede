"""Sequences of tensors: known lists while a model is read, gone when it is read.

A sequence is a name that stands for draft tensors (`Lowering.sequences`). Exporters write them for
`chunk` and `split`, and for rows that a loop appends to (EmbeddingBag); the loop is then unrolled.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from planner.reader.draft.shapes import ShapeError
from planner.reader.lower.call import Call, Unsupported

MOST = 1 << 16


def _given(call: Call) -> tuple[str, ...]:
    try:
        return call.lowering.sequences[call.arg(0)]
    except KeyError:
        raise TypeError("its operand is no sequence") from None


def _bind(call: Call, parts: tuple[str, ...]) -> None:
    if len(parts) > MOST:
        raise ShapeError(f"a sequence of {len(parts)} tensors")
    if any(part in call.lowering.sequences for part in parts):
        raise Unsupported("a sequence of sequences")
    name = call.draft.fresh(call.name(0) or "sequence")
    while name in call.lowering.sequences:
        name += "_"
    call.lowering.sequences[name] = parts
    call.bind(name)


def _place(call: Call, k: int, most: int) -> int:
    place = int(call.const(k, "the place in a sequence").reshape(-1)[0])
    if not -most <= place < max(most, 1):
        raise ShapeError(f"place {place} of a sequence of {most}")
    return place % most if most else 0


def _construct(call: Call) -> None:
    _bind(call, tuple(call.inputs))


def _insert(call: Call) -> None:
    parts = _given(call)
    place = len(parts)
    if call.has(2):
        place = int(call.const(2, "the place in a sequence").reshape(-1)[0])
        if not -len(parts) <= place <= len(parts):
            raise ShapeError(f"place {place} of a sequence of {len(parts)}")
        place += len(parts) * (place < 0)  # before the last at -1, as a list inserts
    _bind(call, (*parts[:place], call.arg(1), *parts[place:]))


def _erase(call: Call) -> None:
    parts = _given(call)
    place = _place(call, 1, len(parts)) if call.has(1) else len(parts) - 1
    _bind(call, (*parts[:place], *parts[place + 1 :]))


def _at(call: Call) -> None:
    parts = _given(call)
    if not parts:
        raise ShapeError("an empty sequence has no tensors")
    call.bind(parts[_place(call, 1, len(parts))])


def _length(call: Call) -> None:
    call.bind(call.constant(np.asarray(len(_given(call)), np.int64), "length"))


def _concat(call: Call) -> None:
    parts = _given(call)
    if not parts:
        raise ShapeError("an empty sequence cannot be joined")
    new = bool(call.attr("new_axis", 0))
    rank = len(call.draft.shape(parts[0])) + new
    axis = call.axis(call.attr("axis"), rank)
    if new:
        shapes = [call.draft.shape(p) for p in parts]
        parts = tuple(
            call.emit("Reshape", [p], shape=(*s[:axis], 1, *s[axis:]))
            for p, s in zip(parts, shapes, strict=True)
        )
    call.result("Concat", parts, {"axis": axis})


def _split(call: Call) -> None:
    shape = call.shape()
    axis = call.axis(call.attr("axis", 0), len(shape))
    extent = shape[axis]
    keep = True
    if not call.has(1):
        sizes, keep = [1] * extent, bool(call.attr("keepdims", 1))
    else:
        sizes = call.ints(1, "the list of sizes")
        if not call.shape(1):  # one size for all
            if sizes[0] < 1:
                raise ShapeError(f"parts of {sizes[0]}")
            sizes = [min(sizes[0], extent - k) for k in range(0, extent, sizes[0])]
    if min(sizes, default=0) < 0 or sum(sizes) != extent or len(sizes) > MOST:
        raise ShapeError(f"parts {sizes[:8]} of a dim of {extent}")
    shapes = [(*shape[:axis], n, *shape[axis + 1 :]) for n in sizes]
    names = [f"{call.name(0)}/{k}" for k in range(len(sizes))]
    parts = (
        [call.arg(0)]
        if len(sizes) == 1
        else call.draft.add_many("Split", [call.arg(0)], {"axis": axis}, names, shapes)
    )
    if not keep:
        parts = [
            call.emit("Reshape", [p], shape=(*shape[:axis], *shape[axis + 1 :])) for p in parts
        ]
    _bind(call, tuple(parts))


SEQUENCE: dict[str, Callable[[Call], None]] = {
    "SequenceEmpty": lambda call: _bind(call, ()),
    "SequenceConstruct": _construct,
    "SequenceInsert": _insert,
    "SequenceErase": _erase,
    "SequenceAt": _at,
    "SequenceLength": _length,
    "ConcatFromSequence": _concat,
    "SplitToSequence": _split,
}
