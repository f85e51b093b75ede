"""A plan under requests that arrive: of the pairs that a search priced, which serves them best, and
how long they wait.

An engine that lets requests join while others generate is simulated (planner.serving.continuous),
with the prices of each pair's phases at the sizes it meets (planner.serving.step_prices).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import NO_PLAN, PlanError
from planner.serving.arrivals import Requests, drawn, traced
from planner.serving.continuous import BLOCK, SETTLING, Course, Limits, most_a_second, serve_all
from planner.serving.joint import Joint, Priced
from planner.serving.lengths import Lengths
from planner.serving.result import PERCENTILES
from planner.serving.step_prices import PlanPrices, Sizes

SERVED = 20_000
"""Of a trace, the first so many requests are served."""
FULL = 2000
"""Requests of which it is worked out how many a second leave a replica at most."""
AT_ONCE = 256
"""Sequences at once where nothing is said: what vLLM lets in."""


@dataclass(frozen=True)
class Traffic:
    """What arrives, so many a second. source: "poisson" or a trace's name; prompt, generate: in
    words."""

    requests: Requests
    rate_per_s: float
    source: str
    prompt: str
    generate: str

    @classmethod
    def of(
        cls, rate: float | str | Path, prompt: int | str, generate: int | str, seed: int
    ) -> Traffic:
        """Requests a second with lengths, or a trace. Raises PlanError P226."""
        text = str(rate)
        try:
            each_s = float(text)
        except ValueError:
            trace = traced(text)
            first = Requests(
                trace.arrival_s[:SERVED], trace.prompt[:SERVED], trace.generate[:SERVED]
            )
            words = (f"{a.mean():.0f} in the mean" for a in (first.prompt, first.generate))
            return cls(first, first.rate, Path(text).name, *words)
        if not 0 < each_s < 1e9:
            raise PlanError(
                "P226",
                f"--rate {text}: no requests a second",
                help=["--rate 8, or the file of a trace"],
            )
        lengths = Lengths.of(prompt, "prompt"), Lengths.of(generate, "generate")
        requests = drawn(each_s, *lengths, seed)
        return cls(requests, each_s, "poisson", *map(str, lengths))

    @property
    def mean_lengths(self) -> tuple[int, int]:
        """Tokens of a prompt and generated, in the mean, rounded up."""
        r = self.requests
        prompt, generate = (int(np.ceil(a.mean())) for a in (r.prompt, r.generate))
        return prompt, generate


@dataclass(frozen=True)
class Loaded:
    """A pair under the traffic. most_per_s: requests a second that all its replicas serve at
    most."""

    pair: Priced
    limits: Limits
    courses: Sequence[Course]
    most_per_s: float
    rate_per_s: float

    @property
    def stable(self) -> bool:
        """Whether the queue ends."""
        return self.rate_per_s < self.most_per_s

    def percentiles(self, figure: str) -> dict[str, float]:
        """p50, p90, p99 of "ttft_s" or "tpot_s"; the first requests are not counted."""
        parts = [getattr(c, figure) for c in self.courses]
        settled = np.concatenate([p[int(SETTLING * len(p)) :] for p in parts])
        if not len(settled):
            return {f"p{p}": 0.0 for p in PERCENTILES}
        return {f"p{p}": float(np.percentile(settled, p)) for p in PERCENTILES}

    def value(self, objective: str) -> float:
        """What is least in the best pair."""
        if objective == "throughput":
            return 1 / self.most_per_s
        return self.percentiles(f"{objective}_s")["p99"]

    def key(self, objective: str) -> tuple:
        """Order: those that serve the rate, then the objective to a thousandth, then the rest."""
        rest = (self.percentiles("tpot_s")["p99"], self.percentiles("ttft_s")["p99"])
        values = [float(f"{v:.4g}") for v in (self.value(objective), *rest)]
        if not self.stable:
            values = [float(f"{1 / self.most_per_s:.4g}"), *values]
        return (not self.stable, values, self.pair.split, self.pair.label)

    def figures(self) -> dict[str, Any]:
        """What happened, by name."""
        courses = self.courses
        end = max(float(c.finish_s.max()) for c in courses)
        waits = [c.admitted_s - c.requests.arrival_s for c in courses]
        tokens = [c.requests.prompt + c.requests.generate for c in courses]
        stays = [c.finish_s - c.admitted_s for c in courses]
        pages = [c.requests.generate.sum() for c in courses]
        replicas = len(courses)
        kept = sum(float((s * t).sum()) for s, t in zip(stays, tokens, strict=True))
        taken = sum(
            float((s * self.limits.room(t)).sum()) for s, t in zip(stays, tokens, strict=True)
        )
        return {
            "rate_per_s": self.rate_per_s,
            "most_per_s": self.most_per_s,
            "stable": self.stable,
            "ttft_s": self.percentiles("ttft_s"),
            "tpot_s": self.percentiles("tpot_s"),
            "tokens_per_s": float(sum(pages)) / end,
            "waiting": sum(float(w.sum()) for w in waits) / end,
            "most_waiting": max(_most_waiting(c) for c in courses),
            "generating": sum(c.sequence_s for c in courses) / end / replicas,
            "busy": sum(c.busy_s for c in courses) / end / replicas,
            "cache_taken": taken / end / replicas / self.limits.cache_tokens,
            "block_waste": 1 - kept / taken,
            "limits": {
                "sequences": self.limits.sequences,
                "step_tokens": self.limits.step_tokens,
                "cache_tokens": self.limits.cache_tokens,
                "block": BLOCK,
            },
        }

    def row(self) -> dict[str, Any]:
        """What its line of the table says beside the pair's figures."""
        return {
            "most_per_s": self.most_per_s,
            "ttft_p99_s": self.percentiles("ttft_s")["p99"],
            "tpot_p99_s": self.percentiles("tpot_s")["p99"],
        }


