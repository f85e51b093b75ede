"""Operators that move, select or make data: constant operands become attributes or output
shapes."""

from __future__ import annotations

import math
from collections.abc import Callable

from planner.reader.draft.shapes import ShapeError, broadcast
from planner.reader.lower.call import Call, Unsupported

Rule = Callable[[Call], None]


def reshape_target(shape: tuple[int, ...], wanted: list[int], allow_zero: bool) -> tuple[int, ...]:
    """The static target of an ONNX Reshape: 0 copies a dim, one -1 is inferred. Raises
    ShapeError."""
    target = list(wanted)
    for k, n in enumerate(target):
        if n == 0 and not allow_zero:
            if k >= len(shape):
                raise ShapeError(f"cannot reshape {list(shape)} to {wanted}")
            target[k] = shape[k]
    if min(target, default=0) < -1 or target.count(-1) > 1:
        raise ShapeError(f"cannot reshape {list(shape)} to {wanted}")
    if -1 in target:
        rest = math.prod(n for n in target if n != -1)
        if rest == 0 or math.prod(shape) % rest:
            raise ShapeError(f"cannot reshape {list(shape)} to {wanted}")
        target[target.index(-1)] = math.prod(shape) // rest
    return tuple(target)


def _reshape(call: Call) -> None:
    wanted = call.ints(1, "the target shape") if call.has(1) else list(call.attr("shape", []))
    allow_zero, guide = bool(call.attr("allowzero", 0)), call.lowering.guide
    if guide is None or any(n > 0 and n % guide.batch == 0 for n in wanted):
        target = reshape_target(call.shape(), wanted, allow_zero)
    else:  # a target for one sample
        target = guide.with_batch(
            call.arg(0), reshape_target(guide.single(call.arg(0)), wanted, allow_zero)
        )
    call.result("Reshape", [call.arg(0)], shape=target)


def _flatten(call: Call) -> None:
    shape, rank = call.shape(), len(call.shape())
    axis = call.attr("axis", 1)
    axis = rank if axis == rank else call.axis(axis, rank)
    call.result("Reshape", [call.arg(0)], shape=(math.prod(shape[:axis]), math.prod(shape[axis:])))


def _axes(call: Call) -> list[int] | None:
    if call.has(1):
        return call.ints(1, "the list of axes")
    return list(call.attr("axes")) if "axes" in call.attrs else None


def _squeeze(call: Call) -> None:
    shape, axes = call.shape(), _axes(call)
    drop = (
        {k for k, n in enumerate(shape) if n == 1}
        if axes is None
        else {call.axis(a, len(shape)) for a in axes}
    )
    if any(shape[k] != 1 for k in drop):
        raise ShapeError(f"cannot squeeze dims {sorted(drop)} of {list(shape)}")
    call.result(
        "Reshape", [call.arg(0)], shape=tuple(n for k, n in enumerate(shape) if k not in drop)
    )


def _unsqueeze(call: Call) -> None:
    shape, axes = call.shape(), _axes(call) or []
    rank = len(shape) + len(axes)
    new = {call.axis(a, rank) for a in axes}
    if len(new) != len(axes):
        raise ShapeError(f"axes {axes} repeat")
    sizes = iter(shape)
    call.result(
        "Reshape", [call.arg(0)], shape=tuple(1 if k in new else next(sizes) for k in range(rank))
    )


def _transpose(call: Call) -> None:
    rank = len(call.shape())
    call.result(
        "Transpose", [call.arg(0)], {"perm": tuple(call.attr("perm", list(range(rank))[::-1]))}
    )


def _expand(call: Call) -> None:
    call.result(
        "Expand",
        [call.arg(0)],
        shape=broadcast(call.shape(), tuple(call.ints(1, "the target shape"))),
    )


def _concat(call: Call) -> None:
    axis = call.axis(call.attr("axis", 1), len(call.shape()))
    kept = [x for x in call.inputs if call.draft.shape(x)[axis]] or call.inputs[
        :1
    ]  # empty caches add nothing
    if call.lowering.guide is not None:
        kept = call.lowering.guide.agreeing(kept, axis)
    call.result("Concat", kept, {"axis": axis})


