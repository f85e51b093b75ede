"""The price of one whole plan, from its flow: time by part, memory by part, communication exactly.

Every printed figure comes from here, for our plans and for the baselines alike. With m microbatches:

    step = m * (forward + backward + recomputed) + gradient reduction * (1 - overlap) + optimizer + bubble + pull and push of hosted tables
    peak = parameters + gradients + optimizer state + kept activations + temporary

The optimizer's time includes, of several microbatches, what adding each one's gradients to their sums moves.

There are two moments of most memory. When the backward pass of the last repeated block begins, what the tail behind it (head and loss) kept is gone,
and the gradients of all repeats are there. While the tail's own backward pass runs it is the other way round. `temporary` is the larger of what
lives in the first (working set of an operator) and in the second (what the tail keeps, its working set, less the gradients not there yet).
A program without a loop over blocks is walked operator by operator (planner.moments); its parts are those of the peak.

With pipeline stages (planner.pipeline) the step takes m + stages - 1 ticks; the arithmetic of stages - 1 of them is the bubble. A stage holds its own blocks and
everything outside the blocks, and what several microbatches keep.

Optimizer state that waits in the host's memory is read where it is used and written back parameter by parameter, of blocks repeat by repeat (PARKED_ARRAYS
on their way), after the backward pass: it takes room only where those take more than activations and temporaries took before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from costmodels.memory import Breakdown
from planner import account
from planner.base import Base
from planner.buckets import launched, launching_s, seconds
from planner.copies import hidden_shares, launch_bytes, per_launch
from planner.emit.replay import Replay, repeated
from planner.emit.runs import Run, dealt_run, find_run, inner_flow, outer_flow
from planner.flow import Flow, Plan, cut_layout, derive, stored_layout
from planner.hosted import pull_push_s
from planner.kernels import kept_beside, kernel_times, savers, working_bytes
from planner.layout import Layout, group, local_shape
from planner.moments import Operators, Walk, Weights, gradient_room, left_bytes, puts_off, readers, walk
from planner.parked import parked, parked_ways
from planner.pipeline import Pipeline, pipeline_of
from planner.price import Pricer

PARKED_ARRAYS = 2
"""Parameters (of blocks those of one repeat) whose new state is on its way to the host's memory at the same time: one that is written, one that is made.
The GPU compiler's schedule of a step with twelve equal parameters has two."""

@dataclass(frozen=True)
class Cost:
    """Price of a plan on one device, per optimizer step (training) or forward pass."""

    step_time_s: float
    compute_time_s: float
    recompute_time_s: float
    bubble_time_s: float
    """Arithmetic of ticks in which a pipeline stage has no microbatch of its own."""
    communication_time_s: float
    exposed_communication_time_s: float
    optimizer_time_s: float
    """The update, of several microbatches the sums of their gradients, and of virtual devices what loops over blocks copy (Pricer.loop_s)."""
    flops_per_device: int
    """2MNK of products forward and backward; what is computed again is left out."""
    memory: Breakdown
    traffic: Mapping[str, Mapping[str, Mapping[str, object]]]
    distinct_work: float
    """Share of the devices' arithmetic that is neither duplicated nor padding."""
    exposed_by_axes: Mapping[tuple[str, str], float]
    tables_time_s: float = 0.0
    """Pulling rows of hosted tables before the step and pushing them after it (planner.hosted)."""
    launch_time_s: float = 0.0
    """Launches of collectives that may go together (planner.buckets)."""


def price_plan(base: Base, plan: Plan, pricer: Pricer) -> tuple[Cost, Flow, tuple[Run, ...]]:
    """Derive the flow of a plan and add up its price. Raises PlanError P068 where its blocks cannot be dealt out over pipeline stages."""
    flow, runs = derived(base, plan)
    return price_flow(base, flow, runs, pricer), flow, runs


def derived(base: Base, plan: Plan) -> tuple[Flow, tuple[Run, ...]]:
    """The flow of a plan and its repeated blocks. Raises PlanError P068 where they cannot be dealt out over pipeline stages."""
    flow = derive(base.graph, plan, training=base.training, rules=base.rules, grad=base.grad)
    found = [find_run(flow, *run) for run in plan.runs] if not plan.cuts else []
    runs = tuple(r for r in found if isinstance(r, Run))
    if pipeline := pipeline_of(base.graph, plan):
        dealt_run(flow, runs, pipeline, [r for r in found if isinstance(r, str)])
    return flow, runs