def _most_waiting(course: Course) -> int:
    """The longest queue of a replica."""
    come, gone = course.requests.arrival_s, np.sort(course.admitted_s)
    return int((np.arange(1, len(come) + 1) - np.searchsorted(gone, come, side="right")).max())


class Loads:
    """Pairs of one search under the traffic."""

    def __init__(self, joint: Joint, traffic: Traffic) -> None:
        r = traffic.requests
        self.joint, self.traffic = joint, traffic
        self.needs = r.prompt + r.generate
        self.sizes = Sizes(joint, int(self.needs.max()), traffic.mean_lengths[0])

    def limits(self, pair: Priced, prices: PlanPrices) -> Limits:
        """What a replica of the pair takes: the memory that weights and work leave is cache."""
        left = self.joint.request.limit_bytes - (pair.memory_bytes - pair.cache_bytes)
        sequences = self.joint.step.service.concurrency // pair.replicas
        tokens = int(left / prices.cache_token_bytes) // BLOCK * BLOCK
        return Limits(sequences, self.joint.prefill_tokens, tokens)

    def load(self, pair: Priced) -> Loaded | None:
        """The pair under the traffic; None where its cache has no room for the longest request."""
        requests = self.traffic.requests
        prices = PlanPrices(self.sizes, pair)
        limits = self.limits(pair, prices)
        if int(limits.room(self.needs).max()) > limits.cache_tokens:
            return None
        courses = serve_all(requests, pair.replicas, prices, limits)
        enough = np.arange(max(FULL, 8 * limits.sequences)) % len(requests)
        full = Requests(np.zeros(len(enough)), requests.prompt[enough], requests.generate[enough])
        most = most_a_second(full, prices, limits) * pair.replicas
        return Loaded(pair, limits, courses, most, self.traffic.rate_per_s)

    def best(self, found: Sequence[Priced], objective: str) -> tuple[Loaded, list[Loaded]]:
        """The best of the pairs that fit, and all of them. Raises PlanError P021."""
        loads = [load for pair in found if pair.fits and (load := self.load(pair))]
        if not loads:
            raise PlanError(
                "P021",
                f"no plan has room for the longest request, {int(self.needs.max()):,} tokens",
                help=["more devices", "--quantize int8"],
                exit_code=NO_PLAN,
            )
        return min(loads, key=lambda load: load.key(objective)), loads


def told(best: Loaded, traffic: Traffic, seed: int) -> Mapping[str, Any]:
    """The file's `traffic`."""
    return {
        "source": traffic.source,
        "requests": len(traffic.requests),
        "longest": int((traffic.requests.prompt + traffic.requests.generate).max()),
        "seed": seed,
        "prompt": traffic.prompt,
        "generate": traffic.generate,
        **best.figures(),
    }
