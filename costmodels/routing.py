"""How a router's choices spread over experts: what the busiest device gets, and what is dropped at
a capacity.

A spread is one number, the rows of the busiest device over the mean, or counts of a router, a
number for each expert. A capacity factor C gives every expert places for C times the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

USUAL_IMBALANCE = 1.25
"""A guess: it was measured of no router. Capacity factors that models are trained with are 1 to 2,
1.25 among them (Switch Transformers, arXiv:2101.03961)."""


def busiest(counts: Sequence[int], pieces: int) -> float:
    """Choices for the fullest of `pieces` equal runs of experts, over the mean of the runs."""
    per_piece = len(counts) // pieces
    sums = [sum(counts[k * per_piece : (k + 1) * per_piece]) for k in range(pieces)]
    return max(sums) * pieces / sum(counts)


def mean_ceiling(least: float, most: float) -> float:
    """Mean of x rounded up, of x that are evenly spread from `least` to `most`."""

    def below(x: float) -> float:
        """Integral of the ceiling from 0 to x."""
        n = int(x)
        return n * (n + 1) / 2 + (x - n) * (n + 1)

    if most - least < 1e-9:
        return max(1.0, math.ceil(most - 1e-9))
    return (below(most) - below(least)) / (most - least)


def dropped_of_counts(counts: Sequence[int], factor: float) -> float:
    """Part of all choices beyond the places of their experts, exactly."""
    total = sum(counts)
    room = factor * total / len(counts)
    return sum(max(0.0, n - room) for n in counts) / total


def dropped_of_spread(imbalance: float, factor: float) -> float:
    """The same where only the busiest expert's rows over the mean are known, F: experts are taken
    to be evenly spread, from 2 - F to F times the mean; above F = 2 from nothing to F, with some
    that nobody chooses.

    Of loads x that are evenly spread over [a, F] a part (F - C)^2 / (2 (F - a)) is beyond C.
    """
    beyond = max(0.0, imbalance - factor)
    if not beyond:
        return 0.0
    if imbalance > 2:
        return beyond**2 / imbalance**2  # a = 0, of 2 / F of the experts
    return beyond**2 / (4 * (imbalance - 1))
