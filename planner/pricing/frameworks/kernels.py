"""What a node's kernels need under a split, for costmodels.frameworks.kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

import numpy as np

from costmodels.frameworks.kernels import KernelNeed, kernel_times_s
from planner.analysis.facts import GraphFacts
from planner.graph.ir import Graph
from planner.ops import operator_of
from planner.ops.expert_load import ROUTED_EXPERTS
from planner.ops.experts import token_rows
from planner.ops.loss import CROSS_ENTROPY
from planner.pricing.pricer import Pricer
from planner.pricing.split_arrays import SplitArrays, compute_type
from planner.sharding.rule import Split


def role(graph: Graph, i: int) -> str:
    """What a node is to a framework's kernels: a key of Kernels.passes and Kernels.saved."""
    known: dict[int, str] = graph.memo.setdefault("roles", {})
    if i not in known:
        known[i] = _role(graph, i)
    return known[i]


def _role(graph: Graph, i: int) -> str:
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
    share = float(SplitArrays.of((split,), pricer.sizes).share(base.rules[i])[0])
    share *= _busiest(base, i, split, pricer)
    return next(_needs(base, i, [(share, ins, outs)], pricer))


def together(base: GraphFacts, i: int) -> int:
    """Products of the first operand of node i, which run as one."""
    name = next(iter(base.graph.nodes[i].inputs), "")
    return sum(bool(base.rules[j].flops) for j, _ in base.graph.consumers.get(name, ()))


def host_waits_s(base: GraphFacts, i: int, pricer: Pricer) -> tuple[float, float]:
    """Seconds of (forward, backward) in `times` that node i waits for the host in each pass,
    however few rows the pass has."""
    kernels, node = pricer.runtime.kernels, base.graph.nodes[i]
    if kernels is None or node.op != ROUTED_EXPERTS:
        return 0.0, 0.0
    trained = base.training and not base.grad.isdisjoint(node.outputs)
    return kernels.expert_waits_s, kernels.expert_waits_s * trained


def _busiest(base: GraphFacts, i: int, split: Split, pricer: Pricer) -> float:
    """Work of the busiest device over the mean."""
    node = base.graph.nodes[i]
    busiest = operator_of(node.op).busiest
    return 1.0 if busiest is None else busiest(node, base.rules[i], split, pricer.sizes)


def _needs(
    base: GraphFacts, i: int, per_split: Iterable[tuple[float, float, float]], pricer: Pricer
) -> Iterator[KernelNeed]:
    """What node i needs under splits. per_split: of each split, the share of the work that the
    busiest device has, and bytes of the node's local operands and results."""
    graph, node = base.graph, base.graph.nodes[i]
    node_flops, kind, products = base.rules[i].flops, role(graph, i), 1
    trained = base.training and any(o in base.grad for o in node.outputs)
    scores = keys = width = inner = rows = 0
    if kind == ROUTED_EXPERTS:
        width, inner = (base.rules[i].sizes[factor] for factor in "hf")
        rows = token_rows(base.rules[i], base.rules[i].sizes)
    elif kind == "attention":
        q, v = (graph.tensors[node.inputs[slot]].shape for slot in (0, 2))
        scores, keys, width = 2 * (q[3] + v[3]), v[2], q[3]
    elif kind != CROSS_ENTROPY and node_flops:
        products = together(base, i)
    logits = prod(graph.tensors[node.inputs[0]].shape) if kind == CROSS_ENTROPY else 0
    backward = base.backward.get(i, 1.0) if trained else 0.0
    dtype = compute_type(graph, i, pricer.recipe)
    causal = bool(node.attrs.get("causal")) and not node.attrs.get("window")
    for share, operand_bytes, result_bytes in per_split:
        flops = node_flops * share
        yield KernelNeed(
            role=kind,
            dtype=dtype,
            flops=flops,
            together=flops * products,
            ins=operand_bytes,
            outs=result_bytes,
            elements=flops / scores if scores else logits * share,
            backward=backward,
            causal=causal,
            keys=keys,
            width=width,
            inner=inner,
            rows=rows * share,
        )


def times(
    base: GraphFacts, i: int, cuts: SplitArrays, ins: np.ndarray, outs: np.ndarray, pricer: Pricer
) -> tuple[np.ndarray, np.ndarray]:
    """(forward, backward) seconds of node i under splits. ins, outs: bytes of its local operands
    and results. [splits] each"""
    if operator_of(base.graph.nodes[i].op).free:
        return np.zeros(len(ins)), np.zeros(len(ins))
    kernels, device = pricer.runtime.kernels, pricer.topology.device
    assert kernels is not None
    share = cuts.share(base.rules[i]).tolist()
    if operator_of(base.graph.nodes[i].op).busiest is not None:
        share = [
            part * _busiest(base, i, split, pricer)
            for part, split in zip(share, cuts.splits, strict=True)
        ]
    work = list(zip(share, ins.tolist(), outs.tolist(), strict=True))
    alike = dict.fromkeys(work)  # splits that differ in what their axes are called cost the same
    known = {
        case: kernel_times_s(need, device, kernels, pricer.rates)
        for case, need in zip(alike, _needs(base, i, alike, pricer), strict=True)
    }
    forward, backward = np.array([known[case] for case in work]).T
    return forward, backward
