"""What a plan costs as a strategy file has it: seconds with their range, bytes, traffic, and the
same of each baseline."""

from __future__ import annotations

from math import prod
from typing import Any

from costmodels.ranges import Asked, TimeRange, time_range
from planner.analysis.facts import GraphFacts
from planner.execution.plan import Plan
from planner.execution.techniques import OF_PLANS
from planner.graph.ir import Graph
from planner.ops import operator_of
from planner.ops.expert_load import dropped, dropped_choices, expert_nodes
from planner.pricing.cost import TOLD_APART, Cost, IslandShare
from planner.pricing.host_tables import host_bytes
from planner.search.request import Candidate, Request
from planner.strategy.strategy import round_figures
from planner.workload.model import Model


def cost_table(
    cost: Cost, request: Request, base: GraphFacts, model: Model, plan: Plan, offloaded: int = 0
) -> dict[str, Any]:
    """The file's `cost`. offloaded: bytes of a device in its host's memory."""
    below, above = request.runtime.memory_spread
    spread = range_of(request, base, model, plan)
    total, limit = cost.memory.total, request.limit_bytes
    upper_bytes = int(total * (1 + above))
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
        "memory_range_bytes": [int(total * (1 - below)), upper_bytes],
        "memory_limit_bytes": limit,
        **({"dropped_choices": round_figures(lost)} if lost else {}),
        **({"islands": [island_row(share) for share in cost.islands]} if cost.islands else {}),
        "fit": "no" if total > limit else "tight" if upper_bytes > limit else "yes",
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


def _dropped_work(base: GraphFacts) -> float:
    """Part of a step's FLOPs that experts have not to do as rows were dropped."""
    lost = sum(
        (dropped(base.graph.nodes[i]) * base.flops_of(i) for i, _ in expert_nodes(base.graph)), 0
    )
    return float(lost / base.model_flops) if lost else 0.0


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
