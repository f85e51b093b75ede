"""Rotary positions: what turns pairs of a head's features by angles position * theta^(-2i/R).

Spread out, x*cos + rotate_half(x)*sin with cos, sin [1, 1, S, R], as exporters of opset 23 write
it; or the RotaryEmbedding operator, whose positions [batch, seq] follow the batch. Where only the
first R features of a head turn, the others pass by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from models_zoo.builder import Scope
from models_zoo.layers import angles

Rotate = Callable[[Scope, str], str]
"""(module, x [B, H, S, D]) -> x with its positions turned in."""


@dataclass(frozen=True)
class Positions:
    """ids: the tokens' input, for its batch; index: positions, int64 [S], or [batch, S] where
    `batched` (a cache's)."""

    ids: str
    index: str
    batched: bool


def rotary(
    s: Scope, places: Positions, theta: float, *, width: int, turned: int, operator: bool
) -> Rotate:
    """Write the tables of the angles once; return what turns the first `turned` of the `width`
    features of x. operator: as RotaryEmbedding."""
    half = turned // 2
    angle = angles(s, s.op("Cast", places.index, to=1), half, theta)
    if operator:
        cos, sin = s.op("Cos", angle), s.op("Sin", angle)
        where = s.op(
            "Expand", s.op("Unsqueeze", places.index, s.ints(0)), s.op("Shape", places.ids)
        )
        return _part(lambda to, x: to.op("RotaryEmbedding", x, cos, sin, where), width, turned)
    both = s.op(
        "Unsqueeze",
        s.op("Concat", angle, angle, axis=-1),
        s.ints(1) if places.batched else s.ints(0, 1),
    )  # [batch or 1, 1, S, R]
    cos, sin = s.op("Cos", both), s.op("Sin", both)

    return _part(lambda to, x: _turned(to, x, cos, sin, half), width, turned)


def _turned(s: Scope, x: str, cos: str, sin: str, half: int) -> str:
    """x cos + (its halves changed, the new first one negative) sin."""
    low, high = (
        s.op("Slice", x, s.ints(a), s.ints(b), s.ints(-1)) for a, b in ((0, half), (half, 2 * half))
    )
    swapped = s.op("Concat", s.op("Neg", high), low, axis=-1)
    return s.op("Add", s.op("Mul", x, cos), s.op("Mul", swapped, sin))


def proportional(s: Scope, places: Positions, theta: float, *, width: int, turned: int) -> Rotate:
    """As `rotary` of all features, of which pairs beyond the first turned / 2 stand still (Gemma
    4): feature i turns with feature i + width / 2."""
    half, some = width // 2, turned // 2
    place = s.op("Cast", places.index, to=1)
    moving = angles(s, place, some, theta ** (some / half))
    zeros = s.net.constant(np.zeros(half - some, np.float32))
    still = s.op("Mul", s.op("Unsqueeze", place, s.ints(-1)), zeros)
    angle = s.op("Concat", moving, still, axis=-1)
    both = s.op("Unsqueeze", s.op("Concat", angle, angle, axis=-1), s.ints(0, 1))
    cos, sin = s.op("Cos", both), s.op("Sin", both)
    return lambda to, x: _turned(to, x, cos, sin, half)


def _part(rotate: Rotate, width: int, turned: int) -> Rotate:
    """`rotate` for the first features of a head alone, where not all turn."""
    if turned == width:
        return rotate

    def some(to: Scope, x: str) -> str:
        first, rest = to.ops(2, "Split", x, to.ints(turned, width - turned), axis=-1)
        return to.op("Concat", rotate(to, first), rest, axis=-1)

    return some


def unturned(to: Scope, x: str) -> str:
    """x of a layer without positions."""
    return x
