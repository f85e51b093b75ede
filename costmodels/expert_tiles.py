"""Tiles of the kernels that multiply the rows of all experts of a device in emitted programs, and
what they cost: through Triton on NVIDIA GPUs, Mosaic on TPUs.

A tile's rows are of one expert, so that half a tile of each expert is empty, on average; its
columns are whole tiles too, and starting and ending a tile takes time beside its products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

TRITON, MOSAIC = "triton", "mosaic"
LANES = 128
"""Columns that arrays on a TPU's chip are stored in whole multiples of."""
LARGEST = ((1024, 2048), (1024, 1024), (512, 1024))
"""Mosaic's tiles of a weight's gradient, the first that the chip has room for."""


@dataclass(frozen=True)
class Tile:
    """rows: of experts, that a tile has, or sums over; columns: of its result; tall: rows of its
    result, of a weight's gradient; slower: how much longer a step of a tile takes than a library's;
    more: what starting and ending a tile takes, in steps over 64 elements; again: whether every
    tile of columns reads its rows from memory, which caches of GPUs hold.
    """

    rows: int
    columns: int
    tall: int
    slower: float
    more: float
    again: bool

    @staticmethod
    def met(rows: float, experts: int) -> float:
        """Experts that get any of the rows, where each is as likely to go to any: the others have
        no tile, and nobody reads their weights."""
        return experts * (1.0 - (1.0 - 1.0 / experts) ** rows) if experts else 0.0

    def rows_flops(self, rows: float, experts: int, across: int, wide: int) -> float:
        """FLOPs of a library's product that takes as long as the kernel that multiplies the rows of
        all experts, [rows, across], by their weights, [across, wide] each."""
        started = rows + self.met(rows, experts) * self.rows / 2
        filled = started * ceil(wide / self.columns) * self.columns
        return self.slower * 2.0 * filled * (across + 64 * self.more)

    def rows_moved(self, rows: float, experts: int, across: int, wide: int) -> float:
        """Elements that the kernel for rows moves."""
        often = ceil(wide / self.columns) if self.again else 1
        return self.met(rows, experts) * across * wide + rows * (often * across + wide)

    def weights_flops(self, rows: float, experts: int, across: int, wide: int) -> float:
        """FLOPs of a library's product that takes as long as the kernel for the gradients of these
        weights, which sums over the rows of an expert."""
        filled = rows + experts * (self.rows / 2 + 64 * self.more)
        tiles = ceil(across / self.tall) * ceil(wide / self.columns)
        return self.slower * 2.0 * filled * tiles * self.tall * self.columns

    def weights_moved(self, rows: float, experts: int, across: int, wide: int) -> float:
        """Elements that the kernel for gradients of weights moves."""
        often = (ceil(wide / self.columns), ceil(across / self.tall)) if self.again else (1, 1)
        return experts * across * wide + rows * (often[0] * across + often[1] * wide)


TILES = {
    (TRITON, "rows"): Tile(128, 256, 0, 1.06, 11, False),
    (TRITON, "weights"): Tile(128, 256, 128, 0.86, 25, False),
    (MOSAIC, "rows"): Tile(256, 0, 0, 1.0, 2, True),
    (MOSAIC, "weights"): Tile(256, 0, 0, 1.2, 1, True),
}
"""Triton's are of programs and single kernels on one H100 80GB HBM3, jax 0.11.2, 2026-11-27
(benchmarks/RESULTS.md, Experts by one kernel); that they are as much slower than the library on
other GPUs is a guess. Mosaic's are a guess: no TPU was measured, and the instructions that the
compiler schedules for a tile on v5p and v6e are counted in their place (benchmarks/RESULTS.md,
Experts by one kernel on TPUs). Columns of Mosaic's follow from the chip's own memory."""


def chip_room(on_chip: int) -> int:
    """Bytes of a core's own memory that Mosaic's tiles are cut for, three quarters of it."""
    return on_chip // 4 * 3


def most_columns(across: int, on_chip: int) -> int:
    """Columns of weights so deep that the chip has room for, twice, beside a tile of rows, three
    times, and its result in bfloat16, twice, and float32."""
    rows = TILES[MOSAIC, "rows"].rows
    free_bytes = chip_room(on_chip) - 6 * rows * across
    return max(0, free_bytes // (4 * across + 8 * rows) // LANES * LANES)


def even_columns(wide: int, most: int) -> int:
    """Columns of a tile where an even number of tiles, each at most so wide, have so many in all,
    as chips of two cores share them; of narrow tiles the last may have none."""
    return LANES * ceil(wide / (LANES * 2 * ceil(wide / (2 * most))))


def rows_tile(kernel: str, on_chip: int, across: int, wide: int) -> Tile:
    """The tile of the kernel for rows. on_chip: bytes of a core's own memory, of TPUs."""
    tile = TILES[kernel, "rows"]
    if kernel == TRITON:
        return tile
    return replace(tile, columns=even_columns(wide, most_columns(across, on_chip)))


def weights_tile(kernel: str, on_chip: int, across: int, wide: int) -> Tile:
    """The tile of the kernel for gradients of weights, which holds a sum in float32, a product and,
    twice, a result beside its operands."""
    tile = TILES[kernel, "weights"]
    if kernel == TRITON:
        return tile
    tall, columns = next(
        (a, b)
        for a, b in LARGEST
        if 12 * a * b + 4 * tile.rows * (a + b) <= chip_room(on_chip) or (a, b) == LARGEST[-1]
    )
    return replace(tile, tall=even_columns(across, tall), columns=even_columns(wide, columns))
