"""Continuous batching as a sequence of events: what an engine does that lets requests join while
others generate.

One replica, step by step. A step takes one token of every sequence that generates, and, as far as
`step_tokens` goes, tokens of prompts: those begun first, then those waiting, in the order of their
arrival (chunked prefill; a long prompt takes several steps, and all that generate wait for the
longer steps). A request is let in when there is a place (`sequences`) and room in the cache for its
prompt and all it will generate, in blocks of BLOCK tokens; so none is ever put out again. The step
in which its prompt ends gives its first token.

Between two events (a request comes, one is done) steps differ only in the keys they read, by as
many as there are sequences, so that all of them are one sum; so are the steps that one long prompt
fills. tests/serving/test_continuous.py holds
this against single steps, closed forms of queues and Little's law.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from planner.serving.arrivals import Requests

BLOCK = 16
"""Tokens of a block of the cache (vLLM's; SGLang's smaller ones waste less)."""
FULL = 2000
"""At least so many requests say how many a second leave a replica at most."""
SETTLING = 0.1
"""Of all requests, the first tenth is not counted: they find an empty machine."""


class StepPrices(Protocol):
    """Seconds of a step: of sequences that generate, and of tokens of prompts among them."""

    def decode(self, sequences: int) -> tuple[float, float]:
        """(seconds of a step of so many sequences, seconds for each token in their caches)."""
        ...

    def prompt(self, tokens: int) -> tuple[float, float]:
        """(seconds of a step with so many rows, seconds for each pair of a token of a prompt and
        one before it)."""
        ...

    @property
    def state_s(self) -> float:
        """Seconds that a step with prompts takes to read and write what layers keep of one sequence
        beside keys and values; steps of sequences that generate have that in theirs."""
        ...


@dataclass(frozen=True)
class Limits:
    """Of a replica. sequences: at once; step_tokens: of a step; cache_tokens: room in the cache, in
    tokens that every layer keeps; windows: (most tokens that they keep, their part of a token's
    bytes) of layers with a sliding window."""

    sequences: int
    step_tokens: int
    cache_tokens: int
    windows: tuple[tuple[int, float], ...] = ()

    def kept(self, tokens: np.ndarray) -> np.ndarray:
        """Room that requests with so many tokens take, but for what blocks waste."""
        return tokens - sum(part * np.maximum(tokens - most, 0) for most, part in self.windows)

    def room(self, tokens: np.ndarray) -> np.ndarray:
        """Room that the blocks of requests take which end with so many tokens."""
        return np.ceil(self.kept(-(-tokens // BLOCK) * BLOCK)).astype(int)

    def full(self, lengths: tuple[int, int]) -> int:
        """Requests of which it is worked out how many a second leave the replica at most, in the
        mean of so many tokens (of a prompt, generated): eight times as many as are in at once."""
        room = int(self.kept(np.array(sum(lengths))))
        return max(FULL, 8 * min(self.sequences, self.cache_tokens // room))


@dataclass(frozen=True)
class Course:
    """What happened to every request of a replica, by their order: seconds [n] from the start of
    the requests. busy_s: in steps; sequence_s: sum of steps' seconds times their sequences."""

    requests: Requests
    admitted_s: np.ndarray
    first_s: np.ndarray
    finish_s: np.ndarray
    busy_s: float
    sequence_s: float


