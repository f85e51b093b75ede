"""The machine: device, link levels (innermost first), and what a group of a logical mesh spans on
them. Files of machines: planner.machine.topology_file.

A mesh axis takes a factor of one or more levels. Axes are ordered outermost first and devices are
numbered row-major, so that the last axis holds neighbours: inner axes fall on inner links
(planner.machine.mesh_choices).

A switch serves any subset of its members alike. A mesh level (a link between any two) gives n
members n-1 links each. On a torus dim the members of a group that covers the whole wrapped dim form
a ring (both directions), others a line (one direction, no way around the end); members `stride`
apart share their links with the stride-1 groups between them, so that each gets 1/stride of the
rate and a step takes stride hops.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from costmodels import Device, DeviceError, Link, aliases, device_names, load_device, topology_names
from costmodels.collectives import MEMORY, Span
from costmodels.hardware.intake import exists
from costmodels.hardware.mixed import slowest
from costmodels.hardware.units import show_bytes
from planner.errors import PlanError, did_you_mean
from planner.machine.group_names import counted_behind, named_groups
from planner.machine.tpu_slices import (
    named_slice,
    of_accelerator_type,
    part_of_host,
    real_slices,
    slice_shapes,
    wraps,
)
from planner.sharding.layout import ISLAND, STAGE

MIN_NODE_SHARE = 4
"""A job of several nodes that leaves less than this many devices of a node in use is called
irregular."""


@dataclass(frozen=True)
class Level:
    """One link level: `size` groups of the level below are joined by it.

    Bandwidth per device and direction as written by the vendor; of one link where kind is mesh (to
    each other member) or torus (to each neighbour). wrap: the ends of a torus dim are joined.
    """

    name: str
    size: int
    bandwidth_bytes_per_s: float
    latency_s: float
    efficiency: float = 1.0
    kind: str = "switch"
    all_reduce_bytes_per_s: float = 0.0
    wrap: bool = False
    all_reduce_latency_s: float = 0.0

    @property
    def effective_bytes_per_s(self) -> float:
        """Sustained bandwidth."""
        return self.bandwidth_bytes_per_s * self.efficiency


@dataclass(frozen=True)
class MeshAxis:
    """A logical axis: `parts` are (level index, size taken from it), innermost level first; size is
    their product."""

    name: str
    parts: tuple[tuple[int, int], ...]

    @cached_property
    def size(self) -> int:
        """Devices along the axis."""
        return prod(n for _, n in self.parts)


@dataclass(frozen=True)
class Mesh:
    """Axes, outermost first. group: those that optimizer sharding cuts over, () for all that
    operators are cut over."""

    axes: tuple[MeshAxis, ...]
    group: tuple[str, ...] = ()

    @cached_property
    def stages(self) -> int:
        """Pipeline stages: the size of axis "stage", which only planner.execution.pipeline uses; 1
        without."""
        return next((a.size for a in self.axes if a.name == STAGE), 1)

    @cached_property
    def inner(self) -> tuple[MeshAxis, ...]:
        """The axes that operators may be cut over."""
        return tuple(a for a in self.axes if a.name not in (STAGE, ISLAND))

    @cached_property
    def zero_axes(self) -> tuple[str, ...]:
        """Axes that optimizer sharding may cut over, outermost first."""
        return self.group or tuple(a.name for a in self.inner)

    @cached_property
    def shape(self) -> tuple[tuple[str, int], ...]:
        """(name, size) pairs."""
        return tuple((a.name, a.size) for a in self.axes)


@dataclass(frozen=True)
class Topology:
    """A device and the levels that join `devices` of them; `notes` say what was assumed about the
    shape.

    groups: (device, how many) where they are of several kinds, in the order of the devices;
    `device` is then what they amount to together (costmodels.hardware.mixed). group_levels: of each
    group the levels as they are among its own devices; () where those of all are `levels`.
    """

    device: Device
    levels: tuple[Level, ...]
    notes: tuple[str, ...] = ()
    groups: tuple[tuple[Device, int], ...] = ()
    group_levels: tuple[tuple[Level, ...], ...] = ()

    @property
    def kinds(self) -> tuple[tuple[Device, int], ...]:
        """(device, how many) of each group, of one where all are of one kind."""
        return self.groups or ((self.device, self.devices),)

    def of_group(self, index: int) -> Topology:
        """The whole machine as it is to the devices of one group: with their speed, their own links
        where these are known, and the kernel of attention that all run."""
        levels = self.group_levels[index] if self.group_levels else self.levels
        device, together = self.kinds[index][0], self.device.attention
        attention = (
            replace(device.attention, heads=together.heads)
            if device.attention and together
            else None
        )
        return Topology(replace(device, attention=attention), levels)

    @classmethod
    def mixed(cls, groups: tuple[tuple[Device, int], ...], levels: tuple[Level, ...]) -> Topology:
        """A machine of several kinds of device, which share the work evenly. Raises DeviceError for
        kinds that cannot run one program."""

        chip = slowest(groups)
        groups_text = " + ".join(f"{n} x {d.name}" for d, n in groups)
        note = (
            f"{groups_text} share the work evenly, as one program on one mesh does: kernels take"
            " what they"
            f" take on the slowest, {show_bytes(chip.memory_bytes)} is the smallest memory, MFU"
            " counts the peaks of all"
        )
        return cls(chip, levels, (note,), groups)

    def peak(self, dtype: str) -> float:
        """FLOP/s of a type, the mean of all devices."""
        return sum(d.peak(dtype) * n for d, n in self.kinds) / self.devices

    @property
    def devices(self) -> int:
        """Number of devices."""
        return prod(level.size for level in self.levels)

    @property
    def virtual(self) -> bool:
        """Whether the devices are virtual ones of a host, whose programs XLA's CPU back end
        makes."""
        return self.levels[0].kind == MEMORY

    def group(self, mesh: Mesh, axes: tuple[str, ...]) -> tuple[Span, ...]:
        """The spans of a collective over some axes of a mesh, innermost level first."""
        spans = []
        for i, level in enumerate(self.levels):
            n = reach = extent = 1
            for name, size in (
                (axis.name, size)
                for axis in reversed(mesh.axes)
                for outward, size in axis.parts
                if outward == i
            ):
                reach *= size
                if name in axes:
                    n, extent = n * size, reach
            if n > 1:
                spans.append(_span(level, n, extent))
        return tuple(spans)

    def to_json(self) -> dict[str, Any]:
        """The strategy file's `topology`."""
        return {
            "device": self.device.name,
            **({"hardware": self.device.file} if self.device.file else {}),
            **(
                {"anchor": {"model": self.device.anchor, "rates": self.device.rates}}
                if self.device.anchor
                else {}
            ),
            "devices": self.devices,
            **(
                {"groups": [{"device": d.source, "devices": n} for d, n in self.groups]}
                if self.groups
                else {}
            ),
            **(
                {"group_levels": [_level_rows(levels) for levels in self.group_levels]}
                if self.group_levels
                else {}
            ),
            "levels": _level_rows(self.levels),
        }


