"""numpy values of canonical operators whose operands are all constant.

Used for shape arithmetic, masks and position tables. Integer semantics are ONNX's: division
truncates toward zero, Cast wraps. `evaluate` returns None for operators that are not worth folding;
they stay in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from planner.reader.draft.shapes import Type

Arrays = Sequence[Any]


def numpy_dtype(name: str) -> np.dtype:
    """numpy dtype of a dtype name of `planner.graph.ir.DTYPE_BYTES` (bfloat16, float8 and int4 come
    from ml_dtypes)."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def evaluate(
    op: str, attrs: Mapping[str, Any], arrays: Arrays, types: Sequence[Type]
) -> list[np.ndarray] | None:
    """Values of all outputs (with the given types), or None when this operator is not folded."""
    rule = _RULES.get(op)
    if rule is None:
        return None
    with np.errstate(all="ignore"):
        try:
            results = rule(attrs, arrays, types)
        except (IndexError, ValueError, TypeError, ZeroDivisionError, OverflowError):
            return None  # e.g. an index out of range: the operator stays, and fails where it is run
        outputs = list(results) if isinstance(results, (list, tuple)) else [results]
        return [
            _as(np.asarray(o), numpy_dtype(t[1])).reshape(t[0])
            for o, t in zip(outputs, types, strict=False)
        ]


