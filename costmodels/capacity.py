"""What a device can hold, part by part.

    usable = capacity - context - collective buffers - reserve

A TPU stores the last two dims of an array, as laid out, in whole tiles of 8 rows x 128 lanes. The
compiler chooses which dims these are, and of most arrays finds some that fit; convolutions want
batch and channels there, whatever their extents: 64 images of 64 channels take twice their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod

from costmodels.hardware.device import Device

COLLECTIVE_BUFFERS_BYTES = 512 * 2**20
"""Staging buffers of the collectives library on a GPU with several devices: a guess in the range
users report."""
DEFAULT_RESERVE_BYTES = 2 * 2**30


def tiled_image(shape: tuple[int, ...], tile: tuple[int, int]) -> int:
    """Elements that an image [batch, channels, *extents] takes in whole tiles, batch in rows and
    channels in lanes or the other way round, whichever is less. Fewer rows than a tile's take the
    next power of two."""
    rows, lanes = tile

    def stored(a: int, b: int) -> int:
        return (
            (-(-a // rows) * rows if a > rows else 1 << (a - 1).bit_length())
            * -(-b // lanes)
            * lanes
        )

    batch, channels, *extents = shape
    return min(stored(batch, channels), stored(channels, batch)) * prod(extents)


def tiled_rows(shape: tuple[int, ...], tile: tuple[int, int]) -> int:
    """Elements that an array takes whose last dim lies in whole lanes."""
    lanes = tile[1]
    return prod(shape[:-1]) * -(-shape[-1] // lanes) * lanes


@dataclass(frozen=True)
class Capacity:
    """The parts of a device's memory, in bytes."""

    capacity: int
    context: int
    collective_buffers: int
    reserve: int

    @property
    def usable(self) -> int:
        """What a program may allocate."""
        return self.capacity - self.context - self.collective_buffers - self.reserve


def capacity(device: Device, devices: int, reserve_bytes: int | None = None) -> Capacity:
    """Capacity of a device in a job of `devices`; the default reserve shrinks on small devices to 4
    % of what they have."""
    reserve = (
        min(DEFAULT_RESERVE_BYTES, device.memory_bytes // 25)
        if reserve_bytes is None
        else reserve_bytes
    )
    buffers = COLLECTIVE_BUFFERS_BYTES if devices > 1 and device.kind == "gpu" else 0
    return Capacity(device.memory_bytes, device.context_bytes, buffers, reserve)


def preallocation(device: Device, limit_bytes: int) -> float | None:
    """Share of a GPU's memory that JAX is to preallocate so that a program has `limit_bytes` and
    the rest stays free; None for other devices.

    Rounded down to a ten-thousandth. The share counts from what CUDA reports, which is 1 % below
    the capacity of an A100's file (nvidia-smi).
    """
    return (
        int(10_000 * limit_bytes / device.memory_bytes) / 10_000 if device.kind == "gpu" else None
    )


@dataclass(frozen=True)
class Breakdown:
    """Peak memory of one device, in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    temporary: int

    @property
    def total(self) -> int:
        """Sum of the parts: they coexist at the end of the last forward pass."""
        return sum(getattr(self, f.name) for f in fields(self))
