"""Routed experts by one kernel for the rows of all of them, on NVIDIA GPUs and TPUs: where, and
what it costs.

Programs choose when they are traced (`takes_grouped` of
planner/emit/runtime/kernels/grouped_experts.py), by the device they find and the operands they are
given; this is the same choice made from the plan, and tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from costmodels.expert_tiles import (
    LANES,
    MOSAIC,
    TILES,
    TRITON,
    Tile,
    most_columns,
    rows_tile,
    weights_tile,
)
from planner.graph.ir import KEPT_FLOAT8, Node
from planner.ops.attention_kernels import BLOCKS, Chosen
from planner.ops.cost import Kernel, Passes, Pieces

KERNELS = {"cudnn": TRITON, "splash": MOSAIC}
"""By the fused attention of a device, as experts' kernels serve where that does."""
ALIGNED = {TRITON: 64, MOSAIC: LANES}
"""What the widths of experts are multiples of."""
FLOAT8 = "float8_e4m3fn"
SHORT = {TRITON: ("bfloat16", "float16", FLOAT8), MOSAIC: ("bfloat16",)}
"""Types of operands."""
INDEX = 4
"""Bytes of a row's number, int32."""
PLACING = 9
"""Kernels that sort rows by expert and find the place of each, beside those that move the rows:
what XLA's GPU compiler makes of a layer of a decode step (benchmarks/RESULTS.md, "Bytes of a decode
step"). Each moves a number a row, and takes its launch."""


def operand_type(node: Node, compute: str, float8: bool) -> str:
    """Type of the operands of experts' products. compute: of activations; float8: whether the
    device multiplies it."""
    if not node.attrs.get(KEPT_FLOAT8):
        return compute
    return FLOAT8 if float8 else "float8, which the device does not multiply"


def kept_itemsize(pieces: Pieces) -> float:
    """Bytes of an element of experts' weights as they are kept."""
    return pieces.weight_itemsize(pieces.graph.tensors[pieces.node.inputs[4]].dtype)


def casts(size: float, short: bool) -> tuple[float, ...]:
    """Bytes moved by the kernels that make rows of so many bytes float8, where `short`: one finds
    the largest value of each, one writes them in a byte an element."""
    return (size, 1.5 * size) if short else ()


# Many parameters: what decides about the device, the program and the plan, by keyword.
def chosen_for_experts(
    local: Mapping[str, int],
    *,
    device_kernel: str,
    on_chip: int,
    compute: str,
    partitioned: bool,
    given: int,
    held: int,
) -> Chosen:
    """The kernel of experts of these local sizes. device_kernel: the device's fused attention;
    on_chip: bytes of a core's own memory, of TPUs; compute: dtype of operands; partitioned: whether
    the compiler's partitioner places the collectives; given: rows that the experts may get; held:
    those that blocks have room for at balance."""
    h, f, kernel = local["h"], local["f"], KERNELS.get(device_kernel, "")
    if kernel == MOSAIC and not on_chip:
        kernel = ""
    reasons = {
        "the device has no kernel for the rows of all experts": not kernel,
        "collectives are placed by the compiler": partitioned,
        f"it computes in {compute}": compute not in SHORT.get(kernel, ()),
        f"its experts are {h:,} x {f:,}": (
            any(size % ALIGNED.get(kernel, 1) for size in (h, f))
            or (kernel == MOSAIC and most_columns(max(h, f), on_chip) < LANES)
        ),
        "most of its rows are for experts of other devices": bool(kernel)
        and 2 * places(kernel, given, local["e"]) > 3 * places(kernel, held, local["e"]),
    }
    why = next((reason for reason, holds in reasons.items() if holds), "")
    return Chosen(BLOCKS, why) if why else Chosen(kernel)


def kernel_of(pieces: Pieces, local: Mapping[str, int], given: int, held: int) -> str:
    """The kernel that serves, as `chosen_for_experts`; "" for blocks."""
    choice = chosen_for_experts(
        local,
        device_kernel=pieces.attention_kernel if pieces.programs else "",
        on_chip=pieces.on_chip,
        compute=operand_type(pieces.node, pieces.compute, pieces.float8),
        partitioned=pieces.partitioned,
        given=given,
        held=held,
    )
    return "" if choice.kernel == BLOCKS else choice.kernel


