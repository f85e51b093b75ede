"""What the axes of a mesh are called: by what they do.

    data         cuts the batch
    fsdp         cuts the batch too, and ZeRO-3 cuts the parameters over it
    sequence     cuts positions: dim 1 of token ids and of inputs [batch, positions, features], and whatever meets attention's queries
    expert       cuts the leading dim of stacks of weights, one of which each expert works with (heads excepted)
    tensor       cuts anything else: features, heads, rows, columns, vocabulary, channels
    replicated   cuts no operator: its devices do the same work

A dim is followed through the graph as long as it stays a dim of its own: dims that one factor of a rule ties together are one, whatever they are
called on the way. An axis is named after what it cuts in most of the work (FLOPs, at least one an element); several of a kind are numbered from the
outermost: tensor, tensor2. Neighbours that every decision uses as one are one, over the links of both (planner.joined). Names that the user gave are kept:
there the search is held to what they say (planner.families).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from planner.base import Base
from planner.evaluate import Cost
from planner.flow import Plan
from planner.layout import STAGE, Axes, Layout
from planner.rule import PENDING, Split
from planner.space import Space
from planner.topology import Mesh, MeshAxis

if TYPE_CHECKING:
    from planner.request import Candidate

ROLES = ("data", "sequence", "expert", "tensor")
TELLING = ("expert", "sequence", "data", "tensor")
DIALECT = {"fsdp": "data", "model": "tensor"}
"""Names beside those of the roles: `fsdp` is what `data` is called under ZeRO-3, `model` what files and pins of before call `tensor`."""
REPLICATED = "replicated"
Names = Mapping[str, str]
"""Axis -> its new name; neighbours that become one axis have the same."""


def role_named(axis: str) -> str:
    """The role that a name claims ("tensor2": tensor, "fsdp": data), "" for names that claim none."""
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


def purposes(base: Base) -> dict[int, dict[str, str]]:
    """Class of nodes -> factor -> role of an axis that cuts it."""
    graph, ties = base.graph, _Ties()

    def place(name: str, dim: int) -> tuple:
        made = graph.producer.get(name)
        return (name, dim) if made is None else (base.shared[made], list(graph.nodes[made].outputs).index(name), dim)

    seeds: dict[str, list[tuple]] = {"sequence": [], "tensor": [], "expert": []}
    for i in base.times:
        node, rule = graph.nodes[i], base.rules[i]
        live = [o for o in node.outputs if o]
        for name, dims in (*zip(node.inputs, rule.operands, strict=False), *zip(live, rule.results, strict=False)):
            for d, dim in enumerate(dims):
                if len(dim) == 1 and name:
                    ties.tie(place(name, d), ("factor", i, dim[0]))
        if node.op == "Attention":
            seeds["sequence"].append(("factor", i, "s"))
            seeds["tensor"] += [("factor", i, f) for f in ("g", "r")]
        elif node.op == "CachedAttention":
            seeds["sequence"].append(("factor", i, "t"))
            seeds["tensor"] += [("factor", i, f) for f in ("g", "r")]
        elif node.op == "RoutedExperts":
            seeds["expert"].append(("factor", i, "e"))
        elif node.op in ("MatMul", "Einsum"):
            stacks = [n for n in node.inputs if n in graph.weights and len(graph.tensors[n].shape) > 2]
            seeds["expert"] += [place(n, d) for n in stacks for d in range(len(graph.tensors[n].shape) - 2)]
    for name in graph.inputs:
        t = graph.tensors[name]
        if len(t.shape) == (3 if t.is_float else 2):
            seeds["sequence"].append(place(name, 1))
    role_of: dict[tuple, str] = {}
    for role, places in seeds.items():
        for at in places:
            role_of.setdefault(ties.top(at), role)
    found = {i: {f: "data" if f == base.batch_factors[i] else role_of.get(ties.top(("factor", i, f)), "tensor") for f in base.rules[i].factors} for i in base.times}
    for i, roles in found.items():  # of the parts its members play, a pair plays the one that says most
        roles.update({name: min((roles[f] for f in members), key=TELLING.index) for name, members in base.rules[i].paired.items()})
    return found


def axis_names(base: Base, plan: Plan, kept: Collection[str] = ()) -> dict[str, str]:
    """Axis of the plan -> its name by what it does. kept: those that the user named."""
    work = {a: dict.fromkeys(ROLES, 0.0) for a, _ in plan.mesh}
    for i, factors in base.roles.items():
        node, rule = base.graph.nodes[i], base.rules[i]
        weight = base.times[i] * max(rule.flops, *(float(prod(base.graph.tensors[o].shape)) for o in node.outputs if o))
        for f, axes in plan.splits.get(node.id, Split()).pairs:
            for a in axes if f != PENDING else ():
                work[a][factors[f]] += weight
    found = {a: a for a, n in plan.mesh if a in kept or a == STAGE or n == 1}
    for a, shares in work.items():
        if a not in found:
            role = max(ROLES, key=lambda r: shares[r]) if any(shares.values()) else REPLICATED
            called = "fsdp" if plan.zero == 3 and a in plan.zero_axes and role in ("data", REPLICATED) else role
            names = (called if k == 1 else f"{called}{k}" for k in range(1, len(work) + 1))
            found[a] = next(n for n in names if n not in found.values())
    return found


def renamed_axes(axes: Axes, names: Names) -> Axes:
    """Axes under their new names."""
    return tuple(dict.fromkeys([names[a] for a in axes]))


def renamed_layout(layout: Layout, names: Names) -> Layout:
    """The same layout, its axes under their new names."""
    return Layout(tuple(renamed_axes(d, names) for d in layout.dims), renamed_axes(layout.partial, names), renamed_axes(layout.fan, names))


def renamed_split(split: Split, names: Names) -> Split:
    """The same split, its axes under their new names."""
    return Split(tuple((f, renamed_axes(axes, names)) for f, axes in split.pairs))


def renamed_mesh(mesh: Mesh, names: Names) -> Mesh:
    """The same axes under their new names."""
    parts: dict[str, dict[int, int]] = {}
    for axis in reversed(mesh.axes):  # of an axis the innermost level comes first
        own = parts.setdefault(names[axis.name], {})
        for level, n in axis.parts:
            own[level] = own.get(level, 1) * n
    return Mesh(tuple(MeshAxis(a, tuple(parts[a].items())) for a in renamed_axes(tuple(a.name for a in mesh.axes), names)), renamed_axes(mesh.group, names))


def renamed_plan(plan: Plan, names: Names) -> Plan:
    """The same decisions on axes under their new names."""
    weights = {n: replace(w, layout=renamed_layout(w.layout, names), axes=renamed_axes(w.axes, names), fan=renamed_axes(w.fan, names))
               for n, w in plan.weight_plans.items()}  # fmt: skip
    known: dict[int, Split] = {}  # repeats share their splits; so do the renamed ones
    splits = {n: known.setdefault(id(s), renamed_split(s, names)) for n, s in plan.splits.items()}
    sizes: dict[str, int] = {}
    for a, n in plan.mesh:
        sizes[names[a]] = sizes.get(names[a], 1) * n
    return replace(plan, mesh=tuple(sizes.items()), splits=splits, zero_axes=renamed_axes(plan.zero_axes, names), weight_plans=weights)


def renamed_cost(cost: Cost, names: Names) -> Cost:
    """The same price, its traffic under the new names."""
    def joined(axes: str) -> str:
        return "+".join(names.get(a, a) for a in axes.split("+"))  # no two have the same: planner.joined prices anew

    traffic = {kind: {joined(axes): row for axes, row in rows.items()} for kind, rows in cost.traffic.items()}
    return replace(cost, traffic=traffic, exposed_by_axes={(kind, joined(axes)): s for (kind, axes), s in cost.exposed_by_axes.items()})


def renamed_candidate(found: Candidate, mesh: Mesh, names: Names) -> Candidate:
    """The same priced plan, on the renamed mesh."""
    return replace(found, mesh=mesh, plan=renamed_plan(found.plan, names), cost=renamed_cost(found.cost, names))


def renamed_space(space: Space, mesh: Mesh, names: Names) -> Space:
    """The same options under the new names, on the renamed mesh."""
    variables = [replace(v, splits=tuple(renamed_split(s, names) for s in v.splits),
                         layouts=tuple((renamed_layout(h, names), None if b is None else renamed_layout(b, names)) for h, b in v.layouts)) for v in space.variables]  # fmt: skip
    pricer = replace(space.pricer, mesh=mesh, memo={}, _affine={}, _sizes={})
    return Space(space.base, pricer, variables, space.links, space.op_of)
