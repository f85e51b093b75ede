"""Logical meshes that fit a machine: every axis takes whole factors of link levels, neighbours
first (planner.machine.topology says what an axis is)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import permutations
from math import log, prod

from planner.errors import PlanError
from planner.machine.topology import Mesh, MeshAxis, Topology
from planner.sharding.layout import STAGE

MOST_FINER = 64
"""Devices that two inner axes of a mesh of three may have together."""
GROUPS = (2, 4)
"""Groups of the innermost level's devices that an axis goes over (`across`)."""


def divisors(n: int) -> list[int]:
    """All divisors, rising."""
    return (
        [d for d in range(1, n + 1) if n % d == 0]
        if n < 10_000
        else sorted({x for d in range(1, int(n**0.5) + 1) if n % d == 0 for x in (d, n // d)})
    )


def meshes(topology: Topology) -> tuple[Mesh, ...]:
    """Candidate meshes: one axis ("data"), two ("data", "tensor"), and three ("data", "tensor",
    "tensor2") where the levels split naturally.

    Inner axes take the innermost devices. A tensor axis larger than the inner levels spills over
    into the next.
    """
    n = topology.devices
    candidates = [Mesh((MeshAxis("data", _take(topology, n, 1)),))]
    for model in divisors(n):
        if model > 1:
            inner = _take(topology, model, 1)
            if inner and (model == n or _take(topology, n // model, model)):
                candidates.append(
                    two_axes(topology, model) if model < n else Mesh((MeshAxis("tensor", inner),))
                )
    for second in divisors(n):
        for first in divisors(n // second):
            if second > 1 and first > 1 and first * second < n and second * first <= MOST_FINER:
                outer = n // (first * second)
                parts = (
                    _take(topology, second, 1),
                    _take(topology, first, second),
                    _take(topology, outer, first * second),
                )
                if all(parts):
                    candidates.append(
                        Mesh(
                            (
                                MeshAxis("data", parts[2]),
                                MeshAxis("tensor", parts[1]),
                                MeshAxis("tensor2", parts[0]),
                            )
                        )
                    )
    return tuple(candidates)


def staged_meshes(topology: Topology, stages: int) -> tuple[Mesh, ...]:
    """The meshes of one and two axes for each of so many pipeline stages, which are outermost: what
    they hand on is little, and goes over the slowest links."""
    per_stage, rest = divmod(topology.devices, stages)
    outer = _take(topology, stages, per_stage) if not rest else ()
    if stages < 2 or not outer:
        return ()
    candidates = []
    for model in divisors(per_stage):
        sizes = (("data", per_stage // model, model), ("tensor", model, 1))
        axes = [MeshAxis(name, _take(topology, n, skip)) for name, n, skip in sizes if n > 1]
        if all(a.parts for a in axes):
            candidates.append(Mesh((MeshAxis(STAGE, outer), *axes)))
    return tuple(candidates)


def finer_meshes(topology: Topology, mesh: Mesh) -> tuple[Mesh, ...]:
    """A mesh of two axes (for each of its stages) with the inner one split in two, the most even
    ways first."""
    if len(mesh.inner) != 2 or mesh.inner[1].size > MOST_FINER:
        return ()
    model, candidates = mesh.inner[1].size, []
    for second in divisors(model)[1:-1]:
        parts = _take(topology, second, 1), _take(topology, model // second, second)
        if all(parts):
            candidates.append(
                Mesh((*mesh.axes[:-1], MeshAxis("tensor", parts[1]), MeshAxis("tensor2", parts[0])))
            )
    return tuple(
        sorted(
            candidates, key=lambda m: (abs(log(m.axes[-2].size / m.axes[-1].size)), m.axes[-2].size)
        )
    )


def across(topology: Topology, stages: int) -> tuple[Mesh, ...]:
    """Meshes of three axes (for each of so many stages): one of the innermost level's devices, one
    over a few such groups, and one over the rest. What a plan on two axes would send over such a
    wide tensor axis is parted by how near its devices are: heads over one, positions over the
    other, say.
    """
    inner, per_stage, candidates = topology.levels[0].size, topology.devices // stages, list[Mesh]()
    for groups in GROUPS:
        wide = groups * inner
        if inner > 1 and wide <= MOST_FINER and per_stage % wide == 0 and per_stage > wide:
            with suppress(PlanError):  # across the links
                candidates.append(
                    pinned_mesh(
                        topology,
                        {
                            **({STAGE: stages} if stages > 1 else {}),
                            "data": per_stage // wide,
                            "tensor": groups,
                            "tensor2": inner,
                        },
                    )
                )
    return tuple(candidates)


def for_long_sequences(topology: Topology, stages: int, rows: int) -> tuple[Mesh, ...]:
    """Meshes of an expert's usual plan (for each of so many stages) where a step has fewer rows
    than devices: heads over neighbours, positions over the next, and the batch over the rest, as
    widely as rows allow and up to two factors of two less.
    """
    per_stage, inner, meshes = topology.devices // stages, topology.levels[0].size, list[Mesh]()
    for tensor in (inner, inner // 2):
        if tensor < 2 or per_stage % tensor or not per_stage // tensor:
            continue
        devices_left = per_stage // tensor
        for data in sorted(
            (d for d in divisors(devices_left) if d <= rows and d < devices_left), reverse=True
        )[:3]:
            sizes = {STAGE: stages} if stages > 1 else {}
            sizes |= {"data": data} if data > 1 else {}
            with suppress(PlanError):  # across the links
                meshes.append(
                    pinned_mesh(
                        topology, {**sizes, "sequence": devices_left // data, "tensor": tensor}
                    )
                )
    return tuple(meshes)


def grouped(topology: Topology, mesh: Mesh, devices: int) -> Mesh | None:
    """The mesh with optimizer sharding over groups of so many neighbours of a stage, each group
    with all of the state: the axis that crosses their edge is split in two. None where groups of
    that size would not be made of whole axes, or of neighbours on the links.
    """
    sizes, inside, have = dict[str, int](), list[str](), 1
    for axis in reversed(mesh.axes):
        part, rest = divmod(devices, have)
        cut = axis.size if part % axis.size == 0 else part
        if axis.name == STAGE or part == 1 or axis.size == 1:
            sizes[axis.name] = axis.size
        elif rest or axis.size % cut:
            return None
        else:
            name = (
                axis.name
                if cut == axis.size
                else next(
                    f"{axis.name}{k}"
                    for k in range(2, 9)
                    if f"{axis.name}{k}" not in (a.name for a in mesh.axes)
                )
            )
            sizes[name], have = cut, have * cut
            inside.append(name)
            if cut < axis.size:
                sizes[axis.name] = axis.size // cut
    if have != devices or not inside:
        return None
    try:
        split = pinned_mesh(topology, dict(reversed(sizes.items())))
    except PlanError:  # a group's edge lies across the links
        return None
    return Mesh(split.axes, tuple(a.name for a in split.inner if a.name in inside))


def two_axes(topology: Topology, model: int) -> Mesh:
    """The mesh (data, tensor) with so many neighbours along the tensor axis."""
    return Mesh(
        (
            MeshAxis("data", _take(topology, topology.devices // model, model)),
            MeshAxis("tensor", _take(topology, model, 1)),
        )
    )


def _take(topology: Topology, size: int, skip: int) -> tuple[tuple[int, int], ...]:
    """`size` devices at stride `skip`, as parts of levels; () when the levels do not divide that
    way."""
    parts = []
    for i, level in enumerate(topology.levels):
        have = level.size
        if skip > 1:
            if skip >= have:
                if skip % have:
                    return ()
                skip //= have
                continue
            if have % skip:
                return ()
            have //= skip
            skip = 1
        used = have if size >= have else size
        if size % used or have % used:
            return ()
        if used > 1:
            parts.append((i, used))
        size //= used
        if size == 1:
            break
    return tuple(parts) if size == 1 else ()


def pinned_mesh(topology: Topology, sizes: Mapping[str, int]) -> Mesh:
    """A mesh with given axis sizes, outermost first as written. Raises PlanError when they do not
    multiply to the devices."""
    if prod(sizes.values()) != topology.devices:
        raise PlanError(
            "P015",
            f"mesh {dict(sizes)} has {prod(sizes.values())} devices, the topology"
            f" {topology.devices}",
            help=["make the product equal"],
        )
    axes, skip = [], 1
    for name, n in reversed(list(sizes.items())):
        parts = _take(topology, n, skip) if n > 1 else ()
        if n > 1 and not parts:
            raise PlanError(
                "P015",
                f"mesh axis {name!r} of {n} does not align with the links"
                f" ({' x '.join(str(x.size) for x in topology.levels)})",
                help=["sizes whose products divide the levels, innermost last"],
            )
        axes.append(MeshAxis(name, parts))
        skip *= n
    return Mesh(tuple(reversed(axes)))


def mesh_on_levels(
    topology: Topology,
    sizes: Mapping[str, int],
    levels: Mapping[str, Sequence[str]],
    first: Sequence[str],
) -> Mesh | None:
    """The mesh whose axes run over the levels that are named for them, in one of the orders in
    which it does: `first`, that of `sizes`, any. None where none does."""
    for order in (tuple(a for a in first if a in sizes), tuple(sizes), *permutations(sizes)):
        if len(order) < len(sizes) or (STAGE in sizes and order[0] != STAGE):
            continue
        try:
            mesh = pinned_mesh(topology, {a: sizes[a] for a in order})
        except PlanError:  # across the links
            continue
        if all(
            not axis.parts
            or {topology.levels[i].name for i, _ in axis.parts} == set(levels[axis.name])
            for axis in mesh.axes
            if axis.name in levels
        ):
            return mesh
    return None