def _as(a: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Values in another type; of complex ones for a real type the real part."""
    return (
        a.real if a.dtype.kind == "c" and dtype.kind != "c" and dtype != np.bool_ else a
    ).astype(dtype, copy=False)


def _div(attrs: Mapping[str, Any], a: Arrays, types: Sequence[Type]) -> np.ndarray:
    x, y = a
    if x.dtype.kind not in "iu":
        return x / y
    if not np.all(y):
        raise ZeroDivisionError
    quotient = np.abs(x) // np.abs(y)
    return np.where((x < 0) != (y < 0), -quotient, quotient)


def _mod(attrs: Mapping[str, Any], a: Arrays, types: Sequence[Type]) -> np.ndarray:
    if a[1].dtype.kind in "iu" and not np.all(a[1]):
        raise ZeroDivisionError
    return np.fmod(*a) if attrs.get("fmod") else np.mod(*a)


def _cast(attrs: Mapping[str, Any], a: Arrays, types: Sequence[Type]) -> np.ndarray:
    to = numpy_dtype(attrs["to"])
    return a[0] != 0 if to == np.bool_ else _as(a[0], to)


def _clip(attrs: Mapping[str, Any], a: Arrays, types: Sequence[Type]) -> np.ndarray:
    return np.clip(a[0], attrs.get("min"), attrs.get("max"))


def _matmul(attrs: Mapping[str, Any], a: Arrays, types: Sequence[Type]) -> np.ndarray:
    x = np.swapaxes(a[0], -1, -2) if attrs.get("trans_a") else a[0]
    y = np.swapaxes(a[1], -1, -2) if attrs.get("trans_b") else a[1]
    return x @ y


def _reduce(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def rule(attrs: Mapping[str, Any], a: Arrays, types: Sequence[Type]) -> np.ndarray:
        return function(a[0], axis=tuple(attrs["axes"]), keepdims=bool(attrs["keepdims"]))

    return rule


def _slice(attrs: Mapping[str, Any], a: Arrays, types: Sequence[Type]) -> np.ndarray:
    index = [slice(None)] * a[0].ndim
    for axis, start, end, step in zip(
        attrs["axes"], attrs["starts"], attrs["ends"], attrs["steps"], strict=True
    ):
        index[axis] = slice(start, None if step < 0 and end < 0 else end, step)
    return a[0][tuple(index)]


def _split(attrs: Mapping[str, Any], a: Arrays, types: Sequence[Type]) -> list[np.ndarray]:
    ends = np.cumsum([t[0][attrs["axis"]] for t in types])[:-1]
    return np.split(a[0], ends, axis=attrs["axis"])


def _pad(attrs: Mapping[str, Any], a: Arrays, types: Sequence[Type]) -> np.ndarray:
    if attrs["mode"] != "constant" or min(attrs["pads"]) < 0:
        raise ValueError
    n = a[0].ndim
    return np.pad(
        a[0],
        list(zip(attrs["pads"][:n], attrs["pads"][n:], strict=True)),
        constant_values=attrs["value"],
    )


def _gather_nd(attrs: Mapping[str, Any], a: Arrays, types: Sequence[Type]) -> np.ndarray:
    if attrs["batch_dims"]:
        raise ValueError
    return a[0][tuple(np.moveaxis(a[1], -1, 0))]


def _scatter_nd(attrs: Mapping[str, Any], a: Arrays, types: Sequence[Type]) -> np.ndarray:
    if attrs["reduction"] != "none":
        raise ValueError
    written = a[0].copy()
    written[tuple(np.moveaxis(a[1], -1, 0))] = a[2]
    return written


def _cumsum(attrs: Mapping[str, Any], a: Arrays, types: Sequence[Type]) -> np.ndarray:
    axis = attrs["axis"]
    x = np.flip(a[0], axis) if attrs["reverse"] else a[0]
    sums = np.cumsum(x, axis=axis, dtype=x.dtype)
    if attrs["exclusive"]:
        sums = sums - x
    return np.flip(sums, axis) if attrs["reverse"] else sums


def _one_hot(attrs: Mapping[str, Any], a: Arrays, types: Sequence[Type]) -> np.ndarray:
    depth, axis = attrs["depth"], attrs["axis"]
    index = a[0].astype(np.int64)
    index = np.where(index < 0, index + depth, index)
    hot = np.expand_dims(index, axis) == np.arange(depth).reshape(
        [-1 if k == axis else 1 for k in range(index.ndim + 1)]
    )
    return np.where(hot, attrs["on_value"], attrs["off_value"])


def _arg(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def rule(attrs: Mapping[str, Any], a: Arrays, types: Sequence[Type]) -> np.ndarray:
        return function(a[0], axis=attrs["axis"])

    return rule


def _top_k(attrs: Mapping[str, Any], a: Arrays, types: Sequence[Type]) -> list[np.ndarray]:
    axis, k = attrs["axis"], attrs["k"]
    order = np.argsort(-a[0] if attrs["largest"] else a[0], axis=axis, kind="stable")
    index = np.take(order, range(k), axis=axis)
    return [np.take_along_axis(a[0], index, axis), index]


def _softmax(attrs: Mapping[str, Any], a: Arrays, types: Sequence[Type]) -> np.ndarray:
    e = np.exp(a[0] - a[0].max(axis=attrs["axis"], keepdims=True))
    return e / e.sum(axis=attrs["axis"], keepdims=True)


def _range(attrs: Mapping[str, Any], a: Arrays, types: Sequence[Type]) -> np.ndarray:
    return (attrs["start"] + np.arange(types[0][0][0]) * attrs["delta"]).astype(
        numpy_dtype(types[0][1])
    )


def _simple(function: Any) -> Callable[..., Any]:
    return lambda attrs, a, types: function(*a)


_RULES: dict[str, Callable[..., Any]] = {
    **{
        name: _simple(f)
        for name, f in {
            "Add": np.add,
            "Sub": np.subtract,
            "Mul": np.multiply,
            "Pow": lambda x, y: np.power(x, y).astype(x.dtype),
            "Max": np.maximum,
            "Min": np.minimum,
            "Equal": np.equal,
            "Less": np.less,
            "LessOrEqual": np.less_equal,
            "Greater": np.greater,
            "GreaterOrEqual": np.greater_equal,
            "And": np.logical_and,
            "Or": np.logical_or,
            "Xor": np.logical_xor,
            "Not": np.logical_not,
            "Neg": np.negative,
            "Abs": np.abs,
            "Sqrt": np.sqrt,
            "Exp": np.exp,
            "Log": np.log,
            "Sin": np.sin,
            "Cos": np.cos,
            "Tanh": np.tanh,
            "Floor": np.floor,
            "Ceil": np.ceil,
            "Round": np.rint,
            "Sign": np.sign,
            "Relu": lambda x: np.maximum(x, 0),
            "IsNaN": np.isnan,
            "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
            "Reciprocal": lambda x: 1 / x,
            "Where": np.where,
            "Identity": lambda x: x,
        }.items()
    },
    "Div": _div,
    "Mod": _mod,
    "Cast": _cast,
    "Clip": _clip,
    "MatMul": _matmul,
    "Softmax": _softmax,
    "ReduceSum": _reduce(np.sum),
    "ReduceMean": _reduce(np.mean),
    "ReduceMax": _reduce(np.max),
    "ReduceMin": _reduce(np.min),
    "ReduceProd": _reduce(np.prod),
    "Reshape": lambda attrs, a, types: a[0],
    "Expand": lambda attrs, a, types: np.broadcast_to(a[0], types[0][0]),
    "Transpose": lambda attrs, a, types: a[0].transpose(attrs["perm"]),
    "Concat": lambda attrs, a, types: np.concatenate(a, axis=attrs["axis"]),
    "Split": _split,
    "Slice": _slice,
    "Pad": _pad,
    "Tile": lambda attrs, a, types: np.tile(a[0], attrs["repeats"]),
    "Trilu": lambda attrs, a, types: (np.triu if attrs["upper"] else np.tril)(a[0], attrs["k"]),
    "Gather": lambda attrs, a, types: np.take(a[0], a[1], axis=attrs["axis"]),
    "GatherElements": lambda attrs, a, types: np.take_along_axis(
        a[0], a[1].astype(np.int64), attrs["axis"]
    ),
    "GatherND": _gather_nd,
    "ScatterND": _scatter_nd,
    "CumSum": _cumsum,
    "OneHot": _one_hot,
    "TopK": _top_k,
    "ArgMax": _arg(np.argmax),
    "ArgMin": _arg(np.argmin),
    "Range": _range,
    "ConstantOfShape": lambda attrs, a, types: np.full(
        types[0][0], attrs["value"], numpy_dtype(types[0][1])
    ),
}
