"""Operators that select, scatter or make data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from planner.graph.ir import DTYPE_BYTES, WeightRef
from planner.reader.draft.draft import FOLD_ELEMENTS, LOOK_ELEMENTS, MOST_ELEMENTS, proto_array
from planner.reader.draft.shapes import ShapeError
from planner.reader.lower.call import Call, Unsupported
from planner.reader.lower.select import added_back, non_zero, share_of
from planner.reader.onnx.tensors import dtype_name

Rule = Callable[[Call], None]


def constant_node(call: Call) -> None:
    """A Constant node: any of its value attributes."""
    draft, out = call.draft, call.name(0)
    if "value" in call.attrs:
        tensor = call.attr("value")
        call.lowering.add_initializer(call.frame, tensor, call.node.output[0])
        return
    for key, dtype in (
        ("value_int", np.int64),
        ("value_ints", np.int64),
        ("value_float", np.float32),
        ("value_floats", np.float32),
    ):
        if key in call.attrs:
            array = np.asarray(call.attr(key), dtype)
            call.lowering.add_ref(
                out, tuple(array.shape), array.dtype.name, WeightRef("inline", proto=array)
            )
            call.bind(out)
            return
    if "sparse_value" in call.attrs:
        raise Unsupported("a sparse constant")
    name = call.node.output[0]
    call.lowering.bad[name] = f"tensor {name!r} holds strings, which cannot be planned"
    call.frame.env[name] = None
    assert draft is call.draft


def _known_index(call: Call, k: int, n: int) -> np.ndarray | None:
    """Constant indices made non-negative, or None. Raises ShapeError when one is out of range."""
    indices = call.draft.value(call.arg(k), LOOK_ELEMENTS)
    if indices is None or not indices.size:
        return None
    if int(indices.min()) < -n or int(indices.max()) >= n:
        raise ShapeError(
            f"index {int(indices.max())} or {int(indices.min())} is outside a dim of {n}"
        )
    return np.where(indices < 0, indices + n, indices) if int(indices.min()) < 0 else indices


def _gather(call: Call) -> None:
    if share_of(call):
        return
    shape = call.shape()
    axis = call.axis(call.attr("axis", 0), len(shape))
    x, indices = call.arg(0), call.arg(1)
    guide = call.lowering.guide
    index = _known_index(call, 1, shape[axis])
    single = shape
    if (
        guide is not None
        and index is not None
        and guide.speaks_of_one(index, guide.single(x)[axis])
    ):
        single = guide.single(x)
    if index is None or (call.draft.is_leaf(x) and x not in call.draft.values):
        call.result("Gather", [x, indices], {"axis": axis})
        return
    flat = index.reshape(-1)
    target = (*shape[:axis], *index.shape, *shape[axis + 1 :])
    if bool((np.diff(flat) == 1).all()):  # neighbours: a slice, or the whole dim
        first = int(flat[0])
        if len(flat) == single[axis] < shape[axis] and guide is not None:
            target = guide.with_batch(x, (*single[:axis], *index.shape, *single[axis + 1 :]))
        elif len(flat) < shape[axis]:
            cut: dict[str, Any] = {
                "axes": (axis,),
                "starts": (first,),
                "ends": (first + len(flat),),
                "steps": (1,),
            }
            x = call.emit("Slice", [x], cut, out=call.name(0) if len(index.shape) == 1 else "")
        call.bind(call.emit("Reshape", [x], shape=target, out=call.name(0)))
        return
    if index is not call.draft.value(indices):
        indices = call.constant(index, "indices")
    call.result("Gather", [x, indices], {"axis": axis})


def _gather_nd(call: Call) -> None:
    data, index_shape = call.shape(), call.shape(1)
    batch = int(call.attr("batch_dims", 0))
    depth = index_shape[-1] if index_shape else 0
    if batch == 0 and 0 < depth <= len(data):
        guide = call.lowering.guide
        index = call.draft.value(call.arg(1), LOOK_ELEMENTS)
        single = data
        if (
            guide is not None
            and index is not None
            and guide.speaks_of_one(index, max(guide.single(call.arg(0)), default=1))
        ):
            single = guide.single(call.arg(0))
        target = (*index_shape[:-1], *single[depth:])
        if index is not None and index.size == math.prod(single[:depth]) * depth and index.size:
            wrapped = np.where(index < 0, index + np.asarray(single[:depth]), index).reshape(
                -1, depth
            )
            flat = np.zeros(len(wrapped), np.int64)
            for k in range(depth):
                flat = flat * single[k] + wrapped[:, k]
            if bool(
                (flat == np.arange(len(flat))).all()
            ):  # every element in order: exporters index by full grids
                call.result(
                    "Reshape",
                    [call.arg(0)],
                    shape=(
                        guide.with_batch(call.arg(0), target)
                        if guide is not None and single != data
                        else target
                    ),
                )
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
    if _writes_nothing(call) or added_back(call):
        return
    axis = call.axis(call.attr("axis", 0), len(call.shape()))
    call.result(
        "ScatterElements",
        call.inputs[:3],
        {"axis": axis, "reduction": call.attr("reduction", "none")},
    )


def _writes_nothing(call: Call) -> bool:
    """A scatter at no place at all is its operand: slices that are empty (windows that are not
    shifted along a dim, Swin 3D)."""
    if math.prod(call.shape(1)):
        return False
    call.bind(call.arg(0))
    return True


def _scatter_nd(call: Call) -> None:
    if _writes_nothing(call):
        return
    if call.attr("reduction", "none") == "none" and (writes := _along(call)) is not None:
        _written(call, *writes)
        return
    call.result("ScatterND", call.inputs[:3], {"reduction": call.attr("reduction", "none")})


def _along(call: Call) -> tuple[int, np.ndarray] | None:
    """(axis, places) where a ScatterND writes whole slices at known places of one dim: the first,
    or (indices of every element) the last."""
    shape, indices = call.shape(), call.draft.value(call.arg(1))
    if (
        indices is None
        or not shape
        or not indices.size
        or (call.draft.value(call.arg(0)) is not None and call.draft.value(call.arg(2)) is not None)
    ):
        return None
    depth = indices.shape[-1]
    if depth == 1 and indices.ndim == 2:
        axis, places = 0, indices[:, 0]
    elif depth == len(shape) and indices.shape[:-2] == shape[:-1]:
        axis, places = len(shape) - 1, indices.reshape(-1, indices.shape[-2], depth)[0, :, -1]
        grid = np.stack(np.meshgrid(*(np.arange(n) for n in shape[:-1]), places, indexing="ij"), -1)
        if not np.array_equal(grid, indices):
            return None
    else:
        return None
    places = np.where(places < 0, places + shape[axis], places)
    inside = bool(((places >= 0) & (places < shape[axis])).all())
    return (axis, places) if inside and len(np.unique(places)) == len(places) else None


def _written(call: Call, axis: int, written_at: np.ndarray) -> None:
    """Slices of one dim replaced: the others stay, each where it was, so that any other dim may
    grow."""
    shape, count = call.shape(), len(written_at)
    untouched = np.setdiff1d(np.arange(shape[axis]), written_at)
    others = (
        call.emit("Gather", [call.arg(0), call.constant(untouched, "kept")], {"axis": axis})
        if untouched.size
        else ""
    )
    parts = [call.arg(2), *([others] if others else [])]
    joined = call.emit("Concat", parts, {"axis": axis}) if others else call.arg(2)
    order = np.argsort(np.concatenate([written_at, untouched]))
    if count > 1 or others:
        call.result("Gather", [joined, call.constant(order, "order")], {"axis": axis})
    else:
        call.bind(joined)


def _shape_of(call: Call) -> None:
    shape, rank = call.shape(), len(call.shape())
    start, end = call.attr("start", 0), call.attr("end", rank)
    start, end = (max(0, v + rank) if v < 0 else min(v, rank) for v in (start, end))
    call.bind(
        call.draft.leaf(
            call.draft.fresh(call.name()), np.asarray(shape[start : max(start, end)], np.int64)
        )
    )


def _size(call: Call) -> None:
    call.bind(
        call.draft.leaf(
            call.draft.fresh(call.name()), np.asarray(math.prod(call.shape()), np.int64)
        )
    )


def _fill(call: Call, shape: tuple[int, ...], array: np.ndarray) -> None:
    """A tensor that repeats one value: known when small; a leaf when it may be a parameter; else
    made where it is run."""
    elements = math.prod(shape)
    if min(shape, default=0) < 0 or elements > MOST_ELEMENTS:
        raise ShapeError(
            f"a filled tensor of shape {list(shape)} has {elements} elements, which no device"
            " memory holds"
        )
    if array.dtype.name not in DTYPE_BYTES:
        raise Unsupported(
            f"a tensor filled with {'strings' if array.dtype.hasobject else array.dtype.name},"
            " which cannot be planned"
        )
    value = array.reshape(-1)[0]
    if array.dtype.kind not in "biu" and elements > 1:
        name = call.draft.fresh(call.name())
        call.lowering.add_ref(
            name, shape, array.dtype.name, WeightRef("inline", proto=np.broadcast_to(value, shape))
        )
        call.bind(name)
    elif elements <= FOLD_ELEMENTS:
        call.bind(call.draft.leaf(call.draft.fresh(call.name()), np.full(shape, value)))
    else:
        call.result(
            "ConstantOfShape", [], {"value": value.item(), "dtype": array.dtype.name}, shape=shape
        )


def _constant_of_shape(call: Call) -> None:
    shape = tuple(call.ints(0, "the shape"))
    value = call.attr("value")
    _fill(call, shape, proto_array(value) if value is not None else np.zeros(1, np.float32))


def _range(call: Call) -> None:
    start, limit, delta = (call.const(k, "a bound of the range").reshape(()) for k in range(3))
    if delta == 0:
        raise ShapeError("a range with step 0")
    count = max(0, math.ceil((limit.astype(object) - start.astype(object)) / delta.astype(object)))
    attrs: dict[str, Any] = {
        "start": start.item(),
        "delta": delta.item(),
        "dtype": start.dtype.name,
    }
    call.result("Range", [], attrs, shape=(count,))


def _one_hot(call: Call) -> None:
    rank = len(call.shape()) + 1
    axis = call.axis(call.attr("axis", -1), rank)
    depth, values = call.ints(1, "the depth")[0], call.const(2, "the pair of values").reshape(-1)
    attrs: dict[str, Any] = {
        "axis": axis,
        "depth": depth,
        "off_value": values[0].item(),
        "on_value": values[1].item(),
    }
    call.result("OneHot", [call.arg(0)], {**attrs, "dtype": values.dtype.name})


def _top_k(call: Call) -> None:
    shape = call.shape()
    k = call.ints(1, "k")[0] if call.opset >= 10 else int(call.attr("k"))
    flags: dict[str, Any] = {
        "largest": int(call.attr("largest", 1)),
        "sorted": int(call.attr("sorted", 1)),
    }
    call.results(
        "TopK",
        [call.arg(0)],
        {"k": k, "axis": call.axis(call.attr("axis", -1), len(shape)), **flags},
    )


def _eye_like(call: Call) -> None:

    rows, columns = call.shape()
    if rows * columns > FOLD_ELEMENTS:
        raise Unsupported("an identity matrix this large")
    dtype = dtype_name(call.attr("dtype")) if "dtype" in call.attrs else call.dtype()
    eye = np.eye(rows, columns, call.attr("k", 0)).astype(dtype)
    call.bind(call.draft.leaf(call.draft.fresh(call.name()), eye))


def _non_zero(call: Call) -> None:
    if call.draft.value(call.arg(0)) is None and non_zero(call):
        return
    values = call.const(0, "its output size")
    call.bind(
        call.draft.leaf(call.draft.fresh(call.name()), np.asarray(np.nonzero(values), np.int64))
    )


INDEX: dict[str, Rule] = {
    "Constant": constant_node,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "GatherElements": _gather_elements,
    "ScatterElements": _scatter_elements,
    "Scatter": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Shape": _shape_of,
    "Size": _size,
    "ConstantOfShape": _constant_of_shape,
    "Range": _range,
    "OneHot": _one_hot,
    "TopK": _top_k,
    "EyeLike": _eye_like,
    "NonZero": _non_zero,
}
