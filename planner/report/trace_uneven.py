"""The trace of uneven pipeline stages (planner.execution.uneven_pipeline): a process per stage, in
every tick its passes, what it hands on, and what it waits for.

A tick is as long as the longest pass of the virtual stages that run in it, so a stage whose own
pass is shorter has a gap; the last virtual stage has no forward pass of its own, and waits at the
end except under gpipe. Where some stages have twice as many devices as others, a tick is of two
microbatches, and a stage of twice the devices runs them at once. Passes without a microbatch are
drawn as bubbles. Inside a pass kernels and collectives are drawn apart, single operators are not.
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


class _UnevenStep:
    """What the tracks of all stages are drawn from."""

    def __init__(self, p: Priced) -> None:
        self.p, self.flow, self.pricer = p, p.flow, p.pricer
        self.schedule = uneven_collectives.uneven_schedule(p.flow)
        self.together = uneven_collectives.uneven_stages(p.flow).microbatches_per_tick
        self.passes: dict[str, Sequence[Pass]] = dict(
            zip(("forward", "backward"), passes_of_chunks(p.base, p.flow, p.pricer), strict=True)
        )
        outside = [*uneven_collectives.collectives_between_stages(p.flow, p.pricer.itemsize)]
        self.handed_on = {
            way: [u for u in outside if u.kind == "collective-permute" and u.phase == way]
            for way in ("forward", "backward")
        }
        self.ends = [u for u in outside if u.kind != "collective-permute" or u.phase == "gradient"]

    def track(self, stage: int) -> Track:
        """One stage's events, as long as the step."""
        line, schedule = Track(stage, f"stage {stage}", stage), self.schedule
        for tick in range(schedule.first_backward + schedule.ticks):
            if tick < schedule.ticks:
                self._add_pass(line, stage, "forward", tick)
                self._hand_on(line, "forward", tick)
            if tick >= schedule.first_backward:
                self._add_pass(line, stage, "backward", tick)
                self._hand_on(line, "backward", tick - schedule.first_backward)
        for use in self.ends:
            line.add(
                LINKS,
                f"{use.kind} {'+'.join(use.axes)}",
                shown_s(use, self.flow, self.pricer),
                {"tensor": use.what, "bytes": use.payload_bytes, "phase": use.phase},
            )
        line.add(KERNELS, "optimizer", self.p.cost.optimizer_time_s, {"phase": "optimizer"})
        return line

    def _add_pass(self, line: Track, stage: int, name: str, tick: int) -> None:
        """A stage's pass, and the wait for the longest one of the tick."""
        forward, passes = name == "forward", self.passes[name]
        running = uneven_collectives.chunks_at(self.schedule, tick, forward=forward)
        turn_at = self.schedule.forward if forward else self.schedule.backward
        microbatch, turn = turn_at(stage, tick)
        k, tick_s = turn * self.schedule.stages + stage, longest(passes, running).seconds
        own_pass = passes[k] if k in running and k < len(passes) else None
        if own_pass is not None:
            chunk = f" virtual stage {turn}" if self.p.plan.virtual_stages > 1 else ""
            first = microbatch * self.together
            number = (
                "none"
                if microbatch == BUBBLE
                else " and ".join(str(first + u) for u in range(self.together))
            )
            facts = {"pass": name, "microbatch": number}
            title = "bubble" if microbatch == BUBBLE else f"{name} {number}{chunk}"
            line.add(KERNELS, title, own_pass.kernels_s, facts)
            line.add(LINKS, f"collectives of {name}", own_pass.seconds - own_pass.kernels_s, facts)
        line.now += tick_s - (own_pass.seconds if own_pass is not None else 0.0)

    def _hand_on(self, line: Track, way: str, tick: int) -> None:
        """What stages send to their neighbours after a pass."""
        for use in self.handed_on[way]:
            if tick * self.together < use.count:
                line.add(
                    LINKS,
                    f"what stages hand on {way}",
                    shown_s(use, self.flow, self.pricer) * self.together / use.count,
                    {"bytes": use.payload_bytes * self.together},
                )


def uneven_tracks(p: Priced) -> Iterator[Track]:
    """Every stage's track; each is as long as the step."""
    step = _UnevenStep(p)
    return (step.track(stage) for stage in range(step.schedule.stages))
