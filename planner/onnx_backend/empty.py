"""Tensors without elements: reductions give their neutral element, element-wise operators
nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from planner.onnx_backend.table import Call, Refused, Value, as_array, handles


def _log_sum_exp(x: np.ndarray, axis: tuple[int, ...], keepdims: bool) -> np.ndarray:
    return np.log(np.sum(np.exp(x), axis=axis, keepdims=keepdims))


def _lowest(dtype: np.dtype) -> Any:
    return False if dtype.kind == "b" else np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf


def _highest(dtype: np.dtype) -> Any:
    return True if dtype.kind == "b" else np.iinfo(dtype).max if dtype.kind in "iu" else np.inf


_WAYS: dict[str, Callable[..., np.ndarray]] = {
    "ReduceSum": np.sum,
    "ReduceProd": np.prod,
    "ReduceMax": lambda x, axis, keepdims: np.max(
        x, axis=axis, keepdims=keepdims, initial=_lowest(x.dtype)
    ),
    "ReduceMin": lambda x, axis, keepdims: np.min(
        x, axis=axis, keepdims=keepdims, initial=_highest(x.dtype)
    ),
    "ReduceL1": lambda x, axis, keepdims: np.sum(np.abs(x), axis=axis, keepdims=keepdims),
    "ReduceL2": lambda x, axis, keepdims: np.sqrt(np.sum(x * x, axis=axis, keepdims=keepdims)),
    "ReduceSumSquare": lambda x, axis, keepdims: np.sum(x * x, axis=axis, keepdims=keepdims),
    "ReduceLogSum": lambda x, axis, keepdims: np.log(np.sum(x, axis=axis, keepdims=keepdims)),
    "ReduceLogSumExp": _log_sum_exp,
}


@handles(*_WAYS)
def reduce(call: Call) -> Value:
    """Sum, product, extremes and norms over axes."""
    x, axes_input = as_array(call.get(0)), call.get(1)
    if x.size:
        raise Refused(f"{call.node.op_type} of {x.dtype.name}")
    axes = list(as_array(axes_input)) if axes_input is not None else list(call.attr("axes", []))
    if not axes and call.attr("noop_with_empty_axes", 0):
        return x
    over = tuple(int(a) % x.ndim for a in axes) or tuple(range(x.ndim))
    with np.errstate(divide="ignore"):
        return np.asarray(
            _WAYS[call.node.op_type](x, axis=over, keepdims=bool(call.attr("keepdims", 1)))
        ).astype(x.dtype)


@handles("Abs", "Add", "Div", "Exp", "Log", "Max", "Min", "Mul", "Neg", "Pow", "Sqrt", "Sub")
def nothing(call: Call) -> Value:
    """No elements of the shape that operands broadcast to."""
    arrays = [as_array(v) for v in call.inputs]
    shape = np.broadcast_shapes(*(a.shape for a in arrays))
    if 0 not in shape:
        raise Refused(f"{call.node.op_type} of {arrays[0].dtype.name}")
    return np.zeros(shape, arrays[0].dtype)
