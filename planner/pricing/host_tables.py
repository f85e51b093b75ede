"""What hosted embedding tables (planner.workload.host_tables) add to a plan's step, and the bytes
they take on the hosts."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from costmodels import host_link
from costmodels.precision import Recipe
from planner.execution.layout_flow import stored_layout
from planner.graph.ir import Graph
from planner.sharding.layout import local_shape

if TYPE_CHECKING:
    from planner.execution.layout_flow import Flow
    from planner.pricing.pricer import Pricer


def host_bytes(graph: Graph, recipe: Recipe) -> int:
    """Bytes of all hosted tables with their optimizer state, on all hosts together."""
    elements = sum(h.rows * graph.tensors[n].shape[1] for n, h in graph.host_tables.items())
    return int(elements * host_link.table_row_bytes(recipe))


def pull_push_s(flow: Flow, pricer: Pricer) -> float:
    """Seconds that pulling and pushing rows add to a step, 0 without hosted tables."""
    graph, mesh = flow.graph, dict(flow.plan.mesh)
    if not graph.host_tables:
        return 0.0
    size = host_link.table_row_bytes(pricer.recipe)
    local = sum(
        prod(local_shape(graph.tensors[n].shape, stored_layout(flow.weights[n]), mesh))
        for n in graph.host_tables
    )
    return host_link.pull_push_s(
        pricer.topology.device,
        pricer.topology.devices,
        total_bytes=sum(graph.tensors[n].elements for n in graph.host_tables) * size,
        local_bytes=local * size,
        from_servers=any(h.place == "server" for h in graph.host_tables.values()),
    )
