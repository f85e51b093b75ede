"""Routed experts by one kernel for the rows of all of them, on NVIDIA GPUs: where, and what it
costs.

Programs choose when they are traced (`takes_grouped` of
planner/emit/runtime/kernels/grouped_experts.py), by the device they find and the operands they are
given; this is the same choice made from the plan, and tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from costmodels.kernels import EXPERT_ROWS, expert_rows_flops, expert_weights_flops
from planner.ops.cost import Kernel, Passes, Pieces

ALIGNED = 64
"""What the widths of experts are multiples of, for the kernel."""


def takes_kernel(pieces: Pieces, local: Mapping[str, int], given: int, held: int) -> bool:
    """Whether one kernel serves experts of these local sizes: where cuDNN's attention serves, too,
    NVIDIA GPUs from Ampere on, in programs that place their collectives themselves. given: rows
    that the kernel may get; held: those that blocks have room for at balance."""
    h, f = local["h"], local["f"]
    return (
        pieces.attention_kernel == "cudnn"
        and pieces.compute in ("bfloat16", "float16")
        and not pieces.partitioned
        and h % ALIGNED == f % ALIGNED == 0
        and 2 * given <= 3 * held
    )


def places(rows: int, experts: int) -> int:
    """Places for so many rows of so many experts, each expert's from a tile's beginning on."""
    return (ceil(rows / EXPERT_ROWS) + experts) * EXPERT_ROWS


def kernel_passes(
    pieces: Pieces, local: Mapping[str, int], given: int, rows: float, layers: int
) -> Passes:
    """Rows into the order of experts, a kernel for each product, the hidden activation, and each
    token's rows summed; in the backward pass the hidden activation is made again. rows: of the
    busiest device, of those given; layers: products of a forward pass."""
    itemsize = pieces.itemsize("float32")
    h, f, experts = local["h"], local["f"], local["e"]
    wide = places(given, experts) * itemsize
    moved = (experts * h * f + rows * (h + f)) * itemsize
    into, out_of = (
        Kernel(expert_rows_flops(rows, experts, *widths), moved) for widths in ((h, f), (f, h))
    )
    gradients = Kernel(expert_weights_flops(rows, experts, h, f), moved)
    sorted_once, summed = Kernel(0.0, 2 * wide * h), Kernel(0.0, 2 * rows * h * itemsize)
    hidden = Kernel(0.0, layers * wide * f)
    pulled = Kernel(0.0, (2 * layers + 1) * wide * f)
    trained = pieces.backward / (3 - 1 / layers)  # the part of all gradients that are asked for
    backward = (into, layers), (out_of, layers - 1), (gradients, layers)
    return (
        (sorted_once, summed, hidden, *[into] * (layers - 1), out_of),
        (
            *(sorted_once, sorted_once, summed, hidden, pulled),
            *(replace(kernel, often=trained * times) for kernel, times in backward),
        ),
    )


def kernel_workspace(pieces: Pieces, local: Mapping[str, int], given: int) -> float:
    """Bytes beside operands and results: rows in the order of experts and both products of the
    hidden layer; training, rows and gradients of the result with three of the hidden layer, or,
    later, with what each product of the first layer leaves for the gradient of rows."""
    h, f = local["h"], local["f"]
    each = max(2 * h + 3 * f, 4 * h + f) if pieces.trained else h + 2 * f
    return places(given, local["e"]) * each * pieces.itemsize("float32")
