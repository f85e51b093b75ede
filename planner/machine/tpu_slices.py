"""Which slices of a torus exist: TPU pods are cut into regular boxes of chips."""

from __future__ import annotations

import itertools
import re
from math import prod

NAMED = re.compile(r"(?P<device>.+):(?P<shape>\d{1,5}(?:x\d{1,5}){1,2})")
"""A slice by its shape, as Google Cloud writes it: tpu-v5e:4x4, v5p:4x4x8."""


def named_slice(hardware: str) -> tuple[str, tuple[int, ...]]:
    """("tpu-v5e", (4, 8)) of "tpu-v5e:8x4", sides rising; the shape is () where none is named."""
    match = NAMED.fullmatch(hardware)
    return (
        (match["device"], tuple(sorted(int(n) for n in match["shape"].split("x"))))
        if match
        else (hardware, ())
    )


ACCELERATOR_TYPE = re.compile(r"(tpu-)?(?P<kind>v4|v5p|v5e|v5litepod|v6e)-(?P<count>\d{1,5})")
"""A slice by its accelerator type: v5litepod-16, v5p-128."""
CORES = {"v4": 2, "v5p": 2}
"""TensorCores of a chip, where accelerator types count these (Google Cloud's pages of v4 and v5p);
those of v5e and v6e count chips."""


def of_accelerator_type(name: str) -> str:
    """What to type for a slice that is named by its accelerator type; "" for other names."""
    match = ACCELERATOR_TYPE.fullmatch(name.lower())
    if match is None:
        return ""
    kind, count = match["kind"].replace("v5litepod", "v5e"), int(match["count"])
    cores = CORES.get(kind, 1)
    chips = f"{max(1, count // cores)} chips"
    what = f"{count} TensorCores, {chips}" if cores > 1 else chips
    return f"{name} has {what}: --hardware {kind} --devices {max(1, count // cores)}"


def slice_shapes(pod: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Chips -> the most even real slice."""
    most_even: dict[int, tuple[int, ...]] = {}
    for shape in real_slices(pod):
        most_even.setdefault(prod(shape), shape)
    return most_even


def real_slices(pod: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The slices that exist, sides rising, the most even first. 3-D: parts of a cube of 4, then
    whole cubes; 2-D: powers of two.

    Source: Google Cloud's TPU configuration pages. (1, .., 2) is half a host, useful for small
    tests.
    """
    shapes: list[tuple[int, ...]]
    if len(pod) == 3:
        shapes = [(1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2), (2, 2, 4), (2, 4, 4)]
        shapes += itertools.combinations_with_replacement(range(4, pod[-1] + 1, 4), 3)
    else:
        shapes = [
            s
            for s in ((1, 1), (1, 2), *itertools.combinations_with_replacement((2, 4, 8, 16), 2))
            if s[-1] <= 2 * s[0]
        ]
    fitting = (s for s in shapes if all(n <= most for n, most in zip(s, pod, strict=True)))
    return sorted(fitting, key=lambda s: (s[-1] / s[0], s))


def part_of_host(shape: tuple[int, ...]) -> bool:
    """Whether a shape is less than the four chips of a host: no slice one can order."""
    return prod(shape) < 4


def wraps(shape: tuple[int, ...], n: int) -> bool:
    """Whether a dim of n is joined at its ends: whole cubes in 3-D (optical switches; Google
    Cloud's page of v5p: slices of 4x4x4 and more are full tori), a full side of 16 in 2-D
    (jax-ml/scaling-book, TPU chapter)."""
    return min(shape) >= 4 if len(shape) == 3 else n >= 16
