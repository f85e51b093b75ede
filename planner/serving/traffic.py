"""A plan under requests that arrive: of the pairs that a search priced, which serves them best, and
how long they wait.

An engine that lets requests join while others generate is simulated (planner.serving.continuous),
with the prices of each pair's phases at the sizes it meets (planner.serving.step_prices).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import NO_PLAN, PlanError
from planner.serving.arrivals import Requests, drawn, traced
from planner.serving.continuous import (
    BLOCK,
    Course,
    Limits,
    most_a_second,
    overlap_s,
    serve_all,
    settled,
)
from planner.serving.joint import Joint, Priced
from planner.serving.lengths import Lengths
from planner.serving.outcome import Outcome, told_of
from planner.serving.sizes import Sizes
from planner.serving.step_prices import PlanPrices
from planner.serving.targets import Target

SERVED = 20_000
"""Of a trace, the first so many requests are served."""
RATES = (1e-6, 1e9)
"""Requests a second, from and to, that are drawn."""
STEP_TOKENS = (8192, 2048, 512)
"""Tokens of a step at most, tried where nothing is said: short steps keep those that generate from
waiting for prompts."""
AT_ONCE = 128
"""Sequences at once, a device, where nothing is said."""


@dataclass(frozen=True)
class Traffic:
    """What arrives, so many a second. source: "poisson" or a trace's name; prompt, generate: in
    words."""

    requests: Requests
    rate_per_s: float
    source: str
    prompt: str
    generate: str
    targets: tuple[Target, ...] = ()

    @classmethod
    def of(
        cls,
        rate: float | str | Path,
        prompt: int | str,
        generate: int | str,
        seed: int,
        targets: tuple[Target, ...] = (),
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
            prompts, generated = (
                f"{a.mean():.0f} in the mean" for a in (first.prompt, first.generate)
            )
            return cls(first, first.rate, Path(text).name, prompts, generated, targets)
        least, most = RATES
        if not least <= each_s <= most:
            raise PlanError(
                "P226",
                f"--rate {text}: no requests a second, of which {least:f} to {most:,.0f} are"
                " planned for",
                help=["--rate 8, or the file of a trace"],
            )
        if seed < 0:
            raise PlanError(
                "P226",
                f"--seed {seed}: requests are drawn from no negative number",
                help=["--seed 0"],
            )
        prompt_lengths, answer_lengths = (
            Lengths.of(prompt, "prompt"),
            Lengths.of(generate, "generate"),
        )
        requests = drawn(each_s, prompt_lengths, answer_lengths, seed)
        return cls(requests, each_s, "poisson", str(prompt_lengths), str(answer_lengths), targets)

    def repeated(self, count: int) -> Requests:
        """So many of the requests, over and over, all there from the start."""
        index = np.arange(count) % len(self.requests)
        return Requests(np.zeros(count), self.requests.prompt[index], self.requests.generate[index])

    @property
    def longest(self) -> int:
        """Tokens of the longest request at its end."""
        return int((self.requests.prompt + self.requests.generate).max())

    @property
    def mean_lengths(self) -> tuple[int, int]:
        """Tokens of a prompt and generated, in the mean, rounded up."""
        r = self.requests
        prompt, generate = (int(np.ceil(a.mean())) for a in (r.prompt, r.generate))
        return prompt, generate


@dataclass(frozen=True)
class Loaded:
    """A pair under the traffic."""

    pair: Priced
    limits: Limits
    courses: Sequence[Course]
    outcome: Outcome


class _Try:
    """A pair with steps of so many tokens at most. What the rate's requests wait and how many are
    served at most are simulated one after the other, the first of them first that the objective
    asks for: most often that tells which of several is best."""

    def __init__(self, loads: Loads, pair: Priced, prices: PlanPrices, limits: Limits) -> None:
        self.loads, self.pair, self.prices, self.limits = loads, pair, prices, limits
        self.of_most = loads.objective == "throughput"

    @cached_property
    def courses(self) -> Sequence[Course]:
        """What becomes of the requests."""
        requests = self.loads.traffic.requests
        return serve_all(requests, self.pair.replicas, self.prices, self.limits)

    @cached_property
    def most_per_s(self) -> float:
        """Requests a second that are served at most."""
        traffic, limits = self.loads.traffic, self.limits
        full = traffic.repeated(limits.full(traffic.mean_lengths))
        return most_a_second(full, self.prices, limits) * self.pair.replicas

    @property
    def done(self) -> bool:
        """Whether both are known."""
        return {"courses", "most_per_s"} <= vars(self).keys()

    def go_on(self) -> None:
        """Simulate what comes next."""
        first, then = "courses", "most_per_s"
        if self.of_most:
            first, then = then, first
        getattr(self, then if first in vars(self) else first)

    @property
    def key(self) -> tuple:
        """Order of tries, the best first; before all is known no later than what it will be."""
        known, rate = vars(self).keys(), self.loads.traffic.rate_per_s
        if "courses" in known:
            most = self.most_per_s if self.done else math.inf
            return self.loads.order(self.limits, Outcome.of(self.courses, most, rate))
        if "most_per_s" in known:
            return ((1.0 if rate < self.most_per_s else math.inf, [told_of(1 / self.most_per_s)]),)
        return ()

    @property
    def loaded(self) -> Loaded:
        """All that is known."""
        rate = self.loads.traffic.rate_per_s
        outcome = Outcome.of(self.courses, self.most_per_s, rate)
        return Loaded(self.pair, self.limits, self.courses, outcome)


def figures_of(courses: Sequence[Course], limits: Limits) -> dict[str, Any]:
    """What happened in replicas while requests came, by name."""
    courses = [c for c in courses if len(c.requests)]
    start, end = settled(courses)
    seconds, replicas = end - start, len(courses)

    def within(begin: np.ndarray, until: np.ndarray) -> np.ndarray:
        return overlap_s(begin, until, start, end)

    tokens = waiting = generating = busy = kept = taken = 0.0
    for c in courses:
        r, begun = c.requests, np.maximum(c.first_s, c.admitted_s)
        stay, generated = c.finish_s - begun, within(begun, c.finish_s)
        share = np.where(stay > 0, generated / np.where(stay > 0, stay, 1.0), 0.0)
        first = (c.first_s >= start) & (c.first_s <= end)
        tokens += float(((r.generate - 1) * share + first).sum())
        waiting += float(within(r.arrival_s, c.admitted_s).sum())
        generating += float(generated.sum())
        busy += float(within(*_together(c.admitted_s, c.finish_s)).sum())
        there, room = within(c.admitted_s, c.finish_s), r.prompt + r.generate
        kept += float((there * limits.kept(room)).sum())
        taken += float((there * limits.room(room)).sum())
    return {
        "tokens_per_s": tokens / seconds,
        "waiting": waiting / seconds,
        "most_waiting": most_waiting(courses),
        "generating": generating / seconds / replicas,
        "busy": busy / seconds / replicas,
        "cache_taken": taken / seconds / replicas / limits.cache_tokens,
        "block_waste": 1 - kept / taken if taken else 0.0,
        "limits": {
            "sequences": limits.sequences,
            "step_tokens": limits.step_tokens,
            "cache_tokens": limits.cache_tokens,
            "block": BLOCK,
        },
    }


def _together(begin: np.ndarray, until: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Stretches, which begin in order, as those that do not overlap."""
    reached = np.maximum.accumulate(until)
    apart = np.flatnonzero(begin[1:] > reached[:-1]) + 1
    return begin[np.append(0, apart)], reached[np.append(apart - 1, len(until) - 1)]


