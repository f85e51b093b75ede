"""Time of a product of matrices by its extents, on a device whose file has `[products]`.

    arithmetic = waves * (start + 2 * tile * sums / rate of a unit), of the tile that is fastest
    waves      = ceil(tiles of the result * batch * pieces / units)
    time       = kernel + max(arithmetic, FLOPs / (peak * best efficiency), bytes / bandwidth)
                 + adding up the pieces, and never below the launch floor; of a convolution,
                 which is a product over taps and channels, all of it / convolutions

A result of few tiles leaves units without work, so compilers cut its sums into pieces, keep the
partial sums in float32 and add these up in a kernel of their own; into how many is XLA's rule
(`pieces_of`). The best efficiency of `[matmul]` is what long steps sustain at the power limit; a
unit within a tile is faster. On devices without `[products]` time follows from FLOPs alone
(`costmodels.kernels.roofline_time_s`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from costmodels.hardware.device import Device
from costmodels.hardware.tiles import Tiles
from costmodels.kernels import roofline_time_s

if TYPE_CHECKING:
    import numpy as np

PARTIAL, RESULT = 4, 2
"""Bytes of a partial sum, float32, and of an element of what they add up to."""
SPLIT_TILE = 128
"""Edge of a tile in XLA's rule for splitting sums (splitk_rewriter.cc)."""
MOST_PIECES = 2**11
ITEM_BYTES = {"float32": 4, "float64": 8, "float8_e4m3fn": 1}
"""Of an element of operands; 2 of other types."""


