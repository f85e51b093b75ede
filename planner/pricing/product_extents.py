"""What one device multiplies of a product under each of several splits, as rows, columns and sums:
read off the factors of its rule."""

from __future__ import annotations

import numpy as np

from costmodels.products import Product
from planner.pricing.split_arrays import SplitArrays
from planner.sharding.rule import Rule


def product_of(
    rule: Rule,
    cuts: SplitArrays,
    flops: np.ndarray,
    wider: np.ndarray | float = 1.0,
    convolution: bool = False,
) -> Product | None:
    """The product of operands 0 and 1 under each split, None of what is none. flops: of a device;
    wider: by what factor padding makes the columns more; convolution: as a Product has it.

    A factor of both operands and the result is one of the batch, of operand 1 and the result one of
    the columns; what else the result has are rows. What FLOPs are left are those of sums, so that a
    convolution sums over taps and channels.
    """
    several = any(len(dims) > 1 for dims in rule.operands[2:])  # what is no bias or scale
    if not rule.flops or len(rule.operands) < 2 or len(rule.results) != 1 or several:
        return None
    left_factors, right_factors, result_factors = (
        {f for dim in dims for f in dim}
        for dims in (rule.operands[0], rule.operands[1], rule.results[0])
    )
    taps = right_factors - left_factors - result_factors
    if (
        taps and left_factors & right_factors & result_factors
    ):  # a convolution in groups multiplies no matrices
        return None
    local = cuts.local(rule)

    def size(factors: set[str]) -> np.ndarray:
        extent = np.ones(len(cuts.splits))
        for f in factors:
            extent = extent * local[f]
        return extent

    batch, columns = (
        size(left_factors & right_factors & result_factors),
        size((right_factors & result_factors) - left_factors),
    )
    rows = size(result_factors - right_factors)
    columns = _whole(columns * wider)
    sums = _whole(flops / (2.0 * rows * columns * batch))
    return Product(rows, columns, sums, batch, convolution=convolution)


def _whole(sizes: np.ndarray) -> np.ndarray:
    """Sizes without what divisions of floats leave: 768 and a trillionth would fill another
    tile."""
    near = np.rint(sizes)
    return np.where(np.abs(sizes - near) < 1e-6 * near, near, sizes)
