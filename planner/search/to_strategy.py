"""From what a search found to a Strategy: nodes with their runner-ups, tensors with their layouts,
costs, baselines, assumptions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from costmodels.ranges import Asked, TimeRange, time_range
from planner.analysis.facts import GraphFacts
from planner.execution.block_values import kept_by_name
from planner.execution.layout_flow import Flow
from planner.execution.pipeline import Pipeline, pipeline_of
from planner.execution.plan import Plan
from planner.execution.techniques import OF_PLANS, write_table
from planner.execution.uneven_pipeline import UnevenPipeline, uneven_pipeline_of
from planner.graph.findings import ordered
from planner.graph.ir import Graph
from planner.machine.topology import Mesh
from planner.ops import operator_of
from planner.ops.attention_kernels import Chosen, chosen, is_attention
from planner.ops.expert_capacity import capacity_of
from planner.ops.expert_kernels import FLOAT8
from planner.ops.expert_load import dropped, dropped_choices, expert_nodes
from planner.ops.experts import kernel_of_experts
from planner.pricing.breakdown import details
from planner.pricing.cost import TOLD_APART, Cost, IslandShare
from planner.pricing.host_memory import offloaded_bytes
from planner.pricing.host_tables import host_bytes
from planner.pricing.islands import as_priced
from planner.pricing.kernels import kernel_times
from planner.pricing.plan_price import price_plan
from planner.search.findings import of_plan, of_request, rows, unfused, unsure
from planner.search.plausible import too_fast
from planner.search.request import Candidate, Request, SearchResult
from planner.sharding.layout import padded
from planner.solvers.problem import FORBIDDEN, Problem
from planner.space.assemble import PICO
from planner.space.variables import Space
from planner.strategy.strategy import Strategy, round_figures
from planner.workload.model import Model

TOOL_VERSION, COST_MODEL_VERSION = "0.1.0", "1"
ROUNDING_S = 10 / PICO
"""What rounding can add up to per node of a graph: its own cost, its hubs' and its conversions',
half a picosecond each."""


def compose(
    model: Model,
    request: Request,
    result: SearchResult,
    provenance: Mapping[str, Any],
    assumptions: tuple[str, ...],
) -> Strategy:
    """The strategy of the best candidate (which must exist)."""
    best = result.best
    assert best is not None
    base = result.base
    pricer = _pricer(request, best)
    pricer_cost, flow, runs = price_plan(base, best.plan, pricer)
    graph = base.graph
    techniques = write_table(best.plan) | stage_starts(best.plan, graph) | hosted_tables(graph)
    workload = {
        **model.workload.to_json(model.plain, model.batch, model.loss),
        "precision": request.recipe.name,
        "runtime": request.runtime.name,
    }
    nodes = node_table(base, flow, result)
    offloaded = offloaded_bytes(base, flow, pricer, runs)
    costs = cost_table(pricer_cost, request, base, model, best.plan, offloaded)
    kernels = attention_kernels(request, base, flow)
    say_kernels(nodes, attention_kernel=kernels, expert_kernel=expert_kernels(request, base, flow))
    for tensor, value in kept_by_name(flow).items():
        nodes[graph.nodes[graph.producer[tensor]].id]["saved_as"] = value
    findings = rows(
        ordered(
            (
                *of_plan(model, graph, costs, nodes, best.plan.microbatches),
                *of_request(model, request),
                *unfused(kernels, costs, nodes, best.plan.microbatches),
                *unsure(range_of(request, base, model, best.plan)),
                *result.findings,
                *too_fast(request, best.cost, base),
            )
        )
    )
    strategy = Strategy(
        model=model_table(model, graph),
        topology=request.topology.to_json(),
        workload=workload,
        mesh=mesh_table(request, best.mesh),
        nodes=nodes,
        blocks=block_table(graph, flow, base),
        tensors=tensor_table(graph, flow, base),
        techniques=techniques,
        costs=costs,
        solver=solver_table(request, result, best, len(graph.nodes)),
        baselines={
            k: baseline_row(c, request, base, model) for k, c in sorted(result.baselines.items())
        },
        assumptions=assumptions,
        findings=findings,
        provenance=provenance,
        details=details(base, runs, *as_priced(base, flow, runs, pricer)),
        graph=graph,
    )
    return replace(strategy, provenance={**provenance, "decisions": strategy.decisions()})


def model_table(model: Model, graph: Graph) -> dict[str, Any]:
    """The file's `model`."""
    return {
        "name": model.name,
        "sha256": model.sha256(),
        "nodes": len(graph.nodes),
        "parameters": graph.parameters,
    }


