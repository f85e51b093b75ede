"""What analyses of a graph start from: rules, gradients, repeated blocks, classes of nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from planner.execution.loops import loopable_blocks
from planner.graph.ir import Graph
from planner.sharding.rule import Rule


@dataclass(frozen=True)
class BasicFacts:
    """What does not depend on the mesh: rules, gradients, repeated blocks, classes and
    multiplicities.

    shared: per node the node whose decision it takes (its class). times: class -> number of its
    nodes.
    """

    graph: Graph
    training: bool
    rules: tuple[Rule, ...]
    reasons: tuple[str, ...]
    grad: frozenset[str]
    runs: tuple[tuple[int, int, int], ...]
    shared: tuple[int, ...]
    times: Mapping[int, int]

    @cached_property
    def loops(self) -> tuple[tuple[int, int, int], ...]:
        """Those of `runs` that a loop serves; repeats that are put together differently share their
        decisions alone."""
        return loopable_blocks(self.graph, self.runs)

    @property
    def written_out(self) -> bool:
        """Whether training programs of the graph have no loop over blocks: their memory is that of
        costmodels.liveness."""
        return self.training and not self.runs