class Replica:
    """A replica at work. prefilled: prompts were passed elsewhere, so that a request begins with
    its keys and its first token."""

    def __init__(
        self, requests: Requests, prices: StepPrices, limits: Limits, prefilled: bool = False
    ) -> None:
        self.requests, self.prices, self.limits, self.prefilled = (
            requests,
            prices,
            limits,
            prefilled,
        )
        self.arrival = requests.arrival_s.tolist()
        self.prompt, self.generate = requests.prompt.tolist(), requests.generate.tolist()
        self.needs = limits.room(requests.prompt + requests.generate).tolist()
        assert max(self.needs, default=0) <= limits.cache_tokens, "a request that never fits"
        n = len(requests)
        self.admitted, self.first, self.finish = [0.0] * n, [0.0] * n, [0.0] * n
        self.now, self.next, self.room, self.steps = 0.0, 0, limits.cache_tokens, 0
        self.generating: list[tuple[int, int]] = []
        """(step in which it is done, request), a heap"""
        self.passing: list[list[int]] = []
        """[request, tokens of its prompt that are done], in their order"""
        self.keys = 0
        """Tokens in the caches of those that generate"""
        self.busy_s = self.sequence_s = 0.0

    def run(self) -> Course:
        """Serve all requests."""
        while self.next < len(self.arrival) or self.generating or self.passing:
            if not self.generating and not self.passing:
                self.now = max(self.now, self.arrival[self.next])
            if chunks := self._take():
                self._mixed(chunks)
            elif self.generating:
                self._alone()
        admitted, first, finish = map(np.array, (self.admitted, self.first, self.finish))
        return Course(self.requests, admitted, first, finish, self.busy_s, self.sequence_s)

    def _admits(self) -> bool:
        """Whether the next request has come and there is room for it."""
        return (
            self.next < len(self.arrival)
            and self.arrival[self.next] <= self.now
            and len(self.generating) + len(self.passing) < self.limits.sequences
            and self.needs[self.next] <= self.room
        )

    def _admit(self) -> int:
        request = self.next
        self.admitted[request] = self.now
        self.room -= self.needs[request]
        self.next += 1
        return request

    def _take(self) -> list[tuple[list[int], int]]:
        """(prompt, tokens of it in the next step); lets requests in."""
        if self.prefilled:
            while self._admits():
                request = self._admit()
                self.first[request] = self.arrival[request]
                self._join(request)
            return []
        if not self.passing and not self._admits():
            return []
        tokens_left = max(1, self.limits.step_tokens - len(self.generating))
        chunks: list[tuple[list[int], int]] = []
        while tokens_left and (len(chunks) < len(self.passing) or self._admits()):
            if len(chunks) == len(self.passing):
                self.passing.append([self._admit(), 0])
            passing = self.passing[len(chunks)]
            tokens = min(tokens_left, self.prompt[passing[0]] - passing[1])
            chunks.append((passing, tokens))
            tokens_left -= tokens
        return chunks

    def _join(self, request: int) -> None:
        """A request begins to generate, or is done with its first token."""
        if self.generate[request] == 1:
            self._leave(request, 0)
            return
        heapq.heappush(self.generating, (self.steps + self.generate[request] - 1, request))
        self.keys += self.prompt[request]

    def _leave(self, request: int, keys: int) -> None:
        self.finish[request] = self.now
        self.room += self.needs[request]
        self.keys -= keys

    def _pass(self, seconds: float, steps: int) -> None:
        """Time goes by; every sequence that generates gets so many tokens."""
        sequences = len(self.generating)
        self.now += seconds
        self.busy_s += seconds
        self.sequence_s += seconds * sequences
        self.steps += steps
        self.keys += steps * sequences
        while self.generating and self.generating[0][0] == self.steps:
            request = heapq.heappop(self.generating)[1]
            self._leave(request, self.prompt[request] + self.generate[request] - 1)

    def _mixed(self, chunks: list[tuple[list[int], int]]) -> None:
        """A step with tokens of prompts, and those after it that are like it."""
        sequences, steps = len(self.generating), self._alike(chunks)
        rows, pairs = sequences, 0.0
        for passing, tokens in chunks:
            rows += tokens
            pairs += tokens * (passing[1] + (tokens + 1) / 2)
        base_s, pair_s = self.prices.prompt(rows)
        seconds, longer_s = base_s + pair_s * pairs, pair_s * chunks[0][1] ** 2
        seconds += self.prices.state_s * (sequences + len(chunks))
        if sequences:
            key_s = self.prices.decode(sequences)[1]
            seconds += key_s * self.keys
            longer_s += key_s * sequences
        self._pass(steps * seconds + longer_s * steps * (steps - 1) / 2, steps)
        done = 0  # the first ones: only the last of a step may be cut short
        for passing, tokens in chunks:
            request = passing[0]
            passing[1] += steps * tokens
            if passing[1] == self.prompt[request]:
                done += 1
                self.first[request] = self.now
                self._join(request)
        del self.passing[:done]

    def _alike(self, chunks: list[tuple[list[int], int]]) -> int:
        """How many steps take as many tokens of one prompt, until it ends or a sequence does: while
        it fills them no other request gets in."""
        passing, tokens = chunks[0]
        if len(chunks) > 1 or tokens < self.limits.step_tokens - len(self.generating):
            return 1
        steps = (self.prompt[passing[0]] - passing[1]) // tokens
        return min(steps, self.generating[0][0] - self.steps) if self.generating else steps

    def _alone(self) -> None:
        """Steps without prompts, until one is done or the next request comes."""
        sequences = len(self.generating)
        base_s, key_s = self.prices.decode(sequences)
        least, slope = base_s + key_s * self.keys, key_s * sequences
        steps = self.generating[0][0] - self.steps
        if self.next < len(self.arrival) and self.arrival[self.next] > self.now:
            steps = min(steps, _steps_until(self.arrival[self.next] - self.now, least, slope))
        self._pass(steps * least + slope * steps * (steps - 1) / 2, steps)


