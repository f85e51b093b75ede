"""The splits of a published run: Megatron's columns, then rows, of each pair of products over
"model", the batch over what holds copies, positions over "sequence" (context parallelism)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from planner.analysis.facts import GraphFacts
from planner.graph.ir import Graph
from planner.machine.topology import Mesh
from planner.ops import operator_of
from planner.ops.expert_load import ROUTED_EXPERTS, expert_nodes
from planner.ops.experts import EXPERT
from planner.ops.loss import CROSS_ENTROPY
from planner.pricing.frameworks.kernels import role
from planner.sharding.rule import Limits, Split, legal
from planner.space.families import batch_only
from planner.workload.model import Model, Workload

REPLICA = "replica"
"""The mesh axis over which sharded parameters are repeated."""
SEQUENCE = "sequence"
"""The mesh axis over which positions are cut from end to end (context parallelism)."""


class Left(Exception):
    """A row that is left out, and why."""


@lru_cache(maxsize=64)
def base_of(spec: str, batch: int) -> GraphFacts:
    """What a price needs to know of a model at the batch of one microbatch."""
    return GraphFacts.of(Model.open(spec, Workload(batch=batch)).graph(1), training=True)


@lru_cache(maxsize=16)
def splits_of(
    spec: str, batch: int, mesh: Mesh, sequence: bool, whole_logits: bool
) -> Mapping[str, Split]:
    """`megatron_splits` of a model, worked out once for the rows that share them."""
    return megatron_splits(base_of(spec, batch), mesh, sequence, whole_logits)


def megatron_splits(
    base: GraphFacts, mesh: Mesh, sequence: bool, whole_logits: bool
) -> dict[str, Split]:
    """Node -> split: the batch over "data"; over "model" the columns of a block's first products,
    what follows from them, and the rows of its last.

    sequence: what lies between is cut along the sequence. whole_logits: the loss is not cut. Raises
    Left where sizes do not divide.
    """
    graph, sizes = base.graph, dict(mesh.shape)
    inner = {a: n for a, n in sizes.items() if a != "stage"}
    data = batch_only(
        base,
        tuple(inner.items()),
        tuple(a for a in inner if a in (REPLICA, "data", "expert") and inner[a] > 1),
    )
    data = data | experts_splits(base, inner)
    if inner.get(SEQUENCE, 1) > 1:
        data = {i: (_along_sequence(base, i, s, inner),) for i, (s,) in data.items()}
    if inner.get("model", 1) == 1:
        return {node.id: data[base.shared[i]][0] for i, node in enumerate(graph.nodes)}
    cut_dim: dict[str, int] = {}  # tensor -> the dim cut over "model"
    split_of: dict[str, Split] = {}
    by_class: dict[
        tuple[int, str], tuple[Split, tuple[int, ...]]
    ] = {}  # repeats share the object, by which later readers know them
    for i, node in enumerate(graph.nodes):
        key = base.shared[i], _factor(base, graph, i, cut_dim, sequence, whole_logits)
        if key not in by_class:
            rule, both = base.rules[i], dict(data[base.shared[i]][0].pairs)
            if key[1]:
                both[key[1]] = (*both.get(key[1], ()), "model")
            split = Split.of(both)
            if not legal(rule, split, inner, Limits(waste=0.5)):
                raise Left(f"{node.op} cannot be cut into {inner['model']}")
            cut = [
                [
                    d
                    for d, axes in enumerate(rule.result(k, split, tuple(inner)).dims)
                    if "model" in axes
                ]
                for k in range(len(rule.results))
            ]
            by_class[key] = split, tuple(dims[0] if dims else -1 for dims in cut)
        split_of[node.id], where = by_class[key]
        if operator_of(node.op).kind != "lookup":
            cut_dim |= {
                name: dim
                for name, dim in zip((o for o in node.outputs if o), where, strict=False)
                if dim >= 0
            }
    return split_of


def _along_sequence(base: GraphFacts, i: int, split: Split, sizes: Mapping[str, int]) -> Split:
    """The split with the positions of node i cut too, attention's on a ring: what Megatron and
    torchtitan do."""
    factor = "ring" if "ring" in base.rules[i].paired else _positions(base, i)
    if not factor:
        return split
    pairs = dict(split.pairs)
    pairs[factor] = (*pairs.get(factor, ()), SEQUENCE)
    cut = Split.of(pairs)
    if legal(base.rules[i], cut, sizes, Limits()):
        return cut
    if i in base.repeated:
        raise Left(f"{base.graph.nodes[i].op} cannot be cut along the sequence")
    return split  # positions themselves, counted up


def _positions(base: GraphFacts, i: int) -> str:
    """The factor of node i that counts positions, "" where there is none."""
    roles = base.roles.get(base.shared[i], {})
    return next((f for f, r in roles.items() if r == "sequence" and f in base.rules[i].sizes), "")


def experts_splits(base: GraphFacts, sizes: Mapping[str, int]) -> dict[int, tuple[Split, ...]]:
    """Class -> split of routed experts: rows travel to them over "expert" and the ranks of
    "model"."""
    split_of: dict[int, tuple[Split, ...]] = {}
    for i, _ in expert_nodes(base.graph):
        rule, rows, positions = base.rules[i], base.batch_factors[i], _positions(base, i)
        pairs: dict[str, tuple[str, ...]] = {}
        if sizes.get("expert", 1) > 1:
            pairs[f"{EXPERT}{rows}"] = ("expert",)
        if positions and sizes.get("model", 1) > 1:
            pairs[f"{EXPERT}{positions}"] = ("model",)
        pairs[rows] = tuple(a for a in (REPLICA, "data") if sizes.get(a, 1) > 1)
        split = Split.of({factor: axes for factor, axes in pairs.items() if axes})
        if not legal(rule, split, sizes, Limits()):
            raise Left("experts do not divide")
        split_of[base.shared[i]] = (split,)
    return split_of


def _factor(
    base: GraphFacts,
    graph: Graph,
    i: int,
    cut_dim: Mapping[str, int],
    sequence: bool,
    whole_logits: bool,
) -> str:
    """The factor of node i that is cut over "model", "" for none."""
    node, rule, kind = graph.nodes[i], base.rules[i], role(graph, i)
    positions = _positions(base, i) if sequence else ""
    if kind == ROUTED_EXPERTS:
        return ""
    block = i in base.repeated
    cut = [(slot, cut_dim[n]) for slot, n in enumerate(node.inputs) if n in cut_dim]
    if kind == CROSS_ENTROPY and whole_logits:
        return ""
    if (
        kind == "product"
        and cut_dim.get(node.inputs[0], -1) != len(graph.tensors[node.inputs[0]].shape) - 1
    ):
        return "n"
    if operator_of(node.op).kind == "lookup" and not block:
        return "v" if any(n in graph.weights for n in node.inputs) and base.batch_factors[i] else ""
    features = [
        (slot, d)
        for slot, d in cut
        if not (sequence and positions and d == _dim(rule, slot, positions))
    ]
    for f in rule.factors if features else ():
        if f not in rule.whole and all(_dim(rule, slot, f) == d for slot, d in features):
            return f
    return positions if positions and kind in ("norm", "residual", "bias") else ""


def _dim(rule: Any, slot: int, factor: str) -> int:
    """The dim of an operand that a factor leads, -1 for none."""
    return next((d for d, dims in enumerate(rule.operands[slot]) if dims and dims[0] == factor), -1)
