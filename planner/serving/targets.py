"""Targets: how long requests may wait."""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.hardware.units import show_time, time_s
from planner.errors import PlanError
from planner.serving.result import PERCENTILES

STRICTEST = PERCENTILES[-1]


@dataclass(frozen=True)
class Target:
    """So many of a hundred requests wait at most so long: figure "ttft" or "tpot"."""

    figure: str
    percentile: int
    seconds: float

    @classmethod
    def of(cls, figure: str, value: str | float) -> Target:
        """The target of "500ms" or "p90=500ms" (without: of 99 in a hundred), or seconds. Raises
        PlanError P226."""
        percentile, eq, text = str(value).rpartition("=")
        try:
            seconds = float(value) if not isinstance(value, str) else time_s(text)
            known = {f"p{p}": p for p in PERCENTILES} | ({} if eq else {"": STRICTEST})
            if not 0 < seconds < 1e9:
                raise ValueError("not a time above 0")
            return cls(figure, known[percentile], seconds)
        except (KeyError, ValueError) as e:
            raise PlanError(
                "P226",
                f"--{figure} {str(value)[:40]}: no target",
                help=[f"--{figure} 500ms, of 99 requests in a hundred, or p50=500ms, p90=500ms"],
            ) from e

    def words(self, seconds: float) -> str:
        """The target and what was reached."""
        reached = f"p{self.percentile} {show_time(seconds)}"
        return f"{self.figure} {reached} of {show_time(self.seconds)}"