def mesh_table(request: Request, mesh: Mesh) -> tuple[dict[str, Any], ...]:
    """The axes of a mesh, each with the names of the topology's levels that it runs over."""
    levels = request.topology.levels
    return tuple(
        {"name": a.name, "size": a.size, "levels": [levels[level].name for level, _ in a.parts]}
        for a in mesh.axes
    )


def solver_table(
    request: Request, result: SearchResult, best: Candidate, nodes: int
) -> dict[str, Any]:
    """What is known of the best candidate's optimality: bound and objective (seconds), their gap
    (a fraction of the step), and what the bound covers. nodes: those of the graph."""
    # The bound is over relaxed problems whose every cost is a whole picosecond: above the price by
    # that rounding alone, it is the price itself.
    step, rounding = best.cost.step_time_s, ROUNDING_S * nodes
    bound = min(result.bound_s, step) if result.bound_s <= step + rounding else 0.0
    gap = (step - bound) / step if bound else None
    status = "optimal" if gap is not None and gap <= 1e-6 and not result.stopped else "feasible"
    solver: dict[str, Any] = {
        "name": request.solver,
        "status": status,
        "objective_s": best.objective_s,
        "bound_s": bound,
        "gap": gap,
        "plans_tried": result.tried,
        "problem_status": best.status,
        "from": best.label,
    }
    if bound and result.covers:
        solver["covers"] = [c.to_json() for c in result.covers]
    if result.stopped:
        solver["stopped"] = result.stopped
    if bound and result.bound_bytes is not None:
        solver["bound_memory_bytes"] = result.bound_bytes
    return solver


def hosted_tables(graph: Graph) -> dict[str, list[str]]:
    """The entry of files for embedding tables on hosts or servers, where there are any."""
    hosted = sorted(graph.labels.get(n, n) for n in graph.host_tables)
    return {"hosted": hosted} if hosted else {}


def stage_starts(plan: Plan, graph: Graph) -> dict[str, list[str]]:
    """The entry of files for the nodes that the chunks of uneven pipeline stages begin with, after
    the first."""
    return {"cuts": [graph.nodes[i].id for i in plan.stage_cuts]} if plan.stage_cuts else {}


def attention_kernels(request: Request, base: GraphFacts, flow: Flow) -> dict[str, Chosen]:
    """First node of every class of attention -> the kernel that the emitted program runs it with;
    nothing for CPUs, and for plans that are priced as a framework runs them."""
    if request.runtime.kernels is not None or request.topology.device.kind == "cpu":
        return {}
    return {
        node.id: chosen(
            node,
            base.graph,
            base.rules[i],
            flow.split(i),
            dict(flow.plan.mesh),
            device_kernel=request.topology.device.attention_kernel,
            head_widths=request.topology.device.head_widths,
            compute=request.recipe.between,
            partitioned=request.partitioned,
        )
        for i, node in enumerate(base.graph.nodes)
        if is_attention(node) and base.shared[i] == i
    }


def say_kernels(nodes: dict[str, dict[str, Any]], **chosen_of: Mapping[str, Chosen]) -> None:
    """Write to the rows of nodes which kernel each gets. chosen_of: the row's key -> by node."""
    for key, of_nodes in chosen_of.items():
        for name, kernel in of_nodes.items():
            nodes[name][key] = str(kernel)


