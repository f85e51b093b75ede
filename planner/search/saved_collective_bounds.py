"""Bounds of plans whose recomputed blocks keep results of collectives, whichever those are
(planner.analysis.recompute_demand).

The search goes by the problem of plans that keep sums alone, as no other is solved: it never solves
what it has no bytes for. What its bounds of such nodes say is therefore said of those plans, and
what holds for all is worked out when it ends, for as few search nodes as settle it.

There what is recomputed is a decision too: a node of a block, or a shared layout on the path from
it, has each option twice, spared and not. A pair of options is impossible where the first is spared
though the reshard between them has no collective and what comes next is recomputed. Where a
collective spares it, its result is saved: what the layout resharded to leaves a device of it at
least, less what other bytes count (planner.analysis.saved_collectives).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from math import prod

import numpy as np

from planner.search.keep_steps import Step, charges, followed, steps_of, without_shared_layouts
from planner.search.relaxation import Relaxation
from planner.search.search_node import SearchNode
from planner.solvers.exact.elimination import Tree
from planner.solvers.model import Model
from planner.space.assemble import least_usage
from planner.space.stage_shares import link_scale, parts_of_stage
from planner.space.techniques import Techniques
from planner.space.variables import Link, Space


class SavedCollectiveRelaxation(Relaxation):
    """Bounds of the options that another looks at, all under recompute=block-keep.

    narrow: nodes that are no products, and are spared over a shared layout, are never recomputed
    and save nothing: a lower bound with smaller tables.
    """

    def __init__(self, relaxed: Relaxation, narrow: bool = False) -> None:
        super().__init__(relaxed.space, relaxed.scratch)
        rows = np.split(relaxed.considered, relaxed.offset[1:-1])
        self._steps, self._charge_s = steps_of(self.space), charges(self.space)
        self._left_out_steps: list[tuple[Step, Step]] = []
        """Of each shared layout that `narrow` leaves out: the step from there to a gradient that
        reads it, and the step to there."""
        if narrow:
            all_steps = self._steps
            self._steps, left_out = without_shared_layouts(self.space, all_steps)
            self._left_out_steps = [
                (from_shared, to_shared)
                for from_shared in all_steps
                for to_shared in all_steps
                if from_shared.variable in left_out
                and from_shared.after < 0
                and to_shared.after == from_shared.variable
                and min(from_shared.link, to_shared.link) >= 0
            ]
            for k in left_out:
                self._charge_s[self._all_offset[k] : self._all_offset[k + 1]] = 0.0
        self._spared = [np.zeros(len(row), bool) for row in rows]
        for step in self._steps:
            k = step.variable
            self._spared[k], rows[k] = np.repeat((False, True), len(rows[k])), np.tile(rows[k], 2)
        self.considered, self.offset = (
            np.concatenate(rows),
            np.concatenate(([0], np.cumsum([len(row) for row in rows]))),
        )
        self._rows = [
            row - first for row, first in zip(rows, self._all_offset.tolist(), strict=False)
        ]

    def _keep(self, possible: np.ndarray, cost: np.ndarray) -> np.ndarray:
        possible_rows = np.split(possible, self.offset[1:-1])
        self._rows, self._spared = (
            [row[stays] for row, stays in zip(rows, possible_rows, strict=True)]
            for rows in (self._rows, self._spared)
        )
        self.__dict__.pop("_saved_pairs", None)
        return super()._keep(possible, cost)

    def _seconds(self, techniques: Techniques) -> np.ndarray:
        passes = (
            self.space.parts
            * parts_of_stage(self.space, techniques)[0]
            * [v.count for v in self.space.variables]
        )
        recompute_s = np.repeat(passes, np.diff(self.offset)) * self._charge_s[self.considered]
        spared = np.concatenate(self._spared)
        return self._least_seconds(techniques) + np.where(spared, 0.0, recompute_s)

    def _bytes(self, techniques: Techniques) -> np.ndarray:
        """What no pair of options tells: sums of variables that no step follows, and the least that
        a layout can leave where no link says what it is."""
        sizes, samples = super()._bytes(techniques), self._samples(techniques)
        sums = sizes - super()._bytes(replace(techniques, recompute="block"))
        for k in followed(self.space):
            sizes[self.offset[k] : self.offset[k + 1]] -= sums[self.offset[k] : self.offset[k + 1]]
        for step in (s for s in self._steps if s.link < 0 and s.after < 0):
            k = step.variable
            even_share = step.bytes / prod(self.space.pricer.sizes.values())
            not_counted = max(0.0, even_share - step.counted)
            sizes[self.offset[k] : self.offset[k + 1]] += np.where(
                self._spared[k], samples[k] * not_counted, 0.0
            )
        return sizes

    def _samples(self, techniques: Techniques) -> np.ndarray:
        """Per variable how many of a microbatch of the graph a device holds results of, of all its
        nodes. [variables]"""
        samples: np.ndarray = (
            self.space.parts / techniques.microbatches * parts_of_stage(self.space, techniques)[1]
        )
        return samples

    @cached_property
    def _saved_pairs(self) -> list[tuple[int, tuple[int, int], np.ndarray]]:
        """(variable, pair, bytes) of what is saved where a reshard has a collective: its reader
        asks for it unless it is spared itself. [options of one, of the other]"""
        saved = []
        for step in (s for s in self._steps if s.link >= 0):
            link = self.space.links[step.link]
            result_bytes = step.bytes * link.share[self._rows[link.b]]
            saved_bytes = np.maximum(0.0, result_bytes - step.counted)
            saved.append(
                (
                    step.variable,
                    *_ordered(
                        link.a,
                        link.b,
                        np.where(self._reshards(link) & ~self._beyond(step), saved_bytes, 0.0),
                    ),
                )
            )
        for from_shared, to_shared in self._left_out_steps:
            # The last collective's result is saved, that on the path to the shared layout where
            # none is on the path from it: what the second adds to the first counts, be it less.
            first, then = self.space.links[to_shared.link], self.space.links[from_shared.link]
            first_share = first.share[self._rows[first.b]]
            added_share = then.share[self._rows[then.b]] - first_share[:, None]
            for link, share in ((first, first_share), (then, added_share)):
                saved_bytes = np.where(self._reshards(link), from_shared.bytes * share, 0.0)
                saved.append((from_shared.variable, *_ordered(link.a, link.b, saved_bytes)))
        return saved

    def _beyond(self, step: Step) -> np.ndarray:
        """Which options of the second variable of a step's link say that it is spared, and so asks
        for nothing. [its options]"""
        k = self.space.links[step.link].b
        return self._spared[k] if step.after >= 0 else np.zeros(len(self._rows[k]), bool)

    def _reshards(self, link: Link) -> np.ndarray:
        """Which of a link's pairs of options have a reshard that takes time forward. [options of
        one, of the other]"""
        reshards: np.ndarray = link.forward_s[np.ix_(self._rows[link.a], self._rows[link.b])] > 0
        return reshards

    def _at(self, techniques: Techniques, price: float) -> Tree:
        tree, samples = self._compiled(techniques), self._samples(techniques)
        pairs = dict(tree.model.pairs)
        for variable, pair, saved_bytes in self._saved_pairs:
            pairs[pair] = pairs[pair] + price * samples[variable] * saved_bytes
        return tree.with_pairs(pairs)

    def _used(self, techniques: Techniques, option_bytes: np.ndarray, choice: np.ndarray) -> float:
        samples = self._samples(techniques)
        saved_by_pairs = sum(
            samples[variable] * float(saved_bytes[choice[u], choice[v]])
            for variable, (u, v), saved_bytes in self._saved_pairs
        )
        return super()._used(techniques, option_bytes, choice) + saved_by_pairs

    def _compiled(self, techniques: Techniques, *, ends: bool = True) -> Tree:
        key = False, ends
        if key not in self._trees:
            scale = link_scale(self.space, replace(techniques, microbatches=0), ends=ends)
            pairs = {
                (a, b): table[np.ix_(self._rows[a], self._rows[b])]
                for (a, b), table in self._pairs([False] * len(scale), scale).items()
            }
            for step in self._steps:
                self._forbid_unspared(step, pairs)
            self._trees[key] = self._eliminated(
                Model(self.offset, np.zeros(self.offset[-1]), pairs, None)
            )
        return self._trees[key]

    def _forbid_unspared(self, step: Step, pairs: dict[tuple[int, int], np.ndarray]) -> None:
        """Forbid what the step does not spare, in the pairs of its link. What no link tells may be
        spared."""
        if step.link < 0:
            return
        link = self.space.links[step.link]
        forbidden = self._spared[link.a][:, None] & ~self._reshards(link) & ~self._beyond(step)
        pair, penalty = _ordered(link.a, link.b, np.where(forbidden, np.inf, 0.0))
        pairs[pair] = pairs[pair] + penalty


def _ordered(a: int, b: int, table: np.ndarray) -> tuple[tuple[int, int], np.ndarray]:
    """A pair of variables as models have it, and its table."""
    return ((a, b), table) if a < b else ((b, a), table.T)


def without_limit(
    relaxed: SavedCollectiveRelaxation, techniques: Techniques
) -> tuple[float, float]:
    """A bound (seconds) without a memory limit, and bytes of the choice that has it."""
    fastest = relaxed.free(techniques, techniques.microbatches)
    return (np.inf, 0.0) if fastest is None else (fastest[1], relaxed.usage(techniques, fastest[0]))


def raised_lower_bound(
    nodes: Iterable[tuple[float, SearchNode, Relaxation]],
    limit_bytes: float,
    bound: float,
    own_space: Callable[[SearchNode], Space | None] | None,
) -> float:
    """The bound, or less where one of the nodes, each with what is known of it, proves no more:
    the least is raised until it is one that has been as far as it can be. own_space: the space of a
    node's own microbatches, None where nothing of it fits; without it nodes are raised by that of
    their mesh alone, and roughly.
    """
    known = [node for node in nodes if node[0] < bound]
    spaces = _SavedCollectiveSpaces(known, limit_bytes, bound, own_space)
    heap = [(node_bound, k) for k, (node_bound, _, _) in enumerate(known)]
    further_bounds = [spaces.raised(node, relaxed) for _, node, relaxed in known]
    heapq.heapify(heap)
    while heap and heap[0][0] < bound:
        least, k = heap[0]
        raised = next(further_bounds[k], None)
        if raised is None:
            return least
        heapq.heapreplace(heap, (max(least, raised), k))
    return bound


class _SavedCollectiveSpaces:
    """The relaxed spaces that nodes are raised by, each made when it is first asked for."""

    def __init__(
        self,
        nodes: Sequence[tuple[float, SearchNode, Relaxation]],
        limit_bytes: float,
        bound: float,
        own_space: Callable[[SearchNode], Space | None] | None,
    ) -> None:
        self._limit, self._bound, self._own_space = limit_bytes, bound, own_space
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
        techniques, rough = node.techniques, list[SavedCollectiveRelaxation]()
        for micro in (
            (0, node.micro)
            if self._own_space is not None and node.micro != relaxed.space.parts
            else (0,)
        ):
            space = (
                self._own_space(node) if micro and self._own_space is not None else relaxed.space
            )
            if space is None or least_usage(space, techniques, uncut=True) > self._limit:
                yield np.inf
                return
            if (node.mesh, micro) not in self._known:
                self._known[node.mesh, micro] = self._near(node, micro, space, relaxed)
            spared = self._known[node.mesh, micro]
            if spared is None:
                yield np.inf
                return
            yield spared.quick(techniques, node.micro)
            seconds, used = without_limit(spared, techniques)
            yield seconds
            if used > self._limit:
                yield spared.limited(techniques, self._limit, (seconds, used), self._bound)
                rough += [spared] if spared.rough(techniques) else []
        for spared in reversed(rough) if self._own_space is not None else ():
            can_gain = True
            while can_gain:
                seconds, can_gain = spared.tightened(techniques, self._limit, self._bound)
                yield seconds

    def _near(
        self, node: SearchNode, micro: int, space: Space, relaxed: Relaxation
    ) -> SavedCollectiveRelaxation | None:
        """What is near in a node's space, kept with the mesh: with a limit of memory and without
        the same is asked for."""
        levels = tuple(sorted(self._levels[node.mesh, micro]))
        key = micro, levels, self._bound
        if key not in relaxed.near_known:
            own_relaxation = Relaxation(space, relaxed.scratch) if micro else relaxed
            relaxed.near_known[key] = near(own_relaxation, list(levels), self._bound)
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
