"""The one place that adds up a step of an emitted program, whatever its pipeline stages are:

    step = kernels + bubble + communication that shows + optimizer + other parts

Who calls `add_up` says how long each of these takes: planner.pricing.step_time for equal stages or
none, planner.pricing.uneven_step for uneven ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from costmodels.capacity import Breakdown
from planner.analysis.facts import GraphFacts
from planner.execution import collectives
from planner.execution.collective import CollectiveUse, traffic
from planner.execution.layout_flow import Flow
from planner.pricing.cost import Communication, Cost, StepParts


def communication_of(rows: Iterable[tuple[CollectiveUse, float, float]]) -> Communication:
    """The communication of a step, of its collectives with their seconds, and those of them that
    hide."""
    exposed = hidden = 0.0
    by_axes: dict[tuple[str, str], float] = {}
    for use, seconds, under in rows:
        exposed += seconds - under
        hidden += under
        label = (use.kind, "+".join(use.axes))
        by_axes[label] = by_axes.get(label, 0.0) + seconds - under
    return Communication(exposed, hidden, by_axes)


def add_up(
    base: GraphFacts,
    flow: Flow,
    uses: Iterable[CollectiveUse],
    *,
    seconds: StepParts,
    memory: Breakdown,
) -> Cost:
    """The price of a derived flow from what its parts take. uses: all its collectives."""
    flops = collectives.dot_flops(flow, as_compiled=False)
    cost = Cost(
        step_time_s=0.0,
        compute_time_s=seconds.kernels.compute_s,
        recompute_time_s=seconds.kernels.recompute_s,
        bubble_time_s=seconds.kernels.bubble_s,
        communication_time_s=0.0,
        exposed_communication_time_s=0.0,
        optimizer_time_s=seconds.optimizer_s,
        flops_per_device=flops,
        memory=memory,
        traffic=traffic(uses, flow.plan.order, dict(flow.plan.mesh)),
        distinct_work=_distinct_work(base, flow, flops),
        exposed_by_axes={},
    )
    others: dict[str, Any] = dict(seconds.others)
    return replace(cost, **others).with_communication(seconds.communication)


def _distinct_work(base: GraphFacts, flow: Flow, flops: int) -> float:
    """Share of the devices' arithmetic that is neither duplicated nor padding."""
    plan = flow.plan
    if not flops:
        return 1.0
    once = base.model_flops * (plan.microbatches if base.training else 1)
    share = float(once / (flops * max(plan.devices, 1)))
    if plan.overlapped_microbatches > 1:
        share = min(1.0, share)  # overlapped microbatches share products of weights alone
    assert share <= 1 + 1e-9, f"{share} of the devices' arithmetic is useful"
    return share
