"""How many tokens requests have: all alike, or drawn from a distribution.

512         every request
512..2048   evenly from 512 to 2,048
512~2048    log-normal: half of them up to 512, one in a hundred over 2,048
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.errors import PlanError

Z99 = 2.3263478740408408
"""Of a normal distribution, one in a hundred is so many deviations above the mean."""
MOST_TOKENS = 1 << 24
LONGEST = 4.0
"""What a log-normal draws is at most so many times its second number."""


@dataclass(frozen=True)
class Lengths:
    """spread "" (all are `low`), ".." (evenly from low to high) or "~" (log-normal: median low,
    99th of a hundred high). Tokens."""

    low: int
    high: int
    spread: str = ""

    @classmethod
    def of(cls, value: int | str, option: str) -> Lengths:
        """The value of an option. Raises PlanError P226 where it is none."""
        text = str(value)
        spread = next((mark for mark in ("..", "~") if mark in text), "")
        parts = text.split(spread) if spread else [text, text]
        tokens = [int(p) if p.isascii() and p.isdigit() and len(p) <= 8 else 0 for p in parts]
        if len(tokens) != 2 or not 1 <= tokens[0] <= tokens[1] <= MOST_TOKENS:
            raise PlanError(
                "P226",
                f"--{option} {text[:60]}: no tokens of a request",
                help=[
                    "512, evenly 512..2048, or 512~2048: half up to 512, one in a hundred over 2048"
                ],
            )
        return cls(tokens[0], tokens[1], spread if tokens[0] < tokens[1] else "")

    @property
    def mean(self) -> float:
        """Tokens of a request in the mean."""
        if self.spread == "~":
            deviation = math.log(self.high / self.low) / Z99
            return self.low * math.exp(deviation**2 / 2)
        return (self.low + self.high) / 2

    def draw(self, count: int, generator: Any) -> np.ndarray:
        """Tokens of so many requests, int64."""
        if self.spread == "~":
            deviation = math.log(self.high / self.low) / Z99
            drawn = np.exp(math.log(self.low) + deviation * generator.standard_normal(count))
            return np.clip(np.rint(drawn), 1, LONGEST * self.high).astype(np.int64)
        return generator.integers(self.low, self.high + 1, count, dtype=np.int64)

    def __str__(self) -> str:
        return f"{self.low}{self.spread}{self.high}" if self.spread else str(self.low)
