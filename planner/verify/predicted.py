"""What a plan's flow says an emitted program will do, in the precision it is compiled in: traffic,
products, and the bytes that enter and leave.

    arguments = parameters as stored + optimizer state + batch + step count
    outputs   = parameters as stored + optimizer state + loss + 8 bytes per array (the table of
              pointers of a tuple; not on TPU)

The optimizer keeps what the recipe says (a float32 master copy beside parameters of a shorter type,
moments), and the loss is float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod

from costmodels.optimizers import MOMENT_BYTES, OPTIMIZERS
from costmodels.precision import recipe_in
from planner.emit.blocks import display_names
from planner.execution import collectives, uneven_collectives
from planner.execution.collective import CollectiveUse, ItemSize, item_sizes, traffic
from planner.execution.engine import Engine, engine_of
from planner.execution.even_collectives import weights_of_other_stages
from planner.execution.layout_flow import Flow, cut_layout, derive, stored_layout
from planner.execution.loops import RepeatedBlock, looped_blocks, repeated_blocks
from planner.execution.pipeline import pipeline_of
from planner.execution.plan import Plan
from planner.execution.weight_offload import offloaded_names
from planner.graph.ir import Graph
from planner.sharding.layout import Layout, local_shape

SCALE_BYTES = 12
"""Of the loss scale, the steps since it changed, and those that were skipped, where a program has
one. Such a step also returns the scale and the norm of its gradients."""
Traffic = Mapping[tuple[str, str], int]
"""(kind, axes joined by +) -> payload bytes per device and optimizer step."""


@dataclass(frozen=True)
class Predicted:
    """One device, one optimizer step (or one forward pass). output_bytes: without the table of
    pointers; batch_bytes: the part of the arguments that one microbatch of inputs is;
    host_argument_bytes: the part of them that waits in the host's memory.
    """

    flow: Flow
    runs: tuple[RepeatedBlock, ...]
    uses: tuple[CollectiveUse, ...]
    traffic: Traffic
    flops: int
    argument_bytes: int
    output_bytes: int
    batch_bytes: int
    host_argument_bytes: int = 0


def predict(
    graph: Graph,
    plan: Plan,
    *,
    workload: str,
    optimizer: str = "adamw",
    compute: str = "float32",
    precision: str = "",
) -> Predicted:
    """The exact prediction for a program of a plan in `precision` (the usual one of the type, where
    there is none) that computes in `compute`."""
    training = workload == "train"
    recipe = recipe_in(compute, precision, optimizer, training)
    flow = derive(graph, plan, training=training)
    runs = looped_blocks(flow)
    size = item_sizes(compute)
    uses = tuple(
        _loss_in_float32(flow, use, size) for use in collectives.collectives(flow, runs, size)
    )
    scales = recipe.loss_scaled and training
    uses += (_agreement(plan),) if scales and plan.order else ()
    cells = traffic(uses, plan.order, dict(plan.mesh))
    totals = {
        (kind, axes): int(cell["payload"])
        for kind, by in cells.items()
        for axes, cell in by.items()
    }
    kept = OPTIMIZERS[optimizer]
    state = _state_bytes(flow, recipe.state_bytes, recipe.matrix_less_bytes)
    plain = kept.moment_bytes, MOMENT_BYTES * kept.matrix_moments_less
    extra = state - _state_bytes(flow, *plain)
    extra += SCALE_BYTES if scales else 0
    arguments = collectives.argument_bytes(flow, optimizer, size) + extra
    batch = sum(
        _bytes(flow, n, flow.source[n], size(graph.tensors[n].dtype))
        for n in graph.inputs
        if graph.consumers.get(n)
    )
    return Predicted(
        flow=flow,
        runs=repeated_blocks(flow)[0],
        uses=uses,
        traffic=totals,
        flops=collectives.dot_flops(flow, runs),
        argument_bytes=arguments,
        output_bytes=_output_bytes(flow, size, state) + (SCALE_BYTES + 8 if scales else 0),
        batch_bytes=batch,
        host_argument_bytes=_offloaded_bytes(flow, runs, size)
        + (state if "optimizer" in plan.offload else 0),
    )


def flops_by_node(flow: Flow, runs: tuple[RepeatedBlock, ...]) -> dict[str, int]:
    """Node -> 2MNK per device and step; the repeats of an emitted block count together, under the
    name that the program's function of all has for them."""
    names = {old: new for run in runs for old, new in display_names(flow.graph, run).items()}
    place = {
        i: run.first + (i - run.first) % run.period
        for run in runs
        for i in range(run.first, run.end)
    }
    total: dict[str, Fraction] = {}
    for i, flops in collectives.flops_by_index(flow, runs).items():
        name = flow.graph.nodes[place.get(i, i)].id
        name = names.get(name, name)
        total[name] = total.get(name, Fraction(0)) + flops
    return {name: int(flops) for name, flops in total.items()}


