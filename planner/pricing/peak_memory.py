"""The memory of one whole plan on one device, part by part.

    peak = parameters + gradients + optimizer state + saved activations + temporary

There are two points of most memory. When the backward pass of the last repeated block begins, what
the epilogue behind it (head and loss) saved is gone, and the gradients of all repeats are there,
with one repeat's activations where those are made again or cut out of stacks at once. While the
epilogue's own backward pass runs it is the other way round. `temporary` is the larger of what lives
at the first (workspace of an operator) and at the second (what the epilogue saves, its workspace,
less what is not there yet).
Gradients of weights outside the blocks are counted where they have room of their own at the first
point (planner.pricing.outside_gradients). A program without a loop over blocks is walked operator
by operator (costmodels.liveness); its parts are those of the peak.

A pipeline stage (planner.execution.pipeline) holds its own blocks and everything outside the
blocks, and what several microbatches save.

Optimizer state that waits in the host's memory is read where it is used and written back parameter
by parameter, of blocks repeat by repeat (PARKED_ARRAYS on their way), after the backward pass: it
takes room only where those take more than activations and temporaries took before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from costmodels.capacity import Breakdown
from costmodels.liveness import (
    Liveness,
    OperatorBytes,
    backward_liveness,
    gradient_buffers,
    passing_bytes,
    temporary_bytes,
)
from planner.analysis.basics import repeat_starts, saved_in
from planner.analysis.facts import GraphFacts
from planner.analysis.passing import puts_off, readers
from planner.execution.block_values import offloaded_by_name
from planner.execution.even_collectives import weights_of_other_stages
from planner.execution.layout_flow import Flow
from planner.execution.loops import RepeatedBlock
from planner.execution.pipeline import pipeline_of
from planner.execution.plan import Plan
from planner.execution.recompute import Recomputed, recomputed_blocks
from planner.execution.techniques import LOOPED, WRITTEN_OUT
from planner.execution.weight_offload import offloaded_names
from planner.ops import operator_of
from planner.pricing.device_weights import device_weights
from planner.pricing.handed_on import handed_on
from planner.pricing.kernels import (
    named_beside,
    pieces_of,
    reads_whole,
    saved_beside,
    working_bytes,
)
from planner.pricing.outside_gradients import outside_gradient
from planner.pricing.pricer import Pricer
from planner.pricing.split_arrays import SplitArrays
from planner.pricing.weight_offload import offloaded_weights
from planner.sharding.layout import Layout, group, local_shape

GATHERED_BLOCKS = 1
"""Whole weights of so many blocks are there at least under ZeRO stage 3, and gradients that are not
scattered yet among them: they are gathered one by one, a little before they are read, and gone when
they were."""
PARKED_ARRAYS = 2
"""Parameters (of blocks those of one repeat) whose new state is on its way to the host's memory at
the same time: one that is written, one that is made. The GPU compiler's schedule of a step with
twelve equal parameters has two."""


def saved_by_blocks_bytes(
    base: GraphFacts, flow: Flow, runs: tuple[RepeatedBlock, ...], pricer: Pricer
) -> Iterator[tuple[int, float]]:
    """(node of the first repeat, bytes of the named values and results of collectives that
    recomputed blocks save on the device, of all repeats)."""
    away = offloaded_by_name(flow)
    for run, replay in recomputed_blocks(flow, runs):
        saved = saved_by_blocks(base, flow, run, replay, pricer)
        yield run.first, sum(size for name, size in saved if name not in away)


def saved_by_blocks(
    base: GraphFacts, flow: Flow, run: RepeatedBlock, replay: Recomputed, pricer: Pricer
) -> Iterator[tuple[str, float]]:
    """(tensor, bytes of all repeats and of all overlapped microbatches) of each named value or
    result of a collective that a recomputed block saves."""
    pipeline = pipeline_of(flow.graph, flow.plan)
    times = (
        run.repeats
        if pipeline is None
        else pipeline.saved_ticks
        * (pipeline.blocks_per_tick if run.first == pipeline.first else run.repeats)
    )
    for name, size in saved_in_repeat(base, flow, replay, pricer):
        yield name, times * size * flow.plan.overlapped_microbatches


def saved_in_repeat(
    base: GraphFacts, flow: Flow, replay: Recomputed, pricer: Pricer
) -> Iterator[tuple[str, float]]:
    """(tensor, bytes of one repeat and one microbatch) of each named value or result of a
    collective that a recomputed block saves; with the former what its kernel saves beside it."""
    mesh, graph = dict(flow.plan.mesh), flow.graph
    for name, way in replay.saved:
        if not way:
            tensor, i = graph.tensors[name], graph.producer[name]
            shape = local_shape(tensor.shape, flow.source[name], mesh)
            size = pricer.stored_bytes(shape, tensor.dtype, base.kind_of(tensor.shape))
            yield name, size + named_beside(base, i, flow.split(i), pricer)
            continue
        step = way[-1]
        size = step.forward_elements * pricer.itemsize(flow.graph.tensors[name].dtype)
        yield name, size / (group(step.axes, mesh) if step.forward == "reduce-scatter" else 1)


@dataclass(frozen=True)
class MemoryParts:
    """Bytes of a device that the two points of most memory are made of (module docstring).

    block_grads, one_repeat: gradients, and of `activations` what one repeat has at once, that the
    epilogue's backward pass does not meet. prologue_grads: gradients that only what is before the
    blocks makes, no part of `gradients`. epilogue: activations that the epilogue saves. workspace,
    epilogue_workspace: the largest workspace of an operator before the epilogue, and in it.
    liveness: of a program without a loop over blocks; `gradients` are then the sums of microbatches
    alone, `epilogue` and the workspaces nothing.
    """

    parameters: float
    gradients: float
    state: float
    activations: float
    block_grads: float = 0.0
    one_repeat: float = 0.0
    prologue_grads: float = 0.0
    epilogue: float = 0.0
    workspace: float = 0.0
    epilogue_workspace: float = 0.0
    liveness: Liveness | None = None

    @property
    def temporary(self) -> float:
        """What lives only for a while at the point of most memory, where there is a loop."""
        return temporary_bytes(
            self.workspace,
            self.epilogue + self.epilogue_workspace,
            self.block_grads + self.one_repeat,
            self.prologue_grads - self.activations,
        )

    @property
    def given_back(self) -> float:
        """Bytes of the peak that the optimizer's step has no more."""
        if self.liveness is None:
            return self.activations + self.temporary - self.prologue_grads
        return self.liveness.peak - float(self.liveness.gradients[0])


