"""What a device holds of a plan, read from its flow for costmodels.frameworks.peak_memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from costmodels.frameworks.kernels import EIGHT_BIT
from costmodels.frameworks.peak_memory import FrameworkMemory, stays
from costmodels.frameworks.step_time import AFTER, BLOCKS
from planner.analysis.facts import GraphFacts
from planner.execution.layout_flow import Flow, cut_layout, stored_layout
from planner.execution.techniques import BESIDE
from planner.ops import operator_of
from planner.ops.expert_load import ROUTED_EXPERTS
from planner.ops.experts import mean_rows
from planner.ops.loss import CROSS_ENTROPY
from planner.pricing.frameworks.kernels import role
from planner.pricing.frameworks.selective import made_again
from planner.pricing.frameworks.stages import (
    StageAssignment,
    attentions_before,
    placed_weights,
    stage_sums,
)
from planner.pricing.pricer import Pricer
from planner.sharding.layout import Layout, local_shape
from planner.sharding.rule import Split


@dataclass
class _Activations:
    """What nodes leave in one microbatch, by place: the fields of FrameworkMemory."""

    results: dict[tuple[str, str], float] = field(default_factory=dict)
    recomputed: dict[tuple[str, str], float] = field(default_factory=dict)
    norms_gathered: dict[str, float] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    logits: float = 0.0
    pieces: float = 0.0
    entering: float = 0.0


def memory_of(
    base: GraphFacts, flow: Flow, stages: StageAssignment, pricer: Pricer
) -> FrameworkMemory:
    """Read a flow; of the pricer only types and mesh matter."""
    state = _kept_bytes(base, flow, stages, pricer)
    activations = _activations(base, flow, stages, pricer)
    return FrameworkMemory(
        stage_blocks=stages.stage_blocks,
        parameters=state["parameters"],
        gradients=state["gradients"],
        state=state["state"],
        gathered=_gathered(base, flow, stages, pricer),
        results=activations.results,
        recomputed=activations.recomputed,
        schedule=flow.plan.schedule,
        overlapped=flow.plan.exchanges == BESIDE,
        norms_gathered=activations.norms_gathered,
        scores=activations.scores,
        logits=activations.logits,
        pieces=activations.pieces,
        entering=activations.entering,
        microbatches=flow.plan.microbatches,
        recompute=flow.plan.recompute,
        layers_before=attentions_before(base, stages.first),
    )


def _kept_bytes(
    base: GraphFacts, flow: Flow, stages: StageAssignment, pricer: Pricer
) -> dict[str, tuple[float, ...]]:
    """Bytes of parameters, gradients and optimizer state of each stage."""
    graph, mesh, recipe = base.graph, dict(flow.plan.mesh), pricer.recipe

    def parameters(n: str) -> float:
        t = graph.tensors[n]
        stored = float(prod(local_shape(t.shape, stored_layout(flow.weights[n]), mesh)))
        return stored * (recipe.parameter_bytes if t.is_float else pricer.itemsize(t.dtype))

    def gradients(n: str) -> float:
        w = flow.weights[n]
        layout = cut_layout(w) if w.zero_stage >= 2 and w.zero_dim >= 0 else w.layout
        size = float(prod(local_shape(graph.tensors[n].shape, layout, mesh)))
        return size * recipe.gradient_bytes * (n in flow.grad)

    def state(n: str) -> float:
        cut = float(prod(local_shape(graph.tensors[n].shape, cut_layout(flow.weights[n]), mesh)))
        less = recipe.matrix_less_bytes * (n in graph.orthogonalised)
        return cut * (recipe.state_bytes - less) * (n in flow.grad)

    of_weight = {"parameters": parameters, "gradients": gradients, "state": state}
    return {name: tuple(stage_sums(base, stages, size)) for name, size in of_weight.items()}


def _activations(
    base: GraphFacts, flow: Flow, stages: StageAssignment, pricer: Pricer
) -> _Activations:
    """What nodes leave, of the blocks those of the first."""
    graph, activations = base.graph, _Activations()
    for i, node in enumerate(graph.nodes):
        place, kind = stages.place(i), role(graph, i)
        if place == BLOCKS and i >= stages.first + stages.period:
            continue
        result = next(o for o in node.outputs if o)
        size = _local_bytes(flow, result, flow.source[result], pricer)
        if kind == "norm":
            largest = max(
                (
                    _local_bytes(flow, result, flow.need[j, slot], pricer)
                    for j, slot in graph.consumers.get(result, ())
                ),
                default=size,
            )
            activations.norms_gathered[place] = (
                activations.norms_gathered.get(place, 0.0) + largest - size
            )
        if kind == CROSS_ENTROPY:
            logits = node.inputs[0]
            whole = _local_elements(flow, logits, flow.need[i, 0])
            piece = _local_elements(flow, logits, flow.source[logits])
            activations.logits += whole
            activations.pieces += piece if piece < whole else 0
        elif place != AFTER or kind == "norm":  # the head's product leaves the logits
            remade = size if made_again(base, i, pricer.runtime) else 0.0
            if kind == ROUTED_EXPERTS:
                size, remade = rows_bytes(base, i, flow.split(i), pricer)
            activations.results[place, kind] = activations.results.get((place, kind), 0.0) + size
            activations.recomputed[place, kind] = (
                activations.recomputed.get((place, kind), 0.0) + remade
            )
        if kind == "attention":
            q, k, _ = (
                local_shape(graph.tensors[n].shape, flow.need[i, slot], dict(flow.plan.mesh))
                for slot, n in enumerate(node.inputs[:3])
            )
            activations.scores[place] = (
                activations.scores.get(place, 0.0) + q[0] * q[1] * q[2] * k[2]
            )
        if place == BLOCKS and kind == "residual":
            activations.entering = size
    return activations


def rows_bytes(base: GraphFacts, i: int, split: Split, pricer: Pricer) -> tuple[float, float]:
    """Bytes of the rows that a device's experts read, and of what their products read and their
    activation reads; and of these what recompute with saved collectives makes again, which is what
    the last product reads (Megatron's moe_act; the time of that one pass is not counted). Of
    products in eight bits in one byte each."""
    node, rule, mesh = base.graph.nodes[i], base.rules[i], pricer.sizes
    local = rule.local(split, mesh)
    busiest = operator_of(node.op).busiest
    rows = float(mean_rows(rule, split, mesh)) * local["e"]
    rows *= 1.0 if busiest is None else busiest(node, rule, split, mesh)
    width = local["h"] + (2 if node.inputs[3] else 1) * local["f"]
    rows *= 1 if pricer.recipe.compute in EIGHT_BIT else pricer.itemsize("float32")
    return rows * (width + local["f"]), rows * local["f"]


def option_bytes(
    base: GraphFacts, i: int, splits: Sequence[Split], outs: np.ndarray, pricer: Pricer
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that a framework's program saves of node i in one microbatch under each split, and of
    those what recompute with saved collectives leaves (costmodels.frameworks.peak_memory). outs:
    bytes of its local result. [splits] each"""
    kernels, kind = pricer.runtime.kernels, role(base.graph, i)
    assert kernels is not None
    saved = kernels.saved.get(kind, 0.0)
    if kind == ROUTED_EXPERTS:
        whole, again = np.array([rows_bytes(base, i, s, pricer) for s in splits]).T
        return saved * whole, saved * (whole - again)
    remaining = stays(kind, kernels) if made_again(base, i, pricer.runtime) else saved
    return saved * outs, min(saved, remaining) * outs


def _gathered(base: GraphFacts, flow: Flow, stages: StageAssignment, pricer: Pricer) -> float:
    """Bytes of the weights that ZeRO stage 3 gathers at a time: one block's, or those outside."""
    sizes: dict[str, float] = {}
    for name, place in placed_weights(base, stages):
        w = flow.weights[name]
        if w.zero_stage == 3 and w.zero_dim >= 0:
            gathered = _local_elements(flow, name, w.layout) * pricer.recipe.parameter_bytes
            sizes[place] = sizes.get(place, 0.0) + gathered
    return max(sizes.values(), default=0.0)


def _local_elements(flow: Flow, name: str, layout: Layout) -> int:
    return prod(local_shape(flow.graph.tensors[name].shape, layout, dict(flow.plan.mesh)))


def _local_bytes(flow: Flow, name: str, layout: Layout, pricer: Pricer) -> float:
    return _local_elements(flow, name, layout) * pricer.itemsize(flow.graph.tensors[name].dtype)
