"""Fused attention in an optimised program: cuDNN's and Splash's custom calls, and how many FLOPs
they stand for.

Predictions count the products of attention over the keys that blocks of queries meet in place of
the kernel, two forward and five backward: `counted_flops`. What a kernel does is less where it
skips keys that a causal mask or a window leaves out (Splash in whole blocks), and more where it
makes scores anew: `done_flops`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from costmodels.hardware.device import AttentionPass
from planner.ops.attention_pairs import Positions
from planner.verify.hlo.text import Computation, Instruction, Shape

_CUDNN = re.compile(r'custom_call_target="__cudnn\$fmha\w*?Softmax(Backward)?"')
_BIAS = re.compile(r'custom_call_target="__cudnn\$fmha\w*?Bias')
_CAUSAL = re.compile(r'"mask_type": ?"[A-Z_]*CAUSAL')
_CUDNN_WINDOW = re.compile(r'"sliding_window_length": ?"?(\d+)')
_SPLASH_WINDOW = re.compile(r"\bwindow_(\d+)\b")
"""Programs name the window around the kernel, whose text does not tell it."""
_VALUES = re.compile(r"\bvalues_(\d+)\b")
"""So they do the width of values that the kernel gets with zeros behind them."""
_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dkv|dq)")
_COUNTED = {"fwd": (1, 1), "dkv": (2, 1), "dq": (1, 1)}
"""Products that a Splash kernel is counted with: over the width of keys, over that of values. The
backward pass's five are shared out between its two kernels, each of which makes scores anew."""
_DONE = {"fwd": (1, 1), "dkv": (2, 2), "dq": (2, 1)}
"""Products that it does: scores, and the gradient of weights, in both kernels of the backward
pass."""


@dataclass(frozen=True)
class FusedAttention:
    """One kernel. name: cudnn or splash; of: the pass; flops: those of one run."""

    name: str
    of: AttentionPass
    counted_flops: int
    done_flops: int


def fused_attention(instruction: Instruction, computation: Computation) -> FusedAttention | None:
    """The kernel that an instruction is, None for any other instruction."""
    if instruction.opcode != "custom-call":
        return None
    if match := _CUDNN.search(instruction.attributes):
        return _cudnn(bool(match.group(1)), instruction, computation.operand_shapes(instruction))
    if match := _SPLASH.search(instruction.name):
        return _splash(match.group(1), instruction, computation.operand_shapes(instruction))
    return None


def _cudnn(backward: bool, instruction: Instruction, operands: tuple[Shape, ...]) -> FusedAttention:
    """Operands begin with queries [B, S, H, D], keys [B, T, G, D] and values [B, T, G, E]."""
    (batch, queries, heads, width), keys, values = (operands[k].dims for k in range(3))
    over_keys, over_values = (3, 2) if backward else (1, 1)
    value_width = _value_width(instruction, values[3])
    window = _CUDNN_WINDOW.search(instruction.attributes)
    positions = Positions(
        bool(_CAUSAL.search(instruction.attributes)), int(window.group(1)) if window else 0
    )
    counted, done = (
        2 * batch * heads * (over_keys * width + over_values * e) for e in (value_width, values[3])
    )
    masked = bool(_BIAS.search(instruction.attributes))
    return FusedAttention(
        "cudnn",
        AttentionPass(backward, width, masked),
        counted * positions.computed_pairs(queries, keys[1], True),
        done * positions.pairs(queries, keys[1]),
    )


def _value_width(instruction: Instruction, padded_width: int) -> int:
    """Elements of a value of the program, where its kernel is given wider ones with zeros."""
    match = _VALUES.search(instruction.attributes)
    return int(match.group(1)) if match else padded_width


def _splash(kernel: str, instruction: Instruction, operands: tuple[Shape, ...]) -> FusedAttention:
    """The first operands of numbers with a fraction are queries [.., S, D], keys [.., T, D] and
    values [.., T, E]. Of 32-bit integers beside them two are the segments of queries and of keys,
    and one the positions of queries, of a causal mask in a window or not."""
    queries, keys, values = [
        x.dims for x in operands if x.dtype in ("bf16", "f16", "f32") and len(x.dims) > 2
    ][:3]
    causal = sum(x.dtype == "s32" for x in operands) % 2 == 1
    window = _SPLASH_WINDOW.search(instruction.attributes)
    positions = Positions(causal, int(window.group(1)) if window else 0)

    def products(over_keys: int, over_values: int, width: int) -> int:
        widths = over_keys * queries[-1] + over_values * width
        return 2 * math.prod(queries[:-2]) * widths

    value_width = _value_width(instruction, values[-1])
    pairs = positions.computed_pairs(queries[-2], keys[-2], True)
    counted = products(*_COUNTED[kernel], value_width) * pairs
    done = products(*_DONE[kernel], values[-1]) * positions.splash_pairs(queries[-2], keys[-2])
    return FusedAttention("splash", AttentionPass(kernel != "fwd", queries[-1]), counted, done)
