"""Names of mesh axes by what they do (data, tensor, ...), and plans, spaces and costs with other
names of axes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from planner.analysis.facts import GraphFacts
from planner.machine.topology import Mesh
from planner.sharding.layout import Layout
from planner.sharding.rule import Split

if TYPE_CHECKING:
    from planner.search.request import Candidate

from collections.abc import Collection, Mapping
from math import prod
from typing import TYPE_CHECKING

from planner.analysis.axis_roles import REPLICATED, ROLES
from planner.execution.plan import Plan
from planner.machine.topology import MeshAxis
from planner.pricing.cost import Cost
from planner.sharding.layout import STAGE, Axes
from planner.sharding.rule import PENDING
from planner.space.variables import Space

Names = Mapping[str, str]
"""Axis -> its new name; neighbours that become one axis have the same."""


def axis_names(base: GraphFacts, plan: Plan, given_names: Collection[str] = ()) -> dict[str, str]:
    """Axis of the plan -> its name by what it does. given_names: those of the user, which stay."""
    work = {a: dict.fromkeys(ROLES, 0.0) for a, _ in plan.mesh}
    for i, factors in base.roles.items():
        node, rule = base.graph.nodes[i], base.rules[i]
        weight = base.times[i] * max(
            rule.flops, *(float(prod(base.graph.tensors[o].shape)) for o in node.outputs if o)
        )
        for f, axes in plan.splits.get(node.id, Split()).pairs:
            for a in axes if f != PENDING else ():
                work[a][factors[f]] += weight
    new_names = {a: a for a, n in plan.mesh if a in given_names or a == STAGE or n == 1}
    for a, shares in work.items():
        if a not in new_names:
            role = max(ROLES, key=lambda r: shares[r]) if any(shares.values()) else REPLICATED
            called = (
                "fsdp"
                if plan.zero_stage == 3 and a in plan.zero_axes and role in ("data", REPLICATED)
                else role
            )
            names = (called if k == 1 else f"{called}{k}" for k in range(1, len(work) + 1))
            new_names[a] = next(n for n in names if n not in new_names.values())
    return new_names


def renamed_axes(axes: Axes, names: Names) -> Axes:
    """Axes under their new names."""
    return tuple(dict.fromkeys([names[a] for a in axes]))


def renamed_mesh(mesh: Mesh, names: Names) -> Mesh:
    """The same axes under their new names."""
    parts: dict[str, dict[int, int]] = {}
    for axis in reversed(mesh.axes):  # of an axis the innermost level comes first
        own = parts.setdefault(names[axis.name], {})
        for level, n in axis.parts:
            own[level] = own.get(level, 1) * n
    return Mesh(
        tuple(
            MeshAxis(a, tuple(parts[a].items()))
            for a in renamed_axes(tuple(a.name for a in mesh.axes), names)
        ),
        renamed_axes(mesh.group, names),
    )


def renamed_plan(plan: Plan, names: Names) -> Plan:
    """The same decisions on axes under their new names."""
    weights = {
        n: replace(
            w,
            layout=renamed_layout(w.layout, names),
            zero_axes=renamed_axes(w.zero_axes, names),
            grad_partial=renamed_axes(w.grad_partial, names),
        )
        for n, w in plan.weight_plans.items()
    }
    known: dict[int, Split] = {}  # repeats share their splits; so do the renamed ones
    splits = {n: known.setdefault(id(s), renamed_split(s, names)) for n, s in plan.splits.items()}
    sizes: dict[str, int] = {}
    for a, n in plan.mesh:
        sizes[names[a]] = sizes.get(names[a], 1) * n
    return replace(
        plan,
        mesh=tuple(sizes.items()),
        splits=splits,
        zero_axes=renamed_axes(plan.zero_axes, names),
        weight_plans=weights,
    )


def renamed_cost(cost: Cost, names: Names) -> Cost:
    """The same price, its traffic under the new names."""

    def joined(axes: str) -> str:
        return "+".join(
            names.get(a, a) for a in axes.split("+")
        )  # no two have the same: planner.search.axis_merging prices anew

    traffic = {
        kind: {joined(axes): row for axes, row in rows.items()}
        for kind, rows in cost.traffic.items()
    }
    return replace(
        cost,
        traffic=traffic,
        exposed_by_axes={
            (kind, joined(axes)): s for (kind, axes), s in cost.exposed_by_axes.items()
        },
    )


def renamed_space(space: Space, mesh: Mesh, names: Names) -> Space:
    """The same options under the new names, on the renamed mesh."""
    variables = [
        replace(
            v,
            splits=tuple(renamed_split(s, names) for s in v.splits),
            layouts=tuple(
                (renamed_layout(h, names), None if b is None else renamed_layout(b, names))
                for h, b in v.layouts
            ),
        )
        for v in space.variables
    ]
    pricer = replace(space.pricer, mesh=mesh, memo={}, _affine={}, _sizes={})
    return Space(space.base, pricer, variables, space.links, space.op_of)


def renamed_layout(layout: Layout, names: Names) -> Layout:
    """The same layout, its axes under their new names."""
    return Layout(
        tuple(renamed_axes(d, names) for d in layout.dims),
        renamed_axes(layout.partial, names),
        renamed_axes(layout.grad_partial, names),
    )


def renamed_split(split: Split, names: Names) -> Split:
    """The same split, its axes under their new names."""
    return Split(tuple((f, renamed_axes(axes, names)) for f, axes in split.pairs))


def renamed_candidate(candidate: Candidate, mesh: Mesh, names: Names) -> Candidate:
    """The same priced plan, on the renamed mesh."""
    return replace(
        candidate,
        mesh=mesh,
        plan=renamed_plan(candidate.plan, names),
        cost=renamed_cost(candidate.cost, names),
    )