@dataclass
class _WeightBytes:
    """Bytes of a device's weights. duplicated: of chunks of a pipeline stage that are there twice;
    gathered: node -> bytes gathered for it; gradients_of: of each trained weight the nodes that
    read it, its whole gradient and what is left of it until the end of the step; passing_state: of
    each trained weight its state that passes through the device."""

    parameters: float = 0.0
    gradients: float = 0.0
    state: float = 0.0
    block_grads: float = 0.0
    prologue_grads: float = 0.0
    duplicated: float = 0.0
    gathered: dict[int, float] = field(default_factory=dict)
    gradients_of: list[tuple[list[int], float, float]] = field(default_factory=list)
    passing_state: list[float] = field(default_factory=list)


def memory(
    base: GraphFacts, flow: Flow, pricer: Pricer, runs: tuple[RepeatedBlock, ...] = ()
) -> Breakdown:
    """Peak memory by part, in bytes of the recipe."""
    parts = memory_parts(base, flow, pricer, runs)
    gradients, activations, temporary = parts.gradients, parts.activations, parts.temporary
    if parts.liveness is not None:
        at = parts.liveness.at
        gradients += float(parts.liveness.gradients[at])
        activations = float(parts.liveness.activations[at])
        temporary = float(parts.liveness.temporary[at])
    return Breakdown(
        int(parts.parameters), int(gradients), int(parts.state), int(activations), int(temporary)
    )


