"""The price of a plan as a training framework runs it (runtime profiles `megatron` and `fsdp`):
used to price published runs, never what is emitted.

The flow is the emitted program's, so that collectives and their bytes are those of
planner.execution.collectives; how they and the kernels follow one another is the framework's
(planner.pricing.frameworks.step_time), and so is what a stage holds
(planner.pricing.frameworks.peak_memory). Blocks are dealt out over stages as evenly as whole blocks
go, the longer stages first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from planner.analysis.facts import GraphFacts
from planner.execution import collectives as account
from planner.execution.layout_flow import Flow, cut_layout
from planner.execution.loops import RepeatedBlock, dealt_run
from planner.execution.pipeline import Pipeline, pipeline_of
from planner.pricing.frameworks.step_time import (
    AFTER,
    BEFORE,
    BLOCKS,
    FREE,
    Deal,
    Need,
    Work,
    need_of,
    step_time,
)
from planner.pricing.kernels import local_bytes
from planner.pricing.pricer import Pricer
from planner.pricing.step_time import Cost
from planner.sharding.layout import STAGE, Axes, local_shape
from planner.sharding.rule import Split

if TYPE_CHECKING:
    from planner.pricing.frameworks.peak_memory import FrameworkMemory


def deal_of(base: GraphFacts, flow: Flow, balance: bool) -> Deal:
    """Of a plan: the pipeline's blocks, else those of its longest run, all in one stage. balance:
    stages have even numbers of parameters, not of blocks."""
    pipeline = pipeline_of(flow.graph, flow.plan)
    if pipeline is None:
        first, period, repeats = max(
            base.runs, key=lambda run: run[1] * run[2], default=(len(base.graph.nodes), 0, 1)
        )
        return Deal(first, first + period * repeats, repeats, (repeats,), None)
    dealt = balanced(base, pipeline) if balance else ()
    less, more = divmod(pipeline.repeats, pipeline.stages)
    return Deal(
        pipeline.first,
        pipeline.end,
        pipeline.repeats,
        dealt or tuple(less + (s < more) for s in range(pipeline.stages)),
        pipeline,
    )


def balanced(base: GraphFacts, pipeline: Pipeline) -> tuple[int, ...]:
    """Blocks of each stage such that the most parameters of a stage are the fewest, what is outside
    the blocks included; () where a stage would have none."""
    graph, period = base.graph, (pipeline.end - pipeline.first) // pipeline.repeats
    sizes = {BEFORE: 0, BLOCKS: 0, AFTER: 0}
    for n in graph.weights:
        for i in sorted({i for i, _ in graph.consumers.get(n, ())}):
            if not pipeline.first + period <= i < pipeline.end:
                sizes[BEFORE if i < pipeline.first else BLOCKS if i < pipeline.end else AFTER] += (
                    graph.tensors[n].elements
                )
    ends = [sizes[BEFORE], *[0] * (pipeline.stages - 2), sizes[AFTER]]
    blocks = [0] * pipeline.stages
    for _ in range(pipeline.repeats):
        s = min(
            range(pipeline.stages), key=lambda k: (ends[k] + (blocks[k] + 1) * sizes[BLOCKS], -k)
        )
        blocks[s] += 1
    return tuple(blocks) if all(blocks) else ()


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
    flops = account.dot_flops(flow, again=False)
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
        account.traffic(work.uses, plan.order, dict(plan.mesh)),
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
        account.CollectiveUse, int
    ] = {}  # whom they serve does not matter: those of all repeats are one
    for use in account.collectives(flow, runs, pricer.itemsize):
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
    for carry in dealt_run(flow, runs, deal.pipeline).carries:
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


def of_stage(base: GraphFacts, flow: Flow, deal: Deal) -> list[tuple[str, str]]:
    """(weight, place) of every weight, a block's once: a weight read in two places (a tied table)
    belongs to the first."""
    found, period = [], (deal.end - deal.first) // deal.repeats
    for name in flow.weights:
        i = min((i for i, _ in base.graph.consumers.get(name, ())), default=-1)
        if i >= 0 and not deal.first + period <= i < deal.end:
            found.append((name, deal.place(i)))
    return found


def stage_sums(base: GraphFacts, flow: Flow, deal: Deal, sizes: Mapping[str, float]) -> list[float]:
    """What each stage has of a figure per weight."""
    sums = {
        place: sum(sizes[n] for n, at in of_stage(base, flow, deal) if at == place)
        for place in (BEFORE, BLOCKS, AFTER)
    }
    last = len(deal.blocks) - 1
    return [
        blocks * sums[BLOCKS] + (s == 0) * sums[BEFORE] + (s == last) * sums[AFTER]
        for s, blocks in enumerate(deal.blocks)
    ]
