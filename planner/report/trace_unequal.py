"""The trace of unequal pipeline stages (planner.unequal): a process per stage, in every tick its passes, what it hands on, and what it waits for.

A tick is as long as the longest stage's pass, so a stage whose own is shorter has a gap; the last stage has no forward pass of its own, and under 1f1b waits at the
end. Passes of no microbatch are drawn as bubbles. Of what is inside a pass its kernels and its collectives are told apart, not its operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from planner import unequal_account
from planner.report.trace import KERNELS, LINKS, Track
from planner.unequal_cost import Pass, longest, passes_of_stages, shown_s

if TYPE_CHECKING:
    from planner.reprice import Priced


def unequal_tracks(p: Priced) -> Iterator[Track]:
    """Every stage's track; each is as long as the step."""
    flow, pricer, micro, stages = p.flow, p.pricer, p.plan.microbatches, p.plan.stages
    ahead, back = passes_of_stages(p.base, flow, pricer)
    n, waits = unequal_account.ticks(flow), unequal_account.last_waits(flow)
    first = stages - 1 if waits else n  # tick of the first backward pass: under gpipe after all forward ones
    outside = [*unequal_account.outside(flow, pricer.itemsize)]
    handing = {way: [u for u in outside if u.kind == "collective-permute" and u.phase == way] for way in ("forward", "backward")}
    ending = [u for u in outside if u.kind != "collective-permute"]
    for stage in range(stages):
        line = Track(stage, f"stage {stage}", stage)

        def run(name: str, own: Pass | None, whole_s: float, microbatch: int, line: Track = line) -> None:
            """A pass, and the wait for the longest one."""
            if own is not None:
                real = 0 <= microbatch < micro
                which = {"pass": name, "microbatch": str(microbatch) if real else "none"}
                line.add(KERNELS, f"{name} {microbatch}" if real else "bubble", own.kernels_s, which)
                line.add(LINKS, f"collectives of {name}", own.seconds - own.kernels_s, which)
            line.now += whole_s - (own.seconds if own is not None else 0.0)

        def hand(way: str, tick: int, line: Track = line) -> None:
            for use in handing[way]:
                if tick < use.count:
                    line.add(LINKS, f"what stages hand on {way}", shown_s(use, flow, pricer) / use.count, {"bytes": use.payload_bytes})

        last = stage + 1 == stages
        for tick in range(first + n):
            if tick < n:
                run("forward", None if last else ahead[stage], longest(ahead).seconds, tick - stage)
                hand("forward", tick)
            if tick >= first:
                ends = tick - first >= n - waits
                run("backward", None if last and ends else back[stage], longest(back[:-1] if ends else back).seconds, tick - first - (stages - 1) + stage)
                hand("backward", tick - first)
        for use in ending:
            line.add(LINKS, f"{use.kind} {'+'.join(use.axes)}", shown_s(use, flow, pricer), {"tensor": use.what, "bytes": use.payload_bytes, "phase": use.phase})
        line.add(KERNELS, "optimizer", p.cost.optimizer_time_s, {"phase": "optimizer"})
        yield line