def _level_rows(levels: tuple[Level, ...]) -> list[dict[str, Any]]:
    """Levels as a strategy file has them."""
    return [
        {
            "name": x.name,
            "size": x.size,
            "bandwidth_bytes_per_s": x.bandwidth_bytes_per_s,
            "latency_s": x.latency_s,
            "kind": x.kind,
            "efficiency": x.efficiency,
            "all_reduce_bytes_per_s": x.all_reduce_bytes_per_s,
            "all_reduce_latency_s": x.all_reduce_latency_s,
            "wrap": x.wrap,
        }
        for x in levels
    ]


def _span(level: Level, n: int, extent: int) -> Span:
    """The span of n members of a level; extent: places of the level from the first member to the
    last, the gaps included."""
    rate, stride = level.effective_bytes_per_s, extent // n
    if level.kind == "mesh":
        return Span(n, rate * (n - 1), level.latency_s, kind="mesh")
    if level.kind == MEMORY:
        return Span(n, rate, level.latency_s, kind=MEMORY)
    if level.kind == "torus":
        ring = level.wrap and extent == level.size
        return Span(
            n,
            rate * (2 if ring else 1) / stride,
            level.latency_s * stride,
            kind="ring" if ring else "line",
        )
    if n < level.size:  # in-switch reduction is known for whole nodes only
        return Span(n, rate, level.latency_s)
    return Span(
        n,
        rate,
        level.latency_s,
        bus_bytes_per_s=level.all_reduce_bytes_per_s,
        bus_latency_s=level.all_reduce_latency_s,
    )


