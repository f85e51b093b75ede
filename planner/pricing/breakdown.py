"""What one operator costs and why, for every class of nodes: a strategy file keeps it, so that
`plan explain FILE NODE` need not open the model.

A row holds the node's rule, the layouts of its operands and results under its split, the seconds of
its kernels and what binds them, and the collectives on its tensors. What binds a kernel:
arithmetic, memory bandwidth or the launch floor, whichever of the roofline's three sets its time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from planner.execution import collectives
from planner.execution.collective import CollectiveUse
from planner.execution.engine import Engine, engine_of
from planner.execution.pipeline import Pipeline, pipeline_of
from planner.execution.uneven_collectives import chunk_ticks, uneven_schedule, uneven_stages
from planner.execution.weights_apart import waiting_share, weights_apart
from planner.graph.ir import Node
from planner.ops import operator_of
from planner.pricing.frameworks.dispatch import dispatched
from planner.pricing.frameworks.stage_passes import without_bubbles
from planner.pricing.kernels import kernel_times
from planner.pricing.pricer import Pricer
from planner.pricing.step_time import recomputed_nodes
from planner.sharding.layout import Layout
from planner.sharding.notation import spell_dim, spell_rule
from planner.sharding.rule import Rule, Split

if TYPE_CHECKING:
    from planner.analysis.facts import GraphFacts
    from planner.execution.layout_flow import Flow
    from planner.execution.loops import RepeatedBlock

Row = dict[str, Any]


def details(
    base: GraphFacts, runs: tuple[RepeatedBlock, ...], flow: Flow, pricer: Pricer
) -> dict[str, Row]:
    """Id of the first node of each class -> its row (planner.strategy.types.DetailTable). Seconds
    are of one pass in `kernels.forward_s` and `backward_s`, of a step elsewhere."""
    pipeline, uneven = pipeline_of(base.graph, flow.plan), engine_of(flow.plan) is Engine.UNEVEN
    recomputed = _recomputed_in_stages(flow, pricer) if uneven else recomputed_nodes(flow, runs)
    members: dict[int, list[int]] = {}
    for i, first in enumerate(base.shared):
        members.setdefault(first, []).append(i)
    uses: dict[str, list[CollectiveUse]] = {}
    lockstep = pricer.runtime.kernels is None
    step_uses = collectives.collectives(flow, runs, pricer.itemsize)
    if pricer.runtime.serves:
        step_uses = tuple(dispatched(base, flow, pricer, step_uses))
    for use in step_uses if lockstep else without_bubbles(step_uses, pipeline):
        uses.setdefault(use.what, []).append(use)
    waiting = weights_apart(flow, pipeline)
    rows = {}
    for i, alike in members.items():
        node, rule, split = base.graph.nodes[i], base.rules[i], flow.split(i)
        recomputed_in_epilogue = (
            pipeline is not None and pipeline.schedule == "gpipe" and pipeline.in_epilogue(i)
        )
        rows[node.id] = {
            "rule": spell_rule(rule),
            "sizes": dict(rule.sizes),
            **_sides(base, node, rule, split, flow.plan.order),
            "kernels": _kernels(
                base,
                i,
                split,
                pricer,
                (
                    _passes_on_stages(flow, alike)
                    if uneven
                    else _passes(pipeline, alike, flow.plan.microbatches, lockstep)
                ),
                any(k in recomputed for k in alike)
                if uneven
                else i in recomputed or recomputed_in_epilogue,
                _apart_less(pipeline, alike, waiting_share(node, flow.grad, waiting)),
            ),
            "moves": _moves(_moved(base, alike, by_name=uneven), uses, pricer),
        }
    return rows


def _sides(base: GraphFacts, node: Node, rule: Rule, split: Split, order: Sequence[str]) -> Row:
    labels = base.graph.labels
    operands = [
        _side(labels.get(t, t), rule.operands[slot], rule.operand(slot, split, tuple(order)))
        for slot, t in enumerate(node.inputs)
        if t
    ]
    results = [
        _side(t, rule.results[k], rule.result(k, split, tuple(order)))
        for k, t in enumerate(o for o in node.outputs if o)
    ]
    return {"operands": operands, "results": results}


def _side(name: str, dims: Sequence[Sequence[str]], layout: Layout) -> Row:
    return {
        "tensor": name,
        "dims": [spell_dim(d) for d in dims],
        "layout": [list(a) for a in layout.dims],
        "partial": list(layout.partial),
    }


def _passes(
    pipeline: Pipeline | None, alike: Sequence[int], microbatches: int, lockstep: bool
) -> tuple[int, float]:
    """(passes of a class's nodes on a device in a step, those beside them in bubbles, where stages
    run in lock-step)."""
    if pipeline is None:
        return microbatches * len(alike), 0.0
    wanted = sum(pipeline.useful_passes(k) * pipeline.stage_share(k) for k in alike)
    if not lockstep:
        return int(wanted), 0.0
    return int(wanted), float(
        sum(
            (pipeline.forward_passes(k) - pipeline.useful_passes(k)) * pipeline.stage_share(k)
            for k in alike
        )
    )


def _passes_on_stages(flow: Flow, alike: Sequence[int]) -> tuple[int, float]:
    """(passes, passes in bubbles) of a class's nodes on a device of the stage that has most of
    them, of stages that are cut anywhere."""
    stages, schedule = uneven_stages(flow), uneven_schedule(flow)
    of_stage: Counter[int] = Counter()
    for k, nodes in enumerate(stages.nodes):
        chunk_nodes = len({*nodes}.intersection(alike))
        of_stage[stages.stage_of_chunk(k)] += chunk_nodes * stages.microbatches_per_place(k)
    most_passes = max(of_stage.values())
    in_bubbles = most_passes * (schedule.stages - 1) / schedule.virtual_stages
    return most_passes * schedule.microbatches, in_bubbles


def _recomputed_in_stages(flow: Flow, pricer: Pricer) -> frozenset[int]:
    """Nodes whose kernels run a second time in the backward pass of their stage."""
    return frozenset(
        i
        for tick in chunk_ticks(flow, pricer.itemsize)
        if tick.recomputed is not None
        for i, result in tick.recomputed.nodes.items()
        if result
    )


def _apart_less(pipeline: Pipeline | None, alike: Sequence[int], share: float) -> float:
    """How many backward passes of a class's nodes fewer there are in bubbles, where `share` of each
    is made apart."""
    if pipeline is None or not share:
        return 0.0
    schedule = pipeline.microbatch_schedule
    nodes = sum(float(pipeline.stage_share(k)) for k in alike)
    return share * (schedule.ticks - schedule.weight_ticks) * nodes


def _kernels(
    base: GraphFacts,
    i: int,
    split: Split,
    pricer: Pricer,
    passes: tuple[int, float],
    recomputed: bool,
    fewer_backward: float,
) -> Row:
    forward, backward = kernel_times(base, i, split, pricer)
    one_pass_s = forward * (2 if recomputed else 1) + backward
    return {
        "forward_s": forward,
        "backward_s": backward,
        "again": recomputed,
        "times": passes[0],
        "step_s": one_pass_s * passes[0],
        "bubble_s": one_pass_s * passes[1] - fewer_backward * backward,
        "bound_by": bound_by(base, i, split, pricer),
    }


def bound_by(base: GraphFacts, i: int, split: Split, pricer: Pricer) -> str:
    """What sets the time of a node's forward kernels: arithmetic, memory bandwidth, their launch,
    or nothing (a view, or what a TPU's kernel before it does). Of several kernels, which of the
    first two takes longer by itself."""
    full, _ = kernel_times(base, i, split, pricer)
    if not full:
        free = operator_of(base.graph.nodes[i].op).free
        return "nothing: it is a view" if free else "nothing: the kernel before it does its work"
    if math.isclose(full, pricer.device.launch_s):
        return "the kernel's launch"
    peaks = dict.fromkeys(pricer.topology.device.peak_flops_per_s, math.inf)
    free_memory = _priced_with(pricer, memory_bytes_per_s=math.inf)
    free_arithmetic = _priced_with(pricer, peak_flops_per_s=peaks)
    arithmetic_s, memory_s = (
        kernel_times(base, i, split, p)[0] for p in (free_memory, free_arithmetic)
    )
    return "arithmetic" if arithmetic_s >= memory_s else "memory bandwidth"


def _priced_with(pricer: Pricer, **rates: Any) -> Pricer:
    """The same machine, but for some of its device's rates."""
    topology = replace(pricer.topology, device=replace(pricer.topology.device, **rates))
    return Pricer(topology, pricer.mesh, pricer.runtime, pricer.recipe)


def _moves(
    moved: Mapping[str, Sequence[str]], uses: Mapping[str, Sequence[CollectiveUse]], pricer: Pricer
) -> list[Row]:
    """The collectives on operands and results of a class's nodes and inside their kernels, the
    costliest first, by the names of the first of them.

    A tensor that several nodes read is converted once for all of them: such a collective is listed
    at each.
    """
    result: dict[tuple[str, str, str, str], Row] = {}
    for what, names in moved.items():
        for use in (use for name in names for use in uses.get(name, ())):
            axes = "+".join(use.axes)
            row = result.setdefault(
                (use.kind, axes, use.phase, what),
                {
                    "kind": use.kind,
                    "axes": axes,
                    "phase": use.phase,
                    "tensor": what,
                    "count": 0,
                    "payload_bytes": 0,
                    "time_s": 0.0,
                },
            )
            row["count"] += use.count
            row["payload_bytes"] += use.total_bytes
            row["time_s"] += pricer.use_s(use)
    return sorted(
        result.values(), key=lambda r: (-r["time_s"], r["phase"], r["kind"], r["axes"], r["tensor"])
    )


def _moved(base: GraphFacts, alike: Sequence[int], *, by_name: bool) -> dict[str, list[str]]:
    """What collectives on a class's nodes are listed under -> under which names: activations of all
    repeats under those of the first or, by name, each under its own, as every weight."""
    graph, labels = base.graph, base.graph.labels
    node = graph.nodes[alike[0]]

    def names(first: str, of_all: Iterable[str]) -> list[str]:
        of_each = of_all if by_name or first in graph.weights else [first]
        return list(dict.fromkeys(labels.get(t, t) for t in of_each))

    tensors = {
        labels.get(t, t): names(t, (sides(graph.nodes[k])[slot] for k in alike))
        for sides in (attrgetter("inputs"), attrgetter("outputs"))
        for slot, t in enumerate(sides(node))
        if t
    }
    return {**tensors, node.id: [graph.nodes[k].id for k in alike] if by_name else [node.id]}
