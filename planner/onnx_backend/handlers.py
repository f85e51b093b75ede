"""All handlers: importing a family enters its handlers in the table."""

from __future__ import annotations

from planner.onnx_backend import (
    control,
    empty,
    make,
    ml,
    quant,
    random,
    resize,
    select,
    sequence,
    shape,
    text,
    training,
    vision,
)
from planner.onnx_backend.table import HANDLERS, Handler

FAMILIES = (
    control,
    empty,
    make,
    ml,
    quant,
    random,
    resize,
    select,
    sequence,
    shape,
    text,
    training,
    vision,
)


def handler_of(domain: str, op: str, opset: int) -> Handler | None:
    """The handler that serves an operator at an opset, or None."""
    serving = [h for since, h in HANDLERS.get((domain, op), []) if since <= opset]
    return serving[-1] if serving else None


def handled() -> tuple[tuple[str, str], ...]:
    """(domain, operator) of everything in the table, sorted."""
    return tuple(sorted(HANDLERS))