def price_flow(base: Base, flow: Flow, runs: tuple[Run, ...], pricer: Pricer, uses: tuple[account.Use, ...] | None = None) -> Cost:
    """Price of a derived flow. uses: its collectives, where they are known."""
    if pricer.runtime.kernels is not None:
        from planner.framework import price

        return price(base, flow, runs, pricer)
    if flow.plan.cuts:
        from planner import unequal_cost

        return unequal_cost.price(base, flow, pricer)
    plan, graph, mesh = flow.plan, flow.graph, dict(flow.plan.mesh)
    micro, pipeline = plan.microbatches, pipeline_of(graph, plan)
    compute = again = bubble = 0.0
    replayed, done = made_again(flow, runs), dict[tuple, tuple[float, float, float]]()
    for i in range(len(graph.nodes)):
        place = (i in pipeline.nodes, pipeline.late(i), i in pipeline.twice) if pipeline else ()
        key = (base.shared[i], id(flow.split(i)), i in replayed, place)
        if key not in done:
            f, b = kernel_times(base, i, flow.split(i), pricer)
            twice = f if i in replayed or (pipeline and pipeline.schedule == "gpipe" and pipeline.late(i)) else 0.0
            turn = (f + b + twice) * (float(pipeline.share(i)) if pipeline else 1.0)
            wanted = pipeline.wanted(i) if pipeline else micro
            done[key] = wanted * turn, wanted * turn * twice / (f + b + twice or 1.0), float(pipeline.turns(i) - wanted) * turn if pipeline else 0.0
        own, more, idle = done[key]
        compute, again, bubble = compute + own, again + more, bubble + idle
    uses = account.collectives(flow, runs, pricer.itemsize) if uses is None else uses
    sending = _sending(base, flow, runs, uses, pricer)
    optimizer = _optimizer_s(flow, pipeline, pricer) + _loops_s(base, flow, runs, pipeline, pricer) if base.training else 0.0
    if parked(flow, runs):
        moved = parked_ways(flow, runs, pricer)
        optimizer += pricer.host_s(micro * moved.added + moved.once)
    tables = pull_push_s(flow, pricer)
    flops = account.dot_flops(flow, again=False)
    distinct = float(base.model_flops * (micro if base.training else 1) / (flops * max(plan.devices, 1))) if flops else 1.0
    distinct = distinct if plan.copies == 1 else min(1.0, distinct)  # copies share products of weights alone
    assert distinct <= 1 + 1e-9, f"{distinct} of the devices' arithmetic is useful"
    return Cost(
        compute + bubble + sending.exposed_s + optimizer + tables, compute, again, bubble, sending.exposed_s + sending.hidden_s, sending.exposed_s, optimizer, flops,
        memory(base, flow, pricer, runs), account.traffic(uses, plan.order, mesh), distinct, sending.by_axes, tables, sending.launching_s,
    )  # fmt: skip


def price_resent(base: Base, flow: Flow, runs: tuple[Run, ...], pricer: Pricer, uses: tuple[account.Use, ...], cost: Cost) -> Cost:
    """Price of a flow from that of the same one whose collectives travel together up to another size: nothing but their times depends on it."""
    if pricer.runtime.kernels is not None or flow.plan.cuts:
        return price_flow(base, flow, runs, pricer)
    sending = _sending(base, flow, runs, uses, pricer)
    return replace(cost, step_time_s=cost.compute_time_s + cost.bubble_time_s + sending.exposed_s + cost.optimizer_time_s + cost.tables_time_s,
                   communication_time_s=sending.exposed_s + sending.hidden_s, exposed_communication_time_s=sending.exposed_s, exposed_by_axes=sending.by_axes,
                   launch_time_s=sending.launching_s)  # fmt: skip


@dataclass(frozen=True)
class _Sending:
    """Seconds of communication in a step, with the host too: what shows (of collectives also by kind and axes), what hides, and launches of what may go together."""

    exposed_s: float
    hidden_s: float
    by_axes: Mapping[tuple[str, str], float]
    launching_s: float


