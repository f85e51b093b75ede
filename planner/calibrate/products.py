"""Measured products -> the figures of `[products]` in a device file: robust least squares on
log(priced / measured) of efficiency, start, kernel and rate of sums. Units, tiles and the
compiler's rule for splitting are the file's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from costmodels.hardware.device import Device
from costmodels.hardware.tiles import Tiles
from costmodels.products import Product, product_time_s

FIGURES = ("efficiency", "start_s", "kernel_s", "sums_bytes_per_s")
FEWEST = 2 * len(FIGURES)
"""Products that figures are fitted to, at least."""
ROBUST = 0.1
"""Errors beyond which a product counts by its error and no longer by the square of that."""
PRIOR = 0.02
"""How much a figure's logarithm counts beside errors: products of one kind leave some figures
free."""


@dataclass(frozen=True)
class MeasuredProduct:
    """A product of bfloat16: [rows, sums] x [sums, columns], and seconds of its kernels."""

    rows: int
    columns: int
    sums: int
    time_s: float

    @property
    def flops(self) -> float:
        """FLOPs of the product."""
        return 2.0 * self.rows * self.columns * self.sums


def priced_s(device: Device, measured: Sequence[MeasuredProduct]) -> np.ndarray:
    """Seconds of each by the device's figures."""
    rows, columns, sums = (
        np.array([getattr(x, name) for x in measured], float)
        for name in ("rows", "columns", "sums")
    )
    size = 2.0 * (rows * columns + rows * sums + sums * columns)
    return product_time_s(
        device, Product(rows, columns, sums, np.ones(len(measured))), size, "bfloat16"
    )


def fit_tiles(device: Device, measured: Sequence[MeasuredProduct]) -> Tiles | None:
    """The device's table with the figures that explain what was measured best; None of a device
    without one, and of too few products."""
    from scipy.optimize import least_squares

    start = device.tiles
    if start is None or len(measured) < FEWEST:
        return None
    seconds = np.log([x.time_s for x in measured])

    def at(theta: np.ndarray) -> Tiles:
        values = [getattr(start, k) * math.exp(x) for k, x in zip(FIGURES, theta, strict=True)]
        values[0] = min(1.0, values[0])
        return replace(start, **dict(zip(FIGURES, values, strict=True)))

    def residuals(theta: np.ndarray) -> np.ndarray:
        errors = np.log(priced_s(replace(device, tiles=at(theta)), measured)) - seconds
        return np.concatenate([errors, PRIOR * theta])

    # Waves make steps of the sum of squares, which differences of 1 % look across.
    optimum = least_squares(
        residuals, np.zeros(len(FIGURES)), loss="soft_l1", f_scale=ROBUST, diff_step=0.01
    )
    return at(optimum.x)
