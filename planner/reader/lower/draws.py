"""Numbers that a model draws: what of them is planned is their shape and how they spread. The seed
comes in with the mode (planner.workload.train_eval_mode), as for Dropout.

An operator `..Like` keeps the tensor whose shape it takes as an operand until the batch was
followed (`planner.reader.onnx.finish`)."""

from __future__ import annotations

import math
from typing import Any

from planner.graph.ir import FLOATS
from planner.reader.draft.draft import MOST_ELEMENTS
from planner.reader.draft.shapes import ShapeError
from planner.reader.lower.call import Call, Unsupported
from planner.reader.onnx.tensors import dtype_name


def _typed(call: Call, usual: str) -> str:
    return dtype_name(call.attr("dtype")) if "dtype" in call.attrs else usual


def _draw(call: Call, op: str, spread: dict[str, float]) -> None:
    if call.op.endswith("Like"):
        shape, dtype, operands = call.shape(), _typed(call, call.dtype()), [call.arg(0)]
    else:
        shape, dtype, operands = tuple(call.attr("shape", ())), _typed(call, "float32"), []
    if min(shape, default=0) < 0 or math.prod(shape) > MOST_ELEMENTS:
        raise ShapeError(f"numbers of shape {list(shape)} are drawn, which no device memory holds")
    if dtype not in FLOATS:
        raise Unsupported(f"draws {dtype}")
    attrs: dict[str, Any] = {**spread, "dtype": dtype}
    call.result(op, operands, attrs, shape=shape)


def _uniform(call: Call) -> None:
    _draw(call, "RandomUniform", {"low": call.attr("low", 0.0), "high": call.attr("high", 1.0)})


def _normal(call: Call) -> None:
    _draw(call, "RandomNormal", {"mean": call.attr("mean", 0.0), "scale": call.attr("scale", 1.0)})


def _bernoulli(call: Call) -> None:
    """One where a number drawn from 0 to 1 is below the operand."""
    x = call.arg(0)
    attrs: dict[str, Any] = {"low": 0.0, "high": 1.0, "dtype": call.dtype()}
    share = call.emit("RandomUniform", [x], attrs, shape=call.shape())
    call.result("Cast", [call.emit("Less", [share, x])], {"to": _typed(call, call.dtype())})


DRAWS = {
    "RandomUniform": _uniform,
    "RandomUniformLike": _uniform,
    "RandomNormal": _normal,
    "RandomNormalLike": _normal,
    "Bernoulli": _bernoulli,
}
