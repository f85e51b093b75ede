"""The price of a whole plan: as a framework runs it, or else as the engine that
planner.execution.engine names does."""

from __future__ import annotations

from planner.analysis.facts import GraphFacts
from planner.execution import collectives
from planner.execution.collective import CollectiveUse
from planner.execution.engine import Engine, engine_of
from planner.execution.layout_flow import Flow
from planner.execution.loops import RepeatedBlock
from planner.execution.plan import Plan
from planner.pricing import islands, step_time, uneven_step
from planner.pricing.cost import Cost
from planner.pricing.pricer import Pricer
from planner.pricing.step_time import derived


def price_plan(
    base: GraphFacts, plan: Plan, pricer: Pricer
) -> tuple[Cost, Flow, tuple[RepeatedBlock, ...]]:
    """Derive the flow of a plan and add up its price. Raises PlanError P068 where its blocks cannot
    be assigned to pipeline stages."""
    flow, runs = derived(base, plan)
    return price_flow(base, flow, runs, pricer), flow, runs


def price_flow(
    base: GraphFacts,
    flow: Flow,
    runs: tuple[RepeatedBlock, ...],
    pricer: Pricer,
    uses: tuple[CollectiveUse, ...] | None = None,
) -> Cost:
    """Price of a derived flow. uses: its collectives, where they are known."""
    if pricer.runtime.kernels is not None:
        from planner.pricing.frameworks import price as frameworks  # few plans need it

        return frameworks.price(base, flow, runs, pricer)
    if engine_of(flow.plan) is Engine.UNEVEN:
        return uneven_step.price(base, flow, pricer, uses)
    if flow.plan.islands:
        return islands.price(base, flow, runs, pricer)
    return step_time.price(base, flow, runs, pricer, uses)


def seconds_of(base: GraphFacts, plan: Plan, pricer: Pricer) -> float:
    """Seconds of a step of a plan, as `price_plan` has them, for who asks for nothing else."""
    flow, runs = derived(base, plan)
    if not _even(plan, pricer):
        return price_flow(base, flow, runs, pricer).step_time_s
    uses = collectives.collectives(flow, runs, pricer.itemsize)
    return step_time.parts_of(base, flow, runs, uses, pricer).step_s


def price_resent(
    base: GraphFacts,
    flow: Flow,
    runs: tuple[RepeatedBlock, ...],
    pricer: Pricer,
    uses: tuple[CollectiveUse, ...],
    cost: Cost,
) -> Cost:
    """Price of a flow from that of the same one whose collectives travel together up to another
    size: nothing but their times depends on it."""
    if not _even(flow.plan, pricer):
        return price_flow(base, flow, runs, pricer)
    return cost.with_communication(step_time.communication(base, flow, runs, uses, pricer))


def _even(plan: Plan, pricer: Pricer) -> bool:
    """Whether a plan is priced by planner.pricing.step_time."""
    framework = pricer.runtime.kernels is not None
    return not framework and engine_of(plan) is not Engine.UNEVEN and not plan.islands
