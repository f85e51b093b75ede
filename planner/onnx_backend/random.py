"""Operators that draw. Their results are right in distribution only: ONNX does not say which
numbers a seed gives."""

from __future__ import annotations

import numpy as np

from planner.onnx_backend.make import element_type
from planner.onnx_backend.table import Call, Value, as_array, handles


@handles(
    "RandomNormal",
    "RandomUniform",
    "RandomNormalLike",
    "RandomUniformLike",
    "Multinomial",
    "Bernoulli",
)
def random(call: Call) -> Value:
    """Draws from numpy's generator; `seed` makes them repeatable."""
    seed = call.attr("seed")
    rng = np.random.default_rng(None if seed is None else abs(int(np.float32(seed).view(np.int32))))
    op = call.node.op_type
    x = call.get(0)
    fallback = (
        x.dtype
        if op.endswith("Like") or op == "Bernoulli"
        else np.dtype(np.int32 if op == "Multinomial" else np.float32)
    )
    dtype = element_type(call.attr("dtype")) if "dtype" in call.attrs else fallback
    if op == "Bernoulli":
        return (rng.random(x.shape) < x.astype(np.float64)).astype(dtype)
    if op == "Multinomial":
        weights = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
        steps = np.cumsum(weights / weights.sum(1, keepdims=True), 1)
        drawn = rng.random((x.shape[0], int(call.attr("sample_size", 1))))
        return np.minimum((drawn[:, :, None] >= steps[:, None, :]).sum(2), x.shape[1] - 1).astype(
            dtype
        )
    dims = x.shape if op.endswith("Like") else tuple(call.attr("shape"))
    if "Normal" in op:
        return rng.normal(call.attr("mean", 0.0), call.attr("scale", 1.0), dims).astype(dtype)
    return rng.uniform(call.attr("low", 0.0), call.attr("high", 1.0), dims).astype(dtype)


@handles("Dropout")
def dropout(call: Call) -> Value:
    """In training mode a share of the elements becomes zero and the rest is scaled up."""
    x = as_array(call.get(0))
    ratio = (
        float(as_array(call.get(1))) if call.get(1) is not None else float(call.attr("ratio", 0.5))
    )
    live = call.opset >= 12 and call.get(2) is not None and bool(as_array(call.get(2)))
    if not live or not ratio:
        return x, np.ones(x.shape, bool)
    rng = np.random.default_rng(call.attr("seed"))
    kept = rng.random(x.shape) >= ratio
    return (x * kept / (1 - ratio)).astype(x.dtype), kept
