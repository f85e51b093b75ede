"""From what a search found to a Strategy: its decisions (planner.search.decision_tables), costs
(planner.search.cost_table), baselines, kernels, findings and assumptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.analysis.facts import GraphFacts
from planner.execution.block_values import kept_by_name
from planner.execution.layout_flow import Flow
from planner.execution.plan import Plan
from planner.execution.techniques import write_table
from planner.graph.findings import ordered
from planner.graph.ir import Graph
from planner.machine.topology import Mesh
from planner.ops.attention_kernels import Chosen, chosen, is_attention
from planner.ops.expert_capacity import capacity_of
from planner.ops.expert_kernels import FLOAT8
from planner.ops.expert_load import expert_nodes
from planner.ops.experts import kernel_of_experts
from planner.pricing.breakdown import details
from planner.pricing.host_memory import offloaded_bytes
from planner.pricing.islands import as_priced
from planner.pricing.plan_price import price_plan
from planner.search.cost_table import baseline_row, cost_table, range_of
from planner.search.decision_tables import block_table, node_table, tensor_table
from planner.search.findings import of_plan, of_request, rows, unfused, unsure
from planner.search.plausible import too_fast
from planner.search.request import Candidate, Request, SearchResult
from planner.space.assemble import PICO
from planner.strategy.strategy import Strategy
from planner.workload.model import Model

TOOL_VERSION, COST_MODEL_VERSION = "0.1.0", "1"
ROUNDING_S = 10 / PICO
"""What rounding can add up to per node of a graph: its own cost, those of shared layouts
and of reshards, half a picosecond each."""


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
    techniques = write_table(best.plan) | stage_starts(best.plan, graph) | host_tables_entry(graph)
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


def host_tables_entry(graph: Graph) -> dict[str, list[str]]:
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
