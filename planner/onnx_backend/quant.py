"""Quantised tensors of the types that programs do not hold (eight-bit and four-bit floats, sub-byte
integers), and blocks of scales."""

from __future__ import annotations

import numpy as np

from planner.onnx_backend.make import cast, element_type
from planner.onnx_backend.table import Call, Value, as_array, handles

_RANGES = {"int4": (-8, 7), "uint4": (0, 15), "int2": (-2, 1), "uint2": (0, 3)}


def _spread(scale: np.ndarray, x: np.ndarray, axis: int, block: int) -> np.ndarray:
    """A scale or zero point against x: one number, one per index of an axis, or one per block of an
    axis."""
    if scale.ndim == 0 or scale.size == 1:
        return scale.reshape(())
    axis %= x.ndim
    if block:
        return np.take(np.repeat(scale, block, axis), range(x.shape[axis]), axis)
    return scale.reshape([-1 if k == axis else 1 for k in range(x.ndim)])


def _is_integer(dtype: np.dtype) -> bool:
    return dtype.kind in "iu" or dtype.name in _RANGES


@handles("QuantizeLinear")
def quantize(call: Call) -> Value:
    """Rounded to even after division by the scale, moved by the zero point, and held within the
    type."""
    x, scale = as_array(call.get(0)), as_array(call.get(1))
    zero = call.get(2)
    code = int(call.attr("output_dtype", 0))
    to = zero.dtype if zero is not None else element_type(code) if code else np.dtype(np.uint8)
    axis, block = int(call.attr("axis", 1)), int(call.attr("block_size", 0))
    precision = int(call.attr("precision", 0))
    wide = element_type(precision) if precision else scale.dtype
    y = (x.astype(wide) / _spread(scale, x, axis, block).astype(wide)).astype(np.float32)
    if _is_integer(to):
        low, high = _RANGES.get(to.name) or (np.iinfo(to).min, np.iinfo(to).max)
        moved = np.rint(y) + (0 if zero is None else _spread(zero.astype(np.int32), x, axis, block))
        return np.clip(moved, low, high).astype(np.int32).astype(to)
    return cast(y, to, bool(call.attr("saturate", 1)))


@handles("DequantizeLinear")
def dequantize(call: Call) -> Value:
    """(x - zero point) times the scale, in the scale's type unless another is asked for."""
    x, scale, zero = as_array(call.get(0)), as_array(call.get(1)), call.get(2)
    axis, block, code = (
        int(call.attr("axis", 1)),
        int(call.attr("block_size", 0)),
        int(call.attr("output_dtype", 0)),
    )
    wide = np.int32 if _is_integer(x.dtype) else np.float32
    moved = (
        x.astype(wide)
        if zero is None
        else x.astype(wide) - _spread(zero.astype(wide), x, axis, block)
    )
    to = element_type(code) if code else scale.dtype
    return (moved.astype(np.float32) * _spread(scale, x, axis, block).astype(np.float32)).astype(to)
