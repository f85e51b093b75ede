"""One optimizer step of one device as a Chrome trace (JSON): kernels on one track, collectives on another, in the order the program runs them.

The price has no overlap inside a step but the hidden share of gradient collectives, so the trace has none either: forward, backward, gradient
reduction, optimizer. Its end is the step time of the strategy; what the runtime profile hides is left out.
Equal microbatches are drawn once, with their count in the name.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from planner import account
from planner.evaluate import made_again
from planner.kernels import kernel_times

if TYPE_CHECKING:
    from planner.reprice import Priced

KERNELS, LINKS = 0, 1
MICRO = 1e6  # trace times are microseconds


class _Track:
    """Events of one step; `now` is where the next one starts, in seconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now = 0.0

    def add(self, track: int, name: str, seconds: float, what: dict[str, Any]) -> None:
        if seconds > 0:
            span = {"ts": round(self.now * MICRO, 3), "dur": round(seconds * MICRO, 3)}
            self.events.append({"name": name, "ph": "X", "pid": 0, "tid": track, **span, "args": what})
            self.now += seconds


def trace(p: Priced) -> str:
    """The trace's JSON text; the sum of what is not hidden equals the step time."""
    graph, micro = p.base.graph, p.plan.microbatches
    uses = account.collectives(p.flow, p.runs, p.pricer.itemsize)
    made: dict[str, int] = {}
    for i, node in enumerate(graph.nodes):
        for t in (*node.inputs, *node.outputs):
            made.setdefault(graph.labels.get(t, t), i)
        made[node.id] = i
    # A collective is drawn where its tensor is first seen; those of a repeated block stand for all repeats.
    at: dict[tuple[str, int], list[account.Use]] = {}
    for use in uses:
        at.setdefault((use.phase, made.get(use.what, 0)), []).append(use)
    times = [kernel_times(p.base, i, p.flow.split(i), p.pricer) for i in range(len(graph.nodes))]
    again = made_again(p.flow, p.runs)
    line = _Track()
    note = f" x {micro} microbatches" if micro > 1 else ""

    def collectives(phase: str, i: int, hidden: bool = False) -> None:
        for use in at.get((phase, i), ()):
            seconds = p.pricer.use_s(use)
            shown = seconds * (1 - p.pricer.runtime.overlap) if hidden else seconds
            line.add(LINKS, f"{use.kind} {'+'.join(use.axes)}", shown, {"tensor": use.what, "bytes": use.payload_bytes, "count": use.count, "phase": phase})

    for i, node in enumerate(graph.nodes):
        collectives("forward", i)
        line.add(KERNELS, f"{node.op}{note}", times[i][0] * micro, {"node": node.id, "phase": "forward"})
    for i in reversed(range(len(graph.nodes) if p.base.training else 0)):
        node = graph.nodes[i]
        collectives("recompute", i)
        if i in again:
            line.add(KERNELS, f"{node.op} again{note}", times[i][0] * micro, {"node": node.id, "phase": "recompute"})
        line.add(KERNELS, f"{node.op} backward{note}", times[i][1] * micro, {"node": node.id, "phase": "backward"})
        collectives("backward", i)
    for i in range(len(graph.nodes)):
        collectives("gradient", i, hidden=True)
    line.add(KERNELS, "optimizer", p.cost.optimizer_time_s, {"phase": "optimizer"})
    for i in range(len(graph.nodes)):
        collectives("optimizer", i)
    names = [{"name": "thread_name", "ph": "M", "pid": 0, "tid": t, "args": {"name": n}} for t, n in ((KERNELS, "kernels"), (LINKS, "collectives"))]
    return json.dumps({"traceEvents": [*names, *line.events], "displayTimeUnit": "ms"}, indent=0) + "\n"
