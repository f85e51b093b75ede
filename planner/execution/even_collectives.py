"""Every collective of a step, in a program whose pipeline stages are even or that has none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from planner.execution.collective import (
    CollectiveUse,
    ItemSize,
    WeightArray,
    first_result,
    handover_collectives,
    kernel_collectives,
    microbatch_tensors,
    path_collectives,
    recomputed_collectives,
    weight_collectives,
)
from planner.execution.layout_flow import Flow, cut_layout
from planner.execution.loops import (
    RepeatedBlock,
    inner_flow,
    passes_of,
    pipelined_block,
    shares_of_blocks,
)
from planner.execution.pipeline import Pipeline, pipeline_of
from planner.execution.plan import WeightPlan
from planner.execution.recompute import (
    Recomputed,
    block_mode,
    find_recomputed,
    gathering_parts,
    is_gathered,
    recomputed_in_block,
    recomputed_reshards,
)
from planner.execution.shared_collectives import merged, outside_blocks
from planner.execution.techniques import WRITTEN_OUT
from planner.execution.weight_offload import offloaded_names
from planner.execution.weights_apart import weights_apart
from planner.graph.ir import Graph
from planner.ops.loss import counted_rows
from planner.sharding.layout import ISLAND, STAGE, Axes, ReshardStep, group, local_shape


def collectives(
    flow: Flow, blocks: tuple[RepeatedBlock, ...], size: ItemSize
) -> Iterator[CollectiveUse]:
    """Every collective of one optimizer step (training) or one forward pass, some of them empty."""
    census = _Census(flow, blocks, size)
    yield from census.outside_blocks()
    for block in blocks:
        yield from census.of_block(block)
    census.gather_in_parts()
    if flow.training:
        yield from census.between_stages()
        yield from census.between_islands()
        yield from census.of_gradients()


@dataclass(frozen=True)
class _Reduction:
    """How the gradient of one weight is reduced, and its parameter gathered.

    gathers: per function that gathers it, whether its forward pass does, and whether its backward
    pass does again. scatters: how often a gradient that is scattered in every microbatch is. over:
    axes over which it is summed beside those of the plan. equal: whether it equals another's, which
    is reduced once for both. stacked: of how many repeats it is one array when the optimizer runs,
    and in each microbatch. looped: under ZeRO stage 3, phases of it that run beside a loop over
    blocks.
    """

    shape: tuple[int, ...]
    dtype: str
    trained: bool
    plan: WeightPlan
    scatters: int
    gathers: tuple[tuple[bool, bool], ...]
    over: Axes
    equal: bool
    stacked: tuple[int, int]
    looped: tuple[str, ...]


class _Census:
    """The collectives of a step, part by part. How weights are gathered and stacked is collected on
    the way, for their reductions, which come last."""

    def __init__(self, flow: Flow, blocks: tuple[RepeatedBlock, ...], size: ItemSize) -> None:
        self.flow, self.blocks, self.size = flow, blocks, size
        self.pipeline = pipeline_of(flow.graph, flow.plan)
        self.passes = passes_of(flow, blocks)
        self.outside = outside_blocks(flow, blocks)
        self.gathers: dict[str, list[tuple[bool, bool]]] = {}
        self.stacked: dict[str, tuple[int, int]] = {}

    def outside_blocks(self) -> Iterator[CollectiveUse]:
        """Collectives of reshards and kernels outside repeated blocks."""
        outside, pipeline, size = self.outside, self.pipeline, self.size
        varying = microbatch_tensors(self.flow)
        last = {c.leaves[-1] for block in self.blocks for c in block.carries}
        for name, tree in outside.trees.items():
            for path in tree.paths():
                if pipeline:
                    sides = _sides(outside.flow, name, path, pipeline, last)
                    times = self._passes(sides)
                else:
                    sides, times = {False}, self.passes(name)
                # Forward collectives of values that no input reaches are the same in every
                # microbatch: compilers take them out of the loop.
                counts = (times if name in varying else 1, times)
                place = "before" if False in sides else "after"
                yield from path_collectives(
                    outside.flow, name, path, counts, outside.merged, size, place
                )
        for i in outside.nodes:
            if pipeline:
                times = int(pipeline.forward_passes(i))
            else:
                times = self.passes(first_result(self.flow.graph, i))
            place = "after" if pipeline and pipeline.in_epilogue(i) else "before"
            yield from kernel_collectives(self.flow, i, times, size, place)
        if pipeline is None:
            again = recomputed_reshards(outside.flow, outside.nodes)
            yield from recomputed_collectives(
                outside.flow, again, "", self.passes, outside.merged, size, "before"
            )
        if pipeline and pipeline.schedule == "gpipe":
            yield from self._recomputed_epilogue(pipeline, last)

    def _passes(self, sides: Iterable[bool]) -> int:
        """How often what runs in the epilogue (True), before it (False) or in both does in a
        step."""
        assert self.pipeline is not None
        passes = {True: self.pipeline.epilogue_passes, False: self.pipeline.ticks}
        return sum(passes[side] for side in set(sides))

    def _recomputed_epilogue(
        self, pipeline: Pipeline, last: Iterable[str]
    ) -> Iterator[CollectiveUse]:
        """Under gpipe head and loss are one function that saves nothing but what it is given."""
        flow = self.outside.flow
        epilogue = [i for i in self.outside.nodes if True in pipeline.sides(i)]
        yield from recomputed_collectives(
            flow,
            find_recomputed(flow, epilogue, "all", (*flow.graph.inputs, *last)),
            "all",
            lambda name: pipeline.epilogue_passes,
            self.outside.merged,
            self.size,
            "after",
        )

    def of_block(self, block: RepeatedBlock) -> Iterator[CollectiveUse]:
        """Collectives of reshards and kernels of a repeated block."""
        graph, size, pipeline = self.flow.graph, self.size, self._stages_of(block)
        repeats = pipeline.blocks_per_tick if pipeline else block.repeats

        def times(name: str) -> int:
            return repeats * (self.pipeline.ticks if self.pipeline else self.passes(name))

        flow = inner_flow(self.outside.flow, block)
        recomputed = recomputed_in_block(flow, block)
        nodes = range(block.first, block.first + block.period)
        names = (
            *(o for i in nodes for o in graph.nodes[i].outputs if o),
            *(c.enters for c in block.carries),
            *(names[0] for names in block.weights),
        )
        trees = {n: flow.trees[n] for n in names if n in flow.trees}
        equal = merged(flow, nodes, trees, [c.leaves[0] for c in block.carries])
        place = "blocks" if pipeline or self.pipeline is None else "before"
        waiting = weights_apart(self.flow, pipeline)
        for name, tree in trees.items():
            counts = times(name), times(name)
            if pipeline and name in waiting:
                counts = times(name), repeats * pipeline.microbatch_schedule.weight_ticks
            for path in tree.paths():
                yield from path_collectives(flow, name, path, counts, equal, size, place)
        for i in nodes:
            count = times(first_result(graph, i))
            yield from kernel_collectives(self.flow, i, count, size, place)
        again = recomputed or recomputed_reshards(flow, nodes)
        mode = block_mode(self.flow)
        yield from recomputed_collectives(flow, again, mode, times, equal, size, place)
        self._collect_weights(block, recomputed)

    def _stages_of(self, block: RepeatedBlock) -> Pipeline | None:
        """The pipeline, where it is the repeats of this block that are assigned to stages."""
        return self.pipeline if self.pipeline and block.first == self.pipeline.first else None

    def _collect_weights(self, block: RepeatedBlock, recomputed: Recomputed | None) -> None:
        """Collect how a block's weights are stacked, and in which passes they are gathered."""
        blocks_here = at_a_time = block.repeats
        if pipeline := self._stages_of(block):
            blocks_here, at_a_time = pipeline.blocks_per_stage, pipeline.blocks_per_tick
        for names in block.weights:
            if self.flow.plan.blocks != WRITTEN_OUT:
                self.stacked.update(dict.fromkeys(names, (blocks_here, at_a_time)))
            in_backward = recomputed is not None and names[0] in recomputed.weights
            for name in names[:blocks_here]:
                self.gathers.setdefault(name, []).append((True, in_backward))
        for name in block.shared:
            if name in self.flow.graph.weights and is_gathered(self.flow, name):
                self.gathers.setdefault(name, []).append((True, False))

    def gather_in_parts(self) -> None:
        """Collect in which passes functions outside blocks gather their weights."""
        nodes, gathered_at_once = self.flow.graph.nodes, set[str]()
        for part in gathering_parts(self.flow, self.blocks):
            recomputed = find_recomputed(self.outside.flow, part, "part")
            read = dict.fromkeys(n for i in part for n in nodes[i].inputs if n)
            for name in (n for n in read if is_gathered(self.flow, n)):
                waits = _gathers_after_operand(self.flow, part, name)
                in_forward = waits or name not in gathered_at_once
                self.gathers.setdefault(name, []).append((in_forward, name in recomputed.weights))
                if not waits:
                    gathered_at_once.add(name)

    def between_stages(self) -> Iterator[CollectiveUse]:
        """Collectives of carried tensors on their way from stage to stage, and of the loss."""
        flow, graph, pipeline = self.flow, self.flow.graph, self.pipeline
        if pipeline is None:
            return
        schedule = pipeline.microbatch_schedule
        for carry in pipelined_block(flow, self.blocks, pipeline).carries:
            tensor = graph.tensors[carry.enters]
            elements = prod(local_shape(tensor.shape, carry.layout, dict(flow.plan.mesh)))
            payload = int(elements * self.size(tensor.dtype))
            yield from handover_collectives(carry.enters, payload, schedule, schedule.ticks)
        loss = graph.outputs[0]
        yield CollectiveUse(
            kind="all-reduce",
            axes=(STAGE,),
            payload_bytes=int(self.size(graph.tensors[loss].dtype)),
            count=1,
            phase="forward",
            what=graph.labels.get(loss, loss),
        )

    def between_islands(self) -> Iterator[CollectiveUse]:
        """Collectives of the loss, and of the rows that count in it where that is a part of the
        data."""
        graph = self.flow.graph
        if ISLAND in self.flow.plan.order:
            for name in filter(None, (graph.outputs[0], counted_rows(graph))):
                yield CollectiveUse(
                    kind="all-reduce",
                    axes=(ISLAND,),
                    payload_bytes=int(self.size(graph.tensors[graph.outputs[0]].dtype)),
                    count=1,
                    phase="forward",
                    what=graph.labels.get(name, name),
                )

    def of_gradients(self) -> Iterator[CollectiveUse]:
        """Collectives of the gradients of all weights that a device holds, and of their
        parameters."""
        flow, graph, pipeline = self.flow, self.flow.graph, self.pipeline
        elsewhere, staged = frozenset[str](), dict[str, int]()
        if pipeline:
            elsewhere = weights_of_other_stages(graph, pipeline)
            for names in pipelined_block(flow, self.blocks, pipeline).weights:
                staged.update({name: repeat for repeat, name in enumerate(names)})
        islands = (ISLAND,) if ISLAND in flow.plan.order else ()
        equal = {} if pipeline else self.outside.merged.gradients
        offloaded = offloaded_names(flow, self.blocks)
        known: dict[_Reduction, tuple[CollectiveUse, ...]] = {}  # weights of repeats share one
        for name, plan in flow.weights.items():
            if name in elsewhere or not (name in flow.grad or is_gathered(flow, name)):
                continue
            tensor = graph.tensors[name]
            reduction = _Reduction(
                shape=tensor.shape,
                dtype=tensor.dtype,
                trained=name in flow.grad,
                plan=plan,
                scatters=self._scatters(name, staged),
                gathers=tuple(self.gathers.get(name, ())),
                # Every stage holds what is outside the blocks, and adds to its gradient.
                over=(STAGE,) if pipeline and name not in staged else islands,
                equal=name in equal,
                stacked=self.stacked.get(name, (1, 1)),
                looped=() if name in offloaded else self._looped(name),
            )
            uses = known.get(reduction)
            if uses is None:
                uses = known[reduction] = tuple(_reduction(flow, name, reduction, self.size))
            what = graph.labels.get(name, name)
            for use in uses:
                yield use if use.what == what else use.of(what)

    def _looped(self, name: str) -> tuple[str, ...]:
        """Phases of a weight's collectives that run beside a loop over blocks: all of those that it
        cuts out of a stack, the scattered gradient of those that only what follows reads."""
        if name in self.stacked:
            return ("forward", "recompute", "gradient")
        loops = self.blocks if self.flow.plan.blocks != WRITTEN_OUT else ()
        end = max((block.end for block in loops), default=None)
        first = min(i for i, _ in self.flow.graph.consumers[name])
        return ("gradient",) if end is not None and not self.pipeline and first >= end else ()

    def _scatters(self, name: str, staged: Mapping[str, int]) -> int:
        """How often a gradient that is scattered in every microbatch is: with the blocks, with the
        epilogue, or with both. Every tick scatters one chunk's: all are counted at the first.
        staged: weights of the blocks on stages -> their repeat."""
        pipeline = self.pipeline
        if pipeline is None:
            return self.flow.plan.accumulation_steps
        if name in staged:
            return pipeline.ticks if staged[name] < pipeline.blocks_per_tick else 0
        readers = self.flow.graph.consumers[name]
        return self._passes(side for i, _ in readers for side in pipeline.sides(i))


