"""All handlers: importing a family enters its handlers in the table."""

from __future__ import annotations

import planner.onnx_backend.control
import planner.onnx_backend.empty
import planner.onnx_backend.make
import planner.onnx_backend.ml
import planner.onnx_backend.quant
import planner.onnx_backend.random
import planner.onnx_backend.resize
import planner.onnx_backend.select
import planner.onnx_backend.sequence
import planner.onnx_backend.shape
import planner.onnx_backend.text
import planner.onnx_backend.training
import planner.onnx_backend.vision  # noqa: F401
from planner.onnx_backend.table import HANDLERS, Handler


def handler_of(domain: str, op: str, opset: int) -> Handler | None:
    """The handler that serves an operator at an opset, or None."""
    serving = [h for since, h in HANDLERS.get((domain, op), []) if since <= opset]
    return serving[-1] if serving else None
