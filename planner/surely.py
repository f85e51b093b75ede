"""Bounds of plans whose recomputed blocks keep results of collectives, whichever those are (planner.kept).

The search goes by the problem of plans that keep sums alone, as no other is solved: it never solves what it has no bytes for. What its bounds of such leaves say is
therefore said of those plans, and what holds for all is worked out when it ends, for as few leaves as settle it.

There what runs again is a decision too: a node of a block, or a hub on the way from it, has each option as often as there are answers to what spares it, and a pair of
options is impossible where the conversion between them has no collective that would. Such a collective's result is kept: at least a device's even share, where no
other bytes count it (planner.collected).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from planner.assemble import Techniques, dealt_parts, least_usage, link_scale
from planner.kept import Step, charges, steps_of
from planner.leaf import Leaf
from planner.relax import Relaxed
from planner.solvers.elimination import Tree
from planner.solvers.minibucket import MiniBuckets
from planner.solvers.model import Model

RUNS, SPARES, SPARED = 0, 1, 2
"""What an option says of running again: it does, its result's first conversion spares it, the next node of its way is spared."""


class Sparing(Relaxed):
    """Bounds of the options that another looks at, all under recompute=block-keep."""

    def __init__(self, relaxed: Relaxed) -> None:
        super().__init__(relaxed.space, relaxed.scratch)
        rows = np.split(relaxed.kept, relaxed.offset[1:-1])
        self._steps, self._charge_s = steps_of(self.space), charges(self.space)
        self._states = [np.zeros(len(row), np.int64) for row in rows]
        for step in self._steps:
            k, states = step.variable, (RUNS, SPARES) if step.after < 0 else (RUNS, SPARES, SPARED)
            self._states[k], rows[k] = np.repeat(states, len(rows[k])), np.tile(rows[k], len(states))
        self.kept, self.offset = np.concatenate(rows), np.concatenate(([0], np.cumsum([len(row) for row in rows])))
        self._rows = [row - first for row, first in zip(rows, self._all.tolist(), strict=False)]

    def _seconds(self, techniques: Techniques) -> np.ndarray:
        each = self.space.parts * dealt_parts(self.space, techniques)[0] * [v.count for v in self.space.variables]
        again = np.repeat(each, np.diff(self.offset)) * self._charge_s[self.kept]
        return super()._seconds(replace(techniques, recompute="none")) + np.where(np.concatenate(self._states) == RUNS, again, 0.0)

    def _bytes(self, techniques: Techniques) -> np.ndarray:
        each = self.space.parts / techniques.microbatches * dealt_parts(self.space, techniques)[1]
        more = np.zeros(len(self._rows))
        more[[step.variable for step in self._steps]] = [step.bytes for step in self._steps]
        return super()._bytes(techniques) + np.where(np.concatenate(self._states) == SPARES, np.repeat(each * more, np.diff(self.offset)), 0.0)

    def _compiled(self, techniques: Techniques, *, ends: bool = True) -> Tree | MiniBuckets:
        key = False, ends
        if key not in self._trees:
            scale = link_scale(self.space, replace(techniques, microbatches=0), ends=ends)
            pairs = {(a, b): table[np.ix_(self._rows[a], self._rows[b])] for (a, b), table in self._pairs([False] * len(scale), scale).items()}
            for step in self._steps:
                self._let(step, pairs)
            self._trees[key] = self._eliminated(Model(self.offset, np.zeros(self.offset[-1]), pairs, None))
        return self._trees[key]

    def _let(self, step: Step, pairs: dict[tuple[int, int], np.ndarray]) -> None:
        """Forbid what the step does not spare, in the pairs of its link. What no link tells may be spared."""
        if step.link < 0:
            return
        link = self.space.links[step.link]
        state, converts = self._states[link.a][:, None], link.forward_s[np.ix_(self._rows[link.a], self._rows[link.b])] > 0
        never = (state == SPARES) & ~converts | (state == SPARED) & (self._states[link.b] == RUNS)
        more = np.where(never, np.inf, 0.0)
        pair, more = ((link.a, link.b), more) if link.a < link.b else ((link.b, link.a), more.T)
        pairs[pair] = pairs[pair] + more


def freely(sparing: Sparing, techniques: Techniques) -> tuple[float, float]:
    """A bound (seconds) without a memory limit, and bytes of the choice that has it."""
    found = sparing.free(techniques, techniques.microbatches)
    return (np.inf, 0.0) if found is None else (found[1], sparing.usage(techniques, found[0]))


def least_surely(leaves: Iterable[tuple[float, Leaf, Relaxed]], limit_bytes: float, bound: float) -> float:
    """The bound, or less where one of the leaves, each with what is known of it, proves no more: the least is raised, first without a memory limit, until it is one that
    has been as far as it can be. One elimination a mesh tells most of them apart (`Relaxed.quick`)."""
    known = [(least, leaf, relaxed) for least, leaf, relaxed in leaves if least < bound]
    heap = [(least, k) for k, (least, _, _) in enumerate(known)]
    heapq.heapify(heap)
    sparing, quick, free, raised = dict[int, Sparing](), set[int](), dict[int, tuple[float, float]](), set[int]()
    while heap and heap[0][0] < bound:
        least, k = heapq.heappop(heap)
        _, leaf, relaxed = known[k]
        if k in raised:
            return least
        if k in free:
            raised.add(k)
            if free[k][1] > limit_bytes:
                least = max(least, sparing[leaf.mesh].limited(leaf.techniques, limit_bytes, free[k], bound))
        elif k in quick:
            free[k] = freely(sparing[leaf.mesh], leaf.techniques)
            least = max(least, free[k][0])
        elif least_usage(relaxed.space, leaf.techniques, uncut=True) > limit_bytes:
            continue
        else:
            quick.add(k)
            if leaf.mesh not in sparing:
                sparing[leaf.mesh] = Sparing(relaxed)
                sparing[leaf.mesh].least(sorted({one.techniques.zero for _, one, _ in known if one.mesh == leaf.mesh}))
            least = max(least, sparing[leaf.mesh].quick(leaf.techniques, leaf.micro))
        heapq.heappush(heap, (least, k))
    return bound
