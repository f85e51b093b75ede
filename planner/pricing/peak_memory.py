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

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

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
from planner.analysis.facts import GraphFacts
from planner.analysis.passing import puts_off, readers, waiting_products
from planner.execution.even_collectives import weights_of_other_stages
from planner.execution.layout_flow import Flow
from planner.execution.loops import RepeatedBlock, gradients_at_once, repeated_blocks
from planner.execution.pipeline import pipeline_of
from planner.execution.techniques import LOOPED, WRITTEN_OUT
from planner.execution.weight_offload import offloaded_names
from planner.ops import operator_of
from planner.pricing.device_weights import device_weights
from planner.pricing.kernels import pieces_of
from planner.pricing.outside_gradients import outside_gradient
from planner.pricing.pricer import Pricer
from planner.pricing.saved_activations import PARKED_ARRAYS, activation_bytes, saved_tensors
from planner.pricing.weight_offload import offloaded_weights
from planner.pricing.workspaces import gathered_bytes, passes, temporaries
from planner.sharding.layout import local_shape


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
        peak_point = parts.liveness.at
        gradients += float(parts.liveness.gradients[peak_point])
        activations = float(parts.liveness.activations[peak_point])
        temporary = float(parts.liveness.temporary[peak_point])
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
    saved = activation_bytes(base, flow, pricer, runs)
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
    it, is there from its own backward pass on until then, when the logits are gone. So it is not
    where programs make a repeat's gradients at once, and in a loop over microbatches there may be
    no collective that they could run beside."""
    plan, nodes, blocks = flow.plan, flow.graph.nodes, repeated_blocks(flow)[0]
    if blocks and all(gradients_at_once(flow, block) for block in blocks):
        return base.putting_nothing_off
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
    return base.putting_all_off if beside else base.putting_nothing_off


def _of_written_out(base: GraphFacts, flow: Flow, pricer: Pricer) -> MemoryParts:
    """What is on a device when, as `memory_parts`, of a plan without loops. What is kept for a
    node's slopes is there from its forward pass to its backward pass."""
    apart = replace(flow, plan=replace(flow.plan, repeated_blocks=(), blocks=LOOPED))
    parts = memory_parts(base, apart, pricer)
    if parts.liveness is None:  # forward passes keep nothing
        return parts
    slack = 1 + pricer.runtime.memory_slack
    slopes, own_slopes = np.zeros((2, len(base.graph.nodes)))
    for i, size in slope_bytes(base, apart, pricer):
        slopes[i] += size * slack
    for i, size in made_alike_bytes(base, apart, pricer):
        own_slopes[i] = size * slack  # part of the workspace of its own backward pass
    live = parts.liveness.activations + np.cumsum(slopes) - own_slopes
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
    saved, results, workspace, postponed, waiting = np.zeros((5, len(graph.nodes)))
    batch, wait = 0.0, waiting_products(base)
    for i, name, size in saved_tensors(base, flow, pricer):
        if name in graph.inputs:
            batch += size
        else:
            saved[i] += size
    for p in passes(base, flow, pricer, weights.gathered):
        results[p.i], workspace[p.i] = p.made, p.work
        if p.i in wait:
            waiting[p.i] = p.made + wait[p.i] * p.ins
        else:
            postponed[p.i] = p.ins + p.outs if puts_off(base, p.i) else 0.0
    classes = np.array(base.shared, np.int64)  # a pass stands for all nodes like it
    results, workspace, postponed, waiting = (
        of_classes[classes] for of_classes in (results, workspace, postponed, waiting)
    )
    users, whole, remaining = (
        zip(*weights.gradients_of, strict=True) if weights.gradients_of else ((), (), ())
    )
    buffers = gradient_buffers(
        readers(graph, users, base.end_of_blocks),
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
        waiting * slack,
    )
    return backward_liveness(base.passing, operators, buffers, batch * slack)
