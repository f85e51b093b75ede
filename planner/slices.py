"""Which slices of a torus exist: TPU pods are cut into regular boxes of chips."""

from __future__ import annotations

import itertools
from math import prod


def slice_shapes(pod: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Chips -> the most even real slice, sides rising. 3-D: parts of a cube of 4, then whole cubes; 2-D: powers of two.

    Source: Google Cloud's TPU configuration pages. (1, .., 2) is half a host, useful for small tests.
    """
    shapes: list[tuple[int, ...]]
    if len(pod) == 3:
        shapes = [(1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2), (2, 2, 4), (2, 4, 4)]
        shapes += itertools.combinations_with_replacement(range(4, pod[-1] + 1, 4), 3)
    else:
        shapes = [(1, 1), (1, 2), *itertools.combinations_with_replacement((2, 4, 8, 16), 2)]
    found: dict[int, tuple[int, ...]] = {}
    for shape in sorted(shapes, key=lambda s: (s[-1] / s[0], s)):
        if all(n <= most for n, most in zip(shape, pod, strict=True)) and (len(pod) == 3 or shape[-1] <= 2 * shape[0]):
            found.setdefault(prod(shape), shape)
    return found


def part_of_host(shape: tuple[int, ...]) -> bool:
    """Whether a shape is less than the four chips of a host: no slice one can order."""
    return prod(shape) < 4


def wraps(shape: tuple[int, ...], n: int) -> bool:
    """Whether a dim of n is joined at its ends: whole cubes in 3-D (optical switches), a full side of 16 in 2-D (jax-ml/scaling-book, TPU chapter)."""
    return min(shape) >= 4 if len(shape) == 3 else n >= 16
