"""Bounds of plans whose recomputed blocks keep results of collectives, whichever those are
(planner.analysis.recompute_demand).

The search goes by the problem of plans that keep sums alone, as no other is solved: it never solves
what it has no bytes for. What its bounds of such nodes say is therefore said of those plans, and
what holds for all is worked out when it ends, for as few search nodes as settle it.

There what runs again is a decision too: a node of a block, or a hub on the way from it, has each
option twice, and a pair of options is impossible where the first is not run again though the
conversion between them has no collective and what comes next runs again. Where a collective spares
it, its result is kept: what the layout converted to leaves a device of it at least, less what other
bytes count (planner.analysis.saved_collectives).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from math import prod

import numpy as np

from planner.search.keep_steps import Step, charges, followed, steps_of, without_hubs
from planner.search.relaxation import Relaxation
from planner.search.search_node import SearchNode
from planner.solvers.exact.elimination import Tree
from planner.solvers.model import Model
from planner.space.assemble import Techniques, least_usage, link_scale, parts_of_stage
from planner.space.variables import Link, Space


class SavedCollectiveRelaxation(Relaxation):
    """Bounds of the options that another looks at, all under recompute=block-keep.

    narrow: nodes that are no products, and are spared by way of a hub, never run again and keep
    nothing: a lower bound with smaller tables.
    """

    def __init__(self, relaxed: Relaxation, narrow: bool = False) -> None:
        super().__init__(relaxed.space, relaxed.scratch)
        rows = np.split(relaxed.kept, relaxed.offset[1:-1])
        self._steps, self._charge_s = steps_of(self.space), charges(self.space)
        self._asked: list[tuple[Step, Step]] = []
        """Of hubs of which nothing is said, that from there to a gradient that reads it, and that
        to there."""
        if narrow:
            every = self._steps
            self._steps, left_out = without_hubs(self.space, every)
            self._asked = [
                (on, to)
                for on in every
                for to in every
                if on.variable in left_out
                and on.after < 0
                and to.after == on.variable
                and min(on.link, to.link) >= 0
            ]
            for k in left_out:
                self._charge_s[self._all[k] : self._all[k + 1]] = 0.0
        self._spared = [np.zeros(len(row), bool) for row in rows]
        for step in self._steps:
            k = step.variable
            self._spared[k], rows[k] = np.repeat((False, True), len(rows[k])), np.tile(rows[k], 2)
        self.kept, self.offset = (
            np.concatenate(rows),
            np.concatenate(([0], np.cumsum([len(row) for row in rows]))),
        )
        self._rows = [row - first for row, first in zip(rows, self._all.tolist(), strict=False)]

    def _keep(self, near: np.ndarray, cost: np.ndarray) -> np.ndarray:
        left = np.split(near, self.offset[1:-1])
        self._rows, self._spared = (
            [part[at] for part, at in zip(parts, left, strict=True)]
            for parts in (self._rows, self._spared)
        )
        self.__dict__.pop("_kept", None)
        return super()._keep(near, cost)

    def _seconds(self, techniques: Techniques) -> np.ndarray:
        each = (
            self.space.parts
            * parts_of_stage(self.space, techniques)[0]
            * [v.count for v in self.space.variables]
        )
        again = np.repeat(each, np.diff(self.offset)) * self._charge_s[self.kept]
        return self._least_seconds(techniques) + np.where(np.concatenate(self._spared), 0.0, again)

    def _bytes(self, techniques: Techniques) -> np.ndarray:
        """What no pair of options tells: sums of variables that no step follows, and the least that
        a layout can leave where no link says what it is."""
        sizes, each = super()._bytes(techniques), self._each(techniques)
        sums = sizes - super()._bytes(replace(techniques, recompute="block"))
        for k in followed(self.space):
            sizes[self.offset[k] : self.offset[k + 1]] -= sums[self.offset[k] : self.offset[k + 1]]
        for step in (one for one in self._steps if one.link < 0 and one.after < 0):
            k, more = (
                step.variable,
                max(0.0, step.bytes / prod(self.space.pricer.sizes.values()) - step.counted),
            )
            sizes[self.offset[k] : self.offset[k + 1]] += np.where(
                self._spared[k], each[k] * more, 0.0
            )
        return sizes

    def _each(self, techniques: Techniques) -> np.ndarray:
        """Per variable how many of a microbatch of the graph a device holds results of, of all its
        nodes. [variables]"""
        samples: np.ndarray = (
            self.space.parts / techniques.microbatches * parts_of_stage(self.space, techniques)[1]
        )
        return samples

    @cached_property
    def _kept(self) -> list[tuple[int, tuple[int, int], np.ndarray]]:
        """(variable, pair, bytes) of what is kept where a conversion has a collective: its reader
        asks for it unless it is spared itself. [options of one, of the other]"""
        saved = []
        for step in (one for one in self._steps if one.link >= 0):
            link = self.space.links[step.link]
            kept = np.maximum(0.0, step.bytes * link.share[self._rows[link.b]] - step.counted)
            saved.append(
                (
                    step.variable,
                    *_ordered(
                        link.a,
                        link.b,
                        np.where(self._converts(link) & ~self._beyond(step), kept, 0.0),
                    ),
                )
            )
        for on, to in self._asked:
            # The last collective's result is kept, that of the way to the hub where none is on the
            # way from it: what else there is counts instead, be it less.
            first, then = self.space.links[to.link], self.space.links[on.link]
            here, there = first.share[self._rows[first.b]], then.share[self._rows[then.b]]
            saved.append(
                (
                    on.variable,
                    *_ordered(
                        first.a, first.b, np.where(self._converts(first), on.bytes * here, 0.0)
                    ),
                )
            )
            saved.append(
                (
                    on.variable,
                    *_ordered(
                        then.a,
                        then.b,
                        np.where(self._converts(then), on.bytes * (there - here[:, None]), 0.0),
                    ),
                )
            )
        return saved

    def _beyond(self, step: Step) -> np.ndarray:
        """Which options of the second variable of a step's link say that it is spared, and so asks
        for nothing. [its options]"""
        k = self.space.links[step.link].b
        return self._spared[k] if step.after >= 0 else np.zeros(len(self._rows[k]), bool)

    def _converts(self, link: Link) -> np.ndarray:
        """Which of a link's pairs of options have a conversion that takes time forward."""
        converts: np.ndarray = link.forward_s[np.ix_(self._rows[link.a], self._rows[link.b])] > 0
        return converts

    def _at(self, techniques: Techniques, price: float) -> Tree:
        tree, each = self._compiled(techniques), self._each(techniques)
        pairs = dict(tree.model.pairs)
        for variable, pair, kept in self._kept:
            pairs[pair] = pairs[pair] + price * each[variable] * kept
        return tree.with_pairs(pairs)

    def _used(self, techniques: Techniques, use: np.ndarray, choice: np.ndarray) -> float:
        return super()._used(techniques, use, choice) + self._held(self._each(techniques), choice)

    def _held(self, each: np.ndarray, choice: np.ndarray) -> float:
        """Bytes of what is kept by pairs of options."""
        return sum(
            each[variable] * float(kept[choice[u], choice[v]])
            for variable, (u, v), kept in self._kept
        )

    def _compiled(self, techniques: Techniques, *, ends: bool = True) -> Tree:
        key = False, ends
        if key not in self._trees:
            scale = link_scale(self.space, replace(techniques, microbatches=0), ends=ends)
            pairs = {
                (a, b): table[np.ix_(self._rows[a], self._rows[b])]
                for (a, b), table in self._pairs([False] * len(scale), scale).items()
            }
            for step in self._steps:
                self._let(step, pairs)
            self._trees[key] = self._eliminated(
                Model(self.offset, np.zeros(self.offset[-1]), pairs, None)
            )
        return self._trees[key]

    def _let(self, step: Step, pairs: dict[tuple[int, int], np.ndarray]) -> None:
        """Forbid what the step does not spare, in the pairs of its link. What no link tells may be
        spared."""
        if step.link < 0:
            return
        link = self.space.links[step.link]
        more = np.where(
            self._spared[link.a][:, None] & ~self._converts(link) & ~self._beyond(step), np.inf, 0.0
        )
        pair, more = _ordered(link.a, link.b, more)
        pairs[pair] = pairs[pair] + more


