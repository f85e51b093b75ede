"""Topology files (docs/hardware.md): a device by name, and a [[level]] table for each kind of link,
innermost first; a torus gives one for all its dims."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from costmodels import Device, DeviceError, topology_names
from costmodels.hardware.device import TOPOLOGIES, count, fraction, machine_named
from costmodels.hardware.intake import exists, read_toml
from costmodels.hardware.units import UnitError, bandwidth_bytes_per_s, time_s
from planner.errors import PlanError
from planner.machine.group_names import named_groups
from planner.machine.topology import Level, Topology, device, for_devices

DEFAULT_EFFICIENCY = 0.8
"""Sustained share of a level's bandwidth when a topology file does not say."""


def is_topology(path: str | Path) -> bool:
    """Whether a file is a topology and not a device: it has [[level]] tables."""
    try:
        return isinstance(read_toml(path).get("level"), list)
    except (OSError, ValueError):
        return False


def is_machine(hardware: str) -> bool:
    """Whether it names a topology, shipped or a file, and not a device."""
    return is_topology(hardware) or bool(machine_named(hardware))


def described(hardware: str, devices: int | None = None) -> Topology:
    """So many devices of what --hardware names: a device, groups by their numbers, a machine, or
    so many nodes of one (4xp5.48xlarge). Raises PlanError P014 for another number of devices."""
    if is_machine(hardware):
        return from_file(hardware, devices)
    if nodes := _nodes_named(hardware):
        topology = from_file(nodes[1], nodes[0] * _per_node(nodes[1]))
        if devices not in (None, topology.devices):
            raise PlanError(
                "P014",
                f"--devices {devices} but {hardware} has {topology.devices}",
                help=[f"--devices {topology.devices}, or leave --devices out"],
            )
        return topology
    return for_devices(hardware, devices)


def _nodes_named(hardware: str) -> tuple[int, str] | None:
    """(4, "aws-p5") of 4xp5.48xlarge: nodes of a machine that ships and may have any number."""
    groups = named_groups(hardware)
    machine = machine_named(groups[0][1]) if len(groups) == 1 else ""
    return (groups[0][0], machine) if machine else None


def _per_node(machine: str) -> int:
    """Devices below the outermost level of a machine that ships."""
    tables = read_toml(TOPOLOGIES / f"{machine}.toml")["level"]
    return prod(table["size"] for table in tables[:-1])


def from_file(path: str | Path, devices: int | None = None) -> Topology:
    """A topology file (docs/hardware.md), or one that ships by name. Its product must equal
    `devices` when both are given.

    The outermost level may leave its size open: `devices` gives it.
    """
    ships = "" if exists(path) else machine_named(str(path))
    path = Path(ships or path)  # as errors name it
    try:
        data = read_toml(TOPOLOGIES / f"{ships}.toml" if ships else path)
    except OSError as e:
        help = [f"shipped: {', '.join(topology_names())}"] if not exists(path) else []
        raise PlanError(
            "P013", f"cannot read topology file {str(path)!r}: {e.strerror}", help=help
        ) from e
    except ValueError as e:
        raise PlanError("P013", f"{path} is not TOML: {e}") from e
    unknown = [
        k for k in data if k not in ("aliases", "device", "group", "level", "summary", "date")
    ]
    if unknown:
        raise PlanError(
            "P013",
            f"{path}: key {unknown[0]!r} is not known here",
            help=["`device = NAME` (or [[group]] tables) and [[level]] tables, innermost first"],
        )
    tables = data.get("level")
    groups = _groups(data["group"], path) if "group" in data and "device" not in data else ()
    if (
        not (groups or (isinstance(data.get("device"), str) and "group" not in data))
        or not isinstance(tables, list)
        or not tables
        or not all(isinstance(t, dict) for t in tables)
    ):
        raise PlanError(
            "P013",
            f"{path}: a topology needs `device = NAME`, or [[group]] tables instead, and at least"
            " one [[level]]",
        )
    if ships and devices is not None and 0 < devices < tables[0]["size"]:
        tables = [_part_of_node(tables[0], devices)]
    if not {"size", "shape"} & tables[-1].keys():
        tables[-1]["size"] = _open_size(path, tables[:-1], sum(n for _, n in groups) or devices)
        if tables[-1]["size"] == 1 and len(tables) > 1:
            tables.pop()
    levels = tuple(level for i, table in enumerate(tables) for level in _levels(table, path, i))
    topology = _mixed(groups, levels, path) if groups else Topology(device(data["device"]), levels)
    if devices is not None and topology.devices != devices:
        raise PlanError(
            "P014",
            f"--devices {devices} but {path} describes {topology.devices}"
            f" ({' x '.join(str(x.size) for x in levels)})",
            help=[f"--devices {topology.devices}, or leave --devices out"],
        )
    return topology