def memory_parts(
    base: GraphFacts, flow: Flow, pricer: Pricer, runs: tuple[RepeatedBlock, ...] = ()
) -> MemoryParts:
    """What is on a device when, in bytes of the recipe: of blocks written out as compilers hold
    what is outside loops."""
    if flow.plan.blocks == WRITTEN_OUT:
        return _of_written_out(without_loops(base, flow), flow, pricer)
    weights = _weight_bytes(base, flow, pricer, runs)
    saved = _activation_bytes(base, flow, pricer, runs)
    slack = 1 + pricer.runtime.memory_slack
    parts = MemoryParts(
        parameters=weights.parameters,
        gradients=weights.gradients,
        state=weights.state,
        activations=saved.bytes * (slack if base.training else 1),
        block_grads=weights.block_grads,
        one_repeat=saved.one_repeat * slack * (flow.plan.stages == 1),
        prologue_grads=weights.prologue_grads,
    )
    if base.written_out:
        parts = replace(parts, liveness=_liveness(base, flow, pricer, weights))
    else:
        workspace, epilogue_workspace = (
            temporaries(base, flow, pricer, weights.gathered, saved.gone)
            if base.training
            else (_forward_bytes(base, flow, pricer), 0.0)
        )
        parts = replace(
            parts,
            epilogue=saved.epilogue * slack,
            workspace=workspace * slack + weights.duplicated,
            epilogue_workspace=epilogue_workspace * slack + weights.duplicated,
        )
    passing = sum(sorted(weights.passing_state)[-PARKED_ARRAYS:])
    return replace(parts, state=weights.state + max(0.0, passing - parts.given_back))


def without_loops(base: GraphFacts, flow: Flow) -> GraphFacts:
    """The facts of a graph of a plan whose blocks are written out. Compilers put off gradients of
    weights, to run them beside collectives: what they are made of, a gated unit made again among
    it, is there until then. In a loop over microbatches there may be no collective that they could
    run beside."""
    plan, nodes = flow.plan, flow.graph.nodes
    if plan.accumulation_steps == 1 or plan.zero_stage > 1:
        return base.without_loops
    paths = (
        flow.trees[name].path(flow.need[i, slot])
        for i in base.looped
        for slot, name in enumerate(nodes[i].inputs)
        if name in flow.trees
    )
    beside = any(step.forward or step.backward for path in paths for step in path) or any(
        inner.axes(flow.split(i), dict(plan.mesh))
        for i in base.looped
        for inner in flow.rules[i].inner
    )
    return base.without_loops if beside else base.in_microbatches


def _of_written_out(base: GraphFacts, flow: Flow, pricer: Pricer) -> MemoryParts:
    """The same of a plan without loops. What is kept for a node's slopes is there from its forward
    pass to its backward pass."""
    apart = replace(flow, plan=replace(flow.plan, repeated_blocks=(), blocks=LOOPED))
    parts = memory_parts(base, apart, pricer)
    if parts.liveness is None:  # forward passes keep nothing
        return parts
    slack = 1 + pricer.runtime.memory_slack
    slopes, own = np.zeros((2, len(base.graph.nodes)))
    for i, size in slope_bytes(base, apart, pricer):
        slopes[i] += size * slack
    for i, size in made_alike_bytes(base, apart, pricer):
        own[i] = size * slack  # part of the workspace of its own backward pass
    live = parts.liveness.activations + np.cumsum(slopes) - own
    return replace(
        parts,
        activations=parts.activations + float(slopes.sum()),
        liveness=replace(parts.liveness, activations=live),
    )


