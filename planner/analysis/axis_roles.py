"""What the axes of a mesh are called: by what they do.

    data         cuts the batch
    fsdp         cuts the batch too, and ZeRO-3 cuts the parameters over it
    sequence     cuts positions: dim 1 of token ids and of inputs [batch, positions, features], and
                 whatever meets attention's queries
    expert       cuts the leading dim of stacks of weights, one of which each expert works with
                 (heads excepted)
    tensor       cuts anything else: features, heads, rows, columns, vocabulary, channels
    replicated   cuts no operator: its devices do the same work

A dim is followed through the graph as long as it stays a dim of its own: dims that one factor of a
rule ties together are one, whatever they are called on the way. An axis is named after what it cuts
in most of the work (FLOPs, at least one an element); several of a kind are numbered from the
outermost: tensor, tensor2. Neighbours that every decision uses as one are one, over the links of
both (planner.search.axis_merging). Names that the user gave are kept: there the search is held to
what they say (planner.space.families).
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.analysis.basics import BasicFacts
from planner.ops import operator_of

ROLES = ("data", "sequence", "expert", "tensor")
TELLING = ("expert", "sequence", "data", "tensor")
DIALECT = {"fsdp": "data", "model": "tensor"}
"""Names beside those of the roles: `fsdp` is what `data` is called under ZeRO-3, `model` what files
and pins of before call `tensor`."""
REPLICATED = "replicated"


def role_named(axis: str) -> str:
    """The role that a name claims ("tensor2": tensor, "fsdp": data), "" for names that claim
    none."""
    plain = axis.rstrip("0123456789")
    role = DIALECT.get(plain, plain)
    return role if role in ROLES else ""


class _Ties:
    """Dims that are one: union-find."""

    def __init__(self) -> None:
        self.up: dict[tuple, tuple] = {}

    def top(self, x: tuple) -> tuple:
        while (above := self.up.get(x, x)) != x:
            self.up[x] = self.up.get(above, above)
            x = above
        return x

    def tie(self, a: tuple, b: tuple) -> None:
        self.up[self.top(a)] = self.top(b)


def purposes(base: BasicFacts, batch_factors: Sequence[str]) -> dict[int, dict[str, str]]:
    """Class of nodes -> factor -> role of an axis that cuts it."""
    graph, ties = base.graph, _Ties()

    def place(name: str, dim: int) -> tuple:
        maker = graph.producer.get(name)
        return (
            (name, dim)
            if maker is None
            else (base.shared[maker], list(graph.nodes[maker].outputs).index(name), dim)
        )

    seeds: dict[str, list[tuple]] = {"sequence": [], "tensor": [], "expert": []}
    for i in base.times:
        node, rule = graph.nodes[i], base.rules[i]
        live = [o for o in node.outputs if o]
        for name, dims in (
            *zip(node.inputs, rule.operands, strict=False),
            *zip(live, rule.results, strict=False),
        ):
            for d, dim in enumerate(dims):
                if len(dim) == 1 and name:
                    ties.tie(place(name, d), ("factor", i, dim[0]))
        operator = operator_of(node.op)
        for factor, role in operator.roles.items():
            seeds[role].append(("factor", i, factor))
        if operator.kind == "product":
            stacks = [
                n for n in node.inputs if n in graph.weights and len(graph.tensors[n].shape) > 2
            ]
            seeds["expert"] += [
                place(n, d) for n in stacks for d in range(len(graph.tensors[n].shape) - 2)
            ]
    for name in graph.inputs:
        t = graph.tensors[name]
        if len(t.shape) == (3 if t.is_float else 2):
            seeds["sequence"].append(place(name, 1))
    role_of: dict[tuple, str] = {}
    for role, places in seeds.items():
        for spot in places:
            role_of.setdefault(ties.top(spot), role)
    by_class = {
        i: {
            f: (
                "data"
                if f == batch_factors[i]
                else role_of.get(ties.top(("factor", i, f)), "tensor")
            )
            for f in base.rules[i].factors
        }
        for i in base.times
    }
    for i, roles in by_class.items():
        # of its members' roles, a pair has the one that says most
        paired = base.rules[i].paired.items()
        roles |= {name: min((roles[f] for f in fs), key=TELLING.index) for name, fs in paired}
    return by_class
