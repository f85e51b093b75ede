"""TODO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from planner.analysis.facts import GraphFacts
from planner.execution.layout_flow import Flow
from planner.execution.pipeline import Pipeline, pipeline_of
from planner.pricing.frameworks.step_time import AFTER, BEFORE, BLOCKS, Deal

if TYPE_CHECKING:
    pass


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