def most_waiting(courses: Sequence[Course]) -> int:
    """The most that wait at a time, in front of all replicas together."""
    come = np.sort(np.concatenate([c.requests.arrival_s for c in courses]))
    gone = np.sort(np.concatenate([c.admitted_s for c in courses]))
    return int((np.arange(1, len(come) + 1) - np.searchsorted(gone, come, side="right")).max())


class Loads:
    """Pairs of one search under the traffic. step_tokens: of a step at most, what is tried."""

    def __init__(
        self, joint: Joint, traffic: Traffic, objective: str, step_tokens: Sequence[int]
    ) -> None:
        r = traffic.requests
        self.joint, self.traffic, self.objective = joint, traffic, objective
        self.step_tokens = step_tokens
        self.needs = r.prompt + r.generate
        self._loads: list[Loaded] = []
        self.sizes = Sizes(joint, traffic.longest, traffic.mean_lengths[0])

    def key(self, load: Loaded) -> tuple:
        """Order of pairs, the best first."""
        value, *rest = self.order(load.limits, load.outcome)
        return (value, load.pair.split, load.pair.label, *rest)

    def order(self, limits: Limits, outcome: Outcome) -> tuple:
        """Order of the loads of one pair, the best first: among equals the longest steps."""
        return (outcome.key(self.objective, self.traffic.targets), -limits.step_tokens)

    def limits(self, pair: Priced, prices: PlanPrices, step_tokens: int) -> Limits:
        """What a replica of the pair takes: the memory that weights and work leave is cache."""
        free_bytes = self.joint.request.limit_bytes - (pair.memory_bytes - pair.cache_bytes)
        sequences = self.joint.step.service.concurrency // pair.replicas
        if prices.cache_token_bytes:
            tokens = int(free_bytes / prices.cache_token_bytes) // BLOCK * BLOCK
        else:  # states do not grow: room for every sequence
            tokens = sequences * (self.traffic.longest + BLOCK)
        return Limits(sequences, step_tokens, tokens, self.sizes.windows)

    def load(self, pair: Priced) -> Loaded | None:
        """The pair under the traffic, its steps as long as is best; None where its cache has no
        room for the longest request. What was found by two labels is simulated once."""
        if twin := next((load for load in self._loads if load.pair.like(pair)), None):
            return replace(twin, pair=pair)
        prices = PlanPrices.of(self.sizes, pair)
        limits = [self.limits(pair, prices, step_tokens) for step_tokens in self.step_tokens]
        if any(int(each.room(self.needs).max()) > each.cache_tokens for each in limits):
            return None
        tries = [_Try(self, pair, prices, each) for each in limits]
        while not (best := min(tries, key=lambda each: each.key)).done:
            best.go_on()
        self._loads.append(best.loaded)
        return self._loads[-1]

    def best(self, pairs: Sequence[Priced]) -> tuple[Loaded, list[Loaded]]:
        """The best of the pairs that fit, and all of them. Raises PlanError P021 where none has
        room for the longest request."""
        loads = [load for pair in pairs if pair.fits and (load := self.load(pair))]
        if not loads:
            raise PlanError(
                "P021",
                f"no plan has room for the longest request, {self.traffic.longest:,} tokens",
                help=["more devices", "--quantize int8"],
                exit_code=NO_PLAN,
            )
        return min(loads, key=self.key), loads


def told(outcome: Outcome, traffic: Traffic, seed: int) -> Mapping[str, Any]:
    """What arrived, and what became of it, for the file."""
    return {
        "source": traffic.source,
        "requests": len(traffic.requests),
        "longest": traffic.longest,
        "seed": seed,
        "prompt": traffic.prompt,
        "generate": traffic.generate,
        **outcome.figures(traffic.targets),
    }
