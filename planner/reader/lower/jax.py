"""Operators that the translation of JAX functions writes (planner.reader.jax)."""

from __future__ import annotations

from typing import Any

from planner.reader.draft.shapes import ShapeError
from planner.reader.lower.call import Call, Unsupported

KERNELS = ("cudnn",)


def fused_attention(call: Call) -> None:
    """A call of a fused kernel, of queries, keys and values by heads: Attention that runs on that
    kernel whoever places the collectives."""
    if any(len(call.draft.shape(x)) != 4 for x in call.inputs[:3]):
        raise ShapeError("FusedAttention of operands that are not by heads")
    kernel = str(call.attr("kernel", ""))
    if kernel not in KERNELS:
        raise Unsupported("the kernel of a FusedAttention")
    attrs: dict[str, Any] = {
        "scale": float(call.attr("scale", 1.0)),
        "causal": int(bool(call.attr("causal", 0))),
        "kernel": kernel,
    }
    if window := int(call.attr("window", 0)):
        attrs["window"] = window
    bias = [call.arg(3)] if call.has(3) else []
    call.bind(call.emit("Attention", [*call.inputs[:3], *bias], attrs, out=call.name(0)))