def _sending(base: Base, flow: Flow, runs: tuple[Run, ...], uses: tuple[account.Use, ...], pricer: Pricer) -> _Sending:
    overlapped = exposed = 0.0
    by_axes: dict[tuple[str, str], float] = {}
    sent = sent_s(base, flow, runs, uses, pricer)
    for use, each, hidden in sent:
        exposed += each - hidden
        overlapped += hidden
        label = (use.kind, "+".join(use.axes))
        by_axes[label] = by_axes.get(label, 0.0) + each - hidden
    micro = flow.plan.microbatches
    if "activations" in flow.plan.offload:  # out and in again in every microbatch
        exposed += 2 * micro * pricer.host_s(sent_activations(flow, pricer, runs)[0])
    if parked(flow, runs):
        exposed += micro * pricer.host_s(parked_ways(flow, runs, pricer).each)
    return _Sending(exposed, overlapped, by_axes, launching_s(sent, pricer))


def sent_s(base: Base, flow: Flow, runs: tuple[Run, ...], uses: tuple[account.Use, ...], pricer: Pricer) -> list[tuple[account.Use, float, float]]:
    """Every collective with its seconds, and those of them that hide: of gradients under the backward pass, of a copy of the batch under other copies."""
    sizes = launched(uses, flow.plan.bucket_bytes)
    if flow.plan.copies == 1:
        return seconds(uses, pricer, sizes)
    mesh = dict(flow.plan.mesh)
    most = launch_bytes(uses, mesh)
    ways = {(use.kind, use.axes) for use in uses if use.bucketed}
    rows = seconds(uses, pricer, {way: min(sizes.get(way, pricer.runtime.bucket_bytes), most.get(way[0], np.inf) * per_launch(*way, mesh)) for way in ways})
    shares = hidden_shares(base, flow, runs, [(use, s) for use, s, _ in rows], made_again(flow, runs), pricer)
    return [(use, s, hidden + share * s) for (use, s, hidden), share in zip(rows, shares, strict=True)]


def _optimizer_s(flow: Flow, pipeline: Pipeline | None, pricer: Pricer) -> float:
    """Seconds of a device's update, and of the sums of gradients over several microbatches: of pieces where the optimizer level cuts them first."""
    graph, mesh, turns, copies = flow.graph, dict(flow.plan.mesh), flow.plan.turns, flow.plan.copies
    elsewhere = account.of_other_stages(graph, pipeline) if pipeline else frozenset[str]()
    sizes: dict[tuple, tuple[int, int, int]] = {}
    updated = added = 0.0
    for n, w in flow.weights.items():
        if n in flow.grad and n not in elsewhere:
            shape = graph.tensors[n].shape
            if (shape, id(w)) not in sizes:
                piece, whole = (prod(local_shape(shape, layout, mesh)) for layout in (cut_layout(w), w.layout))
                sizes[shape, id(w)] = piece, piece if w.zero >= 2 or w.dim < 0 else whole, whole
            piece, summed, whole = sizes[shape, id(w)]
            updated += piece
            if turns > 1:
                added += summed * (float(pipeline.sums(i for i, _ in graph.consumers[n])) if pipeline else turns)
            added += whole * turns * (copies - 1)  # the copies' gradients of one turn
    return pricer.optimizer_s(updated, flow.plan.offload) + pricer.sum_s(added * pricer.recipe.gradient_bytes)


def _loops_s(base: Base, flow: Flow, runs: tuple[Run, ...], pipeline: Pipeline | None, pricer: Pricer) -> float:
    """Seconds that a device's loops over repeated blocks take to copy what lies in stacks (Pricer.loop_s), in all microbatches."""
    if not runs or not pricer.topology.virtual:
        return 0.0
    mesh, weights = dict(flow.plan.mesh), 0.0
    for run in runs:
        for names in run.weights:
            held = names[: pipeline.per_stage] if pipeline and run.first == pipeline.first else names
            shape = flow.graph.tensors[names[0]].shape
            weights += len(held) * prod(local_shape(shape, stored_layout(flow.weights[names[0]]), mesh)) * (names[0] in flow.grad)
    inside = {i for run in runs for i in range(run.first, run.end)}
    kept = sum(size * (float(pipeline.share(i)) if pipeline else 1.0) for i, _, size in kept_tensors(base, flow, pricer) if i in inside)
    return flow.plan.microbatches * pricer.loop_s(weights * pricer.recipe.parameter_bytes, kept)


def _replays(flow: Flow, runs: tuple[Run, ...]) -> Iterator[tuple[Run, Replay]]:
    """What recomputed blocks run a second time, for one repeat of each."""
    outer = flow
    for run in runs:
        outer = outer_flow(outer, run)
    for run in runs if flow.plan.recompute != "none" else ():
        replay = repeated(inner_flow(outer, run), run)
        if replay:
            yield run, replay


