"""What is proven of the nodes of one family, stage by stage (planner.search.best_first names the
stages)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from planner.search.domain import CHUNKS
from planner.search.relaxation import Relaxation
from planner.search.search_node import BOUND_ENDLESS, BOUND_MICROBATCHES, LEVEL_ORDER, SearchNode
from planner.space.assemble import uncut_up_to, waits_in_passes
from planner.space.variables import Space

SAME = 1e-7
"""Relative difference below which a bound is as good as the price."""


class NodeBounds:
    """Bounds of nodes under a limit of memory, those of a mesh all by one relaxed space."""

    def __init__(self, limit_bytes: float) -> None:
        self.limit_bytes = limit_bytes
        self.relaxed: dict[int, Relaxation] = {}
        """Mesh -> its space, relaxed; of meshes that were expanded."""
        self.renewals: dict[int, int] = {}
        """Mesh -> how often it was relaxed anew."""
        self.least: dict[int, float] = {}
        """Mesh -> bound of all its nodes (seconds)."""
        self.known: list[tuple[int, int, int, int, int, float]] = []
        """Mesh, level, recompute, microbatches, virtual stages a stage, bound (seconds) of all
        nodes beyond."""
        self._uncut_up_to: dict[
            int, float
        ] = {}  # mesh -> microbatches up to which no split of the batch becomes too fine

    def renew(self, node: SearchNode, levels: Sequence[int], below_s: float) -> bool:
        """Relax a node's mesh anew where plans that are looked for are much faster than when it was
        last: fewer options are left, in smaller tables. Whether the node is to be bounded again."""
        mesh = node.mesh
        open_ = bool(levels) and self.least[mesh] < below_s
        if open_ and (again := self.relaxed[mesh].again_below(below_s)) is not None:
            bound = again.least(levels, below_s)
            self.least[mesh] = max(self.least[mesh], bound)
            self.renewals[mesh] = self.renewals.get(mesh, 0) + 1
            if bound < below_s:  # else nothing is left to bound
                self.relaxed[mesh] = again
        if node.relaxed == self.renewals.get(mesh, 0):
            return False
        node.relaxed = self.renewals[mesh]
        bubble_s = self.relaxed[mesh].bubble_s(node.micro, node.virtual, node.schedule)
        node.bound = max(node.bound, self.least[mesh] + bubble_s)
        return True

    def choices(self, below_s: float) -> Iterator[tuple[Space, list[int]]]:
        """What bounds below so many seconds were found by, memory aside: spaces with a choice."""
        for relaxed in self.relaxed.values():
            for solved in relaxed.free_known.values():
                if solved is not None and solved[1] < below_s:
                    yield relaxed.space, relaxed.in_space(solved[0])

    def _staged(self, node: SearchNode) -> bool:
        """Whether the node has pipeline stages: more microbatches then also make the bubble smaller
        (0 stands for any number)."""
        return self.relaxed[node.mesh].space.pricer.mesh.stages > 1

    def by_others(self, node: SearchNode) -> float:
        """What nodes that were priced prove of this one (seconds); 0 where that is nothing."""
        relaxed, best = self.relaxed[node.mesh], 0.0
        for m, z, r, k, n, v in self.known:
            if (
                m == node.mesh
                and z == node.level
                and r <= node.recompute
                and n == node.virtual
                and (k == node.micro or (k < node.micro and not self._staged(node)))
            ):
                other = replace(node.techniques, recompute=node.values[r])
                best = max(best, v + relaxed.changes_by_s(other, node.techniques))
        return best

    def quickly(self, node: SearchNode) -> float:
        """No more than `at_stage` finds, without an elimination; 0 where that says nothing or is
        known."""
        if node.stage not in (BOUND_ENDLESS, BOUND_MICROBATCHES) or node.micro == 1:
            return 0.0
        endless, relaxed = node.stage == BOUND_ENDLESS, self.relaxed[node.mesh]
        staged = self._staged(node)
        micro = (0 if staged else 1) if endless else node.micro
        bubble_s = relaxed.bubble_s(node.micro, node.virtual, node.schedule) if endless else 0.0
        key = self._free_key(node, micro)
        return 0.0 if key in relaxed.free_known else self._quick(node, key, bubble_s)

    def _quick(self, node: SearchNode, key: tuple, bubble_s: float) -> float:
        """What `_without_limit` finds at least, by what is known of other techniques."""
        relaxed = self.relaxed[node.mesh]
        known = ((v, relaxed.free_known.get((*key[:3], v))) for v in (1, *CHUNKS) if key[1])
        others = (
            relaxed.by_virtual_stages(solved[1], node.techniques, key[1], v)
            for v, solved in known
            if solved
        )
        return max(relaxed.quick(node.techniques, key[1]), *others, 0.0) + bubble_s

    def at_stage(self, node: SearchNode, below_s: float) -> float:
        """The bound (seconds) that the node's stage knows. below_s: plans of at least so many are
        not looked for."""
        limit, relaxed = self.limit_bytes, self.relaxed[node.mesh]
        if node.stage == BOUND_ENDLESS:
            few = 0 if self._staged(node) else 1
            bubble_s = relaxed.bubble_s(node.micro, node.virtual, node.schedule)
            return self._without_limit(node, few, below_s, bubble_s)
        if node.micro == 1:  # its space is the one that is solved
            node.tight = True
            return node.bound
        bound = self._without_limit(node, node.micro, below_s)
        if node.stage == BOUND_MICROBATCHES:
            return bound
        if bound < below_s * (1 - SAME) and (usage := self._usage(node, node.micro)) > limit:
            bound = relaxed.limited(node.techniques, limit, (bound, usage), below_s)
        node.tight = not relaxed.rough(node.techniques)
        return bound

    def tighten(self, node: SearchNode, below_s: float) -> None:
        """Raise the bound of a search node after its last stage, where that was not exact."""
        relaxed = self.relaxed[node.mesh]
        if not relaxed.rough(node.techniques):  # relaxed anew since
            node.bound = max(node.bound, self.at_stage(node, below_s))
            if node.tight:
                return
        bound, more = relaxed.tightened(node.techniques, self.limit_bytes, below_s)
        node.bound, node.tight = max(node.bound, bound), not more

    def _free_key(self, node: SearchNode, micro: int) -> tuple:
        """What the relaxed problem of a search node without a memory limit depends on, its mesh
        aside, its second part the microbatches.

        micro: reductions are repeated at least that often, and so are copies of weights out of the
        stacks of loops. What is reduced once a step makes the same problem for any number that
        leaves every split legal.
        """
        if node.mesh not in self._uncut_up_to:
            self._uncut_up_to[node.mesh] = uncut_up_to(self.relaxed[node.mesh].space)
        repeats = (
            micro
            if self._staged(node)
            or LEVEL_ORDER[node.level] >= 2
            or micro > self._uncut_up_to[node.mesh]
            or self.relaxed[node.mesh].space.base.looped
            or waits_in_passes(self.relaxed[node.mesh].space)
            else 1
        )
        return node.level, repeats, node.recompute, node.virtual if repeats else 1

    def _without_limit(
        self, node: SearchNode, micro: int, below_s: float, bubble_s: float = 0.0
    ) -> float:
        """The bound of the node's techniques without a memory limit, and what a bubble adds; where
        a quick one is no plan's that is looked for, that one."""
        key, relaxed = self._free_key(node, micro), self.relaxed[node.mesh]
        if key not in relaxed.free_known:
            quick = self._quick(node, key, bubble_s)
            if quick >= below_s * (1 - SAME):
                return quick
            relaxed.free_known[key] = relaxed.free(node.techniques, key[1])
        solved = relaxed.free_known[key]
        return solved[1] + bubble_s if solved else math.inf

    def _usage(self, node: SearchNode, micro: int) -> float:
        """Bytes that the solution of `_without_limit` uses with the node's microbatches."""
        relaxed = self.relaxed[node.mesh]
        solved = relaxed.free_known[self._free_key(node, micro)]
        return relaxed.usage(node.techniques, solved[0]) if solved else math.inf
