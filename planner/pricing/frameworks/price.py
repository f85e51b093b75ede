"""The price of a plan as a training framework runs it (runtime profiles `megatron` and `fsdp`):
used to price published runs, never what is emitted."""

from __future__ import annotations

from dataclasses import dataclass, replace

from costmodels.frameworks.peak_memory import FrameworkMemory, peak
from costmodels.frameworks.step_time import StepSeconds, Work, orthogonalising_s, step_time
from planner.analysis.facts import GraphFacts
from planner.execution import collectives
from planner.execution.collective import traffic
from planner.execution.layout_flow import Flow
from planner.execution.loops import RepeatedBlock
from planner.pricing.cost import Cost
from planner.pricing.frameworks.memory import memory_of
from planner.pricing.frameworks.stage_passes import without_bubbles
from planner.pricing.frameworks.stages import assign_stages
from planner.pricing.frameworks.work import merged_uses, work_of
from planner.pricing.pricer import Pricer


@dataclass(frozen=True)
class FrameworkPrice:
    """The price of a plan, and what it was found from: prices under other rates need no more."""

    cost: Cost
    work: Work
    memory: FrameworkMemory


def price(base: GraphFacts, flow: Flow, runs: tuple[RepeatedBlock, ...], pricer: Pricer) -> Cost:
    """Price of a derived flow as the framework runs it."""
    return price_with_work(base, flow, runs, pricer).cost


def step_seconds(work: Work, pricer: Pricer) -> StepSeconds:
    """Seconds of a step under the rates of a pricer."""
    return step_time(
        work, pricer.topology.device, pricer.runtime, pricer.rates, pricer.collective_s
    )


def price_with_work(
    base: GraphFacts, flow: Flow, runs: tuple[RepeatedBlock, ...], pricer: Pricer
) -> FrameworkPrice:
    """As `price`, with what a step does and holds."""
    plan, stages = flow.plan, assign_stages(base, flow, pricer.runtime.balance)
    if plan.virtual_stages > 1:  # of a plan that says it, else the runtime does
        pricer = replace(pricer, runtime=replace(pricer.runtime, interleave=plan.virtual_stages))
    uses = merged_uses(flow, runs, pricer)
    work = work_of(base, flow, runs, uses, stages, pricer)
    memory, step = memory_of(base, flow, stages, pricer), step_seconds(work, pricer)
    flops = collectives.dot_flops_of_own_parts(flow)
    distinct = (
        float(base.model_flops * work.microbatches / (flops * max(plan.devices, 1)))
        if flops
        else 1.0
    )
    cost = Cost(
        step_time_s=step.total,
        compute_time_s=step.kernels,
        recompute_time_s=step.recomputed,
        bubble_time_s=step.bubble,
        communication_time_s=step.exposed + step.hidden,
        exposed_communication_time_s=step.exposed,
        optimizer_time_s=step.optimizer,
        newton_schulz_time_s=orthogonalising_s(
            work.orthogonalising_flops, pricer.topology.device, pricer.rates
        ),
        flops_per_device=flops,
        memory=peak(memory, pricer.runtime),
        traffic=traffic(without_bubbles(uses, stages.pipeline), plan.order, dict(plan.mesh)),
        distinct_work=distinct,
        exposed_by_axes=step.by_axes,
    )
    return FrameworkPrice(cost, work, memory)