def slope_bytes(base: GraphFacts, flow: Flow, pricer: Pricer) -> Iterator[tuple[int, float]]:
    """(node, bytes) of what compilers keep beside what a backward pass asks for, of a microbatch,
    where no loop parts it from the forward pass: of functions whose slope is kept
    (`Operator.keeps_slope`), of those that a comparison could make again what products read, and
    what both passes make alike (`Operator.kept_unlooped`)."""
    graph, mesh, kept = base.graph, dict(flow.plan.mesh), set(base.residuals.values())
    for i, node in enumerate(graph.nodes):
        operator = operator_of(node.op)
        again = operator.compares and kept.isdisjoint(node.outputs) and node.inputs[0] in kept
        if (again or operator.keeps_slope(node)) and not base.grad.isdisjoint(node.outputs):
            tensor = graph.tensors[node.outputs[0]]
            local = local_shape(tensor.shape, flow.source[tensor.name], mesh)
            yield i, pricer.stored_bytes(local, tensor.dtype, base.kind_of(tensor.shape))
    yield from made_alike_bytes(base, flow, pricer)


def made_alike_bytes(base: GraphFacts, flow: Flow, pricer: Pricer) -> Iterator[tuple[int, float]]:
    """(node, bytes) of what both passes of a node make alike, which compilers keep from one to the
    other where no loop parts them (`Operator.kept_unlooped`)."""
    for i, node in enumerate(base.graph.nodes):
        kept = operator_of(node.op).kept_unlooped
        if kept is not None and not base.grad.isdisjoint(node.outputs):
            yield i, float(kept(pieces_of(base, i, (flow.split(i),), pricer))[0])


def _weight_bytes(
    base: GraphFacts, flow: Flow, pricer: Pricer, runs: tuple[RepeatedBlock, ...]
) -> _WeightBytes:
    """What weights take, their gradients and the optimizer's state."""
    graph, plan, recipe, looped = base.graph, flow.plan, pricer.recipe, not base.written_out
    pipeline, offloaded, result = (
        pipeline_of(graph, plan),
        offloaded_names(flow, runs),
        _WeightBytes(),
    )
    elsewhere = weights_of_other_stages(graph, pipeline) if pipeline else frozenset[str]()
    for name, weight in device_weights(flow).items():
        if name in elsewhere:
            continue
        t, here = graph.tensors[name], name not in offloaded
        element = recipe.parameter_bytes if t.is_float else pricer.itemsize(t.dtype)
        stored = weight.stored * element
        result.parameters += stored * here
        users = [i for i, _ in graph.consumers[name]]
        if pipeline and pipeline.copied_weights_share and any(i in pipeline.nodes for i in users):
            result.duplicated += stored * float(pipeline.copied_weights_share)
        if weight.zero_stage == 3:
            for i in users:
                result.gathered[i] = result.gathered.get(i, 0.0) + weight.whole * element
        if name not in flow.grad:
            continue
        # The program takes all gradients, then scatters each: below stage 3 the whole gradient
        # exists, and microbatches add an accumulator.
        gradient = weight.gradient_bytes(recipe, looped=looped) * here
        if here:
            result.gradients += gradient
            if plan.accumulation_steps > 1:
                result.gradients += weight.accumulator_bytes(recipe, looped=looped)
        state, whole = weight.optimizer_bytes(recipe), weight.whole * recipe.gradient_bytes
        if "optimizer" in plan.offload:
            # Repeats of a block one by one, those of a chunk of a pipeline stage at once.
            chunked = pipeline and pipeline.virtual_stages > 1 and users[0] in pipeline.nodes
            result.passing_state.append(
                state * (pipeline.blocks_per_tick if pipeline and chunked else 1)
            )
        else:
            result.state += state
        result.gradients_of.append((users, whole, weight.remaining_bytes(recipe)))
        if name in base.own and users[0] in base.repeated:
            # Under stage 3 sums over microbatches are as long as these gradients: counted above as
            # there all the time, with one microbatch's own beside them while blocks run backward.
            summed = plan.zero_stage == 3 and plan.accumulation_steps > 1
            result.gradients += gradient * (summed and plan.stages == 1)
            result.block_grads += gradient * (not summed or plan.stages == 1)
        elif name in base.own and here:
            where = users[0], plan.zero_stage, plan.accumulation_steps
            one = outside_gradient(base, pricer, *where)
            result.gradients -= one.absent * gradient - one.waits * weight.remaining_bytes(recipe)
            result.prologue_grads += one.made_later * gradient
    if offloaded:
        # Those of one repeat are here; in the optimizer's step rows of others take their place.
        brought = offloaded_weights(flow, runs, pricer)
        result.parameters += brought.weights
        result.gradients += brought.gradients
    return result


