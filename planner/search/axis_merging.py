"""Neighbouring axes that every decision uses as one, made one: plain ZeRO over a node and over
nodes reads `data=64 (node + nodes)`, not as two axes.

A collective over both goes the same way over the same links as one over the axis they make, so
nothing else changes. That is not trusted but asked: the plan is priced again, and stays on two axes
where its price, its memory or the price of its problem is another, or where no file could say the
mesh (planner.machine.mesh_choices).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise
from math import isclose
from typing import TYPE_CHECKING

from planner.errors import PlanError
from planner.execution.plan import Plan
from planner.machine.mesh_choices import pinned_mesh
from planner.machine.topology import Mesh
from planner.pricing.plan_price import price_plan
from planner.search.axis_names import (
    Names,
    renamed_layout,
    renamed_mesh,
    renamed_plan,
    renamed_split,
)
from planner.search.request import Candidate
from planner.sharding.rule import Limits, Split
from planner.solvers.problem import Problem, evaluate
from planner.space.assemble import assemble
from planner.space.build import build_space
from planner.space.variables import Space, Variable

if TYPE_CHECKING:
    from planner.search.solving import Solving

SAME = 1e-9
"""Of two prices of one plan: sums of the same parts in another order."""


def used_alike(mesh: Mesh, plan: Plan, given_names: Collection[str] = ()) -> Names:
    """Axis -> the outermost of the neighbours that it is one with. given_names: those of the user,
    which stay axes of their own."""
    splits = {id(s): s for s in plan.splits.values()}.values()
    names = {a.name: a.name for a in mesh.axes}
    for outer, inner in pairwise(mesh.inner):
        pair, both = (outer.name, inner.name), {outer.name, inner.name}
        if (
            not both & set(given_names)
            and len(both & set(mesh.group)) != 1
            and all(_beside(axes, pair) for s in splits for _, axes in s.pairs)
        ):
            names[inner.name] = names[outer.name]
    return names


def _beside(axes: tuple[str, ...], pair: tuple[str, str]) -> bool:
    """Whether axes have neither of a pair, or both in order and nothing between."""
    return not set(pair) & set(axes) or pair in pairwise(axes)


def with_merged_axes(
    search: Solving, best: Candidate, space: Space, choice: tuple[int, ...], problem: Problem
) -> tuple[Candidate, Space, tuple[int, ...], Problem]:
    """A plan, its space, choice and problem with axes that are used alike as one; as they are where
    there are none, or the price would be another."""
    request, names = search.request, used_alike(best.mesh, best.plan, search.request.pins.named)
    as_is = best, space, choice, problem
    if all(a == b for a, b in names.items()):
        return as_is
    mesh, plan = renamed_mesh(best.mesh, names), renamed_plan(best.plan, names)
    try:
        if pinned_mesh(request.topology, dict(mesh.shape)).axes != mesh.axes:
            return as_is
        cost, _, _ = price_plan(space.base.untied, plan, search.pricer(mesh))
        if (
            not isclose(cost.step_time_s, best.cost.step_time_s, rel_tol=SAME)
            or cost.memory != best.cost.memory
        ):
            return as_is
        merged_space = _space(search, space, plan, mesh, names)
        merged_choice = tuple(
            _place(v, names, w, k)
            for v, w, k in zip(merged_space.variables, space.variables, choice, strict=True)
        )
    except (PlanError, ValueError):  # across the links; a layout that is reached otherwise
        return as_is
    merged_problem = assemble(merged_space, best.techniques, request.limit_bytes)
    if not isclose(
        evaluate(merged_problem, merged_choice).cost, evaluate(problem, choice).cost, rel_tol=SAME
    ):
        return as_is
    return (
        replace(best, mesh=mesh, plan=plan, cost=cost),
        merged_space,
        merged_choice,
        merged_problem,
    )


def _space(search: Solving, space: Space, plan: Plan, mesh: Mesh, names: Names) -> Space:
    """The space of the joined mesh, of the splits that use its axes as one."""
    pairs = [(outer, inner) for outer, inner in pairwise(names) if names[outer] == names[inner]]
    allowed: dict[int, tuple[Split, ...]] = {}
    for v in space.variables:
        if v.kind == "op":
            left = (
                s
                for s in v.splits
                if all(_beside(axes, pair) for _, axes in s.pairs for pair in pairs)
            )
            allowed[v.node] = tuple(dict.fromkeys(renamed_split(s, names) for s in left))
    pricer = replace(search.space_pricer(mesh), offload=space.pricer.offload, memo={})
    return build_space(
        space.base,
        pricer,
        limits=Limits(spatial=True),
        allowed=allowed,
        zero_axes=mesh.zero_axes,
        parts=plan.microbatches,
    )


def _place(v: Variable, names: Names, old: Variable, k: int) -> int:
    """Where among the options of a variable of the joined space the old one's option k is. Raises
    ValueError where it is not."""
    if v.kind == "op":
        return v.splits.index(renamed_split(old.splits[k], names))
    here, made = old.layouts[k]
    return v.layouts.index(
        (renamed_layout(here, names), None if made is None else renamed_layout(made, names))
    )