def _groups(tables: Any, path: Path) -> tuple[tuple[Device, int], ...]:
    """The [[group]] tables: a device and how many of it each."""
    if not isinstance(tables, list) or not all(
        isinstance(t, dict) and set(t) == {"device", "devices"} for t in tables
    ):
        raise PlanError(
            "P013", f"{path}: a [[group]] has `device = NAME` and `devices = N`, and nothing else"
        )
    try:
        return tuple((device(str(t["device"])), count(t["devices"], "devices")) for t in tables)
    except (TypeError, ValueError) as e:
        raise PlanError("P013", f"{path}: group: {e}") from e


def _mixed(
    groups: tuple[tuple[Device, int], ...], levels: tuple[Level, ...], path: Path
) -> Topology:
    """Groups on their links. Raises PlanError P013 for kinds that run no program together, P014
    where they are not as many as the levels join."""
    groups_text, joined = (
        " + ".join(f"{n} x {d.name}" for d, n in groups),
        prod(x.size for x in levels),
    )
    if (n := sum(n for _, n in groups)) != joined:
        raise PlanError(
            "P014",
            f"{path}: groups of {n} devices ({groups_text}), levels that join {joined}",
            help=["as many devices as the sizes of the levels multiply to"],
        )
    try:
        return Topology.mixed(groups, levels)
    except DeviceError as e:
        raise PlanError(
            "P013", f"{path}: {e}", help=["devices of one kind: gpu, tpu or cpu"]
        ) from e


def _part_of_node(table: Mapping[str, Any], devices: int) -> dict[str, Any]:
    """The innermost level of a machine that ships with fewer devices than a node has, whose switch
    makes no all-reduce of a part of it."""
    of_whole = ("all_reduce_bandwidth", "all_reduce_latency")
    return {key: value for key, value in table.items() if key not in of_whole} | {"size": devices}


def _open_size(path: Path, inner: list[dict[str, Any]], devices: int | None) -> int:
    """The size of an outermost level that leaves it open."""
    below = prod(level.size for i, table in enumerate(inner) for level in _levels(table, path, i))
    if devices is None:
        raise PlanError(
            "P014",
            f"{path} leaves the size of its outermost level open",
            help=[f"--devices N, a multiple of {below}"],
        )
    if devices < 1 or devices % below:
        near = " or ".join(
            str(n) for n in (devices // below * below, (devices // below + 1) * below) if n > 0
        )
        raise PlanError(
            "P014",
            f"--devices {devices} but {path} joins groups of {below}",
            help=[f"--devices {near}"],
        )
    return devices // below


_LEVEL_KEYS = (
    "name",
    "size",
    "shape",
    "wrap",
    "kind",
    "bandwidth",
    "latency",
    "efficiency",
    "all_reduce_bandwidth",
    "all_reduce_latency",
    "source",
)


def _levels(table: Mapping[str, Any], path: Path, index: int) -> tuple[Level, ...]:
    """The levels of one [[level]]: one, or one per dim of a torus."""
    where = f"{path}: level {index}"
    try:
        unknown = [k for k in table if k not in _LEVEL_KEYS]
        if unknown:
            raise ValueError(
                f"key {unknown[0]!r} is not known here; known: {', '.join(_LEVEL_KEYS)}"
            )
        kind, wrap = (
            table.get("kind", "torus" if "shape" in table else "switch"),
            table.get("wrap", False),
        )
        if kind not in ("switch", "mesh", "torus"):
            raise ValueError(f"kind {kind!r}: one of switch, mesh, torus")
        if kind != "torus" and ("shape" in table or wrap):
            raise ValueError('shape and wrap belong to kind = "torus"')
        if "shape" in table and "size" in table:
            raise ValueError("either size or shape")
        if not isinstance(wrap, bool):
            raise ValueError(f"wrap is true or false, not {wrap!r}")
        shape = table["shape"] if "shape" in table else [table["size"]]
        sizes = (
            [count(n, "size") for n in shape]
            if isinstance(shape, list) and shape
            else [count(shape, "shape")]
        )
        rate, latency = bandwidth_bytes_per_s(table["bandwidth"]), time_s(table["latency"])
        bus = (
            bandwidth_bytes_per_s(table["all_reduce_bandwidth"])
            if "all_reduce_bandwidth" in table
            else 0.0
        )
        delay = time_s(table["all_reduce_latency"]) if "all_reduce_latency" in table else 0.0
        if not rate:
            raise ValueError("bandwidth must be above 0")
        name, share = (
            str(table.get("name", f"level{index}")),
            fraction(table.get("efficiency", DEFAULT_EFFICIENCY), "efficiency"),
        )
        return tuple(
            Level(
                name if len(sizes) == 1 else f"{name}{i}",
                n,
                rate,
                latency,
                share,
                kind,
                bus,
                wrap,
                delay,
            )
            for i, n in enumerate(sizes)
        )
    except KeyError as e:
        raise PlanError("P013", f"{where}: key {e.args[0]!r} is missing") from e
    except (UnitError, TypeError, ValueError) as e:
        raise PlanError("P013", f"{where}: {e}") from e