def made_again(flow: Flow, runs: tuple[Run, ...]) -> frozenset[int]:
    """Nodes, of all repeats, whose kernels run a second time in the backward pass of recomputed blocks."""
    return frozenset(i + r * run.period for run, replay in _replays(flow, runs) for i, result in replay.nodes.items() if result for r in range(run.repeats))


def kept_collectives(flow: Flow, runs: tuple[Run, ...], pricer: Pricer) -> float:
    """Bytes of the results of collectives that recomputed blocks keep, of all repeats."""
    total, mesh, pipeline = 0.0, dict(flow.plan.mesh), pipeline_of(flow.graph, flow.plan)
    for run, replay in _replays(flow, runs):
        times = run.repeats if pipeline is None else pipeline.kept_passes * (pipeline.per_tick if run.first == pipeline.first else run.repeats)
        for name, way in replay.kept:
            step = way[-1]
            size = step.forward_elements * pricer.itemsize(flow.graph.tensors[name].dtype)
            total += times * size / (group(step.axes, mesh) if step.forward == "reduce-scatter" else 1)
    return total * flow.plan.copies


@dataclass(frozen=True)
class Moments:
    """Bytes of a device that the two moments of most memory are made of (module docstring). late: gradients that the tail does not meet;
    tail: activations that it keeps; work, end: the largest working set of an operator before the tail, and in it.

    walk: of a program without a loop over blocks. `gradients` are then the sums of microbatches alone, `work` and `end` are nothing."""

    parameters: float
    gradients: float
    state: float
    activations: float
    late: float
    tail: float
    work: float
    end: float
    walk: Walk | None = None


def memory(base: Base, flow: Flow, pricer: Pricer, runs: tuple[Run, ...] = ()) -> Breakdown:
    """Peak memory by part, in bytes of the recipe."""
    m = moments(base, flow, pricer, runs)
    if m.walk is not None:
        i = m.walk.at
        return Breakdown(int(m.parameters), int(m.gradients + m.walk.gradients[i]), int(m.state), int(m.walk.activations[i]), int(m.walk.temporary[i]))
    return Breakdown(int(m.parameters), int(m.gradients), int(m.state), int(m.activations), int(max(m.work, m.tail + m.end - m.late)))


def moments(base: Base, flow: Flow, pricer: Pricer, runs: tuple[Run, ...] = ()) -> Moments:
    """What is held when, in bytes of the recipe."""
    graph, mesh, recipe = base.graph, dict(flow.plan.mesh), pricer.recipe
    parameters = gradients = state = late = copied = 0.0
    gathered: dict[int, float] = {}
    on_way: list[float] = []
    reduced: list[tuple[list[int], float, float]] = []
    parts: dict[tuple, tuple[float, float, float]] = {}
    pipeline = pipeline_of(graph, flow.plan)
    elsewhere = account.of_other_stages(graph, pipeline) if pipeline else frozenset[str]()
    away = parked(flow, runs)
    for name, w in flow.weights.items():
        if name in elsewhere:
            continue
        t = graph.tensors[name]
        key = (t.shape, id(w))
        if key not in parts:
            parts[key] = tuple(float(prod(local_shape(t.shape, x, mesh))) for x in (stored_layout(w), w.layout, cut_layout(w)))  # type: ignore[assignment]
        own, full, cut = parts[key]
        stored = own * (recipe.parameter_bytes if t.is_float else pricer.itemsize(t.dtype))
        parameters += stored * (name not in away)
        if pipeline and pipeline.copies and any(i in pipeline.nodes for i, _ in graph.consumers[name]):
            copied += stored * float(pipeline.copies)
        if name in flow.grad:
            # The program takes all gradients, then scatters each: below level 3 the whole gradient exists, and microbatches add an accumulator.
            level = w.zero if w.dim >= 0 else 0
            several = flow.plan.turns > 1
            held = (cut if level >= 2 else full) if several and (level < 3 or base.written_out) else 0
            gradients += (held + (0 if base.written_out else cut if level == 3 else full)) * recipe.gradient_bytes * (name not in away)
            users = [i for i, _ in graph.consumers[name]]
            if "optimizer" in flow.plan.offload:  # repeats of a block one by one, those of a chunk of a pipeline stage at once
                on_way.append(cut * recipe.state_bytes * (pipeline.per_tick if pipeline and pipeline.virtual > 1 and users[0] in pipeline.nodes else 1))
            else:
                state += cut * recipe.state_bytes
            reduced.append((users, full * recipe.gradient_bytes, cut * left_bytes(recipe, level)))
            for i, _ in graph.consumers[name]:
                if w.zero == 3 and w.dim >= 0:
                    gathered[i] = gathered.get(i, 0.0) + full * recipe.parameter_bytes
                if name in base.own and i in base.repeated and flow.plan.zero < 3 and name not in away:
                    late += full * recipe.gradient_bytes
    if away:  # those of one repeat are here; in the optimizer's step rows of others take their place
        here = parked_ways(flow, runs, pricer)
        parameters, gradients = parameters + here.weights, gradients + here.gradients
    sending = "activations" in flow.plan.offload
    activations, tail = kept_activations(base, flow, pricer, frozenset(n for run in runs for c in run.carries for n in (c.enters, *c.leaves)) if sending else frozenset())
    if sending:
        activations += PARKED_ARRAYS * flow.plan.copies * sent_activations(flow, pricer, runs)[1]
    activations += kept_collectives(flow, runs, pricer)
    slack = 1 + pricer.runtime.memory_slack
    if base.written_out:
        whole, piece = (np.array([row[k] for row in reduced], np.float64) for k in (1, 2))
        weights = gradient_room(readers(graph, [row[0] for row in reduced]), whole, piece, recipe, flow.plan.zero, flow.plan.turns)
        found = Moments(parameters, gradients, state, activations * slack, late, 0.0, 0.0, 0.0, _walk(base, flow, pricer, gathered, weights))
    else:
        work, end = temporaries(base, flow, pricer, gathered)
        found = Moments(parameters, gradients, state, activations * slack, late, tail * slack, work * slack + copied, end * slack + copied)
    return replace(found, state=state + max(0.0, sum(sorted(on_way)[-PARKED_ARRAYS:]) - _given_back(found)))