def _steps_until(seconds: float, least: float, slope: float) -> int:
    """The fewest steps, the first of `least` seconds and each `slope` longer, that take so long."""
    half = least - slope / 2
    if slope <= 0:
        return max(1, math.ceil(seconds / least))
    root = (math.sqrt(half * half + 2 * slope * seconds) - half) / slope
    steps = max(1, math.ceil(root))
    # The root is rounded: the count is looked at once more.
    while steps > 1 and (steps - 1) * half + slope * (steps - 1) ** 2 / 2 >= seconds:
        steps -= 1
    while steps * half + slope * steps**2 / 2 < seconds:
        steps += 1
    return steps


def serve_all(
    requests: Requests, replicas: int, prices: StepPrices, limits: Limits, prefilled: bool = False
) -> list[Course]:
    """What becomes of requests that are dealt to replicas in turn."""
    parts = [requests.part(i, replicas) for i in range(replicas)]
    return [Replica(part, prices, limits, prefilled).run() for part in parts]


def most_a_second(
    requests: Requests, prices: StepPrices, limits: Limits, prefilled: bool = False
) -> float:
    """Requests a second that leave a replica which always finds the next one waiting: of the middle
    half, as the first fill the batch and the last empty it."""
    course = Replica(requests.at_once(), prices, limits, prefilled).run()
    done = np.sort(course.finish_s)
    first, last = len(done) // 4, len(done) * 3 // 4
    return float((last - first) / (done[last] - done[first]))


def settled(courses: Sequence[Course]) -> tuple[float, float]:
    """From when on the first requests have settled, to when the last comes: replicas fill and empty
    before and after. The whole time where most of it is after the last."""
    come = np.sort(np.concatenate([c.requests.arrival_s for c in courses]))
    start, end = float(come[int(SETTLING * len(come))]), float(come[-1])
    whole = max(float(c.finish_s.max()) for c in courses if len(c.requests))
    return (start, end) if end - start > whole / 2 else (0.0, whole)


def steady(arrival_s: np.ndarray, finish_s: np.ndarray) -> slice:
    """Which requests, by their arrival, say how long one waits: neither the first, nor those from
    the first one on that is done after the last has come, as no others join while it generates. All
    but the first where that leaves fewer than half."""
    n = len(arrival_s)
    first, last = int(SETTLING * n), int(np.argmax(finish_s > arrival_s[-1]))
    return slice(first, last if last - first > n / 2 else n)


def overlap_s(begin: np.ndarray, until: np.ndarray, start: float, end: float) -> np.ndarray:
    """Seconds of each stretch that lie between start and end."""
    return np.maximum(np.minimum(until, end) - np.maximum(begin, start), 0.0)
