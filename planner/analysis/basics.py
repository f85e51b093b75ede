"""What analyses of a graph start from: rules, gradients, repeated blocks, classes of nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Self

from planner.execution.gated_units import GatedUnits, gated_units
from planner.execution.layout_flow import zero_stage_frozen
from planner.execution.loops import loopable_blocks
from planner.graph.ir import Graph
from planner.ops import operator_of
from planner.sharding.rule import Rule


@dataclass(frozen=True)
class BasicFacts:
    """What does not depend on the mesh: rules, gradients, repeated blocks, classes and
    multiplicities.

    shared: per node the node whose decision it takes (its class). times: class -> number of its
    nodes. cut_anywhere: whether pipeline stages are cut anywhere in the graph, also where they
    could share repeated blocks. runs_of_units: the repeated blocks whose gated units are made
    again, where these are others than `runs`. end_of_blocks: the first node behind the repeated
    blocks that a program has written out. waiting: whether what gradients of weights of such blocks
    are made of waits until the backward pass has run.
    """

    graph: Graph
    training: bool
    rules: tuple[Rule, ...]
    reasons: tuple[str, ...]
    grad: frozenset[str]
    runs: tuple[tuple[int, int, int], ...]
    shared: tuple[int, ...]
    times: Mapping[int, int]
    cut_anywhere: bool = False
    runs_of_units: tuple[tuple[int, int, int], ...] | None = None
    end_of_blocks: int | None = None
    waiting: bool = False

    @cached_property
    def loops(self) -> tuple[tuple[int, int, int], ...]:
        """The repeated blocks of `runs` that a loop serves; repeats that are put together
        differently share their decisions alone."""
        return loopable_blocks(self.graph, self.runs)

    @cached_property
    def looped(self) -> frozenset[int]:
        """Nodes of repeated blocks that a loop serves, whose weights and saved activations lie in
        stacks."""
        return frozenset(
            i
            for first, period, repeats in self.loops
            for i in range(first, first + period * repeats)
        )

    @cached_property
    def loops_experts(self) -> bool:
        """Whether repeated blocks that a loop serves have routed experts."""
        return any(operator_of(self.graph.nodes[i].op).kind == "experts" for i in self.looped)

    @cached_property
    def nodes_in_repeat(self) -> Mapping[int, tuple[int, ...]]:
        """Class of nodes of repeated blocks -> its nodes in the first repeat."""
        result: dict[int, tuple[int, ...]] = {}
        for first, period, _ in self.runs:
            for i in range(first, first + period):
                c = self.shared[i]
                result[c] = (*result.get(c, ()), i)
        return result

    @cached_property
    def cut_by_zero(self) -> frozenset[str]:
        """Tensors with a gradient, and weights without one that ZeRO stage 3 cuts all the same."""
        return self.grad | zero_stage_frozen(self.graph, self.grad)

    @cached_property
    def gated(self) -> GatedUnits:
        """See planner.execution.gated_units."""
        runs = self.runs if self.runs_of_units is None else self.runs_of_units
        return gated_units(self.graph, self.grad, runs)

    @cached_property
    def without_loops(self) -> Self:
        """The facts of programs that have their blocks written out."""
        return replace(self, runs=(), end_of_blocks=self._behind_loops)

    @cached_property
    def putting_all_off(self) -> Self:
        """The facts of programs that have their blocks written out and may make all gradients of
        their weights behind the backward pass."""
        return replace(self.putting_nothing_off, waiting=True)

    @cached_property
    def putting_nothing_off(self) -> Self:
        """The facts of programs that have their blocks written out and make gradients of weights
        where what they are made of is: gated units are made again for these alone."""
        return replace(self, runs=(), runs_of_units=self.runs, end_of_blocks=self._behind_loops)

    @cached_property
    def _behind_loops(self) -> int | None:
        ends = (first + period * repeats for first, period, repeats in self.loops)
        return max(ends, default=None)

    @property
    def written_out(self) -> bool:
        """Whether training programs of the graph have no loop over blocks: their memory is that of
        costmodels.liveness."""
        return self.training and not self.runs


@lru_cache(maxsize=8)
def repeat_starts(runs: tuple[tuple[int, int, int], ...]) -> Mapping[int, tuple[int, int]]:
    """Node of a repeated block -> the first node of its run, and nodes per repeat."""
    return {
        i: (first, period)
        for first, period, repeats in runs
        for i in range(first, first + period * repeats)
    }


def saved_in(graph: Graph, starts: Mapping[int, tuple[int, int]], i: int, name: str) -> int:
    """The repeat of its run in which a node saves what was made in the same repeat; -1 where the
    tensor enters the repeat, or the node is in no run (`repeat_starts`). Recomputed blocks save
    what enters, and what is made in one repeat at a time."""
    if i not in starts:
        return -1
    first, period = starts[i]
    maker, repeat = graph.producer.get(name, -1), (i - first) // period
    return repeat if maker >= first and (maker - first) // period == repeat else -1
