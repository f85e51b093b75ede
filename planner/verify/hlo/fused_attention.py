"""Fused attention in an optimised program: cuDNN's and Splash's custom calls, and how many FLOPs
they stand for.

Predictions count the products of attention over all keys, two forward and five backward, whatever
a mask leaves out and whatever the kernel makes twice: `counted_flops`. What a kernel does is less
where it skips keys that a causal mask hides, and more where it makes scores anew: `done_flops`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from planner.verify.hlo.text import Computation, Instruction, Shape

_CUDNN = re.compile(r'custom_call_target="__cudnn\$fmha\w*?Softmax(Backward)?"')
_CAUSAL = re.compile(r'"mask_type": ?"[A-Z_]*CAUSAL')
_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dkv|dq)")
_COUNTED = {"fwd": (1, 1), "dkv": (2, 1), "dq": (1, 1)}
"""Products that a Splash kernel is counted with: over the width of keys, over that of values. The
backward pass's five are shared out between its two kernels, each of which makes scores anew."""
_DONE = {"fwd": (1, 1), "dkv": (2, 2), "dq": (2, 1)}
"""Products that it does: scores, and the gradient of weights, in both kernels of the backward
pass."""


@dataclass(frozen=True)
class FusedAttention:
    """One kernel. name: cudnn or splash; backward: whether it is of the backward pass; flops:
    those of one run."""

    name: str
    backward: bool
    counted_flops: int
    done_flops: int


def fused_attention(instruction: Instruction, computation: Computation) -> FusedAttention | None:
    """The kernel that an instruction is, None for any other instruction."""
    if instruction.opcode != "custom-call":
        return None
    if found := _CUDNN.search(instruction.attributes):
        return _cudnn(bool(found.group(1)), instruction, computation.operand_shapes(instruction))
    if found := _SPLASH.search(instruction.name):
        return _splash(found.group(1), computation.operand_shapes(instruction))
    return None


def _cudnn(backward: bool, instruction: Instruction, operands: tuple[Shape, ...]) -> FusedAttention:
    """Operands begin with queries [B, S, H, D], keys [B, T, G, D] and values [B, T, G, E]."""
    (batch, queries, heads, width), keys, values = (operands[k].dims for k in range(3))
    over_keys, over_values = (3, 2) if backward else (1, 1)
    widths = over_keys * width + over_values * values[3]
    counted = 2 * batch * heads * queries * keys[1] * widths
    causal = bool(_CAUSAL.search(instruction.attributes))
    return FusedAttention("cudnn", backward, counted, _seen(counted, queries, keys[1], causal))


def _splash(kernel: str, operands: tuple[Shape, ...]) -> FusedAttention:
    """The first operands of numbers with a fraction are queries [.., S, D], keys [.., T, D] and
    values [.., T, E]; integers beside them describe the mask, and a causal one is the only one that
    programs have."""
    queries, keys, values = [
        x.dims for x in operands if x.dtype in ("bf16", "f16", "f32") and len(x.dims) > 2
    ][:3]
    causal = any(x.dtype.startswith("s") for x in operands)

    def products(over_keys: int, over_values: int) -> int:
        widths = over_keys * queries[-1] + over_values * values[-1]
        return 2 * math.prod(queries[:-1]) * keys[-2] * widths

    done = _seen(products(*_DONE[kernel]), queries[-2], keys[-2], causal)
    return FusedAttention("splash", kernel != "fwd", products(*_COUNTED[kernel]), done)


def _seen(flops: int, queries: int, keys: int, causal: bool) -> int:
    """FLOPs of the pairs that a causal mask leaves: query i sees the keys up to i."""
    if not causal:
        return flops
    full = min(queries, keys)
    return flops * (full * (full + 1) + 2 * (queries - full) * keys) // (2 * queries * keys)