def _split(call: Call) -> None:
    shape = call.shape()
    axis = call.axis(call.attr("axis", 0), len(shape))
    outputs = len(call.node.output)
    if call.has(1):
        sizes = call.ints(1, "the list of sizes")
    elif "split" in call.attrs:
        sizes = list(call.attr("split"))
    else:
        parts = call.attr("num_outputs", outputs)
        if parts != outputs:
            raise ShapeError(f"{parts} parts for {outputs} outputs")
        size = -(-shape[axis] // parts)
        sizes = [min(size, shape[axis] - k * size) for k in range(parts)]
    if len(sizes) != outputs or min(sizes) < 0:
        raise ShapeError(f"{len(sizes)} parts {sizes} for {outputs} outputs")
    if outputs == 1:
        call.bind(call.arg(0))
        return
    call.results(
        "Split",
        [call.arg(0)],
        {"axis": axis},
        shape=[(*shape[:axis], n, *shape[axis + 1 :]) for n in sizes],
    )


def _slice(call: Call) -> None:
    shape, rank = call.shape(), len(call.shape())
    if call.opset < 10:
        starts, ends = list(call.attr("starts")), list(call.attr("ends"))
        axes = list(call.attr("axes", range(len(starts))))
        steps = [1] * len(starts)
    else:
        starts, ends = call.ints(1, "the start of a slice"), call.ints(2, "the end of a slice")
        axes = call.ints(3, "the list of axes") if call.has(3) else list(range(len(starts)))
        steps = call.ints(4, "the list of steps") if call.has(4) else [1] * len(starts)
    cuts = []
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        axis = call.axis(axis, rank)
        n = shape[axis]
        if step == 0:
            raise ShapeError("a slice with step 0")
        start, end = (start + n if start < 0 else start), (end + n if end < 0 else end)
        low, high = (0, n) if step > 0 else (-1, n - 1)
        start, end = min(max(start, low if step > 0 else 0), high), min(max(end, low), high)
        if (step > 0 and end < start) or (step < 0 and end > start):
            end = start
        if (start, end, step) != (0, n, 1):
            cuts.append((axis, start, end, step))
    cuts.sort()
    if not cuts:
        call.bind(call.arg(0))
        return
    axes_, starts_, ends_, steps_ = (tuple(column) for column in zip(*cuts, strict=True))
    call.result(
        "Slice", [call.arg(0)], {"axes": axes_, "starts": starts_, "ends": ends_, "steps": steps_}
    )


def _pad(call: Call) -> None:
    shape, rank = call.shape(), len(call.shape())
    if call.opset < 11:
        pads, value = list(call.attr("pads", call.attr("paddings", []))), call.attr("value", 0.0)
    else:
        pads = call.ints(1, "the list of pads")
        constant = call.draft.scalar(call.arg(2)) if call.has(2) else 0.0
        if constant is None:
            raise Unsupported("the padding value is computed from run-time data")
        value = constant
    if call.has(3):
        axes = [call.axis(a, rank) for a in call.ints(3, "the list of axes")]
        full = [0] * (2 * rank)
        for k, axis in enumerate(axes):
            full[axis], full[rank + axis] = pads[k], pads[len(axes) + k]
        pads = full
    if len(pads) != 2 * rank:
        raise ShapeError(f"{len(pads)} pads for shape {list(shape)}")
    padded = [n + pads[k] + pads[rank + k] for k, n in enumerate(shape)]
    if min(padded, default=0) < 0:
        raise ShapeError(f"pads {pads} make {padded} of {list(shape)}")
    x = call.arg(0)
    crop = [
        (k, max(0, -pads[k]), shape[k] + min(0, pads[rank + k]))
        for k in range(rank)
        if pads[k] < 0 or pads[rank + k] < 0
    ]
    if crop:
        axes_, starts, ends = (tuple(column) for column in zip(*crop, strict=True))
        x = call.emit(
            "Slice", [x], {"axes": axes_, "starts": starts, "ends": ends, "steps": (1,) * len(crop)}
        )
    grow = tuple(max(0, p) for p in pads)
    if any(grow):
        x = call.emit(
            "Pad",
            [x],
            {"pads": grow, "mode": call.attr("mode", "constant"), "value": float(value)},
            out=call.name(0),
        )
    call.bind(x)


def _tile(call: Call) -> None:
    if call.opset < 6:
        raise Unsupported("Tile before opset 6")
    call.result("Tile", [call.arg(0)], {"repeats": tuple(call.ints(1, "the list of repeats"))})


def _trilu(call: Call) -> None:
    k = call.ints(1, "the diagonal")[0] if call.has(1) else 0
    call.result("Trilu", [call.arg(0)], {"k": k, "upper": int(call.attr("upper", 1))})


def _depth_space(call: Call) -> None:
    """DepthToSpace and SpaceToDepth are a Reshape, a Transpose and a Reshape."""
    b, c, h, w = call.shape()
    k, x = int(call.attr("blocksize")), call.arg(0)
    depth_first = call.attr("mode", "DCR") == "DCR"
    if call.op == "SpaceToDepth":
        x = call.emit("Reshape", [x], shape=(b, c, h // k, k, w // k, k))
        x = call.emit(
            "Transpose", [x], {"perm": (0, 3, 5, 1, 2, 4) if depth_first else (0, 1, 3, 5, 2, 4)}
        )
        call.result("Reshape", [x], shape=(b, c * k * k, h // k, w // k))
    elif depth_first:
        x = call.emit("Reshape", [x], shape=(b, k, k, c // (k * k), h, w))
        x = call.emit("Transpose", [x], {"perm": (0, 3, 4, 1, 5, 2)})
        call.result("Reshape", [x], shape=(b, c // (k * k), h * k, w * k))
    else:
        x = call.emit("Reshape", [x], shape=(b, c // (k * k), k, k, h, w))
        x = call.emit("Transpose", [x], {"perm": (0, 1, 4, 2, 5, 3)})
        call.result("Reshape", [x], shape=(b, c // (k * k), h * k, w * k))


SHAPE: dict[str, Rule] = {
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Transpose": _transpose,
    "Expand": _expand,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Pad": _pad,
    "Tile": _tile,
    "Trilu": _trilu,
    "DepthToSpace": _depth_space,
    "SpaceToDepth": _depth_space,
}