def _ordered(a: int, b: int, table: np.ndarray) -> tuple[tuple[int, int], np.ndarray]:
    """A pair of variables as models have it, and its table."""
    return ((a, b), table) if a < b else ((b, a), table.T)


def without_limit(
    sparing: SavedCollectiveRelaxation, techniques: Techniques
) -> tuple[float, float]:
    """A bound (seconds) without a memory limit, and bytes of the choice that has it."""
    fastest = sparing.free(techniques, techniques.microbatches)
    return (np.inf, 0.0) if fastest is None else (fastest[1], sparing.usage(techniques, fastest[0]))


def raised_lower_bound(
    nodes: Iterable[tuple[float, SearchNode, Relaxation]],
    limit_bytes: float,
    bound: float,
    own: Callable[[SearchNode], Space | None] | None,
) -> float:
    """The bound, or less where one of the nodes, each with what is known of it, proves no more:
    the least is raised until it is one that has been as far as it can be. own: the space of a
    node's own microbatches, None where nothing of it fits; without it nodes are raised by that of
    their mesh alone, and roughly.
    """
    known = [one for one in nodes if one[0] < bound]
    sparing = _SavedCollectiveSpaces(known, limit_bytes, bound, own)
    heap, ways = (
        [(least, k) for k, (least, _, _) in enumerate(known)],
        [sparing.raised(node, relaxed) for _, node, relaxed in known],
    )
    heapq.heapify(heap)
    while heap and heap[0][0] < bound:
        least, k = heap[0]
        step = next(ways[k], None)
        if step is None:
            return least
        heapq.heapreplace(heap, (max(least, step), k))
    return bound


