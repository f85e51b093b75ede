"""The price of a plan as a training framework runs it (runtime profiles `megatron` and `fsdp`):
used to price published runs, never what is emitted.

The flow is the emitted program's, so that collectives and their bytes are those of
planner.execution.collectives; how they and the kernels follow one another is the framework's
(planner.pricing.frameworks.step_time), and so is what a stage holds
(planner.pricing.frameworks.peak_memory). Blocks are dealt out over stages as evenly as whole blocks
go, the longer stages first.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from planner.analysis.facts import GraphFacts
from planner.execution import collectives
from planner.execution.collective import CollectiveUse, traffic
from planner.execution.layout_flow import Flow, cut_layout
from planner.execution.loops import RepeatedBlock, pipelined_block
from planner.pricing.cost import Cost
from planner.pricing.frameworks.kernels import FREE, Need, need_of
from planner.pricing.frameworks.stages import deal_of, stage_sums
from planner.pricing.frameworks.step_time import BLOCKS, Deal, Work, step_time
from planner.pricing.kernels import local_bytes
from planner.pricing.pricer import Pricer
from planner.sharding.layout import STAGE, Axes, local_shape
from planner.sharding.rule import Split

if TYPE_CHECKING:
    from planner.pricing.frameworks.peak_memory import FrameworkMemory


def price(base: GraphFacts, flow: Flow, runs: tuple[RepeatedBlock, ...], pricer: Pricer) -> Cost:
    """Price of a derived flow as the framework runs it."""
    from planner.pricing.frameworks.peak_memory import held_of

    work = work_of(base, flow, runs, pricer)
    return price_work(base, flow, work, held_of(base, flow, work.deal, pricer), pricer)


def price_work(
    base: GraphFacts, flow: Flow, work: Work, held: FrameworkMemory, pricer: Pricer
) -> Cost:
    """Price of a flow whose work and what it holds are read already."""
    from planner.pricing.frameworks.peak_memory import peak

    plan, step = flow.plan, step_time(work, pricer)
    flops = collectives.dot_flops(flow, again=False)
    distinct = (
        float(base.model_flops * work.microbatches / (flops * max(plan.devices, 1)))
        if flops
        else 1.0
    )
    return Cost(
        step.total,
        step.kernels,
        step.again,
        step.bubble,
        step.exposed + step.hidden,
        step.exposed,
        step.optimizer,
        flops,
        peak(held, pricer.runtime),
        traffic(work.uses, plan.order, dict(plan.mesh)),
        distinct,
        step.by_axes,
    )


def work_of(base: GraphFacts, flow: Flow, runs: tuple[RepeatedBlock, ...], pricer: Pricer) -> Work:
    """Read a flow. pricer: for the bytes of types and how stages are dealt blocks; no rate of it
    matters."""
    deal, counts = (
        deal_of(base, flow, pricer.runtime.balance),
        dict[tuple[int, Split, str], float](),
    )
    for i, node in enumerate(base.graph.nodes):
        if node.op not in FREE:
            place = deal.place(i)
            key = (base.shared[i], flow.split(i), place)
            counts[key] = counts.get(key, 0.0) + (1 / deal.repeats if place == BLOCKS else 1.0)
    needs: dict[tuple[str, Need], float] = {}
    for (i, split, place), n in counts.items():
        need = need_of(base, i, split, *local_bytes(base, i, split, pricer), pricer)
        needs[place, need] = needs.get((place, need), 0.0) + n
    elements = 0.0
    if base.training:
        graph, mesh = flow.graph, dict(flow.plan.mesh)
        local = {
            n: (
                float(prod(local_shape(graph.tensors[n].shape, cut_layout(w), mesh)))
                if n in flow.grad
                else 0.0
            )
            for n, w in flow.weights.items()
        }
        elements = max(stage_sums(base, flow, deal, local))
    kernels = tuple((place, n, need) for (place, need), n in needs.items())
    uses: dict[
        CollectiveUse, int
    ] = {}  # whom they serve does not matter: those of all repeats are one
    for use in collectives.collectives(flow, runs, pricer.itemsize):
        alike = replace(use, what="", count=0)
        uses[alike] = uses.get(alike, 0) + use.count
    return Work(
        deal,
        kernels,
        tuple(replace(use, count=n) for use, n in uses.items()),
        _handed(flow, runs, deal, pricer),
        elements,
        flow.plan.microbatches if base.training else 1,
        flow.plan.recompute,
    )


def _handed(
    flow: Flow, runs: tuple[RepeatedBlock, ...], deal: Deal, pricer: Pricer
) -> tuple[tuple[float, Axes], ...]:
    """Work.handed: what blocks carry from one to the next."""
    if deal.pipeline is None:
        return ()
    mesh, found = dict(flow.plan.mesh), []
    for carry in pipelined_block(flow, runs, deal.pipeline).carries:
        tensor = flow.graph.tensors[carry.enters]
        size = prod(local_shape(tensor.shape, carry.layout, mesh)) * pricer.itemsize(tensor.dtype)
        found.append(
            (
                size,
                tuple(
                    a
                    for a, n in mesh.items()
                    if n > 1
                    and a != STAGE
                    and not any(a in axes for axes in (*carry.layout.dims, carry.layout.partial))
                ),
            )
        )
    return tuple(found)
