"""Where to cut a graph into pipeline stages that have no block in common
(planner.execution.uneven_pipeline), and how many places of the mesh each takes.

A tick is as long as the longest chunk: 2 f + b of a place's microbatches, of the last chunk f + b.
The step takes as many as there are groups of microbatches and stages less one, so among all cuts
those are sought with the shortest longest chunk, without handing much over: for some limits of what
may be handed over the best cuts and widths (dynamic programming over the possible cuts, and over
how many of the places are given away), and of those the cheapest with the messages counted. Stages
that all take two places are those of a mesh with half as many and twice the replicas, and are left
to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from planner.errors import PlanError
from planner.execution.pipeline import Schedule
from planner.execution.plan import Plan
from planner.execution.techniques import WIDEST
from planner.execution.uneven_pipeline import wrong_widths
from planner.sharding.layout import STAGE
from planner.sharding.rule import PENDING

if TYPE_CHECKING:
    from planner.analysis.facts import GraphFacts
    from planner.pricing.pricer import Pricer

LIMITS = 8
"""Limits of what may be handed over that are tried."""


@dataclass(frozen=True, order=True)
class Cutting:
    """price: seconds of a step's ticks, roughly; cuts: first nodes of the chunks after the first;
    widths: places that each stage takes, () one each."""

    price: float
    cuts: tuple[int, ...]
    widths: tuple[int, ...]


def unbroken(base: GraphFacts, plan: Plan) -> tuple[tuple[int, int], ...]:
    """Maker and reader of what a plan's operators read as pending terms: no cut lies between them,
    as nothing pending is handed on."""
    graph, linked = base.graph, []
    for i, node in enumerate(graph.nodes):
        split = plan.splits[node.id]
        if split.axes(PENDING):
            linked += [
                (graph.producer[node.inputs[slot]], i)
                for slot in sorted(base.rules[i].linear)
                if node.inputs[slot] in graph.producer
            ]
    return tuple(linked)


def with_cuts(
    base: GraphFacts,
    plan: Plan,
    pricer: Pricer,
    limits_bytes: tuple[int, ...] = (),
    widths: tuple[int, ...] = (),
) -> Plan:
    """The plan; where it has stages and no repeated block is assigned to them, with its graph cut.

    base: of one microbatch. limits_bytes: of a device's memory, and what leaves room. widths: the
    places that stages have to take, () for the faster of one each and the best of others, of those
    that keep most of the limits. Raises PlanError P068 where it cannot be cut.
    """
    if plan.stages == 1 or base.dealt is not None:
        if set(widths) - {1}:
            raise PlanError(
                "P068",
                f"stages of widths {'+'.join(map(str, widths))} are not possible: repeated"
                " blocks are divided evenly, one position of the stage axis each",
                help=["pin less"],
            )
        return plan
    if set(widths) - {1}:
        if wrong := wrong_widths(widths, plan.stages, plan.microbatches, plan.virtual_stages):
            raise PlanError(
                "P068", f"such pipeline stages are not possible: {wrong}", help=["pin less"]
            )
        return _cut(plan, cutting(base, plan, pricer, len(widths), widths))
    even = cutting(base, plan, pricer, plan.stages * plan.virtual_stages)
    uneven = None if widths else _uneven(base, plan, pricer, even.price)
    if uneven is None:
        return _cut(plan, even)
    from planner.pricing.plan_price import price_plan

    def worth(cut_plan: Plan) -> tuple[int, float]:
        cost = price_plan(base, cut_plan, pricer)[0]
        return sum(cost.memory.total > limit for limit in limits_bytes), cost.step_time_s

    return min(_cut(plan, even), _cut(plan, uneven), key=worth)


def _cut(plan: Plan, cuts: Cutting) -> Plan:
    return replace(plan, stage_cuts=cuts.cuts, stage_widths=cuts.widths)


def _uneven(base: GraphFacts, plan: Plan, pricer: Pricer, below: float) -> Cutting | None:
    """The best with stages of one place and of two whose price is below the given one. The more
    stages the more ticks: as all places together are no faster than each with its part of the work,
    it ends where that would cost more than the best."""
    if plan.virtual_stages > 1 or plan.microbatches % WIDEST:
        return None
    best, (both, twice) = None, _seconds(base, plan, pricer)
    for stages in range(plan.stages // WIDEST + 1, plan.stages):
        longest = below / _ticks(plan, stages)
        last = np.searchsorted(both, both[-1] - longest)  # begins here or behind
        if WIDEST * (twice[last] + both[-1] - both[last]) / plan.stages >= longest:
            break
        try:
            cuts = cutting(base, plan, pricer, stages)
        except PlanError:  # too few cuts
            continue
        if cuts.price < below:
            best, below = cuts, cuts.price
    return best


def cutting(
    base: GraphFacts, plan: Plan, pricer: Pricer, chunks: int, widths: tuple[int, ...] = ()
) -> Cutting:
    """The best cuts into so many chunks, on all places of the plan (module docstring). widths: the
    places that each has to take. Raises PlanError P068 where there are too few."""
    wide = plan.stages * plan.virtual_stages - chunks
    together, ticks = WIDEST if wide else 1, _ticks(plan, chunks)
    unbreakable = unbroken(base, plan)
    splits = tuple(plan.splits[base.graph.nodes[i].id] for i in base.times)
    key = ("cuts", id(base), chunks, plan.stages, ticks, widths, unbreakable, splits)
    if key not in pricer.memo:
        handed_on = {
            i: size
            for i, size in base.places.items()
            if not any(made < i <= reader for made, reader in unbreakable)
        }
        (both, twice), devices = _seconds(base, plan, pricer), prod(pricer.sizes.values())
        cuttings = []
        for limit in _limits(handed_on, chunks):
            best = _balanced(
                [i for i in handed_on if handed_on[i] <= limit], both, twice, chunks, wide, widths
            )
            if best is not None:
                sent = max(handed_on[i] for i in best[1]) * pricer.itemsize("float32") / devices
                messages_s = (
                    2 * together * pricer.collective_s("collective-permute", (STAGE,), sent)
                )
                cuttings.append(Cutting(ticks * (best[0] + messages_s), best[1], best[2]))
        if not cuttings:
            raise PlanError(
                "P068",
                f"{chunks} virtual stages of the model are not possible: it can be cut"
                f" at {len(handed_on)} places",
                help=["fewer stages"],
            )
        pricer.memo[key] = base, min(cuttings)  # the base is kept, so that its id stays unique
    kept: Cutting = pricer.memo[key][1]
    return kept


def _ticks(plan: Plan, chunks: int) -> int:
    """Ticks of a step of so many chunks, with fewer than places some of which take two."""
    wide = chunks < plan.stages * plan.virtual_stages
    return Schedule(
        chunks if wide else plan.stages,
        plan.microbatches // (WIDEST if wide else 1),
        plan.schedule,
        plan.virtual_stages,
    ).ticks


def _seconds(base: GraphFacts, plan: Plan, pricer: Pricer) -> tuple[np.ndarray, np.ndarray]:
    """Seconds on a place of a microbatch's passes through all nodes before each, as the plan splits
    them: f + b, and 2 f + b."""
    from planner.pricing.kernels import times_of_class

    nodes = base.graph.nodes
    each = [times_of_class(base, i, plan.splits[n.id], pricer) for i, n in enumerate(nodes)]
    forward, backward = np.array([(0.0, 0.0), *each]).cumsum(axis=0).T
    return forward + backward, 2 * forward + backward


def _limits(over: Mapping[int, float], chunks: int) -> Iterator[float]:
    """Some sizes of what is handed over, the least first."""
    sizes = sorted(over.values())
    if len(sizes) >= chunks - 1:
        yield from sorted(
            {sizes[round(q)] for q in np.linspace(chunks - 2, len(sizes) - 1, LIMITS)}
        )


def _balanced(
    where: list[int],
    both_s: np.ndarray,
    twice_s: np.ndarray,
    chunks: int,
    wide: int = 0,
    widths: tuple[int, ...] = (),
) -> tuple[float, tuple[int, ...], tuple[int, ...]] | None:
    """(seconds of a tick, first nodes of all chunks but the first, places of each) such that a tick
    is the shortest. both_s, twice_s: seconds of all nodes before each; wide: of the chunks so many
    take two places, the others run a tick's two microbatches one after the other; widths: or those
    that each has to take.
    """
    if len(where) < chunks - 1:
        return None
    cut_at, runs_by_width = np.array(where), (WIDEST, 1) if wide else (1,)

    def choices(k: int, used: int) -> list[int]:
        """Places beside the first that chunk k may take, where `used` are taken up to and with
        it."""
        return [
            w for w in range(len(runs_by_width)) if w <= used and (not widths or widths[k] == w + 1)
        ]

    longest_s = np.full(
        (wide + 1, len(cut_at)), np.inf
    )  # of the chunks before a cut at their best, by how many of them are wide
    for used in range(wide + 1):
        for w in choices(0, used):
            if w == used:
                longest_s[used] = runs_by_width[w] * twice_s[cut_at]
    back_pointers = []
    for k in range(1, chunks - 1):
        longest_s, *pointers = _next_chunk(
            longest_s,
            twice_s[cut_at],
            runs_by_width,
            [choices(k, used) for used in range(wide + 1)],
        )
        back_pointers.append(pointers)
    last_chunks = []
    for w in choices(chunks - 1, wide):
        last_s = runs_by_width[w] * (both_s[-1] - both_s[cut_at])
        tick_s = np.maximum(longest_s[wide - w], last_s)
        j = int(np.argmin(tick_s))
        last_chunks.append((float(tick_s[j]), w, j))
    seconds, w, j = min(last_chunks, default=(np.inf, 0, 0))
    if not np.isfinite(seconds):
        return None
    cuts, places, used = [int(cut_at[j])], [w + 1], wide - w
    for begin, width in reversed(back_pointers):
        w, j, used = int(width[used, j]), int(begin[used, j]), used - int(width[used, j])
        cuts.append(int(cut_at[j]))
        places.append(w + 1)
    places.append(used + 1)
    return seconds, tuple(reversed(cuts)), tuple(reversed(places)) if wide else ()


def _next_chunk(
    longest: np.ndarray, until: np.ndarray, runs_by_width: tuple[int, ...], choices: list[list[int]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One more chunk in the dynamic program of `_balanced`: of the chunks before each cut the
    longest at their best, by how many of them are wide, and where the last one then begins and how
    much wider than one place it is. [wide ones, cuts] each

    longest: the same of one chunk less; until: seconds of all nodes before each cut; runs_by_width:
    how many passes a chunk runs one after the other in a tick, by the places that it takes beside
    the first; choices: places beside the first that the chunk may take, by how many are taken up to
    and with it.
    """
    longer = np.full(longest.shape, np.inf)
    begin, width = np.zeros(longest.shape, np.int64), np.zeros(longest.shape, np.int64)
    for used, possible in enumerate(choices):
        for w in possible:
            seconds, first = last_chunk(longest[used - w], runs_by_width[w] * until)
            better = seconds < longer[used]
            longer[used] = np.where(better, seconds, longer[used])
            begin[used] = np.where(better, first, begin[used])
            width[used] = np.where(better, w, width[used])
    return longer, begin, width