class _SavedCollectiveSpaces:
    """The relaxed spaces that nodes are raised by, each made when it is first asked for."""

    def __init__(
        self,
        nodes: Sequence[tuple[float, SearchNode, Relaxation]],
        limit_bytes: float,
        bound: float,
        own: Callable[[SearchNode], Space | None] | None,
    ) -> None:
        self._limit, self._bound, self._own = limit_bytes, bound, own
        self._levels: dict[tuple[int, int], set[int]] = {}
        for _, node, _ in nodes:
            for micro in (0, node.micro):
                self._levels.setdefault((node.mesh, micro), set()).add(node.techniques.zero_stage)
        self._known: dict[tuple[int, int], SavedCollectiveRelaxation | None] = {}

    def raised(self, node: SearchNode, relaxed: Relaxation) -> Iterator[float]:
        """Bounds of a search node, each after those that take less: first in the space that all
        nodes of its mesh share, where one elimination tells most of them apart
        (`Relaxation.quick`), then in that of its own microbatches, without a memory limit before
        with it; rough ones are made tight last."""
        at, rough = node.techniques, list[SavedCollectiveRelaxation]()
        for micro in (
            (0, node.micro) if self._own is not None and node.micro != relaxed.space.parts else (0,)
        ):
            space = self._own(node) if micro and self._own is not None else relaxed.space
            if space is None or least_usage(space, at, uncut=True) > self._limit:
                yield np.inf
                return
            if (node.mesh, micro) not in self._known:
                self._known[node.mesh, micro] = self._near(node, micro, space, relaxed)
            spared = self._known[node.mesh, micro]
            if spared is None:
                yield np.inf
                return
            yield spared.quick(at, node.micro)
            seconds, used = without_limit(spared, at)
            yield seconds
            if used > self._limit:
                yield spared.limited(at, self._limit, (seconds, used), self._bound)
                rough += [spared] if spared.rough(at) else []
        for spared in reversed(rough) if self._own is not None else ():
            more = True
            while more:
                seconds, more = spared.tightened(at, self._limit, self._bound)
                yield seconds

    def _near(
        self, node: SearchNode, micro: int, space: Space, relaxed: Relaxation
    ) -> SavedCollectiveRelaxation | None:
        """What is near in a node's space, kept with the mesh: with a limit of memory and without
        the same is asked for."""
        levels = tuple(sorted(self._levels[node.mesh, micro]))
        key = micro, levels, self._bound
        if key not in relaxed.near_known:
            own = Relaxation(space, relaxed.scratch) if micro else relaxed
            relaxed.near_known[key] = near(own, list(levels), self._bound)
        spared: SavedCollectiveRelaxation | None = relaxed.near_known[key]
        return spared


def near(
    relaxed: Relaxation, levels: list[int], below_s: float
) -> SavedCollectiveRelaxation | None:
    """The bounds of those options alone that plans below so many seconds may have; None where there
    is no such plan."""
    fewer = copy(relaxed)  # whose options the search goes on with
    if fewer.least(levels, below_s) >= below_s:
        return None
    for narrow in (False, True):
        spared = SavedCollectiveRelaxation(fewer, narrow)
        if spared.least(levels, below_s) >= below_s:
            return None
        if spared.exact:
            break
    return spared
