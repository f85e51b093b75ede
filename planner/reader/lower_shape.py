"""Operators that move, select or make data: constant operands become attributes or output shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from planner.graph import AttrValue, WeightRef
from planner.reader.draft import FOLD_ELEMENTS, LOOK_ELEMENTS, MOST_ELEMENTS, proto_array
from planner.reader.infer import ShapeError, broadcast
from planner.reader.lower import Call, Unsupported, constant_node

Rule = Callable[[Call], None]


def reshape_target(shape: tuple[int, ...], wanted: list[int], allow_zero: bool) -> tuple[int, ...]:
    """The static target of an ONNX Reshape: 0 copies a dim, one -1 is inferred. Raises ShapeError."""
    out = list(wanted)
    for k, n in enumerate(out):
        if n == 0 and not allow_zero:
            if k >= len(shape):
                raise ShapeError(f"cannot reshape {list(shape)} to {wanted}")
            out[k] = shape[k]
    if min(out, default=0) < -1 or out.count(-1) > 1:
        raise ShapeError(f"cannot reshape {list(shape)} to {wanted}")
    if -1 in out:
        rest = math.prod(n for n in out if n != -1)
        if rest == 0 or math.prod(shape) % rest:
            raise ShapeError(f"cannot reshape {list(shape)} to {wanted}")
        out[out.index(-1)] = math.prod(shape) // rest
    return tuple(out)


def _reshape(call: Call) -> None:
    wanted = call.ints(1, "the target shape") if call.has(1) else list(call.attr("shape", []))
    call.result("Reshape", [call.arg(0)], shape=reshape_target(call.shape(), wanted, bool(call.attr("allowzero", 0))))


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
    drop = {k for k, n in enumerate(shape) if n == 1} if axes is None else {call.axis(a, len(shape)) for a in axes}
    if any(shape[k] != 1 for k in drop):
        raise ShapeError(f"cannot squeeze dims {sorted(drop)} of {list(shape)}")
    call.result("Reshape", [call.arg(0)], shape=tuple(n for k, n in enumerate(shape) if k not in drop))


def _unsqueeze(call: Call) -> None:
    shape, axes = call.shape(), _axes(call) or []
    rank = len(shape) + len(axes)
    new = {call.axis(a, rank) for a in axes}
    left = iter(shape)
    call.result("Reshape", [call.arg(0)], shape=tuple(1 if k in new else next(left) for k in range(rank)))


def _transpose(call: Call) -> None:
    rank = len(call.shape())
    call.result("Transpose", [call.arg(0)], {"perm": tuple(call.attr("perm", list(range(rank))[::-1]))})


def _expand(call: Call) -> None:
    call.result("Expand", [call.arg(0)], shape=broadcast(call.shape(), tuple(call.ints(1, "the target shape"))))


def _concat(call: Call) -> None:
    axis = call.axis(call.attr("axis", 1), len(call.shape()))
    kept = [x for x in call.inputs if call.draft.shape(x)[axis]] or call.inputs[:1]  # empty caches add nothing
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
        size = -(-shape[axis] // parts)
        sizes = [min(size, shape[axis] - k * size) for k in range(parts)]
    if len(sizes) != outputs or min(sizes) < 0:
        raise ShapeError(f"{len(sizes)} parts {sizes} for {outputs} outputs")
    if outputs == 1:
        call.bind(call.arg(0))
        return
    call.results("Split", [call.arg(0)], {"axis": axis}, shape=[(*shape[:axis], n, *shape[axis + 1 :]) for n in sizes])


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
    call.result("Slice", [call.arg(0)], {"axes": axes_, "starts": starts_, "ends": ends_, "steps": steps_})


def _pad(call: Call) -> None:
    shape, rank = call.shape(), len(call.shape())
    if call.opset < 11:
        pads, value = list(call.attr("pads", call.attr("paddings", []))), call.attr("value", 0.0)
    else:
        pads = call.ints(1, "the list of pads")
        given = call.draft.scalar(call.arg(2)) if call.has(2) else 0.0
        if given is None:
            raise Unsupported("the padding value is computed from run-time data")
        value = given
    if call.has(3):
        axes = [call.axis(a, rank) for a in call.ints(3, "the list of axes")]
        full = [0] * (2 * rank)
        for k, axis in enumerate(axes):
            full[axis], full[rank + axis] = pads[k], pads[len(axes) + k]
        pads = full
    if len(pads) != 2 * rank:
        raise ShapeError(f"{len(pads)} pads for shape {list(shape)}")
    x = call.arg(0)
    crop = [(k, max(0, -pads[k]), shape[k] + min(0, pads[rank + k])) for k in range(rank) if pads[k] < 0 or pads[rank + k] < 0]
    if crop:
        axes_, starts, ends = (tuple(column) for column in zip(*crop, strict=True))
        x = call.emit("Slice", [x], {"axes": axes_, "starts": starts, "ends": ends, "steps": (1,) * len(crop)})
    grow = tuple(max(0, p) for p in pads)
    if any(grow):
        x = call.emit("Pad", [x], {"pads": grow, "mode": call.attr("mode", "constant"), "value": float(value)}, out=call.name(0))
    call.bind(x)


def _tile(call: Call) -> None:
    if call.opset < 6:
        raise Unsupported("Tile before opset 6")
    call.result("Tile", [call.arg(0)], {"repeats": tuple(call.ints(1, "the list of repeats"))})


def _trilu(call: Call) -> None:
    k = call.ints(1, "the diagonal")[0] if call.has(1) else 0
    call.result("Trilu", [call.arg(0)], {"k": k, "upper": int(call.attr("upper", 1))})


def _known_index(call: Call, k: int, n: int) -> np.ndarray | None:
    """Constant indices made non-negative, or None. Raises ShapeError when one is out of range."""
    found = call.draft.value(call.arg(k), LOOK_ELEMENTS)
    if found is None or not found.size:
        return None
    if int(found.min()) < -n or int(found.max()) >= n:
        raise ShapeError(f"index {int(found.max())} or {int(found.min())} is outside a dim of {n}")
    return np.where(found < 0, found + n, found) if int(found.min()) < 0 else found


def _gather(call: Call) -> None:
    shape = call.shape()
    axis = call.axis(call.attr("axis", 0), len(shape))
    x, indices = call.arg(0), call.arg(1)
    index = _known_index(call, 1, shape[axis])
    if index is None or call.draft.is_leaf(x) and x not in call.draft.values:
        call.result("Gather", [x, indices], {"axis": axis})
        return
    flat = index.reshape(-1)
    out = (*shape[:axis], *index.shape, *shape[axis + 1 :])
    if bool((np.diff(flat) == 1).all()):  # neighbours: a slice, or the whole dim
        first = int(flat[0])
        if len(flat) < shape[axis]:
            cut: dict[str, AttrValue] = {"axes": (axis,), "starts": (first,), "ends": (first + len(flat),), "steps": (1,)}
            x = call.emit("Slice", [x], cut, out=call.name(0) if len(index.shape) == 1 else "")
        call.bind(call.emit("Reshape", [x], shape=out, out=call.name(0)))
        return
    if index is not call.draft.value(indices):
        indices = call.constant(index, "indices")
    call.result("Gather", [x, indices], {"axis": axis})


def _gather_nd(call: Call) -> None:
    data, index_shape = call.shape(), call.shape(1)
    batch = int(call.attr("batch_dims", 0))
    depth = index_shape[-1] if index_shape else 0
    if batch == 0 and 0 < depth <= len(data):
        out = (*index_shape[:-1], *data[depth:])
        index = call.draft.value(call.arg(1), LOOK_ELEMENTS)
        if index is not None and index.size == math.prod(data[:depth]) * depth and index.size:
            wrapped = np.where(index < 0, index + np.asarray(data[:depth]), index).reshape(-1, depth)
            flat = np.zeros(len(wrapped), np.int64)
            for k in range(depth):
                flat = flat * data[k] + wrapped[:, k]
            if bool((flat == np.arange(len(flat))).all()):  # every element in order: exporters index by full grids
                call.result("Reshape", [call.arg(0)], shape=out)
                return
        if depth == 1:
            index_name = call.emit("Reshape", [call.arg(1)], shape=index_shape[:-1])
            call.result("Gather", [call.arg(0), index_name], {"axis": 0})
            return
    call.result("GatherND", [call.arg(0), call.arg(1)], {"batch_dims": batch})


def _gather_elements(call: Call) -> None:
    axis = call.axis(call.attr("axis", 0), len(call.shape()))
    call.result("GatherElements", [call.arg(0), call.arg(1)], {"axis": axis})


def _scatter_elements(call: Call) -> None:
    axis = call.axis(call.attr("axis", 0), len(call.shape()))
    call.result("ScatterElements", call.inputs[:3], {"axis": axis, "reduction": call.attr("reduction", "none")})


def _scatter_nd(call: Call) -> None:
    call.result("ScatterND", call.inputs[:3], {"reduction": call.attr("reduction", "none")})


def _shape_of(call: Call) -> None:
    shape, rank = call.shape(), len(call.shape())
    start, end = call.attr("start", 0), call.attr("end", rank)
    start, end = (max(0, v + rank) if v < 0 else min(v, rank) for v in (start, end))
    call.bind(call.draft.leaf(call.draft.fresh(call.name()), np.asarray(shape[start : max(start, end)], np.int64)))


def _size(call: Call) -> None:
    call.bind(call.draft.leaf(call.draft.fresh(call.name()), np.asarray(math.prod(call.shape()), np.int64)))


def _fill(call: Call, shape: tuple[int, ...], array: np.ndarray) -> None:
    """A tensor that repeats one value: known when small; a leaf when it may be a parameter; else made where it is run."""
    elements = math.prod(shape)
    if min(shape, default=0) < 0 or elements > MOST_ELEMENTS:
        raise ShapeError(f"a filled tensor of shape {list(shape)} has {elements} elements, which no device memory holds")
    value = array.reshape(-1)[0]
    if array.dtype.kind not in "biu" and elements > 1:
        name = call.draft.fresh(call.name())
        call.lowering.add_ref(name, shape, array.dtype.name, WeightRef("inline", proto=np.broadcast_to(value, shape)))
        call.bind(name)
    elif elements <= FOLD_ELEMENTS:
        call.bind(call.draft.leaf(call.draft.fresh(call.name()), np.full(shape, value)))
    else:
        call.result("ConstantOfShape", [], {"value": value.item(), "dtype": array.dtype.name}, shape=shape)


def _constant_of_shape(call: Call) -> None:
    shape = tuple(call.ints(0, "the shape"))
    value = call.attr("value")
    _fill(call, shape, proto_array(value) if value is not None else np.zeros(1, np.float32))


def _range(call: Call) -> None:
    start, limit, delta = (call.const(k, "a bound of the range").reshape(()) for k in range(3))
    if delta == 0:
        raise ShapeError("a range with step 0")
    count = max(0, math.ceil((limit.astype(object) - start.astype(object)) / delta.astype(object)))
    attrs: dict[str, AttrValue] = {"start": start.item(), "delta": delta.item(), "dtype": start.dtype.name}
    call.result("Range", [], attrs, shape=(count,))


def _one_hot(call: Call) -> None:
    rank = len(call.shape()) + 1
    axis = call.axis(call.attr("axis", -1), rank)
    depth, values = call.ints(1, "the depth")[0], call.const(2, "the pair of values").reshape(-1)
    attrs: dict[str, AttrValue] = {"axis": axis, "depth": depth, "off_value": values[0].item(), "on_value": values[1].item()}
    call.result("OneHot", [call.arg(0)], {**attrs, "dtype": values.dtype.name})


def _top_k(call: Call) -> None:
    shape = call.shape()
    k = call.ints(1, "k")[0] if call.opset >= 10 else int(call.attr("k"))
    flags: dict[str, AttrValue] = {"largest": int(call.attr("largest", 1)), "sorted": int(call.attr("sorted", 1))}
    call.results("TopK", [call.arg(0)], {"k": k, "axis": call.axis(call.attr("axis", -1), len(shape)), **flags})


def _eye_like(call: Call) -> None:
    from planner.reader.tensors import dtype_name

    rows, columns = call.shape()
    if rows * columns > FOLD_ELEMENTS:
        raise Unsupported("an identity matrix this large")
    dtype = dtype_name(call.attr("dtype")) if "dtype" in call.attrs else call.dtype()
    eye = np.eye(rows, columns, call.attr("k", 0)).astype(dtype)
    call.bind(call.draft.leaf(call.draft.fresh(call.name()), eye))


def _non_zero(call: Call) -> None:
    found = call.const(0, "its output size")
    call.bind(call.draft.leaf(call.draft.fresh(call.name()), np.asarray(np.nonzero(found), np.int64)))


def _if(call: Call) -> None:
    condition: Any = call.draft.value(call.arg(0))
    if condition is None:
        raise Unsupported("a branch whose condition is run-time data")
    call.lowering.branch(call, call.attr("then_branch" if bool(condition.reshape(-1)[0]) else "else_branch"))


def _depth_space(call: Call) -> None:
    """DepthToSpace and SpaceToDepth are a Reshape, a Transpose and a Reshape."""
    b, c, h, w = call.shape()
    k, x = int(call.attr("blocksize")), call.arg(0)
    if call.op == "SpaceToDepth":
        x = call.emit("Reshape", [x], shape=(b, c, h // k, k, w // k, k))
        x = call.emit("Transpose", [x], {"perm": (0, 3, 5, 1, 2, 4)})
        call.result("Reshape", [x], shape=(b, c * k * k, h // k, w // k))
    elif call.attr("mode", "DCR") == "DCR":
        x = call.emit("Reshape", [x], shape=(b, k, k, c // (k * k), h, w))
        x = call.emit("Transpose", [x], {"perm": (0, 3, 4, 1, 5, 2)})
        call.result("Reshape", [x], shape=(b, c // (k * k), h * k, w * k))
    else:
        x = call.emit("Reshape", [x], shape=(b, c // (k * k), k, k, h, w))
        x = call.emit("Transpose", [x], {"perm": (0, 1, 4, 2, 5, 3)})
        call.result("Reshape", [x], shape=(b, c // (k * k), h * k, w * k))


SHAPE: dict[str, Rule] = {
    "Constant": constant_node, "Reshape": _reshape, "Flatten": _flatten, "Squeeze": _squeeze, "Unsqueeze": _unsqueeze,
    "Transpose": _transpose, "Expand": _expand, "Concat": _concat, "Split": _split, "Slice": _slice, "Pad": _pad, "Tile": _tile,
    "Trilu": _trilu, "Gather": _gather, "GatherND": _gather_nd, "GatherElements": _gather_elements,
    "ScatterElements": _scatter_elements, "Scatter": _scatter_elements, "ScatterND": _scatter_nd, "Shape": _shape_of, "Size": _size,
    "ConstantOfShape": _constant_of_shape, "Range": _range, "OneHot": _one_hot, "TopK": _top_k, "EyeLike": _eye_like,
    "NonZero": _non_zero, "If": _if, "DepthToSpace": _depth_space, "SpaceToDepth": _depth_space,
}  # fmt: skip
