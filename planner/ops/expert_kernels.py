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
from planner.ops.attention_kernels import BLOCKS, Chosen
from planner.ops.cost import Kernel, Passes, Pieces

TRITON = "triton"
ALIGNED = 64
"""What the widths of experts are multiples of, for the kernel."""


# Many parameters: what decides about the device, the program and the plan, by keyword.
def chosen_for_experts(
    local: Mapping[str, int],
    *,
    device_kernel: str,
    compute: str,
    partitioned: bool,
    given: int,
    held: int,
) -> Chosen:
    """The kernel of experts of these local sizes. device_kernel: the device's fused attention, as
    experts' kernel serves where cuDNN's does; compute: dtype of activations; partitioned: whether
    the compiler's partitioner places the collectives; given: rows that the experts may get; held:
    those that blocks have room for at balance."""
    h, f = local["h"], local["f"]
    reasons = {
        "the device has no kernel for the rows of all experts": device_kernel != "cudnn",
        "collectives are placed by the compiler": partitioned,
        f"it computes in {compute}": compute not in ("bfloat16", "float16"),
        f"its experts are {h:,} x {f:,}": bool(h % ALIGNED or f % ALIGNED),
        "most of its rows are for experts of other devices": 2 * given > 3 * held,
    }
    why = next((reason for reason, holds in reasons.items() if holds), "")
    return Chosen(BLOCKS, why) if why else Chosen(TRITON)


def takes_kernel(pieces: Pieces, local: Mapping[str, int], given: int, held: int) -> bool:
    """Whether one kernel serves, as `chosen_for_experts`."""
    found = chosen_for_experts(
        local,
        device_kernel=pieces.attention_kernel if pieces.programs else "",
        compute=pieces.compute,
        partitioned=pieces.partitioned,
        given=given,
        held=held,
    )
    return found.kernel == TRITON


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
