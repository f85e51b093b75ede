"""Graphs of the phases at any number of sequences and of tokens, derived from a few that are read.

A search for a serving plan asks for both phases at dozens of sizes, and reading a model takes
longer than pricing a plan of it. Read are two batches of one length and, where prices at several
lengths are asked for (`spans`), one of the longest; what lies between follows
(planner.graph.rescale). Nothing is derived along tokens where attention sees a window or a chunk:
there graphs have a kink. planner.serving.asked holds the phases of the plan that is chosen against
readings of themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, cached_property
from typing import Literal

from planner.execution.fewer_repeats import Run, fewer_repeats
from planner.graph.ir import Graph
from planner.graph.rescale import Scaled

Phase = Literal["prompts", "step"]
PHASES: tuple[Phase, Phase] = ("prompts", "step")
Part = tuple[Run, int] | None
Sights = dict[tuple[int, int], dict[str, int]]
"""(tokens, of them padding) -> attention -> how many it sees (planner.serving.rewrite.sight)."""
READ_AT = (2, 4)
"""Batches at which graphs are read, from which others follow."""


class Readings:
    """Of one model, for all searches of it. spans: phase -> tokens of the shortest and of the
    longest that is asked for, where these differ."""

    def __init__(
        self,
        read: Callable[[Phase, int, int], Graph],
        sees_all: Callable[[int], bool],
        sights: Sights,
        spans: Mapping[Phase, tuple[int, int]],
    ) -> None:
        """read: the graph of a phase, so many sequences and tokens; sees_all: whether each
        attention of a step sees all of so many tokens; sights: what is known of that."""
        self.read, self.sees_all, self.sights, self.spans = read, sees_all, sights, spans
        self.derives = True
        self._known: dict[tuple[Phase, int, Part], Scaled | None] = {}
        self._whole: dict[tuple[Phase, int, int], Graph] = {}
        """What was read"""
        self._along = cache(self._between)

    def graph(self, phase: Phase, rows: int, tokens: int, part: Part = None) -> Graph | None:
        """The graph of so many sequences with so many tokens; None where it has to be read. part:
        with so many repeats of a run."""
        if not self.derives:
            return None
        key = phase, tokens, part
        if key not in self._known:
            self._known[key] = self._derived(*key) or Scaled.of(
                *(self._part(phase, batch, tokens, part) for batch in READ_AT)
            )
        scaled = self._known[key]
        return scaled.at(rows) if scaled else None

    def _derived(self, phase: Phase, tokens: int, part: Part) -> Scaled | None:
        """What is alike at all batches, where that follows from other lengths."""
        low, high = self.spans.get(phase, (0, 0))
        if not low <= tokens <= high or low == high or not self._straight:
            return None
        batches, lengths = self._along(phase, part)
        if tokens == low:
            return batches
        graph = lengths and lengths.at(tokens)
        return batches.on(graph) if batches and graph else None

    def _between(self, phase: Phase, part: Part) -> tuple[Scaled | None, Scaled | None]:
        """What is alike at all batches of the shortest, and at all lengths of one batch."""
        low, high = self.spans[phase]
        one, other = READ_AT
        long, short = (self._part(phase, one, tokens, part) for tokens in (high, low))
        batches = Scaled.of(short, self._part(phase, other, low, part))
        return batches, Scaled.along(short, long, (low, high))

    def _part(self, phase: Phase, rows: int, tokens: int, part: Part) -> Graph:
        graph = self._read(phase, rows, tokens)
        return fewer_repeats(graph, (part[0],), part[1]) if part else graph

    def _read(self, phase: Phase, rows: int, tokens: int) -> Graph:
        key = phase, rows, tokens
        if key not in self._whole:
            self._whole[key] = self.read(*key)
        return self._whole[key]

    @cached_property
    def _straight(self) -> bool:
        """Whether every attention sees all tokens of the longest, and so of shorter ones."""
        _, longest = self.spans["step"]
        self._read("step", READ_AT[0], longest)  # which tells
        return self.sees_all(longest)
