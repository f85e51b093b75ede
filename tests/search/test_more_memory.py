"""Relations between a search and one with less memory."""

from __future__ import annotations

from typing import Any

import planner
from planner.search.request import TIE


def planned(**options: Any) -> Any:
    """Four H100 train two layers of Mixtral 8x7B: a loop's stacks of gradients take more there than
    what it saves."""
    return planner.plan(
        "zoo:mixtral-8x7b,layers=2,seq=1024",
        devices=4,
        batch=16,
        baselines=False,
        remedies=False,
        **options,
    )


def test_a_limit_that_the_plan_fits_in_changes_nothing() -> None:
    free = planned()
    assert free.techniques["blocks"] == "written-out"
    limit = int(free.cost.memory_per_device_bytes * 1.05)
    within = planned(memory_limit_bytes=limit)
    assert within.cost.step_time_s <= free.cost.step_time_s * (1 + TIE)
    assert within.solver["bound_s"] <= free.cost.step_time_s