@dataclass(frozen=True)
class SavedActivations:
    """Bytes that the backward pass reads. bytes: when it enters the last repeated blocks, which
    have one_repeat of them at once; epilogue: what that saved, gone by then; gone: how much less
    there is in each turn (GraphFacts.turns) of those before them. [turns]"""

    bytes: float
    epilogue: float
    one_repeat: float
    gone: np.ndarray


def _activation_bytes(
    base: GraphFacts, flow: Flow, pricer: Pricer, runs: tuple[RepeatedBlock, ...]
) -> SavedActivations:
    """Bytes of saved activations: what waits in the host's memory is on its way, what recomputed
    blocks save beside it comes on top."""
    offloaded = "activations" in flow.plan.offload
    entering = frozenset(n for run in runs for c in run.carries for n in (c.enters, *c.leaves))
    saved = saved_activations(base, flow, pricer, entering if offloaded else frozenset())
    more, gone = 0.0, saved.gone.copy()
    more += (
        PARKED_ARRAYS
        * flow.plan.overlapped_microbatches
        * sent_activations(base, flow, pricer, runs)[1]
    )
    for first, size in saved_by_blocks_bytes(base, flow, runs, pricer):
        more += size
        gone[: base.turns[first]] += size * (flow.plan.stages == 1)
    more += sum(size for _, size in handed_on(base, flow, runs, pricer))
    return replace(saved, bytes=saved.bytes + more, gone=gone)


def saved_tensors(base: GraphFacts, flow: Flow, pricer: Pricer) -> Sequence[tuple[int, str, float]]:
    """(node, tensor, bytes) of what nodes are the first to save for their backward pass, with what
    their kernels save beside it; of all microbatches that run at the same time. Worked out once a
    flow and pricer."""
    known = flow.memo.get("saved tensors")
    if known is None or known[0] is not base or known[1] is not pricer:
        known = flow.memo["saved tensors"] = base, pricer, _saved_tensors(base, flow, pricer)
    saved: Sequence[tuple[int, str, float]] = known[2]
    return saved


def _saved_tensors(
    base: GraphFacts, flow: Flow, pricer: Pricer
) -> Sequence[tuple[int, str, float]]:
    graph, mesh, found = base.graph, dict(flow.plan.mesh), list[tuple[int, str, float]]()
    # Nodes that are alike and split alike save as much. By id: repeats share layouts and splits.
    sizes: dict[tuple[int, int, int, int], float] = {}
    need, source, shared, splits = flow.need, flow.source, base.shared, flow.splits
    for (i, slot), name in (base.residuals | base.gathered).items():
        layout = need[i, slot] if slot >= 0 else source[name]
        key = shared[i], slot, id(layout), id(splits[i])
        size = sizes.get(key)
        if size is None:
            tensor = graph.tensors[name]
            size = pricer.stored_bytes(
                local_shape(tensor.shape, layout, mesh), tensor.dtype, base.kind_of(tensor.shape)
            ) + saved_beside(base, i, slot, splits[i], pricer)
            if (i, slot) in base.gathered:
                size *= float(reads_whole(base, i, SplitArrays.of((splits[i],), pricer.sizes))[0])
            size = sizes[key] = flow.plan.overlapped_microbatches * size
        found.append((i, name, size))
    return found


