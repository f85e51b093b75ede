"""A search node of the outer search: a mesh and the techniques on it, with the stage that its bound
has reached (planner.search.best_first says what each stage knows)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from planner.execution.techniques import RECOMPUTE
from planner.solvers.problem import Problem, Solution
from planner.space.techniques import Techniques

if TYPE_CHECKING:
    from planner.search.solving import Solving

LEVEL_ORDER = (2, 1, 0, 3)
"""Of equal bounds the level that needs less memory goes first; ZeRO stage 3 costs time."""
BOUND_BLOCKS, EXPAND, SPREAD, CHECK_FIT = range(-3, 1)
BOUND_ENDLESS, BOUND_MICROBATCHES, BOUND_MEMORY, SOLVE = range(1, 5)
"""Stages, called by what is done next (planner.search.best_first)."""


@dataclass
class SearchNode:
    """A point of the outer search, ordered by bound, then by simplicity."""

    bound: float
    recompute: int
    micro: int
    level: int
    mesh: int
    stage: int = field(compare=False, default=0)
    schedule: str = field(compare=False, default="1f1b")
    virtual: int = field(compare=False, default=1)
    values: tuple[str, ...] = field(compare=False, default=RECOMPUTE)
    """What `recompute` is a number of: a pinned value with names stands behind the others."""
    keeps_all: bool = field(compare=False, default=False)
    """Whether recompute with saved collectives leaves no choice of what is saved: a framework says
    what runs again."""
    relaxed: int = field(compare=False, default=0)
    """How often its mesh had been relaxed anew when it was last bounded."""
    tight: bool = field(compare=False, default=False)
    """Whether nothing but a solver can raise its bound further, once it has been bounded."""

    def __lt__(self, other: SearchNode) -> bool:
        if self.bound != other.bound:  # of nearly all pairs
            return self.bound < other.bound
        return (self.recompute, self.micro, self.level, self.mesh) < (
            other.recompute,
            other.micro,
            other.level,
            other.mesh,
        )

    @property
    def saves_collectives(self) -> bool:
        """Whether its plans keep results of collectives in recomputed blocks: its bound is then one
        of those that keep sums alone (planner.space.assemble)."""
        return self.values[self.recompute] == "block-keep" and not self.keeps_all

    @cached_property
    def techniques(self) -> Techniques:
        """As the problem knows them."""
        return Techniques(
            LEVEL_ORDER[self.level],
            self.values[self.recompute],
            self.micro,
            self.schedule,
            self.virtual,
        )


@dataclass
class NodeSolves:
    """The solves of one node: the work they took, and whether the work limit cut one."""

    search: Solving
    work_factor: int
    work: int = 0
    cut: bool = False

    def solve(self, problem: Problem, below: float = math.inf) -> Solution:
        """The answer of the search's solver, counted. below: as in `Budget`."""
        solved = self.search.solve(problem, self.work_factor, below)
        self.work += solved.work
        self.cut |= solved.stopped == "work"
        return solved