def expert_kernels(request: Request, base: GraphFacts, flow: Flow) -> dict[str, Chosen]:
    """The same of routed experts without a capacity."""
    runtime = request.runtime
    if runtime.kernels is not None or runtime.serves or request.topology.device.kind == "cpu":
        return {}
    return {
        node.id: kernel_of_experts(
            node,
            base.rules[i],
            flow.split(i),
            dict(flow.plan.mesh),
            trained=base.training and not base.grad.isdisjoint(node.outputs),
            device_kernel=request.topology.device.attention_kernel,
            on_chip=request.topology.device.on_chip_bytes,
            compute=request.recipe.between,
            partitioned=request.partitioned,
            float8=FLOAT8 in request.topology.device.peak_flops_per_s,
        )
        for i, node in ((i, base.graph.nodes[i]) for i, _ in expert_nodes(base.graph))
        if not capacity_of(node) and base.shared[i] == i
    }


def _pricer(request: Request, c: Candidate):
    from planner.pricing.pricer import Pricer

    return Pricer(request.topology, c.mesh, request.runtime, request.recipe)


def node_table(base: GraphFacts, flow: Flow, result: SearchResult) -> dict[str, dict[str, Any]]:
    """A row per class of nodes: operator, split, time of the node (all its repeats) and the best
    other split with what it would cost."""
    from planner.pricing.pricer import Pricer

    rows = {}
    pipeline, uneven = pipeline_of(base.graph, flow.plan), uneven_pipeline_of(flow)
    times_run = held_times(base, pipeline) if uneven is None else most_times(base, uneven)
    space, problem = result.space, result.problem
    pricer = space.pricer if space is not None else None
    others = (
        runner_ups(space, problem, result.choice)
        if space is not None and problem is not None
        else {}
    )
    classes = space.base.shared if space is not None else base.shared
    for i, node in enumerate(base.graph.nodes):
        if base.shared[i] != i:
            continue
        row: dict[str, Any] = {
            "op": node.op,
            "split": flow.split(i).as_dict(),
            "stage": stage_of(i, pipeline) if uneven is None else uneven.stage_of(i),
            "recompute": (
                flow.plan.recompute != "none" and (uneven is not None or _inside(base, i))
            ),
            "outputs": [o for o in node.outputs if o],
            "times": base.times[i],
        }
        if node.members:
            row["members"] = list(node.members)
        if base.reasons[i]:
            row["unsupported"] = base.reasons[i]
        if isinstance(pricer, Pricer):
            forward, backward = kernel_times(base, i, flow.split(i), pricer)
            row["time_s"] = (forward + backward) * times_run[i]
        if (other := others.get(classes[i])) is not None:
            row["runner_up"] = {k: n for k, n in other.items() if k != "nodes" or n > base.times[i]}
        rows[node.id] = row
    return rows


def held_times(base: GraphFacts, pipeline: Pipeline | None) -> dict[int, float]:
    """First node of a class -> how many of the class a device runs in a microbatch: of blocks on
    pipeline stages, those of one stage."""
    per_device: dict[int, Fraction] = {}
    for i, first in enumerate(base.shared):
        per_device[first] = per_device.get(first, Fraction(0)) + (
            pipeline.stage_share(i) * pipeline.useful_passes(i) / pipeline.microbatches
            if pipeline
            else 1
        )
    return {i: float(n) for i, n in per_device.items()}


def most_times(base: GraphFacts, uneven: UnevenPipeline) -> dict[int, float]:
    """First node of a class -> how many of the class the uneven stage with the most of them runs
    in a microbatch."""
    per_stage: dict[int, Counter[int]] = {}
    for i, first in enumerate(base.shared):
        per_stage.setdefault(first, Counter())[uneven.stage_of(i)] += 1
    return {first: float(max(counts.values())) for first, counts in per_stage.items()}


