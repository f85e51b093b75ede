"""The size of gradient buckets: chosen for a plan once it is priced, and what a search prices by
while it is open."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from costmodels.runtimes import Runtime
from planner.execution import collectives
from planner.execution.plan import Plan
from planner.pricing.cost import Cost

if TYPE_CHECKING:
    from planner.analysis.facts import GraphFacts
    from planner.pricing.pricer import Pricer
from planner.execution.techniques import AUTO
from planner.pricing.bucketing import NOTABLE, OPEN, SIZES, TIE, _joined, launched, seconds


def runtime_of_buckets(runtime: Runtime, bucket: int | str) -> Runtime:
    """The profile that a search with a pinned bucket prices by: that of its size (bytes), or of the
    largest that AUTO tries, so that what is proven holds for all."""
    if not bucket or bucket == OPEN:
        return runtime
    return replace(runtime, bucket_bytes=float(SIZES[-1] if bucket == AUTO else bucket))


def price_with_buckets(
    base: GraphFacts, plan: Plan, pricer: Pricer, bucket: int | str
) -> tuple[Plan, Cost]:
    """The plan with buckets of the size asked for, and its price. Of AUTO the smallest size that
    ties with the best; of OPEN the same where it is notably faster than the compiler's own. Raises
    PlanError P068 where its blocks cannot be assigned to pipeline stages.
    """
    from planner.pricing.plan_price import price_flow, price_plan, price_resent
    from planner.pricing.step_time import derived

    if isinstance(bucket, int):
        sized = replace(plan, bucket_bytes=bucket)
        return sized, price_plan(base, sized, pricer)[0]
    flow, runs = derived(base, plan)
    uses = collectives.collectives(flow, runs, pricer.itemsize)
    cost = price_flow(base, flow, runs, pricer, uses)
    if bucket == OPEN and (
        plan.overlapped_microbatches > 1 or cost.launch_time_s <= NOTABLE * cost.step_time_s
    ):  # copies ask for launches of their own size (planner.pricing.microbatch_overlap)
        return plan, cost
    few = _joined(uses)
    times = {
        size: sum(
            s - hidden
            for use, s, hidden in seconds(few, pricer, launched(few, size))
            if use.bucketed
        )
        for size in SIZES
    }
    least = min(times.values())
    sized = replace(
        plan, bucket_bytes=next(size for size in SIZES if times[size] <= least * (1 + TIE))
    )
    best = price_resent(base, replace(flow, plan=sized), runs, pricer, uses, cost)
    return (
        (plan, cost)
        if bucket == OPEN and best.step_time_s >= cost.step_time_s * (1 - NOTABLE)
        else (sized, best)
    )