def from_json(data: Mapping[str, Any]) -> Topology:
    """The topology a strategy file records. Its device must ship, or its file be where it was.
    Raises PlanError P060 for groups that are not the machine's."""
    levels = _read_levels(data["levels"])
    if groups := data.get("groups"):
        kinds = tuple((device(g["device"]), int(g["devices"])) for g in groups)
        group_levels = tuple(map(_read_levels, data.get("group_levels", ())))
        return _recorded_groups(kinds, levels, group_levels)
    chip = device(data.get("hardware") or data["device"])
    if anchor := data.get("anchor"):
        chip = replace(chip, rates=anchor["rates"], anchor=anchor["model"])
    return Topology(chip, levels)


def _recorded_groups(
    kinds: tuple[tuple[Device, int], ...],
    levels: tuple[Level, ...],
    group_levels: tuple[tuple[Level, ...], ...],
) -> Topology:
    """The machine of several kinds of device, with each group's own links where they are known."""
    sizes = [level.size for level in levels]
    try:
        if min(n for _, n in kinds) < 1 or sum(n for _, n in kinds) != prod(sizes):
            raise DeviceError(f"{prod(sizes)} devices in groups of {[n for _, n in kinds]}")
        if group_levels and [[level.size for level in each] for each in group_levels] != [
            sizes
        ] * len(kinds):
            raise DeviceError("group_levels that are not the levels of each group")
        return replace(Topology.mixed(kinds, levels), group_levels=group_levels)
    except DeviceError as e:
        raise PlanError(
            "P060",
            f"this strategy cannot be: topology: {e}",
            help=["plan again, or undo the last edit of the file"],
        ) from e


def _read_levels(rows: Sequence[Mapping[str, Any]]) -> tuple[Level, ...]:
    """Levels of a strategy file."""
    return tuple(
        Level(
            name=x["name"],
            size=x["size"],
            bandwidth_bytes_per_s=x["bandwidth_bytes_per_s"],
            latency_s=x["latency_s"],
            efficiency=x["efficiency"],
            kind=x["kind"],
            all_reduce_bytes_per_s=x["all_reduce_bytes_per_s"],
            wrap=x.get("wrap", False),
            all_reduce_latency_s=x.get("all_reduce_latency_s", 0.0),
        )
        for x in rows
    )


OWN = """\
  name = "mine"
  kind = "gpu"
  node_size = 8
  peak = { bfloat16 = "165 TFLOP/s", float32 = "82 TFLOP/s" }
  matmul = { flops = [1e9, 1e12], efficiency = [0.4, 0.7] }
  memory = { capacity = "24 GB", context = "600 MiB", bandwidth = "1008 GB/s", efficiency = 0.8 }
  kernel = { launch = "4 us" }
  inner = { bandwidth = "32 GB/s", efficiency = 0.6, latency = "8 us" }
  outer = { bandwidth = "12.5 GB/s", efficiency = 0.8, latency = "10 us" }
  host = { bandwidth = "25 GB/s" }"""
"""A device file with nothing in it that could be left out."""


def device(name: str) -> Device:
    """A device by name or file; an unknown one is an error that lists what ships."""
    try:
        return load_device(name)
    except DeviceError as e:
        if exists(name):
            raise PlanError(
                "P010",
                f"hardware file {name!r} cannot be used",
                detail=[str(e)],
                help=["docs/hardware.md describes the keys and units"],
            ) from e
        names = device_names()
        others = sorted([*names, *aliases(), *topology_names()], key=len)
        near = (
            of_accelerator_type(name)
            or counted_behind(name, others)
            or did_you_mean(name.lower(), others)
        )
        if "+" in name:
            near = "several kinds of device: COUNTxDEVICE joined by +, 8xh100-sxm+8xa100-80gb"
        hint = "any other device is a file of ten lines, --hardware mine.toml (docs/hardware.md)"
        help = [
            h
            for h in (near, f"shipped: {', '.join(names)}", hint if near else f"{hint}:\n{OWN}")
            if h
        ]
        raise PlanError("P010", f"unknown hardware {name!r}", detail=[str(e)], help=help) from e