def saved_activations(
    base: GraphFacts, flow: Flow, pricer: Pricer, sent: frozenset[str] = frozenset()
) -> SavedActivations:
    """Bytes the backward pass reads: every saved tensor once, in the layout in which the first
    operator that saves it needs it.

    Under recompute a repeated block saves what enters each repeat, and one repeat's own activations
    at a time. Where only weights are gathered again, it saves all, and cuts them out of the stacks
    of all repeats before its backward pass begins (`takes_repeats_whole`). A pipeline stage saves
    for its part of the blocks, and for what comes before them, of all microbatches that wait for
    their backward pass. sent: what enters repeats and waits in the host's memory.
    """
    graph, plan = base.graph, flow.plan
    pipeline, turns, nothing = pipeline_of(graph, plan), base.turns, np.zeros(base.last_run + 2)
    if not base.training:
        kept = sum(size for _, _, size in saved_tensors(base, flow, pricer))
        return SavedActivations(kept, 0.0, 0.0, nothing)
    starts = repeat_starts(plan.repeated_blocks)
    again = plan.recompute != "none" or takes_repeats_whole(base, pricer, plan.zero_stage)
    epilogue, by_turn, one_repeat = 0.0, nothing.tolist(), nothing.tolist()
    microbatches = (
        {
            block: pipeline.saved_microbatches(i) * float(pipeline.stage_share(i))
            for block, i in ((True, pipeline.first), (False, pipeline.end))
        }
        if pipeline
        else {}
    )
    for i, name, size in saved_tensors(base, flow, pricer):
        times = microbatches[i in pipeline.nodes] if pipeline else 1.0
        if i in base.epilogue:
            epilogue += size
            continue
        repeat = saved_in(graph, starts, i, name) if i in starts else -1
        if plan.recompute == "none" or i not in starts:
            by_turn[turns[i]] += size * times
        elif repeat < 0:
            by_turn[turns[i]] += size * times * (name not in sent)
        if repeat == 0 and again:
            one_repeat[turns[i]] += size
    total = sum(by_turn)
    if plan.stages > 1:
        most = max(one_repeat)
        return SavedActivations(total + most, epilogue, most, nothing)
    last = one_repeat[base.last_run]
    gone = total - np.cumsum(by_turn) + last - np.array(one_repeat)
    return SavedActivations(total + last, epilogue, last, gone)


def takes_repeats_whole(base: GraphFacts, pricer: Pricer, zero_stage: int) -> bool:
    """Whether plans without recomputation wrap their blocks all the same, to gather weights again
    (planner.execution.recompute, mode "part"): the wrapped backward pass takes everything that its
    repeat saved at once, where others cut each value out of the stacks when they need it. Uneven
    pipeline stages have no loops."""
    runtime, uneven = pricer.runtime, pricer.mesh.stages > 1 and base.dealt is None
    ours = runtime.kernels is None and not runtime.partitioned
    return zero_stage == 3 and ours and not base.written_out and not uneven


def repeat_is_apart(base: GraphFacts, pricer: Pricer, recompute: str, zero_stage: int) -> bool:
    """Whether what one repeat of a block has at once is counted by itself (`one_repeat`), beside
    workspaces that are gradients alone. What frameworks take was fitted to runs without it. So was
    what programs for one GPU alone take: with no collectives to schedule the compiler makes room
    for stacks of gradients early, beside the logits."""
    uneven = pricer.mesh.stages > 1 and base.dealt is None
    alone = pricer.topology.device.kind == "gpu" and prod(n for _, n in pricer.mesh.shape) == 1
    if pricer.runtime.kernels is not None or base.written_out or uneven or alone:
        return False
    return recompute != "none" or takes_repeats_whole(base, pricer, zero_stage)


def entering_bytes(flow: Flow, pricer: Pricer, run: RepeatedBlock) -> float:
    """Bytes of what enters one repeat of a block, of one microbatch."""
    mesh, tensors = dict(flow.plan.mesh), flow.graph.tensors
    return sum(
        prod(local_shape(tensors[c.enters].shape, c.layout, mesh))
        * pricer.itemsize(tensors[c.enters].dtype)
        for c in run.carries
    )


