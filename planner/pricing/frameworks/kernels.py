"""TODO."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from planner.analysis.facts import GraphFacts
from planner.graph.ir import Graph
from planner.pricing.pricer import Pricer
from planner.sharding.rule import Split

LARGE = 1e11
"""FLOPs of a product beyond which the files' curves are level; what large ones still gain is the
framework's."""


FREE = frozenset({"Reshape", "Identity"})


@dataclass(frozen=True, slots=True)
class Need:
    """What a node's kernels need on one device. together: FLOPs of the products that run as one
    kernel with it. ins, outs: bytes of local operands and results. elements: scores of attention,
    logits of a loss. backward: the backward pass of a product as a multiple of its forward pass (1
    for other kernels), 0 where nothing is trained."""

    role: str
    dtype: str
    flops: float
    together: float
    ins: float
    outs: float
    elements: float
    backward: float
    causal: bool


def role(graph: Graph, i: int) -> str:
    """What a node is to a framework's kernels: a key of Kernels.passes and Kernels.kept."""
    node = graph.nodes[i]
    if node.op == "Attention":
        return "attention"
    if node.op in ("LayerNormalization", "RMSNormalization"):
        return "norm"
    if node.op == "Add":
        return "bias" if any(n in graph.weights for n in node.inputs) else "residual"
    if node.op in ("MatMul", "Gemm"):
        readers = [j for o in node.outputs for j, _ in graph.consumers.get(o, ())]
        for j in tuple(readers):
            if role(graph, j) == "bias":
                readers += [
                    k for o in graph.nodes[j].outputs for k, _ in graph.consumers.get(o, ())
                ]
        return (
            "into residual"
            if any(graph.nodes[j].op == "Add" and role(graph, j) == "residual" for j in readers)
            else "product"
        )
    return node.op


def need_of(
    base: GraphFacts, i: int, split: Split, ins: float, outs: float, pricer: Pricer
) -> Need:
    """What node i needs under a split. ins, outs: bytes of its local operands and results."""
    from planner.pricing.split_arrays import SplitArrays, compute_type

    graph, node, rule = base.graph, base.graph.nodes[i], base.rules[i]
    dtype = compute_type(graph, i, pricer.recipe)
    share, trained = (
        float(SplitArrays.of((split,), pricer.sizes).share(rule)[0]),
        base.training and any(o in base.grad for o in node.outputs),
    )
    flops, kind, elements, alike = rule.flops * share, role(graph, i), 0.0, 1
    if kind == "attention":
        elements = flops / (
            2 * (graph.tensors[node.inputs[0]].shape[3] + graph.tensors[node.inputs[2]].shape[3])
        )
    elif kind == "CrossEntropyLoss":
        elements = prod(graph.tensors[node.inputs[0]].shape) * share
    elif flops:  # products of one operand run as one
        alike = sum(bool(base.rules[j].flops) for j, _ in graph.consumers.get(node.inputs[0], ()))
    return Need(
        kind,
        dtype,
        flops,
        flops * alike,
        ins,
        outs,
        elements,
        base.backward.get(i, 1.0) if trained else 0.0,
        bool(node.attrs.get("causal")),
    )


def seconds(need: Need, pricer: Pricer) -> tuple[float, float]:
    """(forward, backward) seconds of a node's kernels."""
    kernels, rates, device = pricer.runtime.kernels, pricer.rates, pricer.topology.device
    assert kernels is not None
    memory, peak, trained = memory_rate(pricer), device.peak(need.dtype), need.backward > 0
    if need.role == "attention":
        if kernels.flash:
            flops = need.flops * (0.5 if need.causal else 1.0) / (peak * rates.attention)
            forward, backward = flops / kernels.attention[0], 2.5 * flops / kernels.attention[1]
        else:
            product = need.flops / (peak * efficiency(pricer, need.flops / 2))
            forward, backward = (
                n * product + need.elements * size / memory
                for n, size in zip((1, 2), kernels.score_bytes, strict=True)
            )
        return forward, (backward + forward * kernels.again) * trained
    if need.role == "CrossEntropyLoss":
        return (
            need.elements * kernels.logit_bytes[0] / memory,
            need.elements * kernels.logit_bytes[1] / memory * trained,
        )
    if need.flops:
        forward = max(
            need.flops / (peak * efficiency(pricer, need.together)), (need.ins + need.outs) / memory
        )
        return forward, (need.backward + kernels.remade[0] * trained) * forward
    f, b = kernels.passes.get(
        need.role, ((need.ins + need.outs) / need.outs if need.outs else 0.0, 2.0)
    )
    return f * need.outs / memory, (b + f * kernels.remade[1]) * need.outs / memory * trained


def times(
    base: GraphFacts, i: int, split: Split, ins: float, outs: float, pricer: Pricer
) -> tuple[float, float]:
    """(forward, backward) seconds of node i under a split. ins, outs: bytes of its local operands
    and results."""
    return (
        (0.0, 0.0)
        if base.graph.nodes[i].op in FREE
        else seconds(need_of(base, i, split, ins, outs, pricer), pricer)
    )


def efficiency(pricer: Pricer, flops: float) -> float:
    """Fraction of peak that a product of so many FLOPs reaches."""
    rates = pricer.rates
    return min(
        1.0,
        pricer.topology.device.efficiency(flops)
        * rates.matmul
        * (max(flops, LARGE) / LARGE) ** rates.growth,
    )


def memory_rate(pricer: Pricer) -> float:
    """Bytes per second that element-wise kernels reach."""
    device = pricer.topology.device
    return device.memory_bytes_per_s * device.memory_efficiency * pricer.rates.memory
