"""What is refused before any search: a limit of memory that no plan keeps, whatever it cuts and
whatever waits in the host's memory."""

from __future__ import annotations

from costmodels.hardware.units import show_bytes
from planner.errors import NO_PLAN, PlanError
from planner.graph.ir import DTYPE_BYTES
from planner.ops import operator_of
from planner.search.request import Request
from planner.workload.model import Model


def refuse_never_fitting(model: Model, request: Request) -> None:
    """Raises PlanError P021 where a device has no room for its part of the weights that one product
    reads: they are there while it runs, cut into as many pieces as there are devices at most."""
    graph, recipe, devices = model.graph(1), request.recipe, request.topology.devices
    each = min(recipe.parameter_bytes, DTYPE_BYTES[recipe.compute])
    sizes = [
        sum(
            tensor.elements * (each if tensor.is_float else DTYPE_BYTES[tensor.dtype])
            for tensor in (graph.tensors[n] for n in node.inputs if n in graph.weights)
        )
        for node in graph.nodes
        if operator_of(node.op).kind == "product"
    ]
    least = max(sizes, default=0) / devices
    if least <= request.limit_bytes:
        return
    given = request.memory_limit_bytes is not None
    raise PlanError(
        "P021",
        f"no plan fits: {show_bytes(int(least))} a device of the weights of one product alone,"
        f" {show_bytes(request.limit_bytes)} usable",
        help=["a larger --memory-limit" if given else "more devices"],
        exit_code=NO_PLAN,
    )
