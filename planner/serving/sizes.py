"""Both phases at other sizes than those that are searched: their graphs, and what plans take there.

A model's layers are alike, and what a forward pass takes grows evenly with their number: with two
repeats and with three it takes so much, with r it takes

    seconds(2) + (r - 2) * (seconds(3) - seconds(2))

as the third repeat is handed what every later one is. So of the run of most nodes two and three
repeats are priced, as any graph is, at all sizes whose nodes are those of the size that the run was
found at. tests/serving/test_readings.py holds sums against whole graphs.
"""

from __future__ import annotations

from functools import cache, cached_property

from planner.analysis.facts import GraphFacts
from planner.execution.fewer_repeats import Run, follow, runs_left
from planner.execution.plan import Plan
from planner.graph.ir import Graph
from planner.search.request import Candidate
from planner.serving.joint import Joint, Timed
from planner.serving.readings import READ_AT, Phase

FEW, MORE = 2, 3
"""Repeats that are priced in the place of all; there have to be more than these together."""


class Sizes:
    """Graphs of both phases at other sizes, for all plans of a search."""

    def __init__(self, joint: Joint, longest: int, prompt: int) -> None:
        """longest: tokens of a sequence at the end; prompt: of a prompt, in the mean."""
        self.joint, self.longest, self.prompt = joint, max(2, longest), prompt
        self.facts, self.sample = cache(self._facts), cache(self._sample)
        self._summands, self._alike = cache(self._terms), cache(self._has_samples_nodes)

    def _facts(self, phase: Phase, rows: int, tokens: int) -> GraphFacts:
        """The facts of a batch of `rows`: prompts of so many tokens, or a step over so many in the
        cache."""
        graph = self._graph(phase, rows, tokens)
        return GraphFacts.of(graph, training=False, fold=self.joint.request.fold)

    def _graph(self, phase: Phase, rows: int, tokens: int) -> Graph:
        return self.joint.step.of_size(phase, rows, tokens).graph(1)

    def _sample(self, phase: Phase) -> GraphFacts:
        """At one size, where runs are looked for."""
        return self.facts(phase, *self._any(phase))

    def _any(self, phase: Phase) -> tuple[int, int]:
        return READ_AT[0], self.longest if phase == "step" else self.prompt

    def run(self, phase: Phase) -> Run | None:
        """The run of which few repeats are priced; none where a plan has nodes of its own."""
        if phase == "step" and not self._alike(phase, self.joint.step.tokens):
            return None
        runs = [run for run in self.sample(phase).runs if run[2] > FEW + MORE]
        return max(runs, key=lambda run: run[1] * run[2], default=None)

    def _has_samples_nodes(self, phase: Phase, tokens: int) -> bool:
        """Whether a graph of so many tokens has the nodes of `sample`. Where attention sees a
        window, graphs of no more tokens than it have none that leave tokens out."""
        graphs = self.sample(phase).graph, self._graph(phase, READ_AT[0], tokens)
        one, other = ([(n.id, n.op, n.outputs) for n in graph.nodes] for graph in graphs)
        return one == other

    def _terms(self, phase: Phase, rows: int, tokens: int) -> tuple[tuple[int, GraphFacts], ...]:
        """(factor, graph) of which prices of the whole graph are the sum."""
        run = self.run(phase)
        if run is None or not self._alike(phase, tokens):
            return ((1, self.facts(phase, rows, tokens)),)
        added = run[2] - FEW
        model, runs = self.joint.step.of_size(phase, rows, tokens), self.sample(phase).runs
        graph, kept_runs = model.with_repeats(run, FEW), runs_left(runs, run, FEW)
        few = GraphFacts.of(graph, training=False, runs=kept_runs)
        graph, kept_runs = model.with_repeats(run, MORE), runs_left(runs, run, MORE)
        return (1 - added, few), (added, few.with_repeats(graph, kept_runs))

    def on_terms(self, phase: Phase, plan: Plan) -> tuple[Plan, ...]:
        """A plan on each of these graphs, at sizes with the nodes of `sample`."""
        sample = self.sample(phase)
        terms = self._summands(phase, *self._any(phase))
        return tuple(follow(plan, sample.graph, base.graph) for _, base in terms)

    def timed(
        self, phase: Phase, rows: int, tokens: int, best: Candidate, plans: tuple[Plan, ...]
    ) -> Timed:
        """What a plan takes at a size. plans: of `on_terms`."""
        pricer, terms = self.joint.pricer(best), self._summands(phase, rows, tokens)
        plans = plans if len(terms) > 1 else (best.plan,)
        parts = [
            (factor, Timed.of(base, plan, pricer))
            for (factor, base), plan in zip(terms, plans, strict=True)
        ]
        return Timed(
            sum(factor * part.step_s for factor, part in parts),
            sum(factor * part.exchange_s for factor, part in parts),
            pricer,
        )

    @cached_property
    def windows(self) -> tuple[tuple[int, float], ...]:
        """(most tokens that they keep, their part of a token's bytes) of caches of layers with a
        sliding window, as far as a sequence is longer."""
        tensors = self.sample("step").graph.tensors
        caches = [tensors[past].shape for past in self.joint.pasts]
        whole, parts = sum(heads * width for _, heads, _, width in caches), dict[int, float]()
        for _, heads, tokens, width in caches:
            if tokens < self.longest:
                parts[tokens] = parts.get(tokens, 0.0) + heads * width / whole
        return tuple(sorted(parts.items()))
