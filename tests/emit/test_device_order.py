"""The mesh of an emitted program has its devices in the order that was priced: every group along an
axis lies on the links that its price is of, whatever order the runtime lists devices in."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import pytest

from planner.emit.runtime.files.frame import by_links
from planner.machine.mesh_choices import meshes, pinned_mesh, staged_meshes
from planner.machine.topology import Mesh, Topology, _span, device, for_devices
from planner.machine.topology_file import from_file
from planner.strategy import jax_shardings


@dataclass(frozen=True)
class Gpu:
    """As jax shows a GPU: slice_index counts what NVLink joins."""

    id: int
    slice_index: int
    process_index: int
    platform: str = "gpu"
    coords: tuple[int, ...] = (0, 0, 0)
    core_on_chip: int = 0


@dataclass(frozen=True)
class Tpu:
    """As jax shows a core of a TPU chip: coords are those of the chip in its slice."""

    id: int
    slice_index: int
    coords: tuple[int, ...]
    core_on_chip: int
    platform: str = "tpu"


def gpus(count: int, domain: int, host: int) -> list[Gpu]:
    """GPUs of hosts in NVLink domains, numbered as XLA does."""
    return [Gpu(i, i // domain, i // host) for i in range(count)]


def tpus(bounds: tuple[int, int, int], cores: int = 1, slices: int = 1) -> list[Tpu]:
    """Cores of slices of so many chips along x, y and z, numbered with x fastest."""
    places = itertools.product(range(slices), *(range(n) for n in reversed(bounds)), range(cores))
    return [Tpu(i, s, (x, y, z), core) for i, (s, z, y, x, core) in enumerate(places)]


def levels_of_gpu(topology: Topology) -> Callable[[Gpu], tuple[int, ...]]:
    """Its place at each level, from its NVLink domain and its number."""
    domain = topology.levels[0].size

    def places(d: Gpu) -> tuple[int, ...]:
        outer, found = d.slice_index, [d.id % domain]
        for level in topology.levels[1:]:
            outer, at = divmod(outer, level.size)
            found.append(at)
        return tuple(found)

    return places


def levels_of_tpu(topology: Topology, bounds: Sequence[int]) -> Callable[[Tpu], tuple[int, ...]]:
    """Its place at each level: core, then the dims of the torus, the shortest first, then slice."""
    dims = [k for k in sorted(range(3), key=lambda k: -bounds[k]) if bounds[k] > 1][::-1]

    def places(d: Tpu) -> tuple[int, ...]:
        found = [d.core_on_chip] if topology.levels[0].name == "chip" else []
        found += [d.coords[k] for k in dims]
        return (*found, d.slice_index)[: len(topology.levels)]

    return places


NVL72 = replace(for_devices("h100-sxm", 8).levels[0], name="nvlink", size=72)
CLUSTER = for_devices("h100-sxm", 64)
RACKS = Topology(device("h100-sxm"), (NVL72, replace(CLUSTER.levels[1], size=4)))
RAILS = Topology(
    device("h100-sxm"),
    (CLUSTER.levels[0], replace(CLUSTER.levels[1], size=4), replace(CLUSTER.levels[1], size=2)),
)
MACHINES: dict[str, tuple[Topology, list[Any], Callable[[Any], tuple[int, ...]]]] = {
    "NVLink domains of 8": (CLUSTER, gpus(64, 8, 8), levels_of_gpu(CLUSTER)),
    "NVLink domains of 72, hosts of 4": (RACKS, gpus(288, 72, 4), levels_of_gpu(RACKS)),
    "rails of two pods": (RAILS, gpus(64, 8, 8), levels_of_gpu(RAILS)),
    "a shipped rack": (
        rack := from_file("gb200-racks", 144),
        gpus(144, 72, 4),
        levels_of_gpu(rack),
    ),
}
for name, bounds, cores, slices in (
    ("tpu-v5e:4x8", (4, 8, 1), 1, 1),
    ("tpu-v5e:4x8", (8, 4, 1), 1, 1),
    ("tpu-v5e:16x16", (16, 16, 1), 1, 1),
    ("tpu-v5e", (16, 16, 1), 1, 2),
    ("tpu-v6e:8x8", (8, 8, 1), 1, 1),
    ("tpu-v5p:4x4x8", (4, 4, 8), 1, 1),
    ("tpu-v5p:4x8x8", (8, 4, 8), 1, 1),
    ("tpu7x:2x2x4", (2, 2, 4), 2, 1),
    ("tpu7x:4x4x4", (4, 4, 4), 2, 1),
    ("tpu7x:4x4x8", (4, 4, 8), 2, 1),
):
    machine = for_devices(name, prod(bounds) * cores * slices)
    MACHINES[f"{name} as {bounds}, {slices} slices"] = (
        machine,
        list(tpus(bounds, cores, slices)),
        levels_of_tpu(machine, bounds),
    )


def every_mesh(topology: Topology) -> list[Mesh]:
    found = [*meshes(topology), *staged_meshes(topology, 2), *staged_meshes(topology, 4)]
    return [m for m in found if m.axes]


@pytest.mark.parametrize("name", MACHINES)
def test_groups_along_an_axis_lie_on_the_links_they_are_priced_on(name: str) -> None:
    topology, devices, places = MACHINES[name]
    assert len(devices) == topology.devices
    random.Random(0).shuffle(devices)
    ordered = by_links(devices)
    assert sorted(d.id for d in ordered) == list(range(len(devices)))
    table = np.array([places(d) for d in ordered])
    for mesh in every_mesh(topology):
        shape = [a.size for a in mesh.axes]
        of_mesh = table.reshape(*shape, -1)
        for k, axis in enumerate(mesh.axes):
            priced = topology.group(mesh, (axis.name,))
            groups = np.moveaxis(of_mesh, k, -2).reshape(-1, axis.size, table.shape[1])
            for group in groups[:: max(1, len(groups) // 16)]:
                assert spans(topology, group) == priced, (mesh.shape, axis.name)


def spans(topology: Topology, group: np.ndarray) -> tuple[Any, ...]:
    """What a group of devices spans, from where its members lie [members, levels]. Along each level
    they are evenly apart, and every combination of places is taken once."""
    found, sizes = [], []
    for level, column in zip(topology.levels, group.T, strict=True):
        at = sorted(set(column.tolist()))
        sizes.append(len(at))
        if len(at) == 1:
            continue
        gaps = {b - a for a, b in itertools.pairwise(at)}
        assert len(gaps) == 1, at
        found.append(_span(level, len(at), len(at) * gaps.pop()))
    assert prod(sizes) == len(group) == len({tuple(row) for row in group.tolist()})
    return tuple(found)


def test_ranks_of_a_node_are_one_group_and_rails_join_the_same_place_of_every_node() -> None:
    """The tensor axis lies inside NVLink; along the data axis every device has the place in its
    node that its partners have, and so their network adapter's rail."""
    topology = MACHINES["rails of two pods"][0]
    mesh = pinned_mesh(topology, {"data": 8, "tensor": 8})
    devices = gpus(64, 8, 8)
    grid = np.array([d.id for d in by_links(devices[::-1])]).reshape(8, 8)
    assert mesh.shape == (("data", 8), ("tensor", 8))
    assert all(set(row // 8) == {i} for i, row in enumerate(grid))
    assert all(set(column % 8) == {i} for i, column in enumerate(grid.T))


def test_cores_of_a_chip_come_first_and_slices_last() -> None:
    ordered = by_links(tpus((2, 2, 4), 2, 2)[::-1])
    assert [d.core_on_chip for d in ordered[:4]] == [0, 1, 0, 1]
    assert ordered[0].coords == ordered[1].coords != ordered[2].coords
    assert [d.slice_index for d in ordered] == [0] * 32 + [1] * 32


def test_shardings_of_a_strategy_lay_devices_as_its_program_does() -> None:
    dice = random.Random(3)
    for devices in (gpus(32, 16, 8), tpus((4, 2, 3), cores=2, slices=2), tpus((2, 4, 4))):
        mixed = dice.sample(list(devices), len(devices))
        assert jax_shardings.by_links(mixed) == by_links(mixed)


def test_virtual_devices_keep_their_order() -> None:
    @dataclass(frozen=True)
    class Cpu:
        id: int
        platform: str = "cpu"

    devices = [Cpu(i) for i in (0, 1, 2048, 2049)]
    assert by_links(devices) == devices
