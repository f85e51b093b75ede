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

from planner.analysis.facts import GraphFacts
from planner.graph.ir import Graph
from planner.graph.rescale import Scaled
from planner.pricing.pricer import Pricer
from planner.search.request import Candidate
from planner.serving.joint import Joint, Priced

SHORT = 8
"""The shorter of the two lengths of the cache is so many times shorter."""
FEWEST_ROWS = 16
READ_AT = (2, 4)
"""Batches at which graphs are read, from which others follow."""


class Sizes:
    """Graphs of both phases at other sizes, for all plans of a search."""

    def __init__(self, joint: Joint, longest: int, prompt: int) -> None:
        """longest: tokens of a sequence at the end; prompt: of a prompt, in the mean."""
        self.joint, self.longest, self.prompt = joint, max(2, longest), prompt
        self.facts, self._scaled = cache(self._facts), cache(self._read_twice)

    def _facts(self, phase: str, rows: int, tokens: int) -> GraphFacts:
        """Of a batch of `rows`: prompts of so many tokens, or a step over so many in the cache."""
        scaled = self._scaled(phase, tokens)
        graph = (scaled and scaled.at(rows)) or self.read(phase, rows, tokens)
        return GraphFacts.of(graph, training=False, fold=self.joint.request.fold)

    def _read_twice(self, phase: str, tokens: int) -> Scaled | None:
        """What is alike at all batches: reading a graph takes longer than pricing it."""
        return Scaled.of(*(self.read(phase, rows, tokens) for rows in READ_AT))

    @cached_property
    def windows(self) -> tuple[tuple[int, float], ...]:
        """(most tokens that they keep, their part of a token's bytes) of caches of layers with a
        sliding window, as far as a sequence is longer."""
        tensors = self.facts("step", READ_AT[0], self.longest).graph.tensors
        caches = [tensors[past].shape for past in self.joint.pasts]
        whole, parts = sum(heads * width for _, heads, _, width in caches), dict[int, float]()
        for _, heads, tokens, width in caches:
            if tokens < self.longest:
                parts[tokens] = parts.get(tokens, 0.0) + heads * width / whole
        return tuple(sorted(parts.items()))

    def read(self, phase: str, rows: int, tokens: int) -> Graph:
        """The graph, as the model is read."""
        if phase == "prompts":
            model = self.joint.prompts(1).at(concurrency=rows, wave=rows, prompt=tokens)
        else:
            model = self.joint.step.at(concurrency=rows, prompt=tokens - 1, generate=1)
        return model.graph(1)


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
        joint, many = self.sizes.joint, 1024
        mesh, request = self.step.mesh, joint.request
        pricer = Pricer(request.topology, mesh, request.runtime, request.recipe)
        moved = 2 * self.state_bytes * many
        return pricer.kernel_s(0.0, moved, request.recipe.compute) / many if moved else 0.0

    @property
    def length(self) -> int:
        """Tokens of the prompts that passes are priced with, a power of two."""
        return 1 << (self.sizes.prompt.bit_length() - 1)

    def _priced_step(self, sequences: int) -> tuple[float, float]:
        """A step of a replica's sequences, at its two lengths."""
        long = self.sizes.longest
        short = max(1, long // SHORT)
        seconds = [self.step_s(sequences, length) for length in (short, long)]
        key_s = max(0.0, (seconds[1] - seconds[0]) / (sequences * (long - short)))
        return seconds[0] - key_s * sequences * short, key_s

    def step_s(self, sequences: int, length: int) -> float:
        """Seconds of a step of so many sequences of a replica, each with so many tokens."""
        base = self.sizes.facts("step", sequences * self.replicas, length)
        step = self.sizes.joint.phase(base, self.step)
        compute = self.sizes.joint.request.recipe.compute
        written = 2 * self.cache_token_bytes * sequences
        if step.pricer.runtime.serves and sequences > 1:
            half = self.sizes.facts("step", sequences // 2 * self.replicas, length)
            seconds = step.seconds(self.sizes.joint.phase(half, self.step))
        else:
            seconds = step.cost.step_time_s
        return seconds + 2 * step.pricer.kernel_s(0.0, written, compute)

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
        joint = self.sizes.joint
        base = self.sizes.facts("prompts", rows * self.replicas, length)
        first = joint.phase(base, self.prompts)
        written = 2 * rows * (self.cache_token_bytes * length + self.state_bytes)
        compute = joint.request.recipe.compute
        return first.seconds() + first.pricer.kernel_s(0.0, written, compute)

    @classmethod
    def of(cls, sizes: Sizes, pair: Priced) -> PlanPrices:
        """Of a pair of plans on one mesh."""
        assert pair.prompts.best is not None and pair.step.best is not None
        state = pair.state_bytes * pair.replicas / sizes.joint.step.service.concurrency
        return cls(sizes, pair.replicas, pair.prompts.best, pair.step.best, pair.token_bytes, state)


def _between(
    count: int, priced: Callable[[int], tuple[float, float]], least: int
) -> tuple[float, float]:
    """What is priced at powers of two from `least` on, on a line between them."""
    low = max(least, 1 << (count.bit_length() - 1))
    below = priced(low)
    if count <= low:
        return below
    above, share = priced(2 * low), count / low - 1
    first, second = (a + share * (b - a) for a, b in zip(below, above, strict=True))
    return first, second
