"""What a node's kernels need under a split, for costmodels.frameworks.kernels."""

from __future__ import annotations

from math import prod

from costmodels.frameworks.kernels import KernelNeed, kernel_times_s
from planner.analysis.facts import GraphFacts
from planner.graph.ir import Graph
from planner.ops import operator_of
from planner.ops.loss import CROSS_ENTROPY
from planner.pricing.pricer import Pricer
from planner.pricing.split_arrays import SplitArrays, compute_type
from planner.sharding.rule import Split

"""Operators that run no kernel."""


def role(graph: Graph, i: int) -> str:
    """What a node is to a framework's kernels: a key of Kernels.passes and Kernels.saved."""
    node = graph.nodes[i]
    operator = operator_of(node.op)
    if operator.kind in ("attention", "norm"):
        return operator.kind
    if operator.adds == (0, 1):
        return "bias" if any(n in graph.weights for n in node.inputs) else "residual"
    if operator.kind == "product":
        readers = _readers(graph, i)
        for j in tuple(readers):
            if role(graph, j) == "bias":
                readers += _readers(graph, j)
        into_residual = any(role(graph, j) == "residual" for j in readers)
        return "into residual" if into_residual else "product"
    return node.op


def _readers(graph: Graph, i: int) -> list[int]:
    return [j for o in graph.nodes[i].outputs for j, _ in graph.consumers.get(o, ())]


def need_of(
    base: GraphFacts, i: int, split: Split, ins: float, outs: float, pricer: Pricer
) -> KernelNeed:
    """What node i needs under a split. ins, outs: bytes of its local operands and results."""
    graph, node, rule = base.graph, base.graph.nodes[i], base.rules[i]
    share = float(SplitArrays.of((split,), pricer.sizes).share(rule)[0])
    trained = base.training and any(o in base.grad for o in node.outputs)
    flops, kind, elements, products = rule.flops * share, role(graph, i), 0.0, 1
    keys = width = 0
    if kind == "attention":
        q, v = (graph.tensors[node.inputs[slot]].shape for slot in (0, 2))
        elements, keys, width = flops / (2 * (q[3] + v[3])), v[2], q[3]
    elif kind == CROSS_ENTROPY:
        elements = prod(graph.tensors[node.inputs[0]].shape) * share
    elif flops:  # products of one operand run as one
        products = sum(
            bool(base.rules[j].flops) for j, _ in graph.consumers.get(node.inputs[0], ())
        )
    return KernelNeed(
        role=kind,
        dtype=compute_type(graph, i, pricer.recipe),
        flops=flops,
        together=flops * products,
        ins=ins,
        outs=outs,
        elements=elements,
        backward=base.backward.get(i, 1.0) if trained else 0.0,
        causal=bool(node.attrs.get("causal")) and not node.attrs.get("window"),
        keys=keys,
        width=width,
    )


def times(
    base: GraphFacts, i: int, split: Split, ins: float, outs: float, pricer: Pricer
) -> tuple[float, float]:
    """(forward, backward) seconds of node i under a split. ins, outs: bytes of its local operands
    and results."""
    if operator_of(base.graph.nodes[i].op).free:
        return 0.0, 0.0
    assert pricer.runtime.kernels is not None
    need = need_of(base, i, split, ins, outs, pricer)
    return kernel_times_s(need, pricer.topology.device, pricer.runtime.kernels, pricer.rates)