@dataclass(frozen=True)
class Product:
    """[batch, rows, sums] x [batch, sums, columns], each an array over splits. convolution: whether
    an operand is gathered from images, tap by tap."""

    rows: np.ndarray
    columns: np.ndarray
    sums: np.ndarray
    batch: np.ndarray
    convolution: bool = field(default=False, kw_only=True)

    @property
    def of_left(self) -> Product:
        """The product that is the gradient of the left operand."""
        return replace(self, columns=self.sums, sums=self.columns)

    @property
    def of_right(self) -> Product:
        """The product that is the gradient of the right operand."""
        return replace(self, rows=self.sums, sums=self.rows)

    def in_pieces(self, pieces: np.ndarray) -> Product:
        """The product that its kernel multiplies where sums are cut into so many pieces."""
        return replace(self, sums=-(-self.sums // pieces), batch=self.batch * pieces)

    @property
    def flops(self) -> np.ndarray:
        """FLOPs of each product."""
        return 2.0 * self.rows * self.columns * self.sums * self.batch


def product_time_s(
    device: Device, product: Product, size_bytes: np.ndarray, dtype: str
) -> np.ndarray:
    """Seconds of each product, which moves so many bytes of operands and results. ValueError for a
    device without `[products]`."""
    import numpy as np

    tiles = _tiles(device)
    pieces = pieces_of(tiles, product, itemsize(dtype))
    elements = np.where(pieces > 1, product.batch * product.rows * product.columns, 0.0)
    partial_s = PARTIAL * pieces * elements / tiles.sums_bytes_per_s
    adding_s = partial_s + RESULT * elements / tiles.sums_bytes_per_s
    one = _kernel_s(device, product.in_pieces(pieces), size_bytes, dtype, partial_s)
    rate = tiles.convolutions if product.convolution else 1.0
    return np.maximum((one + adding_s) / rate, device.launch_s)


def kernel_time_s(
    device: Device, product: Product, size_bytes: np.ndarray, dtype: str
) -> np.ndarray:
    """Seconds of each product as `product_time_s`, its sums in as many pieces as they are compiled
    in: batches."""
    import numpy as np

    return np.maximum(_kernel_s(device, product, size_bytes, dtype), device.launch_s)


def _kernel_s(
    device: Device,
    product: Product,
    size_bytes: np.ndarray,
    dtype: str,
    partial_s: np.ndarray | float = 0.0,
) -> np.ndarray:
    """Seconds of one kernel beside the launch floor. partial_s: of writing partial sums."""
    import numpy as np

    arithmetic, _ = tiles_time_s(device, product, dtype)
    work = np.maximum(arithmetic.min(axis=0), product.flops / _most_flops_per_s(device, dtype))
    memory = size_bytes / (device.memory_bytes_per_s * device.memory_efficiency) + partial_s
    seconds: np.ndarray = _tiles(device).kernel_s + np.maximum(work, memory)
    return seconds


def tiles_time_s(device: Device, product: Product, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """(seconds of the arithmetic of one kernel, its waves) with each of the device's tiles, for
    each product, whose sums are whole [tiles, products]. ValueError as above."""
    import numpy as np

    tiles = _tiles(device)
    tall, wide = (np.array(x, float)[:, None] for x in zip(*tiles.both_ways, strict=True))
    count = product.batch * np.ceil(product.rows / tall) * np.ceil(product.columns / wide)
    waves = np.ceil(count / tiles.units)
    rate = device.peak(dtype) * tiles.efficiency / tiles.units
    return waves * (tiles.start_s + 2.0 * tall * wide * product.sums / rate), waves


def pieces_of(tiles: Tiles, product: Product, item_bytes: float) -> np.ndarray:
    """Into how many pieces XLA cuts the sums of each product, a power of two: those that cost the
    least by its own count, where waves may be broken."""
    import numpy as np

    of_sum, of_adding = tiles.splitting
    pieces = 2.0 ** np.arange(MOST_PIECES.bit_length()).reshape(-1, 1)
    tall, wide = (np.minimum(x, SPLIT_TILE) for x in (product.rows, product.columns))
    count = np.ceil(product.rows / SPLIT_TILE) * np.ceil(product.columns / SPLIT_TILE)
    filled = tall * wide / (tiles.units * SPLIT_TILE**2)
    waves = np.maximum(1.0, product.batch * pieces * count * filled)
    arithmetic = 2 * tall * wide * np.ceil(product.sums / pieces) * waves
    elements = product.batch * product.rows * product.columns
    result = max(RESULT, min(item_bytes, PARTIAL))
    adding = of_adding + (pieces * PARTIAL + result) * elements * of_sum
    cost = arithmetic + np.where(pieces > 1, adding, 0.0)
    return pieces[np.argmin(cost, axis=0), 0]


def chosen(
    device: Device, extents: tuple[float, ...], dtype: str
) -> tuple[tuple[int, int], int, int]:
    """(tile, waves, pieces of its sums) of a product of these rows, columns, sums and batch.
    ValueError as above."""
    import numpy as np

    product = Product(*(np.array([x]) for x in extents))
    pieces = pieces_of(_tiles(device), product, itemsize(dtype))
    seconds, waves = tiles_time_s(device, product.in_pieces(pieces), dtype)
    fastest = int(seconds[:, 0].argmin())
    return _tiles(device).both_ways[fastest], int(waves[fastest, 0]), int(pieces[0])


def itemsize(dtype: str) -> float:
    """Bytes of an element of operands."""
    return ITEM_BYTES.get(dtype, 2)


def least_time_s(device: Device, flops: float, dtype: str) -> float:
    """Seconds that no product of so many FLOPs, nor parts of it on several devices together, are
    below: products lose efficiency as they shrink, and of tiles none is better than the best."""
    if device.tiles is None:
        return roofline_time_s(device, flops, 0.0, dtype)
    return flops / _most_flops_per_s(device, dtype)


def _most_flops_per_s(device: Device, dtype: str) -> float:
    tiles = _tiles(device)
    return device.peak(dtype) * min(device.matmul_efficiency[-1], tiles.efficiency)


def _tiles(device: Device) -> Tiles:
    if device.tiles is None:
        raise ValueError(f"{device.name} has no [products]")
    return device.tiles