def block_table(graph: Graph, flow: Flow, base: GraphFacts) -> tuple[dict[str, Any], ...]:
    """A row per repeated block; of one that is assigned to pipeline stages, how many repeats a
    stage holds; how names tell the repeats apart, where they do."""
    pipeline = pipeline_of(graph, flow.plan)
    return tuple(
        {"first": f, "period": p, "repeats": r, "body": [n.id for n in graph.nodes[f : f + p]]}
        | (
            {"per_stage": pipeline.blocks_per_stage}
            if pipeline is not None and pipeline.first == f
            else {}
        )
        | numbering(graph, f, p, r)
        for f, p, r in base.runs
    )


def numbering(graph: Graph, first: int, period: int, repeats: int) -> dict[str, Any]:
    """{"scope": "/model/layers.", "step": 1} where the number behind one prefix rises by `step`
    from repeat to repeat in the ids of all of a block's nodes and nothing else in them differs;
    nothing where ids are made otherwise, or of a layer that is there once."""
    if repeats == 1:
        return {}
    ids = [[graph.nodes[first + r * period + j].id for r in range(repeats)] for j in range(period)]
    other = ids[0][1]
    at = next((k for k, (a, b) in enumerate(zip(ids[0][0], other, strict=False)) if a != b), 0)
    scope = other[:at].rstrip("0123456789")
    rest = re.compile(re.escape(scope) + r"(\d+)(.*)", re.S)
    steps: set[int] = set()
    for names in ids:
        read = [rest.fullmatch(name) for name in names]
        if not scope or not all(read) or len({m[2] for m in read if m}) > 1:
            return {}
        numbers = [int(m[1]) for m in read if m]
        steps |= {b - a for a, b in pairwise(numbers)}
    return {"scope": scope, "step": steps.pop()} if len(steps) == 1 and min(steps) > 0 else {}


def stage_of(i: int, pipeline: Pipeline | None) -> int:
    """The pipeline stage of a node: of blocks the first that has one of theirs (blocks follow in
    order), of what comes after them the last."""
    return pipeline.stages - 1 if pipeline is not None and pipeline.in_epilogue(i) else 0


def _inside(base: GraphFacts, i: int) -> bool:
    return any(first <= i < first + period * repeats for first, period, repeats in base.runs)


def runner_ups(
    space: Space, problem: Problem, choice: tuple[int, ...]
) -> dict[int, dict[str, Any]]:
    """Per class of nodes the cheapest other split with every other decision kept, what it adds
    (seconds), and of how many nodes."""
    n = len(problem.cost)
    delta = [c.astype(np.float64).copy() for c in problem.cost]
    for (u, v), t in zip(problem.edges, problem.edge_table, strict=True):
        table = problem.tables[t]
        delta[u] += table[:, choice[v]]
        delta[v] += table[choice[u], :]
    out = {}
    for k in range(n):
        v = space.variables[k]
        if v.kind != "op" or len(delta[k]) < 2:
            continue
        extra = delta[k] - delta[k][choice[k]]
        extra[choice[k]] = np.inf
        best = int(np.argmin(extra))
        if extra[best] < FORBIDDEN / 2:
            out[v.node] = {
                "split": v.splits[best].as_dict(),
                "extra_s": float(extra[best]) / PICO,
                "nodes": v.count,
            }
    return out


