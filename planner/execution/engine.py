"""Which engine runs the repeated blocks of a plan: the one choice that emitted programs, the census
of collectives, prices and reports ask for.

A price may be of a framework's program instead (planner.pricing.plan_price): that is no engine of
ours.
"""

from __future__ import annotations

from enum import Enum

from planner.execution.plan import Plan


class Engine(Enum):
    """How a program runs the model: all of it on every device, as equal pipeline stages
    (planner.execution.pipeline), or as uneven ones (planner.execution.uneven_pipeline)."""

    WHOLE = "no stages"
    EVEN = "equal stages"
    UNEVEN = "uneven stages"


def engine_of(plan: Plan) -> Engine:
    """The engine that runs a plan."""
    if plan.stage_cuts:
        return Engine.UNEVEN
    return Engine.EVEN if plan.stages > 1 else Engine.WHOLE
