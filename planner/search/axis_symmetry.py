"""Axes that only their place tells apart, in the order in which people expect them.

Two axes of a mesh that take as much of the same levels of links cost the same, so that a plan and
its mirror image, in which they change their parts, have one price and the search finds either.
People look for the batch on the outermost axis and for tensor parallelism on the innermost, where
other planners' programs have them and where links may be faster than the file of the machine knows:
of mirror images the one in that order is given.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from planner.analysis.axis_roles import ROLES, role_named
from planner.machine.topology import Mesh
from planner.search.axis_names import Names
from planner.sharding.layout import Axes, Layout
from planner.sharding.rule import Split
from planner.space.variables import Space, Variable


def axis_swap(mesh: Mesh, roles: Names, given_names: Collection[str] = ()) -> Names:
    """Axis -> the axis that is to have its part, so that among axes alike data is outermost and
    model innermost; {} where they stand so already.

    roles: the axis' name by what it cuts (planner.search.axis_names.axis_names); given_names: axes
    that the user named, which stay where they are.
    """
    movable = [a for a in mesh.inner if a.name not in given_names and role_named(roles[a.name])]
    swaps: dict[str, str] = {}
    for alike in dict.fromkeys((a.parts, a.name in mesh.group) for a in movable):
        names = [a.name for a in movable if (a.parts, a.name in mesh.group) == alike]
        wanted = sorted(
            names, key=lambda name: ROLES.index(role_named(roles[name]))
        )  # stable: those of one role keep their order
        swaps.update(
            (source, target)
            for source, target in zip(wanted, names, strict=True)
            if source != target
        )
    return swaps


def swapped_choice(
    space: Space, choice: Sequence[int], mesh: Mesh, swap: Mapping[str, str]
) -> tuple[int, ...] | None:
    """The choice with axes axis_swap, None where the space does not offer it (a dim that two of
    them cut stands in one order only)."""
    order = {name: k for k, (name, _) in enumerate(mesh.shape)}

    def axes(old: Axes, by_place: bool) -> Axes:
        new = [swap.get(a, a) for a in old]
        return tuple(sorted(new, key=order.__getitem__) if by_place else new)

    def layout(old: Layout) -> Layout:
        return Layout(
            tuple(axes(d, False) for d in old.dims),
            axes(old.partial, True),
            axes(old.grad_partial, True),
        )

    def split(old: Split) -> Split:
        return Split(tuple((factor, axes(a, False)) for factor, a in old.pairs))

    def at(variable: Variable, k: int) -> int:
        if variable.kind == "op":
            return variable.splits.index(split(variable.splits[k]))
        here, back = variable.layouts[k]
        return variable.layouts.index((layout(here), None if back is None else layout(back)))

    try:
        return tuple(at(variable, k) for variable, k in zip(space.variables, choice, strict=True))
    except ValueError:
        return None
