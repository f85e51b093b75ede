"""Rows of memory under reduction: usage by maximal time points, what all strategies share, and
which rows some choice can exceed.

Tens of thousands of nodes have one interval each, and each pass asks the same of all of them: what
is asked of a node's arrays alone is asked of all nodes at once, laid end to end. Nodes with several
intervals go by their number of strategies, in one matrix each number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.solvers.model import maximal_times
from planner.solvers.problem import Problem
from planner.solvers.reduce.partial import Infeasible, State
from planner.solvers.reduce.usage import Usage


def set_rows(state: State, problem: Problem) -> None:
    """Give the nodes their usage by maximal time points; what all strategies of an interval share
    is usage of no node."""
    lo, hi = problem.live_span[:, 0], problem.live_span[:, 1]
    real = np.flatnonzero(hi > lo)
    if not len(real):
        return
    times = maximal_times(lo[real], hi[real])
    state.base, state.rise = np.zeros(len(times), np.int64), np.zeros(len(times) + 1, np.int64)
    spans = np.stack([np.searchsorted(times, lo[real]), np.searchsorted(times, hi[real])], axis=1)
    listed = [problem.live_usage[j] for j in real.tolist()]
    size, first, flat = _end_to_end(listed)
    least = np.minimum.reduceat(flat, first)
    np.add.at(state.rise, spans[:, 0], least)
    np.subtract.at(state.rise, spans[:, 1], least)
    varies = (np.maximum.reduceat(flat, first) > least) & (spans[:, 1] > spans[:, 0])
    flat -= np.repeat(least, size)
    by: dict[int, list[int]] = {}
    for j, i in zip(
        np.flatnonzero(varies).tolist(), problem.live_node[real[varies]].tolist(), strict=True
    ):
        by.setdefault(i, []).append(j)
    ends = np.append(first, len(flat)).tolist()
    for i, intervals in by.items():
        use = (
            np.stack([flat[ends[j] : ends[j + 1]] for j in intervals])
            if len(intervals) > 1
            else flat[ends[intervals[0]] : ends[intervals[0] + 1]][None]
        )
        state.usage[i] = Usage(
            spans[intervals] if len(intervals) > 1 else spans[intervals[0] : intervals[0] + 1],
            use,
            flat=True,
        )


def add_rise(state: State) -> None:
    """Bring `base` up to date."""
    state.base = state.base + state.rise.cumsum()[:-1]
    state.rise[:] = 0


def level(state: State, i: int) -> None:
    """Usage that all strategies share becomes a constant."""
    usage = state.usage[i]
    if usage is None or usage.flat:
        return
    spans, use = usage.whole()
    least = use.min(axis=1)
    if least.any():
        np.add.at(state.rise, spans[:, 0], least)
        np.subtract.at(state.rise, spans[:, 1], least)
        use = use - least[:, None]
    some = use.any(axis=1)
    if some.all():
        state.usage[i] = Usage(spans, use, flat=True)
    else:
        state.usage[i] = Usage(spans[some], use[some], flat=True) if some.any() else None


@dataclass
class Sums:
    """Steps of the largest and the least load of all nodes, and the largest rise and fall of each
    added up, at every boundary of rows. [rows + 1] each"""

    top: np.ndarray
    low: np.ndarray
    grow: np.ndarray
    fall: np.ndarray


@dataclass
class Single:
    """Nodes with one interval, of which the least usage is 0: only the largest counts."""

    node: list[int]
    usage: list[Usage]
    span: np.ndarray  # [nodes, 2]
    peak: np.ndarray  # [nodes] largest usage; 0 when live in no row that is left

    def count(self, sums: Sums) -> None:
        """Add what these nodes use."""
        for total, sign, end in (
            (sums.top, 1, 0),
            (sums.top, -1, 1),
            (sums.grow, 1, 0),
            (sums.fall, 1, 1),
        ):
            np.add.at(total, self.span[:, end], sign * self.peak)

    def move(self, place: np.ndarray) -> None:
        """Rows were renumbered: row r is `place[r]` now."""
        self.span = place[self.span]
        self.peak = np.where(self.span[:, 1] > self.span[:, 0], self.peak, 0)

    def give_back(self, state: State) -> None:
        """Give the nodes their usage in the rows that are left."""
        for k, (i, usage, live) in enumerate(
            zip(self.node, self.usage, (self.peak > 0).tolist(), strict=True)
        ):
            state.usage[i] = Usage(self.span[k : k + 1], usage.use, usage.flat) if live else None
            if not live:
                state.touch(i)


@dataclass
class Several:
    """Nodes of one number of strategies with several intervals each: their intervals one after the
    other."""

    node: list[int]
    owner: np.ndarray  # [intervals] place in `node`, ascending
    span: np.ndarray  # [intervals, 2]
    use: np.ndarray  # [intervals, strategies]

    def count(self, sums: Sums) -> None:
        """Add what these nodes use: a node's load is the running sum of its steps, which ends at 0,
        so that one sum runs over all nodes."""
        if not len(self.owner):
            return
        places, owner = (
            np.concatenate([self.span[:, 0], self.span[:, 1]]),
            np.concatenate([self.owner, self.owner]),
        )
        by = np.lexsort((places, owner))
        places, owner = places[by], owner[by]
        last = np.append((places[1:] != places[:-1]) | (owner[1:] != owner[:-1]), True)
        load = np.concatenate([self.use, -self.use])[by].cumsum(axis=0)[last]
        places = places[last]
        step = np.diff(load, axis=0, prepend=np.zeros((1, load.shape[1]), np.int64))
        np.add.at(sums.top, places, np.diff(load.max(axis=1), prepend=0))
        np.add.at(sums.low, places, np.diff(load.min(axis=1), prepend=0))
        np.add.at(sums.grow, places, step.max(axis=1))
        np.add.at(sums.fall, places, (-step).max(axis=1))

    def move(self, place: np.ndarray) -> None:
        """Rows were renumbered: row r is `place[r]` now. Intervals that are live in no row that is
        left are forgotten."""
        span = place[self.span]
        some = span[:, 1] > span[:, 0]
        self.owner, self.span, self.use = self.owner[some], span[some], self.use[some]

    def give_back(self, state: State) -> None:
        """Give the nodes their usage in the rows that are left."""
        ends = np.searchsorted(self.owner, np.arange(len(self.node) + 1)).tolist()
        for i, p, q in zip(self.node, ends, ends[1:], strict=False):
            usage = state.usage[i]
            assert usage is not None
            if q - p != len(usage.spans):
                state.touch(i)
            state.usage[i] = Usage(self.span[p:q], self.use[p:q], usage.flat) if q > p else None


def _sorted_out(state: State) -> tuple[Single, list[Several]]:
    """The nodes that use rows: those with one interval, and the others by their number of
    strategies."""
    node: list[int] = []
    usage: list[Usage] = []
    many: dict[int, list[int]] = defaultdict(list)
    for i, node_usage in enumerate(state.usage):
        if node_usage is None:
            continue
        spans, use = node_usage.whole()
        if len(spans) == 1:
            node.append(i)
            usage.append(node_usage)
        else:
            many[use.shape[1]].append(i)
    peak = np.zeros(0, np.int64)
    if node:
        _, first, flat = _end_to_end([node_usage.use[0] for node_usage in usage])
        peak = np.maximum.reduceat(flat, first)
    span = (
        np.concatenate([node_usage.spans for node_usage in usage])
        if usage
        else np.zeros((0, 2), np.int64)
    )
    return Single(node, usage, span, peak), [_together(state, listed) for listed in many.values()]


def _together(state: State, node: list[int]) -> Several:
    parts = [node_usage.whole() for i in node if (node_usage := state.usage[i]) is not None]
    owner = np.repeat(np.arange(len(node)), [len(spans) for spans, _ in parts])
    return Several(
        node,
        owner,
        np.concatenate([spans for spans, _ in parts]),
        np.concatenate([use for _, use in parts]),
    )


def _end_to_end(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arrays laid end to end: the size of each, its first place, and all entries (a copy)."""
    size = np.fromiter((len(a) for a in arrays), np.int64, len(arrays))
    return size, np.cumsum(size) - size, np.concatenate(arrays).astype(np.int64)