def sent_activations(
    base: GraphFacts, flow: Flow, pricer: Pricer, runs: tuple[RepeatedBlock, ...]
) -> tuple[float, float]:
    """Bytes of what recomputed blocks send to the host's memory, what enters them and values by
    name, of one microbatch: of all repeats, and the most of one."""
    entering, away = "activations" in flow.plan.offload, offloaded_by_name(flow)
    sent = [(r, entering_bytes(flow, pricer, r)) for r in runs] if entering else []
    for run, replay in recomputed_blocks(flow, runs) if away else ():
        values = saved_in_repeat(base, flow, replay, pricer)
        sent.append((run, sum(size for name, size in values if name in away)))
    each = dict[int, float]()
    for run, size in sent:
        each[run.first] = each.get(run.first, 0.0) + size
    return sum(run.repeats * size for run, size in sent), max(each.values(), default=0.0)


@dataclass(frozen=True)
class Pass:
    """Bytes of a device while node i runs, of one class of nodes. ins, outs: of operands that are
    no weights and of results; made: of results with a gradient."""

    i: int
    ins: float
    outs: float
    made: float
    work: float


def passes(
    base: GraphFacts, flow: Flow, pricer: Pricer, gathered: Mapping[int, float]
) -> Iterator[Pass]:
    """Every class of nodes while it runs, in all copies of the batch. gathered: nodes whose weights
    are counted by the caller."""
    graph, mesh, copies = base.graph, dict(flow.plan.mesh), flow.plan.overlapped_microbatches
    apart = repeat_is_apart(base, pricer, flow.plan.recompute, flow.plan.zero_stage)

    def local(name: str, layout: Layout) -> float:
        tensor = graph.tensors[name]
        return (1 if name in graph.weights else copies) * pricer.stored_bytes(
            local_shape(tensor.shape, layout, mesh), tensor.dtype, base.kind_of(tensor.shape)
        )

    for i, node in enumerate(graph.nodes):
        if base.shared[i] != i:
            continue
        sizes = [
            (name in graph.weights, local(name, flow.need[i, slot]))
            for slot, name in enumerate(node.inputs)
            if name
        ]
        results = [
            (name in base.grad, local(name, flow.source[name])) for name in node.outputs if name
        ]
        ins, outs = (
            sum(size for weight, size in sizes if not weight),
            sum(size for _, size in results),
        )
        weights = 0.0 if gathered else sum(size for weight, size in sizes if weight)
        yield Pass(
            i,
            ins,
            outs,
            sum(size for grad, size in results if grad),
            working_bytes(base, i, flow.split(i), ins, outs, weights, pricer, apart),
        )


def gathered_blocks(base: GraphFacts, pricer: Pricer, copies: int = 1) -> int:
    """Whole weights of how many blocks a loop has at a time under ZeRO stage 3 at least, gradients
    that are not scattered yet among them (docs/memory.md): on GPUs one more for each of so many
    microbatches that run at the same time, where experts' kernels make the gradients of all their
    weights together, beside those of the repeat before, which the compiler scatters while this one
    runs."""
    nodes = base.graph.nodes
    experts = any(operator_of(nodes[i].op).kind == "experts" for i in base.looped)
    ours = pricer.topology.device.kind == "gpu" and not base.written_out
    return GATHERED_BLOCKS + copies * (experts and ours)


def scatters_later(base: GraphFacts, pricer: Pricer, recompute: str) -> bool:
    """Whether a GPU's program scatters the gradients of a repeat while the next one runs, beside
    all weights of a block that is made again; of experts `gathered_blocks` counts them."""
    gpu = pricer.topology.device.kind == "gpu" and not base.written_out
    return gpu and recompute != "none" and gathered_blocks(base, pricer) == GATHERED_BLOCKS


def gathered_bytes(
    base: GraphFacts, plan: Plan, pricer: Pricer, gathered: Mapping[int, float]
) -> float:
    """Bytes of what is gathered of weights at a time, and of gradients before they are scattered:
    as much as the weights of so many of the largest block."""
    layer: dict[int, float] = {}
    for i, size in gathered.items():
        if (block := block_of(plan, i)) < 0:
            layer[block] = layer.get(block, 0.0) + size
    blocks = gathered_blocks(base, pricer, plan.overlapped_microbatches)
    return blocks * max(layer.values(), default=0.0)