def named_uses(
    graph: Graph, runs: tuple[RepeatedBlock, ...], uses: Iterable[CollectiveUse]
) -> tuple[CollectiveUse, ...]:
    """Collectives by the names that the program has for what they serve: those of a block's repeats
    by one name (layers.*.up.weight)."""
    names = {old: new for run in runs for old, new in display_names(graph, run).items()}
    for run in runs:
        for weights in run.weights:
            labels = [graph.labels.get(n, n) for n in weights]
            names |= dict.fromkeys(labels, names[labels[0]])
    return tuple(replace(use, what=names.get(use.what, use.what)) for use in uses)


def _loss_in_float32(flow: Flow, use: CollectiveUse, size: ItemSize) -> CollectiveUse:
    """The loss, one number, is summed in float32 whatever the rest computes in (and so are the rows
    inside its kernel, which say so themselves)."""
    if not flow.training:
        return use
    loss = flow.graph.outputs[0]
    loss_bytes = int(size(flow.graph.tensors[loss].dtype))
    return (
        replace(use, payload_bytes=4)
        if use.what == flow.graph.labels.get(loss, loss) and use.payload_bytes == loss_bytes
        else use
    )


def _bytes(flow: Flow, name: str, layout: Layout, itemsize: float) -> int:
    return int(
        prod(local_shape(flow.graph.tensors[name].shape, layout, dict(flow.plan.mesh))) * itemsize
    )


def _agreement(plan: Plan) -> CollectiveUse:
    """What the devices sum to agree whether gradients are finite."""
    return CollectiveUse("all-reduce", plan.order, 4, 1, "optimizer", "norm of all gradients")


def _state_bytes(flow: Flow, element_bytes: float, matrix_less: float) -> int:
    """Moments and master copies, of so many bytes for each element of a parameter, of so many less
    where it lies in matrices that are orthogonalised."""
    if not flow.training:
        return 0
    if engine_of(flow.plan) is Engine.UNEVEN:
        return int(element_bytes * uneven_collectives.state_elements(flow))
    elsewhere = _elsewhere(flow)
    return sum(
        _bytes(
            flow,
            name,
            cut_layout(w),
            element_bytes - matrix_less * (name in flow.graph.orthogonalised),
        )
        for name, w in flow.weights.items()
        if name in flow.grad and name not in elsewhere
    )


def _offloaded_bytes(flow: Flow, runs: tuple[RepeatedBlock, ...], size: ItemSize) -> int:
    """Weights, as they are stored, that wait in the host's memory."""
    return sum(
        _bytes(flow, name, stored_layout(flow.weights[name]), size(flow.graph.tensors[name].dtype))
        for name in sorted(offloaded_names(flow, runs))
    )


def _elsewhere(flow: Flow) -> frozenset[str]:
    """Weights that other pipeline stages hold."""
    pipeline = pipeline_of(flow.graph, flow.plan)
    return weights_of_other_stages(flow.graph, pipeline) if pipeline else frozenset()


def _output_bytes(flow: Flow, size: ItemSize, state_bytes: int) -> int:
    graph = flow.graph
    if engine_of(flow.plan) is Engine.UNEVEN:
        return uneven_collectives.parameter_bytes(flow, size, trained=True) + state_bytes + 4
    if flow.training:
        elsewhere = _elsewhere(flow)
        mine = {n: w for n, w in flow.weights.items() if n in flow.grad and n not in elsewhere}
        parameters = sum(
            _bytes(flow, n, stored_layout(w), size(graph.tensors[n].dtype)) for n, w in mine.items()
        )
        return parameters + state_bytes + 4
    return sum(
        _bytes(flow, n, flow.source[n].stored, size(graph.tensors[n].dtype)) for n in graph.outputs
    )
