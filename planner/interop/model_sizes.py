"""What a configuration says of its model, held against the model that it is priced with.

A size is agreed with where the model has it at all: a width is the width of a table or a norm, an
inner width a dim of some weight. Where a model has no attention, nothing is held against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.errors import PlanError
from planner.graph.ir import Graph
from planner.interop.keys import Keys
from planner.interop.unset import COMPUTED, Unset
from planner.ops import operator_of

LAYERS, HIDDEN, HEADS, GROUPS, INNER, VOCABULARY, EXPERTS = (
    "layers",
    "a hidden size",
    "attention heads",
    "key-value heads",
    "an inner width",
    "a vocabulary",
    "experts",
)


@dataclass(frozen=True)
class Claim:
    """One size that a configuration says. key: as it is called there; most: the largest that is
    meant, as a vocabulary may be padded."""

    key: str
    size: str
    value: int
    most: int


def claims_of(keys: Keys, names: Mapping[str, Sequence[str]]) -> tuple[Claim, ...]:
    """The sizes that keys say. names: size -> the keys that say it. Raises PlanError P191."""
    claims = []
    for size, spellings in names.items():
        key = next((k for k in spellings if k in keys), "")
        if any(
            v == COMPUTED for k in spellings for _, v in keys.entries(k) if isinstance(v, Unset)
        ):
            continue  # nobody knows here: nothing is held against it
        value = keys.whole(0, *spellings, least=-1) if key else 0
        if value > 0:  # others stand for the model's own
            claims.append(Claim(key, size, value, value))
    return tuple(claims)


def sizes_of(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Size -> the values that a model has of it; {} for one without attention."""
    tensors = graph.tensors
    kinds = [(operator_of(n.op).kind, n) for n in graph.nodes]
    attention = [n for kind, n in kinds if kind == "attention"]
    if not attention:
        return {}
    # Where some layers keep a state, projects count differently: all of them, or each part as one.
    mixed = any(mixes(n.op) for kind, n in kinds if kind != "attention")
    tables = [
        tensors[n.inputs[0]].shape
        for kind, n in kinds
        if kind == "lookup"
        and n.inputs[0] in graph.weights
        and len(tensors[n.inputs[0]].shape) == 2
    ]
    scales = [
        tensors[i].shape[0]
        for kind, n in kinds
        if kind == "norm"
        for i in n.inputs[1:2]
        if i and len(tensors[i].shape) == 1
    ]
    weights = [tensors[w].shape for w in graph.weights if len(tensors[w].shape) > 1]
    inner = {d for shape in weights for d in shape}
    stacks = [
        tensors[next(i for i in n.inputs[3:] if i)].shape[0]  # experts without gates have no third
        for kind, n in kinds
        if kind == "experts"
    ]
    values_of = {
        LAYERS: [] if mixed else [len(attention)],
        HIDDEN: [*(shape[1] for shape in tables), *scales] if tables else [],
        HEADS: [tensors[n.inputs[0]].shape[1] for n in attention],
        GROUPS: [tensors[n.inputs[1]].shape[1] for n in attention],
        INNER: [*inner, *(d // 2 for d in inner)],
        VOCABULARY: [max(shape[0] for shape in tables)] if tables else [],
        EXPERTS: stacks,
    }
    return {size: tuple(dict.fromkeys(values)) for size, values in values_of.items() if values}


def hold(claims: Sequence[Claim], graph: Graph, path: str) -> None:
    """Raises PlanError P191 where a configuration says another model than the graph is."""
    there = sizes_of(graph)
    wrong = [
        c
        for c in claims
        if c.size in there and not any(c.value <= n <= c.most for n in there[c.size])
    ]
    if not wrong:
        return
    claimed = " and ".join(f"{c.key} = {c.value}" for c in wrong)
    has = " and ".join(_counted(c, there[c.size][0]) for c in wrong)
    raise PlanError(
        "P191",
        f"{path} says {claimed}, the model has {has}",
        help=["--model the one that the configuration trains"],
    )


def layers_of(graph: Graph) -> int:
    """Layers of a model, 0 without attention: those that mix positions."""
    mixing = [n for n in graph.nodes if mixes(n.op)]
    return len(mixing) if any(operator_of(n.op).kind == "attention" for n in mixing) else 0


def mixes(op: str) -> bool:
    """Whether an operator is what a layer has one of: attention, or a kernel that keeps a state."""
    operator = operator_of(op)
    return operator.kind == "attention" or bool(operator.caches)


def _counted(claim: Claim, value: int) -> str:
    if claim.size == INNER:
        return f"no weight {claim.value} wide"
    return f"{claim.size} of {value}" if claim.size.startswith("a ") else f"{value} {claim.size}"