def tensor_table(graph: Graph, flow: Flow, base: GraphFacts) -> dict[str, dict[str, Any]]:
    """Producer's layout per tensor; of repeated blocks only the first repeat's, except parameters,
    which are all listed."""
    rows, pipeline, uneven = {}, pipeline_of(graph, flow.plan), uneven_pipeline_of(flow)
    holder = (
        {n: uneven.stage_of_chunk(k) for k in range(uneven.count) for n in uneven.weights(k)}
        if uneven is not None
        else {}
    )
    for name, layout in flow.source.items():
        made = graph.producer.get(name)
        if name in graph.constants or (made is not None and base.shared[made] != made):
            continue
        t = graph.tensors[name]
        row: dict[str, Any] = {
            "layout": [list(a) for a in layout.dims],
            "partial": list(layout.partial),
            "padded": _padded(t.shape, layout, flow),
            "memory": "device",
            "shape": list(t.shape),
        }
        if name in flow.weights:
            row["label"] = graph.labels.get(name, name)
            w = flow.weights[name]
            stages = (
                {pipeline.stage_of(i) for i, _ in graph.consumers[name]} if pipeline else set[int]()
            )
            if name in holder:
                row["stage"] = holder[name]
            if len(stages) == 1 and -1 not in stages:
                row["stage"] = stages.pop()
            if w.zero_stage and w.zero_dim >= 0:
                row["zero"] = {"level": w.zero_stage, "dim": w.zero_dim, "axes": list(w.zero_axes)}
        rows[name] = row
    return rows


def _padded(shape: tuple[int, ...], layout: Any, flow: Flow) -> bool:

    sizes = dict(flow.plan.mesh)
    return any(padded(n, a, sizes) != n for n, a in zip(shape, layout.dims, strict=True))


def _dropped_work(base: GraphFacts) -> float:
    """Part of a step's FLOPs that experts have not to do as rows were dropped."""
    lost = sum(
        (dropped(base.graph.nodes[i]) * base.flops_of(i) for i, _ in expert_nodes(base.graph)), 0
    )
    return float(lost / base.model_flops) if lost else 0.0


def cost_table(
    cost: Cost, request: Request, base: GraphFacts, model: Model, plan: Plan, offloaded: int = 0
) -> dict[str, Any]:
    """The file's `cost`. offloaded: bytes of a device in its host's memory."""
    memory_below, memory_above = request.runtime.memory_spread
    spread = range_of(request, base, model, plan)
    total, limit = cost.memory.total, request.limit_bytes
    high = int(total * (1 + memory_above))
    peak = request.topology.peak(request.recipe.compute)
    step = cost.step_time_s
    tokens = tokens_per_step(base.graph, model)
    lost = dropped_choices(base.graph)
    ideal = cost.flops_per_device * cost.distinct_work * (1 - _dropped_work(base))
    return {
        "step_time_s": step,
        "step_time_range_s": list(spread.ends(step)),
        "tie_range_s": list(spread.tied(step)),
        # As the file has it: a report from the file is the one made with the plan.
        "tokens_per_s_per_device": (
            round_figures((1 - lost) * tokens / step / request.topology.devices) if step else 0.0
        ),
        "tokens_per_step": tokens,
        "compute_time_s": cost.compute_time_s,
        "recompute_time_s": cost.recompute_time_s,
        "optimizer_time_s": cost.optimizer_time_s,
        "communication_time_s": cost.communication_time_s,
        "exposed_communication_time_s": cost.exposed_communication_time_s,
        "bubble_time_s": cost.bubble_time_s,
        "flops_per_device": cost.flops_per_device,
        "distinct_work": cost.distinct_work,
        "model_flops_utilization": ideal / peak / step if step else 0.0,
        "memory_per_device_bytes": total,
        "memory_range_bytes": [int(total * (1 - memory_below)), high],
        "memory_limit_bytes": limit,
        **({"dropped_choices": round_figures(lost)} if lost else {}),
        **({"islands": [island_row(share) for share in cost.islands]} if cost.islands else {}),
        "fit": "no" if total > limit else "tight" if high > limit else "yes",
        **({"offloaded_per_device_bytes": offloaded} if offloaded else {}),
        "memory_breakdown_bytes": {
            "parameters": cost.memory.parameters,
            "gradients": cost.memory.gradients,
            "optimizer": cost.memory.optimizer,
            "activations": cost.memory.activations,
            "temporary": cost.memory.temporary,
        },
        "communication_bytes_per_device": _traffic_table(cost),
        "exposed_s_by_collective": {
            f"{k} {a}": s for (k, a), s in sorted(cost.exposed_by_axes.items())
        },
        **{part: s for part in TOLD_APART if (s := getattr(cost, part))},
        **(
            {
                "tables_time_s": cost.tables_time_s,
                "host_memory_bytes": host_bytes(base.graph, request.recipe),
            }
            if base.graph.host_tables
            else {}
        ),
    }


