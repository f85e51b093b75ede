"""The trace of unequal pipeline stages (planner.execution.uneven_pipeline): a process per stage, in
every tick its passes, what it hands on, and what it waits for.

A tick is as long as the longest pass of the chunks that run in it, so a stage whose own is shorter
has a gap; the last chunk has no forward pass of its own, and but under gpipe waits at the end.
Where stages have one place or two, a tick is of two microbatches; a stage of two places runs them
at once. Passes of no microbatch are drawn as bubbles. Of what is inside a pass its kernels and its
collectives are told apart, not its operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from planner.execution import uneven_collectives
from planner.execution.pipeline import BUBBLE
from planner.pricing.uneven_step import Pass, longest, passes_of_chunks, shown_s
from planner.report.trace_tracks import KERNELS, LINKS, Track

if TYPE_CHECKING:
    from planner.whatif.reprice import Priced


def unequal_tracks(p: Priced) -> Iterator[Track]:
    """Every stage's track; each is as long as the step."""
    flow, pricer, passing, found = (
        p.flow,
        p.pricer,
        uneven_collectives.passing(p.flow),
        uneven_collectives.found(p.flow),
    )
    stages = passing.stages
    ahead, back = passes_of_chunks(p.base, flow, pricer)
    outside = [*uneven_collectives.outside(flow, pricer.itemsize)]
    handing = {
        way: [u for u in outside if u.kind == "collective-permute" and u.phase == way]
        for way in ("forward", "backward")
    }
    ending = [u for u in outside if u.kind != "collective-permute" or u.phase == "gradient"]
    for stage in range(stages):
        line = Track(stage, f"stage {stage}", stage)

        def run(
            name: str, passes: Sequence[Pass], tick: int, line: Track = line, stage: int = stage
        ) -> None:
            """A pass, and the wait for the longest one."""
            forward = name == "forward"
            chunks = uneven_collectives.chunks_at(passing, tick, forward=forward)
            microbatch, turn = (passing.forward if forward else passing.backward)(stage, tick)
            k, whole_s = turn * stages + stage, longest(passes, chunks).seconds
            own = passes[k] if k in chunks and k < len(passes) else None
            if own is not None:
                chunk = f" chunk {turn}" if p.plan.virtual > 1 else ""
                number = (
                    "none"
                    if microbatch == BUBBLE
                    else " and ".join(
                        str(microbatch * found.together + u) for u in range(found.together)
                    )
                )
                which = {"pass": name, "microbatch": number}
                line.add(
                    KERNELS,
                    "bubble" if microbatch == BUBBLE else f"{name} {number}{chunk}",
                    own.kernels_s,
                    which,
                )
                line.add(LINKS, f"collectives of {name}", own.seconds - own.kernels_s, which)
            line.now += whole_s - (own.seconds if own is not None else 0.0)

        def hand(way: str, tick: int, line: Track = line) -> None:
            for use in handing[way]:
                if tick * found.together < use.count:
                    line.add(
                        LINKS,
                        f"what stages hand on {way}",
                        shown_s(use, flow, pricer) * found.together / use.count,
                        {"bytes": use.payload_bytes * found.together},
                    )

        for tick in range(passing.first_backward + passing.ticks):
            if tick < passing.ticks:
                run("forward", ahead, tick)
                hand("forward", tick)
            if tick >= passing.first_backward:
                run("backward", back, tick)
                hand("backward", tick - passing.first_backward)
        for use in ending:
            line.add(
                LINKS,
                f"{use.kind} {'+'.join(use.axes)}",
                shown_s(use, flow, pricer),
                {"tensor": use.what, "bytes": use.payload_bytes, "phase": use.phase},
            )
        line.add(KERNELS, "optimizer", p.cost.optimizer_time_s, {"phase": "optimizer"})
        yield line