def last_chunk(before: np.ndarray, until: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of chunks that end at each cut: the longest one at its least, and the cut where the last one
    then begins. before: the longest of those before each cut; until: seconds up to each. [cuts]

    The later the last one begins the shorter it is. A cut is not worth beginning at where what is
    before a later one is no longer; what is before the others grows from cut to cut, and the best
    is where that crosses the length of the last one. Where the later cut is beyond the end, all
    between are looked at.
    """
    n = len(before)
    cuts, least = np.arange(n), np.minimum.accumulate(before[::-1])[::-1]
    worth = np.flatnonzero((before == least) & np.isfinite(before))
    if not worth.size:
        return np.full(n, np.inf), np.zeros(n, np.int64)
    crossing = np.searchsorted(before[worth] + until[worth], until)
    candidates = worth[np.clip(crossing + np.arange(-2, 2)[:, None], 0, len(worth) - 1)]
    longest = np.where(
        candidates < cuts, np.maximum(before[candidates], until - until[candidates]), np.inf
    )
    row = longest.argmin(0), cuts
    seconds, first = longest[row], candidates[row]
    next_worth = worth[np.minimum(crossing, len(worth) - 1)]
    beyond = np.flatnonzero((next_worth >= cuts) | (crossing >= len(worth)))
    if beyond.size:
        table = np.maximum(before[:, None], until[beyond] - until[:, None])
        table[cuts[:, None] >= beyond] = np.inf
        first[beyond] = table.argmin(0)
        seconds[beyond] = table[first[beyond], np.arange(beyond.size)]
    return seconds, first
