"""Several microbatches at the same time: the communication of one under the products of another.

A block of one microbatch is a chain: products wait for what is gathered, what is reduced waits for
products. The chains of c microbatches (Plan.copies) wait for nothing of each other, and stand in
one program, one statement of each in turn (planner.emit.program): a compiler that runs collectives
beside kernels may put those of one under the kernels of another. Every stretch of a program (the
passes of one repeat of a block; what stands between loops) is a chain of pieces, kernels and
collectives by turns, and costmodels.overlap says how much of such chains hides. Not hidden are
collectives inside kernels (rings, exchanges of rows), which take both streams, and what copies
share: weights that are gathered, their gradients. A loop's turn ends for all copies at once.

What it costs stands in the price as for any number of microbatches: kernels of fewer rows, as many
launches and latencies as microbatches. Activations are saved of c microbatches, but a weight is
gathered, and its gradient scattered, once for all of them. Compilers that join neighbouring
collectives of a kind into one launch would join those of the copies, which then wait for each
other: programs ask for smaller launches where two of the largest would fit into one
(`launch_bytes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from costmodels.overlap import BOTH, KERNELS, LINKS, Piece, collectives_hidden, joined
from planner.execution.loops import tensors_per_microbatch
from planner.pricing.kernels import kernel_times
from planner.sharding.layout import Axes, group

if TYPE_CHECKING:
    from planner.analysis.facts import GraphFacts
    from planner.execution.collective import CollectiveUse
    from planner.execution.layout_flow import Flow
    from planner.execution.loops import RepeatedBlock
    from planner.pricing.pricer import Pricer


def launch_bytes(uses: Iterable[CollectiveUse], mesh: Mapping[str, int]) -> dict[str, int]:
    """Kind -> bytes of results up to which collectives may be sent together so that those of two
    copies are not: one less than two of the largest that kernels of blocks wait for, or without
    blocks any kernels."""
    waits = [use for use in uses if use.place and not use.inside]
    largest: dict[str, int] = {}
    for use in [use for use in waits if use.place == "blocks"] or waits:
        largest[use.kind] = max(
            largest.get(use.kind, 0), use.payload_bytes // per_launch(use.kind, use.axes, mesh)
        )
    return {kind: 2 * size - 1 for kind, size in largest.items()}


def per_launch(kind: str, axes: Axes, mesh: Mapping[str, int]) -> int:
    """Payload of a collective over its result, which is what the GPU compiler counts of those it
    joins."""
    return group(axes, mesh) if kind == "reduce-scatter" else 1


@dataclass(frozen=True)
class Stretch:
    """Nodes that run as one piece of a program. times: how often a microbatch passes them in a step
    (repeats of a block)."""

    nodes: range
    times: int


def stretches(flow: Flow, runs: Iterable[RepeatedBlock]) -> tuple[Stretch, ...]:
    """One repeat of every loop, and what stands between loops."""
    result, first = list[Stretch](), 0
    for run in sorted(runs, key=lambda r: r.first):
        result += [
            Stretch(range(first, run.first), 1),
            Stretch(range(run.first, run.first + run.period), run.repeats),
        ]
        first = run.end
    return tuple(s for s in (*result, Stretch(range(first, len(flow.graph.nodes)), 1)) if s.nodes)


def hidden_shares(
    base: GraphFacts,
    flow: Flow,
    runs: tuple[RepeatedBlock, ...],
    sent: Sequence[tuple[CollectiveUse, float]],
    recomputed: frozenset[int],
    pricer: Pricer,
) -> list[float]:
    """What part of each collective hides under other copies. sent: all collectives of a step with
    their seconds; recomputed: nodes that run a second time."""
    plan, shares = flow.plan, [0.0] * len(sent)
    if plan.overlapped_microbatches == 1 or not pricer.copies_hidden:
        return shares
    every = stretches(flow, runs)
    home = _homes(flow, runs, every)
    rows: dict[
        tuple[int, bool], list[int]
    ] = {}  # stretch, whether backward -> numbers of its collectives
    for k, (use, _) in enumerate(sent):
        if use.place and (spot := home.get((use.place == "blocks", use.what))) is not None:
            rows.setdefault((spot[0], use.phase != "forward"), []).append(k)
    for (number, backward), numbers in rows.items():
        stretch = every[number]
        once = plan.microbatches * stretch.times
        events = [
            (home[use.place == "blocks", use.what][1], use, seconds / once)
            for use, seconds in (sent[k] for k in numbers)
        ]
        chain = joined(_chain(base, flow, stretch.nodes, backward, events, recomputed, pricer))
        share = collectives_hidden(chain, plan.overlapped_microbatches, pricer.copies_hidden)
        for k in numbers:
            if not sent[k][0].inside:
                shares[k] = share
    return shares


def _homes(
    flow: Flow, runs: tuple[RepeatedBlock, ...], every: Sequence[Stretch]
) -> dict[tuple[bool, str], tuple[int, int]]:
    """(whether in a loop, what a collective of one copy serves) -> (number of its stretch, the node
    after which it runs forward and before which backward; -1: where the stretch begins)."""
    graph, per_microbatch = flow.graph, tensors_per_microbatch(flow, runs)
    loops = {run.first: run for run in runs}
    result: dict[tuple[bool, str], tuple[int, int]] = {}
    for k, stretch in enumerate(every):
        run = loops.get(stretch.nodes.start)
        entering = (
            [c.enters for c in run.carries]
            if run is not None
            else [n for i in stretch.nodes for n in graph.nodes[i].inputs if n in per_microbatch]
        )
        for i in stretch.nodes:
            result |= {
                (run is not None, graph.labels.get(n, n)): (k, i)
                for n in (graph.nodes[i].id, *graph.nodes[i].outputs)
                if not per_microbatch.isdisjoint(graph.nodes[i].outputs)
            }
        for name in entering:
            result.setdefault((run is not None, graph.labels.get(name, name)), (k, -1))
    return result


def _chain(
    base: GraphFacts,
    flow: Flow,
    nodes: range,
    backward: bool,
    events: Sequence[tuple[int, CollectiveUse, float]],
    recomputed: frozenset[int],
    pricer: Pricer,
) -> Iterator[Piece]:
    """The pieces of one microbatch's pass through a stretch; the backward pass begins with what
    runs a second time."""
    pieces_at: dict[tuple[int, str], list[Piece]] = {}
    for i, use, seconds in events:
        pieces_at.setdefault((i, use.phase), []).append((BOTH if use.inside else LINKS, seconds))
    times = {i: kernel_times(base, i, flow.split(i), pricer) for i in nodes}
    phase = "recompute" if backward else "forward"
    yield from pieces_at.get((-1, phase), ())
    for i in nodes:
        if i in recomputed or not backward:
            yield KERNELS, times[i][0]
        yield from pieces_at.get((i, phase), ())
    for i in reversed(nodes) if backward else ():
        yield from pieces_at.get((i, "backward"), ())
        yield KERNELS, times[i][1]
    yield from pieces_at.get((-1, "backward"), ())