def drop_rows(state: State, rounds: int = 4) -> None:
    """Forget rows that no choice can exceed, and rows that a neighbour row always exceeds; a row
    above its least use is a proof."""
    for i in range(len(state.usage)):
        level(state, i)
    limit, base = state.limit, state.base
    if limit is None or not len(base):
        return
    add_rise(state)
    base = state.base
    single, several = _sorted_out(state)
    for _ in range(rounds):
        rows = len(base)
        sums = Sums(*(np.zeros(rows + 1, np.int64) for _ in range(4)))
        single.count(sums)
        for many in several:
            many.count(sums)
        high, least = sums.top[:rows].cumsum() + base, sums.low[:rows].cumsum() + base
        if (least > limit).any():
            raise Infeasible
        step = np.diff(base)
        # boundary b lies between rows b - 1 and b
        below_next = np.append(sums.fall[1:rows] <= step, False)  # row r never exceeds row r + 1
        below_last = np.append(False, sums.grow[1:rows] <= -step)
        keep = (high > limit) & ~below_next & ~(below_last & ~np.append(False, below_next[:-1]))
        if keep.all():
            break
        place = np.concatenate(([0], np.cumsum(keep)))
        base = base[keep]
        single.move(place)
        for many in several:
            many.move(place)
        if not len(base) or keep.mean() > 0.97:
            break
    if len(base) == len(state.base):
        return
    state.base, state.rise = base, np.zeros(len(base) + 1, np.int64)
    for many in several:
        many.give_back(state)
    single.give_back(state)
