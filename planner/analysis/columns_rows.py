"""Megatron's pairs of products: which weights tensor parallelism cuts by columns, which by rows.

A product that reads whole values (the input, a norm, what a product by rows or experts have
summed up) is cut by columns; the next one, behind it or behind an attention whose heads are cut by
them, by rows. Tables are cut by rows, which is the vocabulary. What chooses experts is neither.
Adapters are no such pair: the inner product is cut as the weight that it stands beside, what it
makes is narrow and sent whole, and the outer one is cut by columns, so that what both make together
lies as the weight's own product does.
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.graph.ir import Graph
from planner.ops import operator_of

COLUMNS, ROWS = "columns", "rows"
INNER, OUTER = "lora_A", "lora_B"
"""How labels of adapters' weights end (planner.workload.lora)."""
RANK_DIMS = {INNER: -1, OUTER: -2}
"""The dim of each that is the rank."""


def directions(graph: Graph) -> Mapping[int, str]:
    """Node -> COLUMNS or ROWS, of products with a weight and lookups of a table that have one."""
    if "directions" not in graph.memo:
        graph.memo["directions"] = _directions(graph)
    known: Mapping[int, str] = graph.memo["directions"]
    return known


def _directions(graph: Graph) -> dict[int, str]:
    direction_of: dict[int, str] = {}
    after: dict[str, str] = {}  # tensor -> how a product that reads it is cut, "" where unclear
    for i, node in enumerate(graph.nodes):
        kind = operator_of(node.op).kind
        read = [
            n
            for n in node.inputs
            if n
            and n not in graph.weights
            and n not in graph.constants
            and graph.tensors[n].is_float
        ]
        weights = [n for n in node.inputs if n in graph.weights and len(graph.tensors[n].shape) > 1]
        states = {after.get(n, COLUMNS) for n in read}
        state = states.pop() if len(states) == 1 else "" if states else COLUMNS
        if kind == "product" and weights:
            adapter = weights[0].rpartition(".")[2]
            if state:
                direction_of[i] = COLUMNS if adapter == OUTER else state
            if adapter != INNER:
                state = {COLUMNS: ROWS, ROWS: COLUMNS}.get(state, "")
        elif kind == "lookup" and weights:
            if not set(node.inputs) & set(graph.constants):
                direction_of[i] = ROWS
            state = COLUMNS
        elif kind in ("norm", "experts"):
            state = COLUMNS
        elif kind == "attention":
            state = ROWS
        after |= dict.fromkeys(node.outputs, state)
    routers = _routers(graph)
    return {i: way for i, way in direction_of.items() if i not in routers}


def _routers(graph: Graph) -> frozenset[int]:
    """Products whose results say which experts take a token, and how much of each."""
    routers: set[int] = set()
    read_by_experts: set[str] = set()
    for i in reversed(range(len(graph.nodes))):
        node = graph.nodes[i]
        kind = operator_of(node.op).kind
        if kind == "experts":
            read_by_experts.update(node.inputs[1:3])
        elif read_by_experts.intersection(node.outputs):
            if kind == "product":
                routers.add(i)
            elif kind not in ("norm", "attention", "lookup"):
                read_by_experts.update(node.inputs)
    return frozenset(routers)
