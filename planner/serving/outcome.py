"""What became of requests: percentiles of what they waited, whether a target is met, and which of
two plans served them better."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.serving.continuous import Course, steady
from planner.serving.result import PERCENTILES, rate_words
from planner.serving.targets import STRICTEST, Target


@dataclass(frozen=True)
class Outcome:
    """Of requests that found others before and behind them: ttft_s [n], tpot_s [n] (0 where there
    is one token). Requests a second that arrive, and that are served at most."""

    ttft_s: np.ndarray
    tpot_s: np.ndarray
    several: np.ndarray
    """[n] whether a request has more than one token"""
    most_per_s: float
    rate_per_s: float

    @classmethod
    def of(cls, courses: Sequence[Course], most_per_s: float, rate_per_s: float) -> Outcome:
        """The outcome of what happened in replicas."""
        rows = [(c.requests.arrival_s, c.requests.generate, c.first_s, c.finish_s) for c in courses]
        columns = [np.concatenate(column) for column in zip(*rows, strict=True)]
        order = np.argsort(columns[0], kind="stable")
        arrival, generate, first, finish = (column[order] for column in columns)
        return cls.of_requests(arrival, generate, first, finish, most_per_s, rate_per_s)

    @classmethod
    def of_requests(
        cls,
        arrival_s: np.ndarray,
        generate: np.ndarray,
        first_s: np.ndarray,
        finish_s: np.ndarray,
        most_per_s: float,
        rate_per_s: float,
    ) -> Outcome:
        """The outcome of those among requests, in the order of their arrival, that found others
        before them and behind them."""
        counted = steady(arrival_s, finish_s)
        return cls(
            (first_s - arrival_s)[counted],
            ((finish_s - first_s) / np.maximum(generate - 1, 1))[counted],
            generate[counted] > 1,
            most_per_s,
            rate_per_s,
        )

    @property
    def stable(self) -> bool:
        """Whether the queue ends."""
        return self.rate_per_s < self.most_per_s

    def seconds(self, figure: str, percentile: int) -> float:
        """A percentile of "ttft" or "tpot", of the requests that have it."""
        values = self.ttft_s if figure == "ttft" else self.tpot_s[self.several]
        return float(np.percentile(values, percentile)) if len(values) else 0.0

    def percentiles(self, figure: str) -> dict[str, float]:
        """Seconds by percentile: p50 and so on."""
        return {f"p{p}": self.seconds(figure, p) for p in PERCENTILES}

    def attained(self, targets: Sequence[Target]) -> float:
        """Part of the requests that wait no longer than all targets say."""
        good = np.ones(len(self.ttft_s), bool)
        for t in targets:
            values = self.ttft_s if t.figure == "ttft" else self.tpot_s
            good &= values <= t.seconds
        return float(good.mean())

    def miss(self, targets: Sequence[Target]) -> float:
        """The factor by which the worst target is missed, above 1; 1 where all are met and the rate
        is served."""
        if not self.stable:
            return math.inf
        over = (self.seconds(t.figure, t.percentile) / t.seconds for t in targets)
        return max([1.0, *over])

    def missed(self, targets: Sequence[Target]) -> str:
        """Which targets are missed, in words; "" where none is."""
        if not self.stable:
            rate = f"{rate_words(self.most_per_s)} requests a second are served at most"
            return f"{rate}, {rate_words(self.rate_per_s, 4)} arrive"
        reached = ((t, self.seconds(t.figure, t.percentile)) for t in targets)
        return ", ".join(t.words(s) for t, s in reached if s > t.seconds)

    def value(self, objective: str) -> float:
        """What is least in the best plan."""
        if objective == "throughput":
            return 1 / self.most_per_s
        return self.seconds(objective, STRICTEST)

    def key(self, objective: str, targets: Sequence[Target]) -> tuple:
        """Order: those that serve the rate and meet the targets, then the objective to a
        thousandth, then the rest."""
        rest = (self.seconds("tpot", STRICTEST), self.seconds("ttft", STRICTEST))
        values = [told_of(v) for v in (self.value(objective), *rest)]
        if not self.stable:
            values = [told_of(1 / self.most_per_s), *values]
        return (self.miss(targets), values)

    def row(self) -> dict[str, float]:
        """What a line of the table says."""
        return {
            "most_per_s": self.most_per_s,
            "ttft_p99_s": self.seconds("ttft", STRICTEST),
            "tpot_p99_s": self.seconds("tpot", STRICTEST),
        }

    def figures(self, targets: Sequence[Target]) -> Mapping[str, Any]:
        """What is said of the plan that was chosen."""
        return {
            "rate_per_s": self.rate_per_s,
            "most_per_s": self.most_per_s,
            "stable": self.stable,
            "ttft_s": self.percentiles("ttft"),
            "tpot_s": self.percentiles("tpot"),
            "attained": self.attained(targets),
            "targets": [
                {"figure": t.figure, "percentile": t.percentile, "seconds": t.seconds}
                for t in targets
            ],
        }


def told_of(value: float) -> float:
    """A value to a thousandth: what is told apart of two."""
    return float(f"{value:.4g}")
