"""How a framework assigns the repeated blocks of a plan to pipeline stages, and sums over what each
stage has: as evenly as whole blocks go, the longer stages first, or by numbers of parameters.

Where layers that are unlike them come before the blocks (dense layers before mixtures of experts),
the first stage has those, and blocks go where they make the longest stage shortest, as launch files
lay them out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from costmodels.frameworks.step_time import AFTER, BEFORE, BLOCKS
from planner.analysis.facts import GraphFacts
from planner.execution.layout_flow import Flow
from planner.execution.pipeline import Pipeline, balanced_blocks, laid_out_blocks, pipeline_of
from planner.ops import operator_of


@dataclass(frozen=True)
class StageAssignment:
    """Which nodes the repeated blocks are (first, end, repeats), and how many blocks each stage
    has."""

    first: int
    end: int
    repeats: int
    stage_blocks: tuple[int, ...]
    pipeline: Pipeline | None

    @property
    def period(self) -> int:
        """Nodes of one block."""
        return (self.end - self.first) // self.repeats

    def place(self, i: int) -> str:
        """Where node i is."""
        return BEFORE if i < self.first else BLOCKS if i < self.end else AFTER


def assign_stages(base: GraphFacts, flow: Flow, balance: str) -> StageAssignment:
    """The stage assignment of a plan: the pipeline's blocks, else those of its longest layer stack,
    all in one stage. balance: as in costmodels.runtimes.Runtime."""
    pipeline = pipeline_of(flow.graph, flow.plan)
    if pipeline is None:
        first, period, repeats = max(
            base.runs, key=lambda run: run[1] * run[2], default=(len(base.graph.nodes), 0, 1)
        )
        return StageAssignment(first, first + period * repeats, repeats, (repeats,), None)
    blocks: tuple[int, ...] = ()
    if balance:
        sizes = _parameters(base, pipeline, balance == "products")
        ends = (sizes[place] / sizes[BLOCKS] for place in (BEFORE, AFTER))
        blocks = balanced_blocks(pipeline.repeats, pipeline.stages, *ends)
    if not all(blocks) or not blocks:
        outside = work_outside(base, pipeline.nodes, pipeline.repeats)
        of_chunks = laid_out_blocks(pipeline.repeats, pipeline.chunks, *outside)
        blocks = tuple(sum(of_chunks[s :: pipeline.stages]) for s in range(pipeline.stages))
    return StageAssignment(pipeline.first, pipeline.end, pipeline.repeats, blocks, pipeline)


def work_outside(base: GraphFacts, nodes: range, repeats: int) -> tuple[float, float]:
    """Work of products before the blocks and after them, as multiples of one block's. nodes: those
    of all blocks."""
    key = "work outside", nodes
    if key not in base.graph.memo:
        flops = [float(rule.flops) for rule in base.rules]
        before, after = sum(flops[: nodes.start]), sum(flops[nodes.stop :])
        block = sum(flops[i] for i in nodes) / repeats or 1.0
        base.graph.memo[key] = before / block, after / block
    known: tuple[float, float] = base.graph.memo[key]
    return known


def share_layers_before(base: GraphFacts, pipeline: Pipeline) -> bool:
    """Whether layers come before the blocks, and the first stage has no more work by them than the
    others by blocks: then each has an equal part of everything."""
    before, _ = work_outside(base, pipeline.nodes, pipeline.repeats)
    return 1 / 2 <= before <= (before + pipeline.repeats) / pipeline.stages


def attentions_before(base: GraphFacts, first: int) -> int:
    """Layers before the blocks, which begin at node `first`, by their attentions."""
    before = base.graph.nodes[:first]
    return sum(operator_of(node.op).kind == "attention" for node in before)


def _parameters(base: GraphFacts, pipeline: Pipeline, products: bool) -> dict[str, float]:
    """Parameters (of products alone, where so asked) before the blocks, in one of them, and after
    them."""
    graph, period = base.graph, (pipeline.end - pipeline.first) // pipeline.repeats
    sizes = {BEFORE: 0.0, BLOCKS: 0.0, AFTER: 0.0}
    for n in graph.weights:
        for i in sorted({i for i, _ in graph.consumers.get(n, ())}):
            if products and not base.rules[i].flops:
                continue
            if not pipeline.first + period <= i < pipeline.end:
                place = BEFORE if i < pipeline.first else BLOCKS if i < pipeline.end else AFTER
                sizes[place] += graph.tensors[n].elements
    return sizes


def placed_weights(base: GraphFacts, stages: StageAssignment) -> tuple[tuple[str, str], ...]:
    """(weight, place) of every weight, a block's once: a weight read in two places (a tied table)
    belongs to the first. Kept with the graph: it is asked for several times by every price."""
    end = stages.first + stages.period
    key = "placed weights", stages.first, end, stages.end
    if key not in base.graph.memo:
        firsts = (
            (name, min((i for i, _ in base.graph.consumers.get(name, ())), default=-1))
            for name in base.graph.weights
        )
        base.graph.memo[key] = tuple(
            (name, stages.place(i)) for name, i in firsts if i >= 0 and not end <= i < stages.end
        )
    known: tuple[tuple[str, str], ...] = base.graph.memo[key]
    return known


def stage_sums(
    base: GraphFacts, stages: StageAssignment, size_of: Callable[[str], float]
) -> list[float]:
    """What each stage has of a figure per weight."""
    sums = {BEFORE: 0.0, BLOCKS: 0.0, AFTER: 0.0}
    for name, place in placed_weights(base, stages):
        sums[place] += size_of(name)
    last = len(stages.stage_blocks) - 1
    return [
        blocks * sums[BLOCKS] + (s == 0) * sums[BEFORE] + (s == last) * sums[AFTER]
        for s, blocks in enumerate(stages.stage_blocks)
    ]
