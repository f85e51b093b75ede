"""Dot FLOPs of an optimised program: 2 M N K of every dot and convolution, loops multiplied, per
device.

    dot            2 * (elements of the result) * (product of the contracted dims of the left
                   operand)
    convolution    2 * (batch and feature elements of the result) * (input features per group) *
                   product over spatial dims of taps

`taps` counts pairs (output position, window position). Pairs that fall into the holes of a dilated
base multiply nothing and are not counted, so that the gradient of a strided convolution costs what
its forward does; padding is counted, as in M N K. Batched products that TPU writes as convolutions
have a dim of the batch in place of a spatial one: each of its outputs meets the base once, and
beyond that padding alone, which is not counted. Library calls (cuBLAS, cuDNN, oneDNN, Eigen) count
as what they compute. Fused attention (cuDNN's, Splash) counts as the products of attention over all
keys, as predictions do: two forward and five backward, whatever a mask leaves out and whatever the
kernel makes twice; the kernel for all experts' rows as the rows of a balanced router. Work that is
no dot or convolution is not counted: XLA may turn a product with a vector into multiply and sum.
"""

from __future__ import annotations

import math
import re

from planner.verify.hlo.expert_kernels import expert_kernel
from planner.verify.hlo.fused_attention import fused_attention
from planner.verify.hlo.text import Computation, Instruction, Shape, parse
from planner.verify.hlo.trip_counts import walk

_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")
CUDNN = re.compile(
    r'custom_call_target="__cudnn\$conv(Forward|BackwardInput|BackwardFilter|BiasActivationForward)'
)
LIBRARY_DOT = re.compile(
    r'custom_call_target="(__onednn\$matmul|__cublas\$(?:gemm|lt\$matmul)[^"]*|__triton\$gemm)"'
)


def dot_flops(text: str) -> int:
    """2 M N K summed over every dot and convolution of a compiled module, trip counts multiplied
    (unknown ones count once).

    Raises:
        ValueError: not HLO.
    """
    return sum(flops for _, flops in dots(text))


def dots(text: str) -> tuple[tuple[Instruction, int], ...]:
    """Every dot and convolution that totals count, in program order, with its FLOPs of a whole
    step. Raises ValueError as `dot_flops`."""

    def select(
        instruction: Instruction, computation: Computation
    ) -> tuple[Instruction, int] | None:
        flops = flops_of(instruction, computation)
        return None if flops is None else (instruction, flops)

    sites = walk(parse(text), select, lambda dot: dot[1])
    return tuple(
        (site.selected[0], site.selected[1] * site.count) for site in sites if site.heaviest
    )


def flops_of(instruction: Instruction, computation: Computation) -> int | None:
    """2 M N K of one run of a dot, convolution, library call or fused attention; None of anything
    else, fusions with a dot inside included."""
    opcode = instruction.opcode
    if opcode == "dot":
        left = computation.operand_shapes(instruction)[0]
        contracted = dims_in(instruction.attribute(r"\blhs_contracting_dims=\{([\d,]*)\}"))
        return 2 * instruction.shapes[0].elements * math.prod(left.dims[d] for d in contracted)
    if opcode == "convolution":
        return _convolution(instruction, computation.operand_shapes(instruction))
    if opcode == "custom-call" and LIBRARY_DOT.search(instruction.attributes):
        return _library_dot(instruction, computation.operand_shapes(instruction)[0])
    if opcode == "custom-call" and (match := CUDNN.search(instruction.attributes)):
        return _cudnn(match.group(1), instruction, computation.operand_shapes(instruction))
    if attention := fused_attention(instruction, computation):
        return attention.counted_flops
    if experts := expert_kernel(instruction, computation):
        return experts.counted_flops
    return None


def dims_in(text: str) -> tuple[int, ...]:
    """Numbers in an attribute."""
    return tuple(int(d) for d in re.findall(r"\d+", text))


def _library_dot(instruction: Instruction, left: Shape) -> int:
    """The contracted dims come from the backend's own config; without one the last dim of the left
    operand is contracted."""
    listed = instruction.attribute(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
    if listed:
        contracted = dims_in(listed)
    else:
        contracted = (
            len(left.dims) - (2 if '"transpose_a":true' in instruction.attributes else 1),
        )
    return 2 * instruction.shapes[0].elements * math.prod(left.dims[d] for d in contracted)


def _cudnn(kind: str, instruction: Instruction, operands: tuple[Shape, ...]) -> int:
    """A cuDNN convolution and its gradients cost the same; labels and window are those of the
    forward one, whatever is asked for."""
    labels = LABELS.search(instruction.attributes)
    if labels is None:
        raise ValueError(f"no dim_labels in convolution {instruction.name}")
    result, first, second = instruction.shapes[0], operands[0], operands[1]
    out, kernel = {"BackwardInput": (first, second), "BackwardFilter": (second, result)}.get(
        kind, (result, second)
    )
    window = _WINDOW.search(instruction.attributes)
    fields = dict(part.split("=", 1) for part in window.group(1).split()) if window else {}
    taps = math.prod(int(n) for n in fields.get("size", "1").split("x"))
    return 2 * out.elements * kernel.dims[labels.group(2).index("i")] * taps


def _convolution(instruction: Instruction, operands: tuple[Shape, ...]) -> int:
    labels = LABELS.search(instruction.attributes)
    if labels is None:
        raise ValueError(f"no dim_labels in convolution {instruction.name}")
    base, kernel, result = labels.groups()
    out = instruction.shapes[0]
    window = _WINDOW.search(instruction.attributes)
    fields = dict(part.split("=", 1) for part in window.group(1).split()) if window else {}
    spatial = sorted(c for c in result if c.isdigit())
    taps = math.prod(
        _taps(out.dims[result.index(d)], operands[0].dims[base.index(d)], fields, k)
        for k, d in enumerate(spatial)
    )
    rest = math.prod(
        size for size, label in zip(out.dims, result, strict=True) if not label.isdigit()
    )
    return 2 * rest * operands[1].dims[kernel.index("i")] * taps


def _taps(outputs: int, inputs: int, fields: dict[str, str], k: int) -> int:
    """(output, window) pairs of one spatial dim that meet no hole: o*stride + w*dilate - pad is a
    multiple of the base's dilation. Of a dim of the batch, whose outputs meet the base once each,
    those pairs alone."""

    def field(name: str, default: str) -> str:
        return fields[name].split("x")[k] if name in fields else default

    size, stride = int(field("size", "1")), int(field("stride", "1"))
    hole, dilate = int(field("lhs_dilate", "1")), int(field("rhs_dilate", "1"))
    low, high = (int(n) for n in field("pad", "0_0").split("_"))
    if hole == 1 and not low and not high:
        return outputs * size
    places = [o * stride + w * dilate - low for o in range(outputs) for w in range(size)]
    met = [p for p in places if p % hole == 0]
    inside = sum(0 <= p <= (inputs - 1) * hole for p in met)
    return inside if inside == outputs > 1 else len(met)
