"""How often the stages of a framework's pipeline run what a flow says. The flow is of a program in
lock-step ticks, whose stages compute and send in bubbles too; a framework's wait there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from costmodels.frameworks.step_time import AFTER, BEFORE, BLOCKS
from planner.execution.collective import CollectiveUse
from planner.execution.pipeline import Pipeline
from planner.sharding.layout import STAGE

ONCE = ("gradient", "optimizer")
"""Phases of collectives that no tick runs."""


def without_bubbles(
    uses: Iterable[CollectiveUse], pipeline: Pipeline | None
) -> tuple[CollectiveUse, ...]:
    """The collectives of a flow as often as the device of a stage runs them for microbatches."""
    if pipeline is None:
        return tuple(uses)
    micro, ticks = pipeline.microbatches, pipeline.ticks
    chunks = micro * pipeline.virtual_stages
    passes = {
        BEFORE: (micro, ticks),
        BLOCKS: (chunks, ticks),
        AFTER: (micro, pipeline.epilogue_passes),
    }

    def often(use: CollectiveUse) -> int:
        if use.phase in ONCE:
            return use.count
        wanted, run = passes.get(use.place, (1, 1))
        if use.kind == "collective-permute" and STAGE in use.axes:
            # The last tick may hand on nothing.
            wanted, run = chunks, ticks if use.count % ticks == 0 else ticks - 1
        # Of what the blocks do not need anew in every tick some runs less often.
        return use.count if use.count % run else use.count // run * wanted

    return tuple(replace(use, count=often(use)) for use in uses)
