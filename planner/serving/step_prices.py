"""Prices of a plan's two phases at other sizes, as continuous batching meets them.

Both graphs are priced under the plan's splits at sizes that are powers of two, and lie on lines
between: a step at two lengths of the cache for each number of sequences, a pass over prompts at two
lengths of prompts for each number of tokens, which tells pairs of tokens (attention) from rows
(products). Only sizes that are met are priced. In steps with prompts rows of sequences that
generate are priced as those of prompts, and their states, and those of prompts that take several
steps, as read and written once.

A step of both has the rows of both (weights are read once) and reads the caches of those that
generate: prompt(tokens + sequences) + keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property

from planner.execution.plan import Plan
from planner.search.request import Candidate
from planner.serving.joint import Priced, Timed
from planner.serving.readings import Phase
from planner.serving.sizes import Sizes

SHORT = 8
"""The shorter of the two lengths of the cache is so many times shorter."""
FEWEST_ROWS = 16


def shorter(longest: int) -> int:
    """The shorter of the two lengths of the cache."""
    return max(1, longest // SHORT)


def power_below(number: int) -> int:
    """The greatest power of two that is no more."""
    return 1 << (number.bit_length() - 1)


def spans_of(longest: int, lengths: tuple[int, int]) -> dict[Phase, tuple[int, int]]:
    """Tokens of the shortest and of the longest prompt and cache that are priced. longest: tokens
    of the longest sequence at its end; lengths: of a prompt and generated, in the mean."""
    prompt = min(FEWEST_ROWS, power_below(lengths[0]))
    step = min(shorter(longest), sum(lengths))
    return {"prompts": (prompt, longest), "step": (step, max(longest, sum(lengths)))}


class PlanPrices:
    """Of one plan (planner.serving.continuous.StepPrices): both phases on a mesh of so many
    replicas, bytes on a device of the keys and values of one token of its replica, in every layer,
    and of what a sequence has beside them."""

    def __init__(
        self,
        sizes: Sizes,
        replicas: int,
        prompts: Candidate,
        step: Candidate,
        cache_token_bytes: float,
        state_bytes: float = 0.0,
    ) -> None:
        self.state_bytes = state_bytes
        self.sizes, self.replicas, self.cache_token_bytes = sizes, replicas, cache_token_bytes
        self.prompts, self.step = prompts, step
        self.plans: dict[Phase, tuple[Plan, ...]] = {
            "prompts": sizes.on_terms("prompts", prompts.plan),
            "step": sizes.on_terms("step", step.plan),
        }
        self.decode, self.prompt = cache(self._decode), cache(self._prompt)
        self._steps, self._passes = cache(self._priced_step), cache(self._priced_pass)

    def _decode(self, sequences: int) -> tuple[float, float]:
        return _between(sequences, self._steps, 1)

    def _prompt(self, tokens: int) -> tuple[float, float]:
        seconds, pair_s = _between(max(tokens, FEWEST_ROWS), self._passes, FEWEST_ROWS)
        return seconds - pair_s * tokens * min(tokens, self.length) / 2, pair_s

    @cached_property
    def state_s(self) -> float:
        """Seconds of reading and writing what is kept of one of many sequences."""
        many = 1024
        moved = 2 * self.state_bytes * many
        seconds = self.sizes.joint.pricer(self.step).kernel_s(0.0, moved, self.compute)
        return seconds / many if moved else 0.0

    @property
    def length(self) -> int:
        """Tokens of the prompts that passes are priced with, a power of two."""
        return power_below(self.sizes.prompt)

    def _priced_step(self, sequences: int) -> tuple[float, float]:
        """A step of a replica's sequences, at its two lengths."""
        long = self.sizes.longest
        short = shorter(long)
        seconds = [self.step_s(sequences, length) for length in (short, long)]
        key_s = max(0.0, (seconds[1] - seconds[0]) / (sequences * (long - short)))
        return seconds[0] - key_s * sequences * short, key_s

    def step_s(self, sequences: int, length: int) -> float:
        """Seconds of a step of so many sequences of a replica, each with so many tokens."""
        step = self._timed("step", sequences, length)
        written = 2 * self.cache_token_bytes * sequences
        if step.pricer.runtime.serves and sequences > 1:
            seconds = step.seconds(self._timed("step", sequences // 2, length))
        else:
            seconds = step.step_s
        return seconds + 2 * step.pricer.kernel_s(0.0, written, self.compute)

    def _priced_pass(self, tokens: int) -> tuple[float, float]:
        """(seconds of a pass over prompts of so many tokens together, seconds a pair); tokens: a
        power of two. Prompts of half the length, twice as many, tell what pairs take."""
        length = min(tokens, self.length)
        rows = tokens // length
        seconds = self.pass_s(rows, length)
        if length < 2 * FEWEST_ROWS:
            return seconds, 0.0
        halves = self.pass_s(2 * rows, length // 2)
        return seconds, max(0.0, (seconds - halves) / (tokens * length / 4))

    def pass_s(self, rows: int, length: int) -> float:
        """Seconds of a pass over so many prompts of a replica, their keys, values and states
        written into the cache."""
        first = self._timed("prompts", rows, length)
        written = 2 * rows * (self.cache_token_bytes * length + self.state_bytes)
        return first.seconds() + first.pricer.kernel_s(0.0, written, self.compute)

    def _timed(self, phase: Phase, rows: int, tokens: int) -> Timed:
        """The times of so many sequences of a replica."""
        best = self.prompts if phase == "prompts" else self.step
        rows *= self.replicas
        return self.sizes.timed(phase, rows, tokens, best, self.plans[phase])

    @property
    def compute(self) -> str:
        """The type computed in."""
        return self.sizes.joint.request.recipe.compute

    @classmethod
    def of(cls, sizes: Sizes, pair: Priced) -> PlanPrices:
        """The prices of a pair of plans on one mesh."""
        assert pair.prompts.best is not None and pair.step.best is not None
        state = pair.state_bytes * pair.replicas / sizes.joint.step.service.concurrency
        return cls(sizes, pair.replicas, pair.prompts.best, pair.step.best, pair.token_bytes, state)


def _between(
    count: int, priced: Callable[[int], tuple[float, float]], least: int
) -> tuple[float, float]:
    """What is priced at powers of two from `least` on, on a line between them."""
    low = max(least, power_below(count))
    below = priced(low)
    if count <= low:
        return below
    above, share = priced(2 * low), count / low - 1
    first, second = (a + share * (b - a) for a, b in zip(below, above, strict=True))
    return first, second
