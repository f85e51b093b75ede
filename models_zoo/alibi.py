"""Attention with linear biases (ALiBi): scores fall with the distance of a key, by a slope of each
head (BLOOM, Falcon, MPT)."""

from __future__ import annotations

import numpy as np

from models_zoo.builder import Scope
from models_zoo.layers import positions


def slopes(heads: int, most: float) -> list[float]:
    """2^(-most i / n) for i = 1 .. n, the largest power of two of heads, and the values half way
    between these for the others."""
    n = 1 << (heads.bit_length() - 1)
    steps = [i / n for i in range(1, n + 1)] + [(i + 0.5) / n for i in range(n)]
    return [2.0 ** (-most * step) for step in steps[:heads]]


def by_distance(s: Scope, heads: int, most: float, keys: int, scale: float = 1.0) -> str:
    """What is added to scores, [1, heads, keys, keys]: the slope times the key's position, and
    times `scale`. It is minus the slope times the distance but for a term of the query's, which
    softmax does not see."""
    own = np.array(slopes(heads, most), np.float32) * np.float32(scale)
    table = s.net.constant(own.reshape(heads, 1, 1))
    place = s.op("Cast", positions(s, keys), to=1)
    one = s.op("Unsqueeze", s.op("Mul", place, table), s.ints(0))  # [1, heads, 1, keys]
    return s.op("Expand", one, s.ints(1, 1, keys, 1))  # onnxruntime wants a row per query