def _given_back(m: Moments) -> float:
    """Bytes of the peak that the optimizer's step has no more."""
    return m.walk.peak - float(m.walk.gradients[0]) if m.walk is not None else m.activations + max(m.work, m.tail + m.end - m.late)


def kept_tensors(base: Base, flow: Flow, pricer: Pricer) -> Iterator[tuple[int, str, float]]:
    """(node, tensor, bytes) of what nodes are the first to keep for their backward pass, with what their kernels keep beside it; of all copies of the batch."""
    graph, mesh = base.graph, dict(flow.plan.mesh)
    sizes: dict[tuple, float] = {}
    for (i, slot), name in savers(base).items():
        layout, tensor = flow.need[i, slot] if slot >= 0 else flow.source[name], graph.tensors[name]
        key = (tensor.shape, tensor.dtype, id(layout))
        if key not in sizes:
            sizes[key] = pricer.stored_bytes(local_shape(tensor.shape, layout, mesh), tensor.dtype, tensor.shape in base.images)
        yield i, name, flow.plan.copies * (sizes[key] + kept_beside(base, i, slot, flow.split(i), pricer))


def kept_activations(base: Base, flow: Flow, pricer: Pricer, sent: frozenset[str] = frozenset()) -> tuple[float, float]:
    """Bytes the backward pass reads, and those of the tail apart: every kept tensor once, in the layout its first keeper needs it.

    Under recompute a repeated block keeps what enters each repeat, and one repeat's own activations at a time. A pipeline stage keeps its part of the
    blocks, and what comes before them, of all microbatches that wait for their backward pass. sent: what enters repeats and waits in the host's memory.
    """
    graph, plan = base.graph, flow.plan
    pipeline = pipeline_of(graph, plan)
    if not base.training:
        return 0.0, 0.0
    inside = {i: (first, period) for first, period, repeats in plan.runs for i in range(first, first + period * repeats)}
    total = tail = 0.0
    transient: dict[int, float] = {}
    many = {block: pipeline.kept(i) * float(pipeline.share(i)) for block, i in ((True, pipeline.first), (False, pipeline.end))} if pipeline else {}
    for i, name, size in kept_tensors(base, flow, pricer):
        times = many[i in pipeline.nodes] if pipeline else 1.0
        if i in base.tail:
            tail += size
        elif plan.recompute != "none" and i in inside:
            first, period = inside[i]
            made = graph.producer.get(name, -1)
            entering = made < first or (i - first) // period != (made - first) // period
            if entering:
                total += size * times * (name not in sent)
            elif (i - first) // period == 0:
                transient[first] = transient.get(first, 0.0) + size
        else:
            total += size * times
    return total + max(transient.values(), default=0.0), tail