def places(kernel: str, rows: int, experts: int) -> int:
    """Places for so many rows of so many experts, each expert's from a tile's beginning on."""
    tile_rows = TILES[kernel, "rows"].rows
    return (ceil(rows / tile_rows) + experts) * tile_rows


# Many parameters: a kernel of a node, and the rows that it gets.
def kernel_passes(
    kernel: str, pieces: Pieces, local: Mapping[str, int], rows_given: int, rows: float, layers: int
) -> Passes:
    """Places found, rows into the order of experts, a kernel for each product, the hidden
    activation, and each token's rows summed; in the backward pass the hidden activation is made
    again. rows: of the busiest device, of those given; layers: products of a forward pass."""
    itemsize, kept = pieces.itemsize("float32"), kept_itemsize(pieces)
    short = bool(pieces.node.attrs.get(KEPT_FLOAT8))
    h, f, experts = local["h"], local["f"], local["e"]
    wide = places(kernel, rows_given, experts) * itemsize
    spared = Tile.met(rows, experts) * h * f * (itemsize - kept)
    into, out_of = (
        Kernel(
            tile.rows_flops(rows, experts, *widths),
            tile.rows_moved(rows, experts, *widths) * itemsize
            - spared
            - rows * widths[0] * short * (itemsize - 1),
        )
        for widths in ((h, f), (f, h))
        for tile in (_rows_tile(kernel, pieces.on_chip, widths, short),)
    )
    tile = weights_tile(kernel, pieces.on_chip, h, f)
    gradients = Kernel(
        tile.weights_flops(rows, experts, h, f), tile.weights_moved(rows, experts, h, f) * itemsize
    )
    sorted_once, summed = Kernel(0.0, 2 * wide * h), Kernel(0.0, 2 * rows * h * itemsize)
    hidden, placed = Kernel(0.0, layers * wide * f), Kernel(0.0, 2.0 * INDEX * rows_given, PLACING)
    cast_kernels = [
        Kernel(0.0, moved) for moved in (*casts(wide * h, short), *casts(wide * f, short))
    ]
    if pieces.serves:  # rows come in float8, sorted; the activation's kernel writes such
        return (summed, hidden, *[into] * (layers - 1), out_of), ()
    pulled = Kernel(0.0, (2 * layers + 1) * wide * f)
    trained = pieces.backward / (3 - 1 / layers)  # the part of all gradients that are asked for
    backward = (into, layers), (out_of, layers - 1), (gradients, layers)
    return (
        (placed, sorted_once, summed, hidden, *cast_kernels, *[into] * (layers - 1), out_of),
        (
            *(sorted_once, sorted_once, summed, hidden, pulled),
            *(replace(one, often=trained * times) for one, times in backward),
        ),
    )


def _rows_tile(kernel: str, on_chip: int, widths: tuple[int, int], short: bool) -> Tile:
    """The tile of the kernel for rows. In float8 starting and ending one takes as long as in
    bfloat16, twice as many steps: a guess, as none was timed."""
    tile = rows_tile(kernel, on_chip, *widths)
    return replace(tile, more=2 * tile.more) if short else tile


def kernel_workspace(
    kernel: str, pieces: Pieces, local: Mapping[str, int], rows_given: int
) -> float:
    """Bytes beside operands and results: rows in the order of experts and both products of the
    hidden layer; training, rows and gradients of the result with three of the hidden layer, or,
    later, with what each product of the first layer leaves for the gradient of rows."""
    h, f = local["h"], local["f"]
    row_elements = max(2 * h + 3 * f, 4 * h + f) if pieces.trained else h + 2 * f
    short = max(h, f) if pieces.node.attrs.get(KEPT_FLOAT8) else 0  # a float8 copy
    return places(kernel, rows_given, local["e"]) * (
        row_elements * pieces.itemsize("float32") + short
    )