def island_row(share: IslandShare) -> dict[str, Any]:
    """What devices of one kind do in a step, as in a file."""
    return {
        "device": share.device,
        "devices": share.devices,
        "microbatches": list(share.microbatches),
        "busy_s": share.busy_s,
    }


def _traffic_table(cost: Cost) -> dict[str, Any]:
    """Kind -> axes -> bytes of a device and step."""
    return {
        k: {
            a: {"payload": int(c["payload"]), "wire": float(c["wire"])}  # type: ignore[arg-type, call-overload]
            for a, c in sorted(axes.items())
        }
        for k, axes in sorted(cost.traffic.items())
    }


def range_of(request: Request, base: GraphFacts, model: Model, plan: Plan) -> TimeRange:
    """How sure the step of a plan is, and why no surer."""
    device = request.topology.device
    return time_range(
        request.runtime,
        Asked(
            device=device.name,
            kind=device.kind,
            calibrated=bool(device.measured),
            devices=request.topology.devices,
            parameters=base.graph.parameters,
            sequence=tokens_per_step(base.graph, model) // max(model.batch, 1),
            stages=plan.stages,
            experts=any(operator_of(n.op).kind == "experts" for n in base.graph.nodes),
            training=base.training,
            anchored=device.anchor == model.name,
        ),
    )


def baseline_row(c: Candidate, request: Request, base: GraphFacts, model: Model) -> dict[str, Any]:
    """The same summary for a baseline, with its tuned techniques."""
    row = {**cost_table(c.cost, request, base, model, c.plan), "mesh": dict(c.plan.mesh)}
    for t in OF_PLANS:
        if t.structural or (t.name == "offload" and c.plan.offload):
            row |= t.to_file(getattr(c.plan, t.field))
    return row


def tokens_per_step(graph: Graph, model: Model) -> int:
    """Positions of an integer input [batch, positions] that is looked up whole in a table (token
    ids), else the batch.

    Of an encoder and a decoder the first input counts. Columns of categories, looked up one by one,
    are not tokens; nor is a history whose rows are averaged before anything is multiplied by them:
    its length is none of the model's work.
    """
    plain = model.plain
    for name in plain.inputs:
        t = plain.tensors[name]
        if (
            not t.is_float
            and len(t.shape) == 2
            and _looked_up(plain, name)
            and _worked_on(plain, t.shape[0] * t.shape[1])
        ):
            return t.shape[0] * t.shape[1]
    return model.batch


def _worked_on(graph: Graph, rows: int) -> bool:
    """Whether something works along positions, or a product on as many rows."""
    kinds = {operator_of(node.op).kind for node in graph.nodes}
    if kinds & {"attention", "recurrent", "convolution"}:
        return True
    read = (
        graph.tensors[n].shape
        for node in graph.nodes
        if operator_of(node.op).kind == "product"
        for n in node.inputs
        if n and n not in graph.weights
    )
    return any(prod(shape[:-1]) >= rows for shape in read)


def _looked_up(graph: Graph, name: str) -> bool:
    """Whether a tensor, as it is or moved about, is what a lookup in a weight looks up."""
    for i, slot in graph.consumers.get(name, ()):
        node = graph.nodes[i]
        if operator_of(node.op).kind == "lookup" and slot == 1 and node.inputs[0] in graph.weights:
            return True
        if operator_of(node.op).passes_values and _looked_up(graph, node.outputs[0]):
            return True
    return False
