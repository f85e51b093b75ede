"""How a device's library multiplies matrices: tiles of the result, handed out to its compute units.
The table `[products]` of a device file; `costmodels.products` is the time that follows.

    [products]                            # optional: products by their extents
    units = 132                           # compute units, each of which makes one tile at a time
    tiles = [[256, 128], [128, 128]]      # rows and columns of tiles, each turned as well
    efficiency = 0.87                     # fraction of peak that a unit reaches within a tile
    start = "0.8 us"                      # what beginning and ending a tile takes
    kernel = "1.9 us"                     # what beginning and ending a kernel takes
    sums = "2600 GB/s"                    # rate at which partial sums are written, read and added
    splitting = [1.9, 4.4e5]              # by what the compiler splits long sums: what a byte of
                                          # partial sums, and adding them up, cost beside a FLOP of
                                          # a unit
    convolutions = 0.8                    # optional: share of these rates that convolutions reach
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from costmodels.hardware.units import bandwidth_bytes_per_s, time_s

KEYS = {"units", "tiles", "efficiency", "start", "kernel", "sums", "splitting", "convolutions"}


@dataclass(frozen=True)
class Tiles:
    """A device's products. units: compute units; shapes: (rows, columns) of tiles, which are used
    turned as well; efficiency: fraction of peak of a unit within a tile; start_s, kernel_s: what
    beginning and ending a tile, and a kernel, take; sums_bytes_per_s: of partial sums, which lie in
    the cache; splitting: as in the file; convolutions: share of the rate of products, in arithmetic
    and in memory alike, that convolutions reach."""

    units: int
    shapes: tuple[tuple[int, int], ...]
    efficiency: float
    start_s: float
    kernel_s: float
    sums_bytes_per_s: float
    splitting: tuple[float, float]
    convolutions: float = 1.0

    @property
    def both_ways(self) -> tuple[tuple[int, int], ...]:
        """All tiles, turned ones too."""
        return tuple(dict.fromkeys(x for m, n in self.shapes for x in ((m, n), (n, m))))

    def at(self, rate: float) -> Tiles:
        """These tiles with units that run at a share of their rate."""
        return replace(
            self,
            efficiency=self.efficiency * rate,
            start_s=self.start_s / rate,
            kernel_s=self.kernel_s / rate,
        )


def tiles_of(table: Mapping[str, Any]) -> Tiles:
    """The table of a file. KeyError and ValueError say what is wrong with it."""
    shapes = tuple((_whole(m, "tiles"), _whole(n, "tiles")) for m, n in table["tiles"])
    splitting = tuple(_number(x, "splitting") for x in table["splitting"])
    sums = bandwidth_bytes_per_s(table["sums"])
    efficiency = _number(table["efficiency"], "efficiency")
    convolutions = _number(table.get("convolutions", 1.0), "convolutions")
    if not 0 < convolutions <= 1:
        raise ValueError(f"products.convolutions: above 0 and at most 1, not {convolutions:g}")
    if not shapes or len(splitting) != 2 or not sums or not 0 < efficiency <= 1:
        raise ValueError(
            "[products] needs a tile, an efficiency of at most 1, a rate of sums above 0 and two"
            " figures of splitting"
        )
    return Tiles(
        units=_whole(table["units"], "units"),
        shapes=shapes,
        efficiency=efficiency,
        start_s=time_s(table["start"]),
        kernel_s=time_s(table["kernel"]),
        sums_bytes_per_s=sums,
        splitting=(splitting[0], splitting[1]),
        convolutions=convolutions,
    )


def _whole(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"products.{what}: a whole number of at least 1, not {value!r}")
    return value


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"products.{what}: a number, not {value!r}")
    return float(value)