def _gathers_after_operand(flow: Flow, part: range, name: str) -> bool:
    """Whether a part gathers a weight after a float operand beside it. Others (tables read at
    integers) gather at once, and compilers make one of two such gathers."""
    graph = flow.graph
    first = next(graph.nodes[i] for i in part if name in graph.nodes[i].inputs)
    return any(
        n and n not in graph.weights and n not in graph.constants and graph.tensors[n].is_float
        for n in first.inputs
    )


def _sides(
    flow: Flow, name: str, path: tuple[ReshardStep, ...], pipeline: Pipeline, last: Iterable[str]
) -> set[bool]:
    """Whether a reshard outside the blocks runs in the epilogue (True), before it (False), or in
    both: where its readers do."""
    late = _in_epilogue(flow.graph, name, pipeline, last)
    twice = flow.graph.producer.get(name) in pipeline.shared_prologue
    if not late and (twice or name in flow.graph.weights):
        return {
            side
            for i, slot in flow.graph.consumers[name]
            if flow.trees[name].path(flow.need[i, slot])[: len(path)] == path
            for side in ((False,) if i in pipeline.nodes else pipeline.sides(i))
        }
    return {late}


def _in_epilogue(graph: Graph, name: str, pipeline: Pipeline, last: Iterable[str]) -> bool:
    """Whether a tensor outside the blocks belongs to the epilogue."""
    maker = graph.producer.get(name, -1)
    return name in last or (
        pipeline.in_epilogue(maker)
        if maker >= 0
        else all(pipeline.in_epilogue(i) for i, _ in graph.consumers.get(name, ()))
    )