def sent_activations(flow: Flow, pricer: Pricer, runs: tuple[Run, ...]) -> tuple[float, float]:
    """Bytes of what enters recomputed blocks: of all repeats, and the most that enters one."""
    mesh, tensors = dict(flow.plan.mesh), flow.graph.tensors
    each = [sum(prod(local_shape(tensors[c.enters].shape, c.layout, mesh)) * pricer.itemsize(tensors[c.enters].dtype) for c in run.carries) for run in runs]
    return sum(run.repeats * size for run, size in zip(runs, each, strict=True)), max(each, default=0.0)


@dataclass(frozen=True)
class Pass:
    """Bytes of a device while node i runs, of one class of nodes. ins, outs: of operands that are no weights and of results; made: of results with a gradient."""

    i: int
    ins: float
    outs: float
    made: float
    work: float


def passes(base: Base, flow: Flow, pricer: Pricer, gathered: Mapping[int, float]) -> Iterator[Pass]:
    """Every class of nodes while it runs, in all copies of the batch. gathered: nodes whose weights are counted by the caller."""
    graph, mesh, copies = base.graph, dict(flow.plan.mesh), flow.plan.copies

    def local(name: str, layout: Layout) -> float:
        tensor = graph.tensors[name]
        return (1 if name in graph.weights else copies) * pricer.stored_bytes(local_shape(tensor.shape, layout, mesh), tensor.dtype, tensor.shape in base.images)

    for i, node in enumerate(graph.nodes):
        if base.shared[i] != i:
            continue
        sizes = [(name in graph.weights, local(name, flow.need[i, slot])) for slot, name in enumerate(node.inputs) if name]
        results = [(name in base.grad, local(name, flow.source[name])) for name in node.outputs if name]
        ins, outs = sum(size for weight, size in sizes if not weight), sum(size for _, size in results)
        weights = 0.0 if gathered else sum(size for weight, size in sizes if weight)
        yield Pass(i, ins, outs, sum(size for grad, size in results if grad), working_bytes(base, i, flow.split(i), ins, outs, weights, pricer))


def gathered_bytes(plan: Plan, gathered: Mapping[int, float]) -> float:
    """Bytes of two layers' gathered weights, and of the gradient of one before it is scattered."""
    layer: dict[int, float] = {}
    for i, size in gathered.items():
        layer[block_of(plan, i)] = layer.get(block_of(plan, i), 0.0) + size
    return 3 * max(layer.values(), default=0.0)


def temporaries(base: Base, flow: Flow, pricer: Pricer, gathered: Mapping[int, float]) -> tuple[float, float]:
    """The largest working set of one operator (planner.kernels), with gathered weights of two layers: before the tail, and in it."""
    largest = {False: 0.0, True: 0.0}
    for p in passes(base, flow, pricer, gathered):
        largest[p.i in base.tail] = max(largest[p.i in base.tail], p.work)
    full = gathered_bytes(flow.plan, gathered)
    return largest[False] + full, largest[True] + full


def _walk(base: Base, flow: Flow, pricer: Pricer, gathered: Mapping[int, float], weights: Weights) -> Walk:
    """The backward pass of a program without a loop over blocks."""
    graph, slack = base.graph, 1 + pricer.runtime.memory_slack
    kept, made, work, waits = np.zeros((4, len(graph.nodes)))
    batch = 0.0
    for i, name, size in kept_tensors(base, flow, pricer):
        if name in graph.inputs:
            batch += size
        else:
            kept[i] += size
    for p in passes(base, flow, pricer, gathered):
        made[p.i], work[p.i] = p.made, p.work
        waits[p.i] = p.ins + p.outs if puts_off(base, p.i) else 0.0
    own = Operators(kept * slack, made * slack, (work + gathered_bytes(flow.plan, gathered)) * slack, waits * slack)
    return walk(base.passing, own, weights, batch * slack)


def block_of(plan: Plan, i: int) -> int:
    """A number for the repeat a node is in; nodes outside runs are each their own."""
    for first, period, repeats in plan.runs:
        if first <= i < first + period * repeats:
            return -1 - (first + (i - first) // period)
    return i
