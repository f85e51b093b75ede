"""The machine: device, link levels (innermost first), and the logical meshes that fit them.

A mesh axis takes a factor of one or more levels. Axes are ordered outermost first and devices are numbered row-major, so that the last axis holds
neighbours: inner axes fall on inner links.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from costmodels import Device, DeviceError, device_names, load_device
from costmodels.collectives import Span
from costmodels.units import UnitError, bandwidth_bytes_per_s, time_s
from planner.errors import PlanError, did_you_mean

MIN_NODE_SHARE = 4
"""A job of several nodes that leaves less than this many devices of a node in use is called irregular."""


@dataclass(frozen=True)
class Level:
    """One link level: `size` groups of the level below are joined by it. Bandwidth per device and direction, as written by the vendor."""

    name: str
    size: int
    bandwidth_bytes_per_s: float
    latency_s: float
    efficiency: float = 1.0
    kind: str = "switch"
    all_reduce_bytes_per_s: float = 0.0

    @property
    def effective_bytes_per_s(self) -> float:
        """Sustained bandwidth."""
        return self.bandwidth_bytes_per_s * self.efficiency


@dataclass(frozen=True)
class MeshAxis:
    """A logical axis: `parts` are (level index, size taken from it), innermost level first; size is their product."""

    name: str
    parts: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Devices along the axis."""
        return prod(n for _, n in self.parts)


@dataclass(frozen=True)
class Mesh:
    """Axes, outermost first."""

    axes: tuple[MeshAxis, ...]

    @property
    def shape(self) -> tuple[tuple[str, int], ...]:
        """(name, size) pairs."""
        return tuple((a.name, a.size) for a in self.axes)


@dataclass(frozen=True)
class Topology:
    """A device and the levels that join `devices` of them; `notes` say what was assumed about the shape."""

    device: Device
    levels: tuple[Level, ...]
    notes: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """Number of devices."""
        return prod(level.size for level in self.levels)

    def group(self, mesh: Mesh, axes: tuple[str, ...]) -> tuple[Span, ...]:
        """The spans of a collective over some axes of a mesh, innermost level first."""
        sizes = [1] * len(self.levels)
        for axis in mesh.axes:
            if axis.name in axes:
                for level, n in axis.parts:
                    sizes[level] *= n
        spans = []
        for level, n in zip(self.levels, sizes, strict=True):
            if n > 1:
                bus = level.all_reduce_bytes_per_s if n == level.size else 0.0
                spans.append(Span(n, level.effective_bytes_per_s, level.latency_s, bus))
        return tuple(spans)

    def to_json(self) -> dict[str, Any]:
        """The strategy file's `topology`."""
        return {
            "device": self.device.name, "devices": self.devices,
            "levels": [{"name": x.name, "size": x.size, "bandwidth_bytes_per_s": x.bandwidth_bytes_per_s, "latency_s": x.latency_s, "kind": x.kind,
                        "efficiency": x.efficiency, "all_reduce_bytes_per_s": x.all_reduce_bytes_per_s} for x in self.levels],
        }  # fmt: skip


def from_json(data: Mapping[str, Any]) -> Topology:
    """The topology a strategy file records. Its device must ship (or be a readable file)."""
    levels = tuple(Level(x["name"], x["size"], x["bandwidth_bytes_per_s"], x["latency_s"], x["efficiency"], x["kind"], x["all_reduce_bytes_per_s"])
                   for x in data["levels"])  # fmt: skip
    return Topology(device(data["device"]), levels)


def device(name: str) -> Device:
    """A device by name or file; an unknown one is an error that lists what ships."""
    try:
        return load_device(name)
    except DeviceError as e:
        names = device_names()
        raise PlanError("P010", f"unknown hardware {name!r}", detail=[str(e)], help=[h for h in (did_you_mean(name, names), f"shipped: {', '.join(names)}") if h]) from e