def temporaries(
    base: GraphFacts, flow: Flow, pricer: Pricer, gathered: Mapping[int, float], gone: np.ndarray
) -> tuple[float, float]:
    """The largest workspace of one operator (planner.pricing.kernels), with what is gathered of
    weights: before the epilogue, as far as it is above activations that are gone by its turn, and
    in it. A loop gathers weights of its blocks as it runs; stages
    of a pipeline run both in one tick. Of a gathered weight in the epilogue every overlapped
    microbatch has a whole gradient beside it, until all are added up and scattered; on a TPU one
    alone has it, too, which is scattered while the operand's gradient is made."""
    largest, copies = {False: 0.0, True: 0.0}, flow.plan.overlapped_microbatches
    beside = copies > 1 or pricer.topology.device.kind == "tpu"
    terms = copies * pricer.recipe.gradient_bytes / pricer.recipe.parameter_bytes
    full = gathered_bytes(base, flow.plan, pricer, gathered)
    later = full * scatters_later(base, pricer, flow.plan.recompute)
    for p in passes(base, flow, pricer, gathered):
        own = later if p.i in base.repeated else gathered.get(p.i, 0.0)
        behind = p.i in base.epilogue
        own *= 1 + terms * (beside and behind)
        less = 0.0 if behind else float(gone[base.turns[p.i]])
        largest[behind] = max(largest[behind], p.work + own - less)
    return largest[False] + full, largest[True] + full * (flow.plan.stages > 1)


def _forward_bytes(base: GraphFacts, flow: Flow, pricer: Pricer) -> float:
    """The most bytes that a forward pass alone has beside weights and the graph's results: an
    operator's workspace and the results that pass by it."""
    results, workspace = np.zeros((2, len(base.graph.nodes)))
    for p in passes(base, flow, pricer, {}):
        results[p.i], workspace[p.i] = p.outs * (not base.has_its_place(p.i)), p.work
    classes = np.array(base.shared, np.int64)
    passing = passing_bytes(base.passing, results[classes])
    return float((passing + workspace[classes]).max(initial=0.0))


def _liveness(base: GraphFacts, flow: Flow, pricer: Pricer, weights: _WeightBytes) -> Liveness:
    """The backward pass of a program without a loop over blocks."""
    graph, slack = base.graph, 1 + pricer.runtime.memory_slack
    saved, results, workspace, postponed = np.zeros((4, len(graph.nodes)))
    batch = 0.0
    for i, name, size in saved_tensors(base, flow, pricer):
        if name in graph.inputs:
            batch += size
        else:
            saved[i] += size
    for p in passes(base, flow, pricer, weights.gathered):
        results[p.i], workspace[p.i] = p.made, p.work
        postponed[p.i] = p.ins + p.outs if puts_off(base, p.i) else 0.0
    classes = np.array(base.shared, np.int64)  # a pass stands for all nodes like it
    results, workspace, postponed = results[classes], workspace[classes], postponed[classes]
    users, whole, remaining = (
        zip(*weights.gradients_of, strict=True) if weights.gradients_of else ((), (), ())
    )
    buffers = gradient_buffers(
        readers(graph, users),
        np.array(whole, np.float64),
        np.array(remaining, np.float64),
        pricer.recipe,
        flow.plan.zero_stage,
        flow.plan.accumulation_steps,
        pricer.topology.device.kind == "gpu",
    )
    operators = OperatorBytes(
        saved * slack,
        results * slack,
        (workspace + gathered_bytes(base, flow.plan, pricer, weights.gathered)) * slack,
        postponed * slack,
    )
    return backward_liveness(base.passing, operators, buffers, batch * slack)


def block_of(plan: Plan, i: int) -> int:
    """A number for the repeat a node is in; nodes outside runs are each their own."""
    for first, period, repeats in plan.repeated_blocks:
        if first <= i < first + period * repeats:
            return -1 - (first + (i - first) // period)
    return i
