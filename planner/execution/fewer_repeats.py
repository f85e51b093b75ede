"""A graph with fewer repeats of its repeated blocks, and a plan on it: what is alike need not be
looked at over and over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from planner.execution.plan import Plan
from planner.graph.ir import Graph
from planner.workload.loss import prune

Run = tuple[int, int, int]
"""First node, nodes of a repeat, repeats (planner.graph.repeats)."""


def fewer_repeats(graph: Graph, runs: Iterable[Run], repeats_left: int) -> Graph:
    """The graph with at most so many repeats of these runs: what read the last repeat reads the
    last one left."""
    dropped: set[int] = set()
    renamed: dict[str, str] = {}
    last: set[str] = set()
    for first, period, repeats in runs:
        end = first + period * repeats
        for i in range(first + period * repeats_left, end):
            twin = graph.nodes[first + period * (repeats_left - 1) + (i - first) % period]
            dropped.add(i)
            renamed.update(zip(graph.nodes[i].outputs, twin.outputs, strict=True))
            if i >= end - period:
                last.update(graph.nodes[i].outputs)
    nodes = tuple(
        replace(n, inputs=tuple(renamed.get(x, x) for x in n.inputs))
        for i, n in enumerate(graph.nodes)
        if i not in dropped
    )
    # What a dropped repeat gave as an output of its own is gone, except what the last one gave, now
    # the last one left's.
    outputs = tuple(
        dict.fromkeys(renamed.get(o, o) for o in graph.outputs if o not in renamed or o in last)
    )
    outputs = outputs or tuple(renamed.get(o, o) for o in graph.outputs[:1])
    return prune(replace(graph, nodes=nodes, outputs=outputs))


def runs_left(runs: Sequence[Run], run: Run, kept: int) -> tuple[Run, ...]:
    """The runs of a graph of which so many repeats of one are kept."""
    start, length, all_repeats = run
    gone = length * (all_repeats - kept)
    return tuple(
        (first - gone * (first > start), period, kept if first == start else repeats)
        for first, period, repeats in runs
    )


def follow(plan: Plan, graph: Graph, small: Graph) -> Plan:
    """The plan of a graph on one with fewer repeats: the same splits, and the repeated blocks that
    are left."""
    place = {node.id: i for i, node in enumerate(small.nodes)}
    runs = []
    for first, period, repeats in plan.repeated_blocks:
        ids = [node.id for node in graph.nodes[first : first + period * repeats]]
        start = place.get(ids[0])
        kept_repeats = 0
        while (
            start is not None
            and kept_repeats < repeats
            and all(
                place.get(ids[k]) == start + k
                for k in range(kept_repeats * period, (kept_repeats + 1) * period)
            )
        ):
            kept_repeats += 1
        if start is not None and kept_repeats:
            runs.append((start, period, kept_repeats))
    return replace(
        plan,
        splits={k: s for k, s in plan.splits.items() if k in place},
        repeated_blocks=tuple(runs),
    )
