"""One optimizer step as a Chrome trace (JSON): kernels on one track, collectives on another, in the
order the program runs them.

The price has no overlap inside a step but the hidden share of gradient collectives, so the trace
has none either: forward, backward, gradient reduction, optimizer. Its end is the step time of the
strategy; what the runtime profile hides is left out. Equal microbatches are drawn once, with their
count in the name.

With pipeline stages every stage is a process: per tick its passes by microbatch, bubbles by that
name (where there are very many ticks, equal neighbours as one). What a full tick consists of,
operator by operator, is a process of its own beside them; uneven stages have passes alone
(planner.report.trace_uneven). A process, too, is the memory of a device, as counters (bytes) by
part over the last microbatch and what follows it, from time 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from planner.execution.collective import CollectiveUse
from planner.execution.collectives import collectives as census
from planner.execution.engine import Engine, engine_of
from planner.execution.pipeline import BUBBLE
from planner.pricing.kernels import kernel_times
from planner.pricing.step_time import recomputed_nodes, sent_s
from planner.report.ticks import PASSES, Stretch, stretches, ticks
from planner.report.trace_tracks import KERNELS, LINKS, MICRO, Track, process_events

if TYPE_CHECKING:
    from planner.report.html.bars import Part
    from planner.report.html.derive import Detail
    from planner.whatif.reprice import Priced

MOST_TICKS = 20_000
"""Ticks of all stages up to which each is drawn by itself."""


def trace(p: Priced) -> str:
    """The trace's JSON text; the sum of what is not hidden equals the step time, of every stage
    where there are several.

    Raises PlanError P069 where the price is not made of single operators.
    """
    from planner.report.html.derive import work_out
    from planner.report.trace_uneven import uneven_tracks

    if engine_of(p.plan) is Engine.UNEVEN:
        events = [e for t in uneven_tracks(p) for e in t.events]
    else:
        detail = work_out(p)
        tracks = [_operators(p)] if detail.pipeline is None else [*_stages(detail)]
        events = [*(e for t in tracks for e in t.events), *_memory(detail, len(tracks))]
    lines = ",\n".join(json.dumps(e) for e in events)  # an event a line
    return f'{{\n"traceEvents": [\n{lines}\n],\n"displayTimeUnit": "ms"\n}}\n'


def _memory(d: Detail, process: int) -> Iterator[dict[str, Any]]:
    """Counters of what is held, a process of their own. Of two points of one time, a jump, the last
    counts for a viewer."""
    from planner.report.html.memory import series

    curve = series(d)
    yield from process_events(process, "memory of a device over the last microbatch", process)
    for k, (seconds, total) in enumerate(zip(curve.times_s, curve.total_bytes, strict=True)):
        event = {"ph": "C", "pid": process, "tid": 0, "ts": round(seconds * MICRO, 3)}
        yield {"name": "total", **event, "args": {"bytes": round(total)}}
        yield {
            "name": "held",
            **event,
            "args": {part: round(band[k]) for part, band in curve.bands},
        }


def _operators(p: Priced) -> Track:
    """The step of a plan without a pipeline, operator by operator."""
    graph, micro = p.base.graph, p.plan.microbatches
    uses = _exposed_collectives(p)
    times = [kernel_times(p.base, i, p.flow.split(i), p.pricer) for i in range(len(graph.nodes))]
    recomputed = recomputed_nodes(p.flow, p.runs)
    line = Track(name="a device")
    note = f" x {micro} microbatches" if micro > 1 else ""

    def collectives(phase: str, i: int) -> None:
        for use, exposed_s in uses.get((phase, i), ()):
            facts = {"tensor": use.what, "bytes": use.payload_bytes, "count": use.count}
            name = f"{use.kind} {'+'.join(use.axes)}"
            line.add(LINKS, name, exposed_s, {**facts, "phase": phase})

    def kernel(phase: str, i: int, word: str, seconds: float) -> None:
        node = graph.nodes[i]
        facts = {"node": node.id, "phase": phase}
        line.add(KERNELS, f"{node.op}{word}{note}", seconds * micro, facts)

    for i in range(len(graph.nodes)):
        collectives("forward", i)
        kernel("forward", i, "", times[i][0])
    for i in reversed(range(len(graph.nodes) if p.base.training else 0)):
        collectives("recompute", i)
        if i in recomputed:
            kernel("recompute", i, " recomputed", times[i][0])
        kernel("backward", i, " backward", times[i][1])
        collectives("backward", i)
    for i in range(len(graph.nodes)):
        collectives("gradient", i)
    if p.cost.loop_copy_time_s:  # of all microbatches, where they fall is not known
        phase = "backward" if p.base.training else "forward"
        line.add(KERNELS, "copies of loops", p.cost.loop_copy_time_s, {"phase": phase})
    line.add(KERNELS, "optimizer", p.cost.optimizer_time_s, {"phase": "optimizer"})
    for i in range(len(graph.nodes)):
        collectives("optimizer", i)
    return line


def _exposed_collectives(p: Priced) -> dict[tuple[str, int], list[tuple[CollectiveUse, float]]]:
    """(phase, node) -> collectives that are drawn there, with their seconds that nothing hides. A
    collective is drawn where its tensor is first seen; those of a repeated block stand for all
    repeats."""
    graph = p.base.graph
    first_seen: dict[str, int] = {}
    for i, node in enumerate(graph.nodes):
        for t in (*node.inputs, *node.outputs):
            first_seen.setdefault(graph.labels.get(t, t), i)
        first_seen[node.id] = i
    uses = census(p.flow, p.runs, p.pricer.itemsize)
    drawn: dict[tuple[str, int], list[tuple[CollectiveUse, float]]] = {}
    for use, seconds, hidden in sent_s(p.base, p.flow, p.runs, uses, p.pricer):
        key = (use.phase, first_seen.get(use.what, 0))
        drawn.setdefault(key, []).append((use, seconds - hidden))
    return drawn


def _stages(d: Detail) -> Iterator[Track]:
    """A process per pipeline stage, then one with a full tick of any of them, operator by
    operator."""
    from planner.report.html.bars import ends_of, passes_of, total

    p = d.pipeline
    assert p is not None
    passes = passes_of(d)
    sums = {name: total(parts) for name, parts in passes.items()}
    names = {
        "forward": "forward",
        "epilogue": "head and loss",
        "epilogue_back": "head and loss backward",
        "backward": "backward",
        "weights": "gradients of weights",
    }
    single = p.stages * 2 * p.ticks <= MOST_TICKS
    for stage in range(p.stages):
        line = Track(stage, f"stage {stage}", stage)
        for s in [Stretch(t, t, 1) for t in ticks(p, stage)] if single else stretches(p, stage):
            for (name, m), (_, last) in zip(s.first.passes, s.last.passes, strict=True):
                which = "" if m == BUBBLE else f" {m}" if m == last else f" {m} to {last}"
                chunk = (
                    f" virtual stage {s.first.chunks[name == 'backward']}"
                    if p.virtual_stages > 1 and name in ("forward", "backward")
                    else ""
                )
                words = "bubble" if m == BUBBLE else names[name] + which + chunk
                work = s.count * sum(
                    seconds for kind, seconds in sums[name].items() if kind != "comm"
                )
                line.add(
                    KERNELS,
                    words,
                    work,
                    {"pass": names[name], "microbatch": which.strip() or "none", "ticks": s.count},
                )
                line.add(
                    LINKS,
                    f"collectives of {names[name]}",
                    s.count * sums[name].get("comm", 0.0),
                    {"pass": names[name], "ticks": s.count},
                )
        for part in ends_of(d):
            line.add(LINKS if "comm" in part.shares else KERNELS, part.label, part.time_s, {})
        yield line
    line = Track(p.stages, "inside a full tick, on any stage", p.stages)
    for name in PASSES:
        for part in passes[name]:
            _inside(line, d, part, name)
    yield line


def _inside(line: Track, d: Detail, part: Part, name: str) -> None:
    """Parts of a pass; those of a block are its operators, all repeats together."""
    from planner.report.html.bars import opened

    for piece in opened(d, part, name in ("epilogue_back", "backward")):
        for kind, seconds in piece.shares.items():
            line.add(
                LINKS if kind == "comm" else KERNELS,
                f"{piece.label}{f' x {part.repeats}' if part.repeats > 1 else ''}",
                seconds,
                {"what": piece.note, "kind": kind},
            )
