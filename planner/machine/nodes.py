"""Machines with a node less, or with one that is slower than the others.

A node is what shares the fastest links: a server, a rack of NVL72, on a torus a whole slice. Nodes
are numbered from 0 in the order of devices, those of the innermost outer level first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    groups = _counted(
        slowed(device, share) if i in ours else device
        for i, device in enumerate(_devices(topology))
    )
    return Topology.mixed(groups, topology.levels)


def _largest(topology: Topology, nodes: Sequence[int]) -> tuple[tuple[Level, ...], list[int]]:
    """The levels, and the numbers of devices, of the largest even machine without some nodes: whole
    groups of one outer level are left out."""
    domain, missing = domain_of(topology), set(nodes)
    found: list[tuple[tuple[Level, ...], list[int]]] = []
    stride = domain
    for i, level in enumerate(topology.levels):
        if i in fast_levels(topology):
            continue
        out = {n * domain // stride % level.size for n in missing}
        kept = [d for d in range(topology.devices) if d // stride % level.size not in out]
        fewer = replace(level, size=level.size - len(out))
        found.append(((*topology.levels[:i], fewer, *topology.levels[i + 1 :]), kept))
        stride *= level.size
    return max(found, key=lambda levels_kept: len(levels_kept[1]))


def _machine(topology: Topology, levels: tuple[Level, ...], kept: Sequence[int]) -> Topology:
    if not topology.groups:
        return replace(topology, levels=levels, notes=())
    every = list(_devices(topology))
    groups = _counted(every[i] for i in kept)
    if len(groups) == 1:
        return Topology(groups[0][0], levels)
    return Topology.mixed(groups, levels)


def _devices(topology: Topology) -> Iterator[Device]:
    for device, count in topology.groups:
        yield from [device] * count


def _counted(devices: Iterator[Device]) -> tuple[tuple[Device, int], ...]:
    """Stretches of the same device, each with its length."""
    groups: list[tuple[Device, int]] = []
    for device in devices:
        if groups and groups[-1][0].source == device.source:
            groups[-1] = device, groups[-1][1] + 1
        else:
            groups.append((device, 1))
    return tuple(groups)
