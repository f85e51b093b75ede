"""Every collective of a step, in a program whose pipeline stages are equal or that has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod

from planner.execution.collective import (
    CollectiveUse,
    ItemSize,
    first_result,
    kernel_collectives,
    microbatch_tensors,
    path_collectives,
    recomputed_collectives,
    tree_collectives,
)
from planner.execution.layout_flow import Flow, cut_layout
from planner.execution.loops import Carry, RepeatedBlock, inner_flow, passes_of, pipelined_block
from planner.execution.pipeline import Pipeline, pipeline_of
from planner.execution.plan import WeightPlan
from planner.execution.recompute import (
    block_mode,
    find_recomputed,
    gathering_parts,
    is_gathered,
    recomputed_in_block,
)
from planner.execution.shared_collectives import merged, outside_blocks
from planner.execution.zero_stages import WEIGHT_COLLECTIVES
from planner.graph.ir import Graph
from planner.sharding.layout import STAGE, Axes, ReshardStep, group, local_shape


def collectives(
    flow: Flow, runs: tuple[RepeatedBlock, ...], size: ItemSize
) -> Iterator[CollectiveUse]:
    micro = flow.plan.microbatches if flow.training else 1
    graph, pipeline = flow.graph, pipeline_of(flow.graph, flow.plan)
    ticks, ends = (pipeline.ticks, pipeline.epilogue_passes) if pipeline else (micro, micro)
    turns, passes = micro // flow.plan.overlapped_microbatches, passes_of(flow, runs)
    last = {c.leaves[-1] for run in runs for c in run.carries}
    varying = microbatch_tensors(flow)
    outside = outside_blocks(flow, runs)
    outer, once = outside.flow, outside.merged
    alike = once.gradients if pipeline is None else dict[str, str]()
    for name, tree in outside.trees.items():
        # Forward collectives of values that no input reaches are the same in every microbatch:
        # compilers take them out of the loop.
        for path in tree.paths():
            with_ends = _with_ends(outer, name, path, pipeline, last) if pipeline else {False}
            times = (
                (ticks if False in with_ends else 0) + (ends if True in with_ends else 0)
                if pipeline
                else passes(name)
            )
            yield from path_collectives(
                outer,
                name,
                path,
                times,
                times if name in varying else 1,
                once,
                size,
                "before" if False in with_ends else "after",
            )
    for i in outside.nodes:
        late = pipeline is not None and pipeline.in_epilogue(i)
        yield from kernel_collectives(
            flow,
            i,
            int(pipeline.forward_passes(i)) if pipeline else passes(first_result(graph, i)),
            size,
            "after" if late else "before",
        )
    if (
        pipeline and pipeline.schedule == "gpipe"
    ):  # head and loss are one function that keeps nothing but what it is given
        ending = [i for i in outside.nodes if pipeline.in_epilogue(i)]
        yield from recomputed_collectives(
            outer,
            find_recomputed(outer, ending, "all", (*graph.inputs, *last)),
            "all",
            lambda name: ends,
            once,
            size,
            "after",
        )
    stacked: dict[
        str, tuple[int, int]
    ] = {}  # weight of a block -> blocks that a device holds, and those of them that run in a turn
    gathered: dict[
        str, list[tuple[bool, bool]]
        # sharded weight -> per function that gathers it, whether forward does, and backward again
    ] = {}
    for run in runs:
        dealt = pipeline is not None and run.first == pipeline.first
        often = _often(
            pipeline.blocks_per_tick if pipeline and dealt else run.repeats,
            (lambda name: ticks) if pipeline else passes,
        )
        body = inner_flow(outer, run)
        again = recomputed_in_block(body, run)
        own = range(run.first, run.first + run.period)
        local = [o for i in own for o in graph.nodes[i].outputs if o]
        trees = {
            n: body.trees[n]
            for n in (
                *local,
                *(c.enters for c in run.carries),
                *(names[0] for names in run.weights),
            )
            if n in body.trees
        }
        once = merged(body, own, trees, [c.leaves[0] for c in run.carries])
        place = "blocks" if dealt or pipeline is None else "before"
        for name, tree in trees.items():
            yield from tree_collectives(body, name, tree, often(name), once, size, place)
        for i in own:
            yield from kernel_collectives(flow, i, often(first_result(graph, i)), size, place)
        yield from recomputed_collectives(body, again, block_mode(flow), often, once, size, place)
        for names in run.weights:
            stacked.update(
                dict.fromkeys(
                    names,
                    (
                        (pipeline.blocks_per_stage, pipeline.blocks_per_tick)
                        if pipeline and dealt
                        else (run.repeats, run.repeats)
                    ),
                )
            )
            for name in names[: pipeline.blocks_per_stage] if pipeline and dealt else names:
                gathered.setdefault(name, []).append(
                    (True, again is not None and names[0] in again.weights)
                )
        for name in run.shared:
            if name in graph.weights and is_gathered(flow, name):
                gathered.setdefault(name, []).append((True, False))
    at_once: set[str] = set()
    for part in gathering_parts(flow, runs):
        again = find_recomputed(outer, part, "part")
        for name in dict.fromkeys(
            n for i in part for n in graph.nodes[i].inputs if n and is_gathered(flow, n)
        ):
            waits = _gathers_after_operand(flow, part, name)
            gathered.setdefault(name, []).append(
                (waits or name not in at_once, name in again.weights)
            )
            at_once |= set() if waits else {name}
    if flow.training:
        elsewhere, held, first = frozenset[str](), frozenset[str](), frozenset[str]()
        if pipeline:
            run = pipelined_block(flow, runs, pipeline)
            elsewhere, held = (
                weights_of_other_stages(graph, pipeline),
                frozenset(n for names in run.weights for n in names),
            )
            first = frozenset(n for names in run.weights for n in names[: pipeline.blocks_per_tick])
            for carry in run.carries:
                yield from _handover(flow, carry, pipeline, size)
            loss = graph.outputs[0]
            yield CollectiveUse(
                "all-reduce",
                (STAGE,),
                int(size(graph.tensors[loss].dtype)),
                1,
                "forward",
                graph.labels.get(loss, loss),
            )

        def reductions(name: str) -> int:
            """How often a gradient that is scattered in every microbatch is: with the blocks, with
            what follows them, or with both. Every tick scatters one chunk's: all are counted at the
            first."""
            assert pipeline is not None
            if name in held:
                return ticks if name in first else 0
            ends = {pipeline.in_epilogue(i) for i, _ in graph.consumers[name]}
            return (ticks if False in ends else 0) + (
                pipeline.epilogue_passes if True in ends else 0
            )

        known: dict[tuple, tuple[CollectiveUse, ...]] = {}  # weights of repeats are reduced alike
        for name, plan in flow.weights.items():
            if name in flow.grad and name not in elsewhere:
                tensor = graph.tensors[name]
                over = (
                    (STAGE,) if pipeline and name not in held else ()
                )  # every stage holds what is outside the blocks, and adds to its gradient
                times = reductions(name) if pipeline else turns
                often_gathered, stack = tuple(gathered.get(name, ())), stacked.get(name, (1, 1))
                key = (
                    tensor.shape,
                    tensor.dtype,
                    id(plan),
                    times,
                    often_gathered,
                    over,
                    name in alike,
                    stack,
                )
                if key not in known:
                    known[key] = tuple(
                        _reduction(
                            flow,
                            name,
                            plan,
                            times,
                            size,
                            often_gathered,
                            over,
                            name in alike,
                            stack,
                        )
                    )
                what = graph.labels.get(name, name)
                for use in known[key]:
                    yield (
                        use
                        if use.what == what
                        else CollectiveUse(
                            use.kind,
                            use.axes,
                            use.payload_bytes,
                            use.count,
                            use.phase,
                            what,
                            use.bucketed,
                            use.merged,
                            use.stacked,
                        )
                    )


def _often(repeats: int, passes: Callable[[str], int]) -> Callable[[str], int]:
    """How often blocks compute a tensor of one repeat."""
    return lambda name: repeats * passes(name)


def _gathers_after_operand(flow: Flow, part: range, name: str) -> bool:
    """Whether a part gathers a weight after a float operand beside it. Others (tables read at
    integers) gather at once, and compilers make one of two such gathers."""
    graph = flow.graph
    first = next(graph.nodes[i] for i in part if name in graph.nodes[i].inputs)
    return any(
        n and n not in graph.weights and n not in graph.constants and graph.tensors[n].is_float
        for n in first.inputs
    )


def _with_ends(
    flow: Flow, name: str, path: tuple[ReshardStep, ...], pipeline: Pipeline, last: Iterable[str]
) -> set[bool]:
    """Whether a conversion outside the blocks runs with what follows them (True), with what comes
    before (False), or with both: where its readers do."""
    late = _in_epilogue(flow.graph, name, pipeline, last)
    if name in flow.graph.weights and not late:
        return {
            pipeline.in_epilogue(i)
            for i, slot in flow.graph.consumers[name]
            if flow.trees[name].path(flow.need[i, slot])[: len(path)] == path
        }
    return {late}


def _in_epilogue(graph: Graph, name: str, pipeline: Pipeline, last: Iterable[str]) -> bool:
    """Whether a tensor outside the blocks belongs to what follows them."""
    made = graph.producer.get(name, -1)
    return name in last or (
        pipeline.in_epilogue(made)
        if made >= 0
        else all(pipeline.in_epilogue(i) for i, _ in graph.consumers.get(name, ()))
    )


def _handover(
    flow: Flow, carry: Carry, pipeline: Pipeline, size: ItemSize
) -> Iterator[CollectiveUse]:
    """A carried tensor on its way to the next stage, and its gradient on the way back. Between two
    stages the last way back is a loop of one tick, which compilers unroll: nobody reads what it
    sends."""
    tensor = flow.graph.tensors[carry.enters]
    payload = int(
        prod(local_shape(tensor.shape, carry.layout, dict(flow.plan.mesh))) * size(tensor.dtype)
    )
    back = pipeline.ticks - (pipeline.schedule == "1f1b" and pipeline.stages == 2)
    yield CollectiveUse(
        "collective-permute", (STAGE,), payload, pipeline.ticks, "forward", carry.enters
    )
    yield CollectiveUse("collective-permute", (STAGE,), payload, back, "backward", carry.enters)


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
    found: frozenset[str] = graph.memo[key]
    return found


def _reduction(
    flow: Flow,
    name: str,
    plan: WeightPlan,
    micro: int,
    size: ItemSize,
    gathered: Sequence[tuple[bool, bool]],
    over: Axes,
    alike: bool,
    stacked: tuple[int, int],
) -> Iterator[CollectiveUse]:
    """The reduction of one weight's gradient (alike: equal to another's, which is reduced once for
    both) and, with sharded state, the gathering of the parameter. stacked: of how many repeats it
    is one array when the optimizer runs, and in each microbatch."""
    tensor, mesh = flow.graph.tensors[name], dict(flow.plan.mesh)
    what = flow.graph.labels.get(name, name)
    level = plan.zero_stage if plan.zero_dim >= 0 else 0
    piece = int(
        prod(local_shape(tensor.shape, cut_layout(plan) if level else plan.layout, mesh))
        * size(tensor.dtype)
    )
    full = piece * group(plan.zero_axes, mesh) if level else piece  # padded where the pieces are
    rest = (*over, *(a for a in plan.grad_partial if not level or a not in plan.zero_axes))
    functions = {
        "forward": sum(forward for forward, _ in gathered),
        "recompute": sum(again for _, again in gathered),
        "gradient": len(gathered),
    }
    for c in WEIGHT_COLLECTIVES[level]:
        axes = plan.zero_axes if c.cut else rest
        if axes:
            yield CollectiveUse(
                kind=c.kind,
                axes=axes,
                payload_bytes=full if c.cut else piece,
                count=(micro if c.per_microbatch else 1)
                * (functions[c.phase] if level == 3 and c.cut else 1),
                phase=c.phase,
                what=what,
                bucketed=c.bucketed,
                merged=alike and c.bucketed and c.phase == "gradient",
                stacked=stacked[c.per_microbatch] if c.bucketed else 1,
            )
