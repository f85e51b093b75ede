"""Seconds of orthogonalising Muon's matrices: the products of Newton-Schulz steps, by the device's
table of products, and the collectives that make pieces whole (planner.execution.orthogonalising).

    a turn = 5 x (X X' + its square + what they add up to, times X
             + the two sums between them, each read and written by a kernel of its own)
    before = one pass that reads X twice, for its norm and to divide by it, and writes it
"""

from __future__ import annotations

from math import prod

import numpy as np

from costmodels.optimizers import NEWTON_SCHULZ_STEPS
from costmodels.products import Product
from planner.execution.orthogonalising import Matrices
from planner.graph.ir import DTYPE_BYTES
from planner.pricing.pricer import Pricer


def newton_schulz_s(matrices: Matrices, pricer: Pricer) -> float:
    """Seconds of a device's kernels in a step."""
    key = "orthogonalising", matrices
    if key not in pricer.memo:
        pricer.memo[key] = matrices.arrays * _array_s(matrices, pricer)
    known: float = pricer.memo[key]
    return known


def exchanges_s(matrices: Matrices, pricer: Pricer) -> float:
    """Seconds of the collectives in a step."""
    size = pricer.itemsize("float32")
    return matrices.arrays * sum(
        pricer.collective_s(step.kind, step.axes, int(step.elements * size))
        for step in matrices.exchanges
    )


def _array_s(matrices: Matrices, pricer: Pricer) -> float:
    dtype = pricer.recipe.orthogonalising_type
    size, (m, n), (rounds, batch) = DTYPE_BYTES[dtype], sorted(matrices.whole), matrices.rounds
    products = (  # (rows, columns, sums), elements that are read and written
        ((m, m, n), m * n + m * m),
        ((m, m, m), 2 * m * m),
        ((m, n, m), m * m + 2 * m * n),
    )
    multiplied = sum(
        float(
            pricer.kernels_s(
                np.array([2.0 * prod(extents) * batch]),
                np.array([float(size * batch * elements_moved)]),
                dtype,
                Product(*(np.array([float(x)]) for x in (*extents, batch))),
            )[0]
        )
        for extents, elements_moved in products
    )
    added = sum(
        pricer.kernel_s(0.0, 3.0 * size * batch * elements, dtype) for elements in (m * m, m * n)
    )
    before = pricer.kernel_s(0.0, 3.0 * size * matrices.own * m * n, dtype)
    return before + rounds * NEWTON_SCHULZ_STEPS * (multiplied + added)
