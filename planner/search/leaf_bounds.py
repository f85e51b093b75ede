"""What is proven of the leaves of one family, stage by stage (planner.search.best_first names the
stages)."""

from __future__ import annotations

import math

import numpy as np

from planner.search.domain import CHUNKS
from planner.search.leaf import FITTING, FREE, LEVEL_ORDER, Leaf
from planner.search.relaxation import Relaxation
from planner.space.assemble import uncut_up_to

SAME = 1e-7
"""Relative difference below which a bound is as good as the price."""


class LeafBounds:
    """Bounds of leaves under a limit of memory, those of a mesh all by one relaxed space."""

    def __init__(self, limit_bytes: float) -> None:
        self.limit_bytes = limit_bytes
        self.relaxed: dict[int, Relaxation] = {}
        """Mesh -> its space, relaxed; of meshes that were expanded."""
        self.least: dict[int, float] = {}
        """Mesh -> bound of all its leaves (seconds)."""
        self.known: list[tuple[int, int, int, int, int, float]] = []
        """Mesh, level, recompute, microbatches, chunks a stage, bound (seconds) of all leaves
        beyond."""
        self._free: dict[tuple, tuple[np.ndarray, float] | None] = {}
        self._uncut_up_to: dict[
            int, float
        ] = {}  # mesh -> microbatches up to which no split of the batch becomes too fine

    def _staged(self, leaf: Leaf) -> bool:
        """Whether the leaf has pipeline stages: more microbatches then also make the bubble smaller
        (0 stands for any number)."""
        return self.relaxed[leaf.mesh].space.pricer.mesh.stages > 1

    def by_others(self, leaf: Leaf) -> float:
        """What leaves that were priced prove of this one (seconds); 0 where that is nothing."""
        same = [
            (k, v)
            for m, z, r, k, n, v in self.known
            if m == leaf.mesh and z == leaf.level and r <= leaf.recompute and n == leaf.virtual
        ]
        return max(
            (v for k, v in same if k == leaf.micro or (k < leaf.micro and not self._staged(leaf))),
            default=0.0,
        )

    def at_stage(self, leaf: Leaf, below_s: float) -> float:
        """The bound (seconds) that the leaf's stage knows. below_s: plans of at least so many are
        not looked for."""
        limit, relaxed = self.limit_bytes, self.relaxed[leaf.mesh]
        if leaf.stage == FITTING:
            return (
                self._without_limit(leaf, 0, below_s, relaxed.waiting(leaf.micro, leaf.virtual))
                if self._staged(leaf)
                else self._without_limit(leaf, 1, below_s)
            )
        if leaf.micro == 1:  # its space is the one that is solved
            leaf.tight = True
            return leaf.bound
        bound = self._without_limit(leaf, leaf.micro, below_s)
        if leaf.stage == FREE:
            return bound
        if bound < below_s * (1 - SAME) and (usage := self._usage(leaf, leaf.micro)) > limit:
            bound = relaxed.limited(leaf.techniques, limit, (bound, usage), below_s)
        leaf.tight = not relaxed.rough(leaf.techniques)
        return bound

    def tighten(self, leaf: Leaf, below_s: float) -> None:
        """Raise the bound of a leaf after its last stage, where that was not exact."""
        bound, more = self.relaxed[leaf.mesh].tightened(leaf.techniques, self.limit_bytes, below_s)
        leaf.bound, leaf.tight = max(leaf.bound, bound), not more

    def _free_key(self, leaf: Leaf, micro: int) -> tuple:
        """What the relaxed problem of a leaf without a memory limit depends on, its third part the
        microbatches.

        micro: reductions are repeated at least that often. What is reduced once a step makes the
        same problem for any number that leaves every split legal.
        """
        if leaf.mesh not in self._uncut_up_to:
            self._uncut_up_to[leaf.mesh] = uncut_up_to(self.relaxed[leaf.mesh].space)
        each = (
            micro
            if self._staged(leaf)
            or LEVEL_ORDER[leaf.level] >= 2
            or micro > self._uncut_up_to[leaf.mesh]
            else 1
        )
        return leaf.mesh, leaf.level, each, leaf.recompute, leaf.virtual if each else 1

    def _without_limit(
        self, leaf: Leaf, micro: int, below_s: float, waiting_s: float = 0.0
    ) -> float:
        """The bound of the leaf's techniques without a memory limit, and what a bubble adds; where
        a quick one is no plan's that is looked for, that one."""
        key, relaxed = self._free_key(leaf, micro), self.relaxed[leaf.mesh]
        if key not in self._free:
            known = ((v, self._free.get((*key[:4], v))) for v in (1, *CHUNKS) if key[2])
            others = (
                found[1] * relaxed.as_chunked(leaf.techniques, key[2], v)
                for v, found in known
                if found
            )
            quick = max(relaxed.quick(leaf.techniques, key[2]), *others, 0.0) + waiting_s
            if quick >= below_s * (1 - SAME):
                return quick
            self._free[key] = relaxed.free(leaf.techniques, key[2])
        found = self._free[key]
        return found[1] + waiting_s if found else math.inf

    def _usage(self, leaf: Leaf, micro: int) -> float:
        """Bytes that the solution of `_without_limit` uses with the leaf's microbatches."""
        found = self._free[self._free_key(leaf, micro)]
        return self.relaxed[leaf.mesh].usage(leaf.techniques, found[0]) if found else math.inf
