"""Which mesh axes a collective runs over, from the device groups in HLO text.

A mesh of sizes (s_1 .. s_k) numbers its devices row-major. A collective over a set S of axes has as
groups the cosets: devices that agree on every axis outside S. `axes_label` inverts this. Four
spellings of groups exist, all read here:

    {{0,1},{2,3}}                                              written out; `{}` = one group of all
        devices
    [4,2]<=[2,2,2]T(0,2,1)                                     iota(8) reshaped, transposed, cut
        into 4 groups of 2
    mesh['a'=2,'b'=4] {'b'}                                    axes of a mesh of XLA's own, device
        ids row-major
    mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'b'}    the same with permuted ids, iota or
        explicit; 'b':(2)2 is a sub-axis
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

Groups = tuple[tuple[int, ...], ...]
MeshAxes = tuple[tuple[str, int], ...]

_LISTED = re.compile(r"replica_groups=\{((?:\s*\{[\d,\s]*\}\s*,?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:,\s*device_ids=\(((?:[^()]|\([^()]*\))*)\))?\s*\{([^}]*)\}"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\s*\{[\d,\s]*\}\s*,?)*)\}")
_AXIS = re.compile(r"'?([^',=:]+)'?=(\d+)")
_PICKED = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word.strip())


def _iota(dims: str, permutation: str | None) -> np.ndarray:
    ids = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
    return ids.transpose(_ints(permutation)) if permutation else ids


def _mesh_groups(axes: str, device_ids: str | None, picked: str) -> Groups:
    """XLA's mesh spelling: split sub-axes off, then move the picked axes last; each row is a
    group."""
    sizes = {name.strip(): int(size) for name, size in _AXIS.findall(axes)}
    total = math.prod(sizes.values())
    if device_ids is None:
        ids = np.arange(total)
    elif "[" in device_ids:
        match = re.match(r"\s*\[([\d,]+)\](?:T\(([\d,]+)\))?", device_ids)
        if match is None:
            raise ValueError(f"cannot read device_ids=({device_ids})")
        ids = _iota(match.group(1), match.group(2))
    else:
        ids = np.asarray(_ints(device_ids))
    shape: list[int] = []
    slots: list[int] = []
    chosen = [
        (name.strip(), pre, size) for name, pre, size in _PICKED.findall(picked) if name.strip()
    ]
    where: dict[tuple[str, str], int] = {}
    for name, size in sizes.items():
        subs = [(int(pre), int(part), pre) for n, pre, part in chosen if n == name and pre]
        before = 1
        for pre_size, part, pre in sorted(subs):
            shape += [pre_size // before, part]
            where[name, pre] = len(shape) - 1
            before = pre_size * part
        shape.append(size // before)
        where[name, ""] = len(shape) - 1
    slots = [where[name, pre] for name, pre, _ in chosen]
    rest = [i for i in range(len(shape)) if i not in slots]
    table = (
        ids.reshape(shape).transpose(rest + slots).reshape(-1, math.prod(shape[i] for i in slots))
    )
    return tuple(tuple(int(i) for i in row) for row in table)


def _listed(text: str) -> Groups:
    return tuple(_ints(part) for part in re.findall(r"\{([\d,\s]*)\}", text))


def groups(attributes: str, devices: int) -> Groups:
    """Replica groups of a collective's attributes, in any spelling.

    Raises:
        ValueError: the attributes hold no replica groups that can be read.
    """
    if match := _LISTED.search(attributes):
        return _listed(match.group(1)) or (tuple(range(devices)),)
    if match := _IOTA.search(attributes):
        rows = _iota(match.group(2), match.group(3)).reshape(_ints(match.group(1)))
        return tuple(tuple(int(i) for i in row) for row in rows.reshape(rows.shape[0], -1))
    if match := _MESH.search(attributes):
        return _mesh_groups(match.group(1), match.group(2), match.group(3))
    if "replica_groups=" not in attributes:
        return (tuple(range(devices)),)
    raise ValueError(f"cannot read the replica groups in {attributes[:120]!r}")


def pairs(attributes: str) -> Groups:
    """(source, target) of a collective-permute, those to itself left out (nothing moves)."""
    match = _PAIRS.search(attributes)
    if match is None:
        raise ValueError(f"no source_target_pairs in {attributes[:120]!r}")
    return tuple(p for p in _listed(match.group(1)) if p[0] != p[1])


def _coordinates(
    mesh_axes: MeshAxes, device_ids: Sequence[int] | None
) -> dict[int, tuple[int, ...]]:
    sizes = tuple(size for _, size in mesh_axes)
    ids = range(math.prod(sizes)) if device_ids is None else device_ids
    return {int(d): tuple(int(c) for c in np.unravel_index(i, sizes)) for i, d in enumerate(ids)}


def _irregular(members: Groups) -> str:
    first = "{" + ",".join(map(str, members[0])) + "}"
    return f"irregular:{first}" + (f"+{len(members) - 1} more" if len(members) > 1 else "")


def _at(coordinates: dict[int, tuple[int, ...]], device: int) -> tuple[int, ...]:
    if device not in coordinates:
        raise ValueError(
            f"device {device} of a collective is outside the mesh of {len(coordinates)} devices:"
            " wrong mesh for this program?"
        )
    return coordinates[device]


def axes_label(
    members: Groups, mesh_axes: MeshAxes, device_ids: Sequence[int] | None = None
) -> str:
    """Mesh axes of replica groups: names in mesh order joined by "+"; "" when nothing is exchanged;
    "irregular:..." when no set of axes has these groups.

    Args:
        members: device ids of each group. mesh_axes: (name, size) per axis, outermost first.
        device_ids: id in the text of each row-major mesh position; default 0, 1, 2 ... (what jax
        writes).

    Raises:
        ValueError: an id that is not in the mesh.
    """
    coordinates = _coordinates(mesh_axes, device_ids)
    varying: set[int] = set()
    for group in members:
        first = _at(coordinates, group[0])
        for device in group[1:]:
            varying.update(
                k
                for k, (a, b) in enumerate(zip(first, _at(coordinates, device), strict=True))
                if a != b
            )
    # A group holds all combinations of the varying axes exactly when its size is their product (ids
    # within a group are distinct).
    expected = math.prod(mesh_axes[k][1] for k in varying)
    if any(len(group) != expected for group in members):
        return _irregular(members)
    return "+".join(name for k, (name, _) in enumerate(mesh_axes) if k in varying)


def permute_label(
    members: Groups, mesh_axes: MeshAxes, device_ids: Sequence[int] | None = None
) -> str:
    """Mesh axes whose coordinate changes between source and target in any pair; "" when nothing
    moves."""
    coordinates = _coordinates(mesh_axes, device_ids)
    varying: set[int] = set()
    for source, target in members:
        ends = zip(_at(coordinates, source), _at(coordinates, target), strict=True)
        varying.update(k for k, (a, b) in enumerate(ends) if a != b)
    return "+".join(name for k, (name, _) in enumerate(mesh_axes) if k in varying)
