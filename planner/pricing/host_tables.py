"""TODO."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from costmodels.precision import Recipe
from planner.graph.ir import Graph
from planner.sharding.layout import local_shape

if TYPE_CHECKING:
    from planner.execution.layout_flow import Flow
    from planner.pricing.pricer import Pricer


HOST_ROWS_BYTES_PER_S = 5e9
"""Rows of a few hundred bytes gathered from a host's memory, or scattered, by one process: a
guess."""


FLOAT_BYTES = 4


def row_bytes(recipe: Recipe) -> float:
    """Bytes of an element of a hosted row: float32 with its moments."""
    return FLOAT_BYTES + recipe.state_bytes - recipe.master_bytes


def host_bytes(graph: Graph, recipe: Recipe) -> int:
    """Bytes of all hosted tables with their optimizer state, on all hosts together."""
    return int(
        sum(h.rows * graph.tensors[n].shape[1] for n, h in graph.hosted.items()) * row_bytes(recipe)
    )


def pull_push_s(flow: Flow, pricer: Pricer) -> float:
    """Seconds that pulling and pushing add to a step, 0 without hosted tables. An upper figure:
    every id of a batch is taken to be another row."""
    from planner.execution.layout_flow import stored_layout

    graph = flow.graph
    if not graph.hosted:
        return 0.0
    mesh, chip, devices = dict(flow.plan.mesh), pricer.topology.device, pricer.topology.devices
    size = row_bytes(pricer.recipe)
    total = sum(graph.tensors[n].elements for n in graph.hosted) * size
    local = (
        sum(
            prod(local_shape(graph.tensors[n].shape, stored_layout(flow.weights[n]), mesh))
            for n in graph.hosted
        )
        * size
    )
    inside = min(chip.node_size, devices)
    nodes = -(-devices // inside)
    into = min(total, local * inside)
    rate = chip.outer.bandwidth_bytes_per_s * chip.outer.efficiency * inside
    server = any(h.place == "server" for h in graph.hosted.values())
    network = (
        into / rate + chip.outer.latency_s
        if server
        else into * (nodes - 1) / nodes / rate + chip.outer.latency_s * (nodes > 1)
    )
    return 2 * (into / HOST_ROWS_BYTES_PER_S + network + local / chip.host_bytes_per_s)