def for_devices(hardware: str, devices: int) -> Topology:
    """`devices` of a shipped or calibrated device: one level inside a node; beyond, nodes with the largest equal share g <= node size."""
    chip = device(hardware)
    if devices < 1:
        raise PlanError("P011", f"--devices {devices}: at least one device is needed")
    if chip.inner.torus_dims:
        return _torus(chip, devices)
    inner, outer = chip.inner, chip.outer
    g = max(k for k in range(1, min(devices, chip.node_size) + 1) if devices % k == 0)
    inner_level = Level("node", g, inner.bandwidth_bytes_per_s, inner.latency_s, inner.efficiency, inner.kind,
                        inner.all_reduce_bytes_per_s if g == chip.node_size else 0.0)  # fmt: skip
    if g == devices:
        return Topology(chip, (inner_level,))
    if g < min(MIN_NODE_SHARE, chip.node_size):
        near = sorted({devices // chip.node_size * chip.node_size, -(-devices // chip.node_size) * chip.node_size} - {0})
        raise PlanError("P012", f"{devices} devices do not fill nodes of {chip.node_size} evenly: only {g} of each node would be used",
                        help=[f"--devices {' or '.join(map(str, near))}", "or describe the machine with --topology FILE"])  # fmt: skip
    notes = () if g == chip.node_size else (f"{devices} devices = {devices // g} nodes x {g} of {chip.node_size} devices each",)
    return Topology(chip, (inner_level, Level("nodes", devices // g, outer.bandwidth_bytes_per_s, outer.latency_s, outer.efficiency, outer.kind)), notes)


def _torus(chip: Device, devices: int) -> Topology:
    """A slice of a torus: the most even shape of powers of two (each dim at most 16), one level per dim, both directions of a ring used."""
    dims = chip.inner.torus_dims
    shapes = [s for s in itertools.combinations_with_replacement((1, 2, 4, 8, 16), dims) if prod(s) == devices]
    if not shapes:
        counts = sorted({prod(s) for s in itertools.combinations_with_replacement((1, 2, 4, 8, 16), dims)})
        near = sorted(counts, key=lambda c: abs(c - devices))[:2]
        raise PlanError("P012", f"{devices} is no slice of {chip.name} (a {dims}-D torus)", help=[f"--devices {' or '.join(map(str, sorted(near)))}"])
    shape = min(shapes, key=lambda s: max(s) / min(s))
    link = chip.inner
    # A dim of 4 or more wraps around on full cubes (3-D) or on 16 (2-D): without it the ring goes back along the line, at half the rate.
    levels = []
    for i, n in enumerate(s for s in shape if s > 1):
        wrap = n >= 16 or (dims == 3 and n >= 4 and min(shape) >= 4)
        levels.append(Level(f"torus{i}", n, link.bandwidth_bytes_per_s * (2 if wrap else 1), link.latency_s, link.efficiency, "torus"))
    return Topology(chip, tuple(levels) or (Level("chip", 1, link.bandwidth_bytes_per_s, link.latency_s, link.efficiency, "torus"),),
                    (f"slice {'x'.join(map(str, shape))}",))  # fmt: skip


def from_file(path: str | Path, devices: int | None = None) -> Topology:
    """A topology file (docs/hardware.md). Its product must equal `devices` when both are given."""
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text())
    except OSError as e:
        raise PlanError("P013", f"cannot read topology file {str(path)!r}: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise PlanError("P013", f"{path} is not TOML: {e}") from e
    if "device" not in data or not data.get("level"):
        raise PlanError("P013", f"{path}: a topology needs `device = NAME` and at least one [[level]]")
    levels = tuple(_level(table, path, i) for i, table in enumerate(data["level"]))
    topology = Topology(device(str(data["device"])), levels)
    if devices is not None and topology.devices != devices:
        raise PlanError("P014", f"--devices {devices} but {path} describes {topology.devices} ({' x '.join(str(x.size) for x in levels)})",
                        help=[f"--devices {topology.devices}, or leave --devices out"])  # fmt: skip
    return topology


def _level(table: Mapping[str, Any], path: Path, index: int) -> Level:
    where = f"{path}: level {index}"
    try:
        shape = table.get("shape")
        size = prod(shape) if shape else int(table["size"])
        if size < 1:
            raise PlanError("P013", f"{where}: size {size}")
        rate = bandwidth_bytes_per_s(table["bandwidth"]) * (2 if table.get("wrap") else 1)
        return Level(str(table.get("name", f"level{index}")), size, rate, time_s(table["latency"]), float(table.get("efficiency", 0.8)), str(table.get("kind", "switch")))
    except KeyError as e:
        raise PlanError("P013", f"{where}: key {e.args[0]!r} is missing") from e
    except (UnitError, TypeError, ValueError) as e:
        raise PlanError("P013", f"{where}: {e}") from e


def divisors(n: int) -> list[int]:
    """All divisors, rising."""
    return [d for d in range(1, n + 1) if n % d == 0] if n < 10_000 else sorted({x for d in range(1, int(n**0.5) + 1) if n % d == 0 for x in (d, n // d)})


def meshes(topology: Topology) -> tuple[Mesh, ...]:
    """Candidate meshes: one axis ("data"), two ("data", "model"), and three ("data", "model", "model2") where the levels split naturally.

    Inner axes take the innermost devices. A model axis larger than the inner levels spills over into the next.
    """
    n = topology.devices
    found = [Mesh((MeshAxis("data", _take(topology, n, 1)),))]
    for model in divisors(n):
        if 1 < model:
            inner = _take(topology, model, 1)
            if inner and (model == n or _take(topology, n // model, model)):
                found.append(two_axes(topology, model) if model < n else Mesh((MeshAxis("model", inner),)))
    for second in divisors(n):
        for first in divisors(n // second):
            if second > 1 and first > 1 and first * second < n and second * first <= 64:
                outer = n // (first * second)
                parts = _take(topology, second, 1), _take(topology, first, second), _take(topology, outer, first * second)
                if all(parts):
                    found.append(Mesh((MeshAxis("data", parts[2]), MeshAxis("model", parts[1]), MeshAxis("model2", parts[0]))))
    return tuple(found)


def two_axes(topology: Topology, model: int) -> Mesh:
    """The mesh (data, model) with `model` neighbours along the model axis."""
    return Mesh((MeshAxis("data", _take(topology, topology.devices // model, model)), MeshAxis("model", _take(topology, model, 1))))


def _take(topology: Topology, size: int, skip: int) -> tuple[tuple[int, int], ...]:
    """`size` devices at stride `skip`, as parts of levels; () when the levels do not divide that way."""
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
    """A mesh with given axis sizes, outermost first as written. Raises PlanError when they do not multiply to the devices."""
    if prod(sizes.values()) != topology.devices:
        raise PlanError("P015", f"mesh {dict(sizes)} has {prod(sizes.values())} devices, the topology {topology.devices}", help=["make the product equal"])
    axes, skip = [], 1
    for name, n in reversed(list(sizes.items())):
        parts = _take(topology, n, skip) if n > 1 else ()
        if n > 1 and not parts:
            raise PlanError("P015", f"mesh axis {name!r} of {n} does not align with the links ({' x '.join(str(x.size) for x in topology.levels)})",
                            help=["sizes whose products divide the levels, innermost last"])  # fmt: skip
        axes.append(MeshAxis(name, parts))
        skip *= n
    return Mesh(tuple(reversed(axes)))