def weights_of_other_stages(graph: Graph, pipeline: Pipeline) -> frozenset[str]:
    """Weights of blocks beyond the first stage's; where the blocks do not divide evenly the first
    stages hold the most."""
    key = (
        "of other stages",
        pipeline.first,
        pipeline.period,
        pipeline.repeats,
        pipeline.stages,
        pipeline.virtual_stages,
    )
    if key not in graph.memo:
        beyond = [i for i in pipeline.nodes if pipeline.stage_of(i)]
        mine = {
            n
            for i in range(pipeline.end)
            if pipeline.stage_of(i) < 1
            for n in graph.nodes[i].inputs
        }
        graph.memo[key] = frozenset(
            n for i in beyond for n in graph.nodes[i].inputs if n in graph.weights and n not in mine
        )
    known: frozenset[str] = graph.memo[key]
    return known


def _reduction(
    flow: Flow, name: str, reduction: _Reduction, size: ItemSize
) -> Iterator[CollectiveUse]:
    """The collectives of one weight's gradient and of its sharded parameter."""
    plan, mesh, gathers = reduction.plan, dict(flow.plan.mesh), reduction.gathers
    zero_stage = plan.zero_stage if plan.zero_dim >= 0 else 0
    layout = cut_layout(plan) if zero_stage else plan.layout
    piece = int(prod(local_shape(reduction.shape, layout, mesh)) * size(reduction.dtype))
    summed = [a for a in plan.grad_partial if not zero_stage or a not in plan.zero_axes]
    array = WeightArray(
        what=flow.graph.labels.get(name, name),
        zero_stage=zero_stage,
        zero_axes=plan.zero_axes,
        rest=(*reduction.over, *summed),
        full=piece * group(plan.zero_axes, mesh) if zero_stage else piece,  # padded as pieces are
        piece=piece,
        share=shares_of_blocks(flow.graph, flow.plan.repeated_blocks).get(name, 1.0),
        trained=reduction.trained,
    )
    functions = {
        "forward": sum(in_forward for in_forward, _ in gathers),
        "recompute": sum(in_backward for _, in_backward in gathers),
        "gradient": len(gathers),
    }
    yield from weight_collectives(
        array,
        reduction.scatters,
        functions if zero_stage == 3 else None,
        reduction.stacked,
        reduction.equal,
        reduction.looped,
    )