def for_devices(hardware: str, devices: int | None = None) -> Topology:
    """`devices` of a shipped or calibrated device: one level inside a node; beyond, nodes with the
    largest equal share g <= node size.

    A slice of a torus may be named by its shape in chips (tpu-v5e:4x8), and groups of several kinds
    by their numbers (8xh100-sxm+8xa100-80gb), which also says how many devices there are.
    """
    if named := named_groups(hardware):
        return _of_groups(hardware, named, devices)
    name, shape = named_slice(hardware)
    chip = device(name)
    if shape:
        return _slice(chip, shape, devices)
    if devices is None:
        raise PlanError("P017", "how many devices?", help=["--devices N, or --topology FILE"])
    if devices < 1:
        raise PlanError("P011", f"--devices {devices}: at least one device is needed")
    if chip.inner.torus_dims:
        return _torus(chip, devices)
    return _nodes(chip, devices)


def _of_groups(hardware: str, named: tuple[tuple[int, str], ...], devices: int | None) -> Topology:
    """Groups of several kinds: nodes of as many devices of one kind as divide all groups, joined by
    the slowest of their links between nodes. Raises PlanError P012 for kinds that run no program
    together, P014 for another number of devices."""
    groups = tuple((device(name), n) for n, name in named)
    total = sum(n for _, n in groups)
    if devices not in (None, total):
        raise PlanError(
            "P014",
            f"--devices {devices} but {hardware} has {total}",
            help=[f"--devices {total}, or leave --devices out"],
        )
    if len({chip.source for chip, _ in groups}) == 1:
        return for_devices(groups[0][0].source, total)
    if torus := next((chip.name for chip, _ in groups if chip.inner.torus_dims), None):
        raise PlanError(
            "P012",
            f"{hardware}: {torus} forms slices of its own, which no other device is part of",
            help=["a plan for each kind"],
        )
    island = math.gcd(*(n for _, n in groups))
    most = min(chip.node_size for chip, _ in groups)
    per_node = max(k for k in range(1, min(island, most) + 1) if island % k == 0)
    sizes = (("node", per_node), ("nodes", island // per_node), ("groups", total // island))
    between = min((c.outer for c, _ in groups), key=lambda x: x.bandwidth_bytes_per_s)

    def levels(chip: Device) -> tuple[Level, ...]:
        links = (chip.inner, chip.outer, between)
        return tuple(
            _link_level(name, n, link, in_switch=name == "node" and n == chip.node_size)
            for (name, n), link in zip(sizes, links, strict=True)
            if name != "nodes" or n > 1
        )

    try:
        together = slowest(groups)
        return replace(
            Topology.mixed(groups, levels(together)),
            group_levels=tuple(levels(chip) for chip, _ in groups),
        )
    except DeviceError as e:
        raise PlanError("P012", f"{hardware}: {e}", help=["devices of one kind"]) from e


def _nodes(chip: Device, devices: int) -> Topology:
    """Nodes of a device file's size, or of fewer devices each where these do not fill whole nodes.
    Raises PlanError P012 where that would leave most of every node unused."""
    per_node = max(k for k in range(1, min(devices, chip.node_size) + 1) if devices % k == 0)
    whole = per_node == chip.node_size
    node = _link_level("node", per_node, chip.inner, in_switch=whole)
    if per_node == devices:
        return Topology(chip, (node,))
    if per_node < min(MIN_NODE_SHARE, chip.node_size):
        below = devices // chip.node_size * chip.node_size
        counts = sorted({below, -(-devices // chip.node_size) * chip.node_size} - {0})
        raise PlanError(
            "P012",
            f"{devices} devices do not fill nodes of {chip.node_size} evenly: only {per_node} of"
            " each node would be used",
            help=[
                f"--devices {' or '.join(map(str, counts))}",
                "or describe the machine with --topology FILE",
            ],
        )
    nodes = devices // per_node
    note = f"{devices} devices = {nodes} nodes x {per_node} of {chip.node_size} devices each"
    return Topology(chip, (node, _link_level("nodes", nodes, chip.outer)), () if whole else (note,))


def _link_level(name: str, size: int, link: Link, in_switch: bool = False) -> Level:
    """A level of so many members on a device file's link. in_switch: with the all-reduce that the
    switch makes of whole nodes."""
    return Level(
        name=name,
        size=size,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        latency_s=link.latency_s,
        efficiency=link.efficiency,
        kind=link.kind,
        all_reduce_bytes_per_s=link.all_reduce_bytes_per_s if in_switch else 0.0,
        all_reduce_latency_s=link.all_reduce_latency_s if in_switch else 0.0,
    )


def _torus(chip: Device, devices: int) -> Topology:
    """A slice of a torus, one level per dim, in its most even shape; beyond the largest slice,
    several of those joined by the outer link."""
    link, per_chip = chip.inner, chip.package_size
    slices = slice_shapes(link.torus_pod)
    chips, rest = divmod(devices, per_chip)
    if devices == 1:  # one of a chip's devices
        return Topology(chip, (_link_level("chip", 1, link),))
    most = prod(link.torus_pod)
    shape = slices.get(chips) or (link.torus_pod if chips and chips % most == 0 else None)
    if rest or shape is None:
        real = sorted(n for n, s in slices.items() if not part_of_host(s))
        below = (
            [n for n in real if n * per_chip < devices][-1:]
            if chips < most
            else [chips // most * most]
        )
        above = (
            [n for n in real if n * per_chip > devices][:1]
            if chips < most
            else [(chips // most + 1) * most]
        )
        near = " or ".join(str(n * per_chip) for n in below + above)
        shapes = (
            f"a {link.torus_dims}-D torus of at most {'x'.join(map(str, link.torus_pod))} chips"
            + (f", {per_chip} devices each" if per_chip > 1 else "")
        )
        raise PlanError(
            "P012",
            f"{devices} devices are no slice of {chip.name} ({shapes})",
            help=[f"--devices {near}"],
        )
    return _on_torus(chip, shape, chips // most if chips > most else 1)


def _slice(chip: Device, shape: tuple[int, ...], devices: int | None) -> Topology:
    """A slice named by its shape in chips."""
    shape_text = "x".join(map(str, shape))
    real = real_slices(chip.inner.torus_pod) if chip.inner.torus_pod else []
    if shape not in real:
        near = sorted(
            (
                s
                for s in real
                if prod(shape) <= 2 * prod(s) <= 4 * prod(shape) and not part_of_host(s)
            ),
            key=lambda s: (prod(s), s),
        )
        help = [
            (
                f"one of {', '.join('x'.join(map(str, s)) for s in near[:8])}"
                if near
                else "--devices N instead of a shape"
            )
        ]
        raise PlanError(
            "P012",
            f"{shape_text} is no slice of {chip.name}"
            + ("" if real else ": its devices form no torus"),
            help=help,
        )
    n = prod(shape) * chip.package_size
    if devices not in (None, n):
        raise PlanError(
            "P014",
            f"--devices {devices} but a slice {shape_text} of {chip.name} has {n}",
            help=[f"--devices {n}, or leave --devices out"],
        )
    return _on_torus(chip, shape, 1)


def _on_torus(chip: Device, shape: tuple[int, ...], slices: int) -> Topology:
    """Slices of a shape: the devices of a chip, a level per dim, and the network between slices."""
    link, per_chip, levels = chip.inner, chip.package_size, []
    if chip.package:
        p = chip.package
        levels.append(Level("chip", per_chip, p.bandwidth_bytes_per_s, p.latency_s, p.efficiency))
    levels += [
        Level(
            f"torus{i}",
            n,
            link.bandwidth_bytes_per_s / per_chip,
            link.latency_s,
            link.efficiency,
            "torus",
            wrap=wraps(shape, n),
        )
        for i, n in enumerate(s for s in shape if s > 1)
    ]
    notes = [
        f"slice {'x'.join(map(str, shape))}"
        + (" (part of a host's chips)" if part_of_host(shape) else "")
    ]
    if slices > 1:
        outer = chip.outer
        levels.append(
            Level("slices", slices, outer.bandwidth_bytes_per_s, outer.latency_s, outer.efficiency)
        )
        notes[0] = f"{slices} slices {'x'.join(map(str, shape))}"
    return Topology(chip, tuple(levels), tuple(notes))


def fast_levels(topology: Topology) -> frozenset[int]:
    """The levels of links within a fast domain: the innermost, and on a torus all its dims."""
    return frozenset(
        i for i, level in enumerate(topology.levels) if i == 0 or level.kind == "torus"
    )


def domain_of(topology: Topology) -> int:
    """Devices of a fast domain."""
    return prod(topology.levels[i].size for i in fast_levels(topology))
