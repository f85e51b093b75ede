"""What of a space's bytes is on a device at which time of a step, for problems that tell the
workspaces of operators apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planner.space.liveness_points import variables_of_nodes
from planner.space.option_arrays import arrays_of
from planner.space.variables import Space

Span = tuple[int, int, int, np.ndarray]
"""First time, end, variable, and bytes of each of its options."""


@dataclass(frozen=True)
class Kept:
    """Bytes of every option. [options] each

    state: there all the time. saved: activations when the backward pass enters the last repeated
    blocks. one_repeat: what one repeat of whatever blocks has at once (part of `saved` for the last
    ones), 0 where none is made again. after: what is there for the operators behind the blocks.
    before: for those before them.
    """

    state: np.ndarray
    saved: np.ndarray
    one_repeat: np.ndarray
    after: np.ndarray
    before: np.ndarray


def live_spans(space: Space, kept: Kept, gathered: bool, apart: bool) -> list[Span]:
    """The spans of training: what is kept, and what lives only for a while, an operator's
    workspace, one after the other in the order of the forward pass, as far as it may be the
    largest; activations from the turn on that saves them (`gone_before` of
    planner.space.liveness_points). Where weights are gathered (ZeRO stage 3), then the operators
    that follow the repeated blocks, with all that they save and without what is there for the
    blocks alone, and what is before them. apart: whether what a repeat has at once is counted by
    itself."""
    arrays = arrays_of(space)
    behind = arrays.epilogue[arrays.first]
    works = _each(space, arrays.workspace[gathered, apart])
    large, turn = _largest(space, works, behind)
    spans = [(time, time + 1, k, works[k]) for time, k in enumerate(large)]
    last, end = space.base.last_run, max(1, len(large))
    if large and turn[large[-1]] < last:
        end += 1
    starts = np.searchsorted(turn[large], np.arange(last + 2)).tolist()
    state, saved, one_repeat = (_each(space, x) for x in (kept.state, kept.saved, kept.one_repeat))
    for k, (always, then) in enumerate(zip(state, saved, strict=True)):
        first = starts[turn[k]] if not behind[k] else 0
        if not first:
            spans.append((0, end, k, always + then))
            continue
        spans += [(0, end, k, always), (first, end, k, then)]
    for k in np.flatnonzero([x.any() for x in one_repeat] * (turn < last)).tolist():
        first, until = starts[turn[k]], starts[turn[k] + 1]
        spans += [(first, until, k, one_repeat[k])] * (until > first)
    return [*spans, *_around(space, kept, works, end)] if gathered else spans


def forward_spans(space: Space, kept: np.ndarray) -> list[Span]:
    """The spans of a forward pass alone: what is kept (weights, the graph's results; [options]),
    and what lives only for a while, as `forward_bytes` has it of one choice: at every operator its
    workspace and the results that pass by it. Operators beside which the same is there, as in
    repeats of a block, are one time; those are left out beside which there is never the most."""
    arrays = arrays_of(space)
    works, results = (
        _each(space, x) for x in (arrays.workspace[False, False], arrays.costs.passing_bytes)
    )
    least, most = ([int(end(x)) for x in results] for end in (np.min, np.max))
    times, sizes = list[tuple[int, tuple[tuple[int, int], ...]]](), list[tuple[int, int]]()
    for variable, passing in dict.fromkeys(_forward_times(space)):
        times.append((variable, passing))
        sizes.append(
            (
                int(works[variable].min()) + sum(n * least[k] for k, n in passing),
                int(works[variable].max()) + sum(n * most[k] for k, n in passing),
            )
        )
    floor = max((low for low, _ in sizes), default=0)
    large = [time for time, (_, high) in zip(times, sizes, strict=True) if high >= floor]
    spans: list[Span] = [(0, max(1, len(large)), k, x) for k, x in enumerate(_each(space, kept))]
    for time, (variable, passing) in enumerate(large):
        spans.append((time, time + 1, variable, works[variable]))
        spans += [(time, time + 1, k, n * results[k]) for k, n in passing if most[k]]
    return spans


def _forward_times(space: Space) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
    """For every operator in order: its variable, and those whose results pass by it, with how many
    of them do."""
    of_node, passing = variables_of_nodes(space).tolist(), space.base.passing
    by: list[Counter[int]] = [Counter() for _ in of_node]
    for maker, first, last in zip(passing.maker, passing.first, passing.last, strict=True):
        for i in range(first, last + 1):
            by[i][of_node[maker]] += 1
    for row, i in zip(*passing.readers, strict=True):
        by[i][of_node[passing.maker[row]]] -= 1
    for variable, results in zip(of_node, by, strict=True):
        yield variable, tuple(sorted((k, n) for k, n in results.items() if n))


def _largest(
    space: Space, works: list[np.ndarray], behind: np.ndarray
) -> tuple[list[int], np.ndarray]:
    """Variables whose workspace may be the largest of their turn, epilogue aside, turn by turn, and
    the turn of every variable: one for all with pipeline stages."""
    base = space.base
    parted = space.pricer.mesh.stages == 1
    turn = arrays_of(space).turn if parted else np.full(len(works), base.last_run)
    least = dict[int, float]()
    for k, work in enumerate(works):
        if not behind[k]:
            least[turn[k]] = max(least.get(turn[k], 1.0), float(work.min()))
    # Beside nothing that is made again, no more is there than when the last blocks are entered.
    floor = least.get(base.last_run, 1.0)
    large = [
        k
        for k, work in enumerate(works)
        if not behind[k] and work.max() >= max(least[turn[k]], 0.0 if turn[k] % 2 else floor)
    ]
    return sorted(large, key=lambda k: turn[k]), turn


def _around(space: Space, kept: Kept, works: list[np.ndarray], end: int) -> Iterator[Span]:
    """Spans of what is in memory behind the blocks, one operator after the other, and before
    them."""
    after = np.flatnonzero(arrays_of(space).epilogue[arrays_of(space).first]).tolist()
    last = end + len(after)
    for first, until, of_options in ((end, last, kept.after), (last, last + 1, kept.before)):
        if until > first:
            yield from (
                (first, until, k, of_variable)
                for k, of_variable in enumerate(_each(space, of_options))
            )
    yield from ((end + time, end + time + 1, k, works[k]) for time, k in enumerate(after))


def _each(space: Space, bytes_: np.ndarray) -> list[np.ndarray]:
    """Whole bytes of every variable's options."""
    return np.split(np.rint(bytes_).astype(np.int64), arrays_of(space).first[1:])
