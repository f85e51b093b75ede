"""Machines with a node less, or with one that is slower than the others.

A node is what shares the fastest links: a server, a rack of NVL72, on a torus a whole slice. Nodes
are numbered from 0 in the order of devices, those of the innermost outer level first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from costmodels import Device
from costmodels.hardware.mixed import slowed
from planner.errors import PlanError
from planner.machine.topology import Level, Topology, domain_of, fast_levels


def nodes_of(topology: Topology) -> int:
    """How many nodes there are."""
    return topology.devices // domain_of(topology)


def check_nodes(topology: Topology, nodes: Sequence[int], option: str) -> None:
    """Raises PlanError P003 for nodes that the machine has not, or that are all it has."""
    count = nodes_of(topology)
    if wrong := [n for n in nodes if not 0 <= n < count]:
        raise PlanError(
            "P003",
            f"{option} {wrong[0]}: the machine has {count}"
            + (" nodes, numbered from 0" if count > 1 else " node, number 0"),
            help=[f"a number from 0 to {count - 1}"],
        )
    if len(set(nodes)) >= count and option == "--without":
        raise PlanError(
            "P003",
            f"--without {','.join(map(str, nodes))}: no node of {count} is left",
            help=["plan sweep MODEL --devices shows what fewer devices of a node would do"],
        )


def machines_without(topology: Topology, nodes: Sequence[int], batch: int) -> tuple[Topology, ...]:
    """What is left without some nodes, as machines whose levels are filled evenly: the largest, and
    the largest that the batch can be divided over, where that is another."""
    largest, kept = _largest(topology, nodes)
    outermost = largest[-1].size
    inner = prod(level.size for level in largest[:-1])
    evenly = next((n for n in range(outermost, 0, -1) if batch % (n * inner) == 0), outermost)
    return tuple(
        _machine(topology, (*largest[:-1], replace(largest[-1], size=n)), kept[: n * inner])
        for n in dict.fromkeys((outermost, evenly))
    )


def with_slow_node(topology: Topology, node: int, share: float) -> Topology:
    """The machine where the devices of one node run at a share of their speed; links as before."""
    if not topology.groups:
        return replace(topology, device=slowed(topology.device, share))
    domain = domain_of(topology)
    ours = range(node * domain, (node + 1) * domain)
    devices = [
        (slowed(device, share) if i in ours else device, group)
        for i, (device, group) in enumerate(_devices(topology))
    ]
    return _grouped(topology, devices, topology.levels)


def _largest(topology: Topology, nodes: Sequence[int]) -> tuple[tuple[Level, ...], list[int]]:
    """The levels, and the numbers of devices, of the largest even machine without some nodes: whole
    groups of one outer level are left out."""
    domain, missing = domain_of(topology), set(nodes)
    machines: list[tuple[tuple[Level, ...], list[int]]] = []
    stride = domain
    for i, level in enumerate(topology.levels):
        if i in fast_levels(topology):
            continue
        positions = {n * domain // stride % level.size for n in missing}
        kept = [d for d in range(topology.devices) if d // stride % level.size not in positions]
        fewer = replace(level, size=level.size - len(positions))
        machines.append(((*topology.levels[:i], fewer, *topology.levels[i + 1 :]), kept))
        stride *= level.size
    return max(machines, key=lambda levels_kept: len(levels_kept[1]))


def _machine(topology: Topology, levels: tuple[Level, ...], kept: Sequence[int]) -> Topology:
    if not topology.groups:
        return replace(topology, levels=levels, notes=())
    every = _devices(topology)
    return _grouped(topology, [every[i] for i in kept], levels)


def _devices(topology: Topology) -> list[tuple[Device, int]]:
    """(device, its group) of each."""
    return [(device, k) for k, (device, n) in enumerate(topology.groups) for _ in range(n)]


def _grouped(
    topology: Topology, devices: Sequence[tuple[Device, int]], levels: tuple[Level, ...]
) -> Topology:
    """The machine of these devices, each with the links that its group has in a topology, of the
    sizes of `levels`."""
    groups: list[tuple[Device, int, int]] = []  # with the group in the topology
    for device, group in devices:
        if groups and groups[-1][0].source == device.source:
            groups[-1] = device, groups[-1][1] + 1, group
        else:
            groups.append((device, 1, group))
    group_links = tuple(
        tuple(
            replace(link, size=level.size)
            for link, level in zip(topology.group_levels[group], levels, strict=True)
        )
        for _, _, group in groups
        if topology.group_levels
    )
    if len(groups) == 1:
        return Topology(groups[0][0], group_links[0] if group_links else levels)
    mixed = Topology.mixed(tuple((device, n) for device, n, _ in groups), levels)
    return replace(mixed, group_levels=group_links)
