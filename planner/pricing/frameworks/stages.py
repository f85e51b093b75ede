"""How a framework assigns the repeated blocks of a plan to pipeline stages, and sums over what each
stage has: as evenly as whole blocks go, the longer stages first, or by numbers of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from costmodels.frameworks.step_time import AFTER, BEFORE, BLOCKS
from planner.analysis.facts import GraphFacts
from planner.execution.layout_flow import Flow
from planner.execution.pipeline import Pipeline, pipeline_of


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
    """Of a plan: the pipeline's blocks, else those of its longest layer stack, all in one stage.
    balance: as in costmodels.runtimes.Runtime."""
    pipeline = pipeline_of(flow.graph, flow.plan)
    if pipeline is None:
        first, period, repeats = max(
            base.runs, key=lambda run: run[1] * run[2], default=(len(base.graph.nodes), 0, 1)
        )
        return StageAssignment(first, first + period * repeats, repeats, (repeats,), None)
    balanced = _balanced(base, pipeline, balance == "products") if balance else ()
    fewest, longer = divmod(pipeline.repeats, pipeline.stages)
    even = tuple(fewest + (s < longer) for s in range(pipeline.stages))
    return StageAssignment(
        pipeline.first, pipeline.end, pipeline.repeats, balanced or even, pipeline
    )


def _balanced(base: GraphFacts, pipeline: Pipeline, products: bool) -> tuple[int, ...]:
    """Blocks of each stage such that the most parameters of a stage (of products alone, where so
    asked) are the fewest, what is outside the blocks included; () where a stage would have none."""
    graph, period = base.graph, (pipeline.end - pipeline.first) // pipeline.repeats
    sizes = {BEFORE: 0, BLOCKS: 0, AFTER: 0}
    for n in graph.weights:
        for i in sorted({i for i, _ in graph.consumers.get(n, ())}):
            if products and not base.rules[i].flops:
                continue
            if not pipeline.first + period <= i < pipeline.end:
                place = BEFORE if i < pipeline.first else BLOCKS if i < pipeline.end else AFTER
                sizes[place] += graph.tensors[n].elements
    ends = [sizes[BEFORE], *[0] * (pipeline.stages - 2), sizes[AFTER]]
    blocks = [0] * pipeline.stages
    for _ in range(pipeline.repeats):
        s = min(
            range(pipeline.stages), key=lambda k: (ends[k] + (blocks[k] + 1) * sizes[BLOCKS], -k)
        )
        blocks[s] += 1
    return tuple(blocks) if all(blocks) else ()


def placed_weights(base: GraphFacts, flow: Flow, stages: StageAssignment) -> list[tuple[str, str]]:
    """(weight, place) of every weight, a block's once: a weight read in two places (a tied table)
    belongs to the first."""
    weights = []
    for name in flow.weights:
        i = min((i for i, _ in base.graph.consumers.get(name, ())), default=-1)
        if i >= 0 and not stages.first + stages.period <= i < stages.end:
            weights.append((name, stages.place(i)))
    return weights


def stage_sums(
    base: GraphFacts, flow: Flow, stages: StageAssignment, sizes: Mapping[str, float]
) -> list[float]:
    """What each stage has of a figure per weight."""
    sums = {
        place: sum(sizes[n] for n, at in placed_weights(base, flow, stages) if at == place)
        for place in (BEFORE, BLOCKS, AFTER)
    }
    last = len(stages.stage_blocks) - 1
    return [
        blocks * sums[BLOCKS] + (s == 0) * sums[BEFORE] + (s == last) * sums[AFTER]
        for s, blocks in enumerate(stages.stage_blocks)
    ]
