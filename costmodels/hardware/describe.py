"""Devices in words: every figure with its unit and where it is from, and a table of what ships.
Plain text, at most `width` columns of a terminal."""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from costmodels.hardware.device import (
    TOPOLOGIES,
    Device,
    FusedAttention,
    Link,
    device_names,
    load_device,
    machine_named,
    topology_names,
)
from costmodels.hardware.intake import exists, read_toml
from costmodels.hardware.tiles import Tiles
from costmodels.hardware.units import bandwidth_bytes_per_s, show_bytes

WIDTH = 110
LEAST = 30
"""Columns of a terminal that a last column of words needs; in fewer it is left out."""
ALSO = "also"
_NAME, _GAP = 26, 2


def attention_keys(fused: FusedAttention | None) -> tuple[str, ...]:
    """Figures of a device's fused attention that are shown with their source."""
    if fused is None:
        return ()
    optional = (("masked", (1.0, 1.0)), ("passes", (0.0, 0.0)))
    there = (k for k, none in optional if getattr(fused, k) != none)
    return ("forward", "backward", *there, *(("latent_head",) if fused.heads.latent else ()))


def figures(device: Device) -> tuple[tuple[str, str], ...]:
    """("table.key", value with unit) of everything the cost models read from a device file, in the
    order of the file."""
    rows = [("node_size", f"{device.node_size} on the inner link")]
    rows += [(f"peak.{name}", _rate(value)) for name, value in device.peak_flops_per_s.items()]
    points = zip(device.matmul_flops, device.matmul_efficiency, strict=True)
    rows += [
        ("matmul.efficiency", ", ".join(f"{y:g} at {x:g} FLOPs" for x, y in points)),
        *_tiles(device.tiles),
        ("memory.capacity", f"{show_bytes(device.memory_bytes)} ({device.memory_bytes} B)"),
        ("memory.context", show_bytes(device.context_bytes)),
        ("memory.bandwidth", _bandwidth(device.memory_bytes_per_s)),
        ("memory.efficiency", f"{device.memory_efficiency:g}"),
        *([("memory.tile", "{} rows x {} lanes".format(*device.tile))] if device.tile else []),
        *([("memory.on_chip", show_bytes(device.on_chip_bytes))] if device.on_chip_bytes else []),
        ("kernel.launch", _micro(device.launch_s)),
    ]
    if fused := device.attention:
        of_peak = f"of peak, {fused.kernel}"
        if fused.widths:
            of_peak += f", heads of {', '.join(map(str, fused.widths))}"
        for name, rates in (("forward", fused.forward), ("backward", fused.backward)):
            text = f"{', '.join(f'{x:g}' for x in rates)} {of_peak}"
            rows.append((f"attention.{name}", text))
        both = (("masked", fused.masked, "of that, with a mask"), ("passes", fused.passes, "times"))
        rows += [
            (f"attention.{name}", f"{pair[0]:g} and {pair[1]:g} {unit}, forward and backward")
            for name, pair, unit in both
            if name in attention_keys(fused)
        ]
        if fused.heads.latent:
            text = "{} and {}, keys and values".format(*fused.heads.latent)
            rows.append(("attention.latent_head", text))
    for name, link in (
        ("package", device.package),
        ("inner", device.inner),
        ("outer", device.outer),
    ):
        if link:
            rows += _link(name, link, device.package_size)
    rows.append(("host.bandwidth", _bandwidth(device.host_bytes_per_s)))
    rows += [("power.device", f"{device.watts:g} W")] if device.watts else []
    return (*rows, *([("price.device", f"{device.usd_per_h:g} USD/h")] if device.usd_per_h else []))


def describe(device: Device, width: int = WIDTH) -> str:
    """`plan hardware NAME`: a line or more for every figure, with its source or `guessed: why`."""
    facts = (
        device.kind,
        f"also {', '.join(device.aliases)}" if device.aliases else "",
        f"figures and price of {device.date}" if device.date else "",
    )
    lines = [*textwrap.wrap(f"{device.name}: {', '.join(x for x in facts if x)}", width), ""]
    for key, value in figures(device):
        error = device.uncertainty.get(key)
        lines += _row(
            key, value + (f" +- {error:.0%}" if error else ""), origin(device, key), width
        )
    curve = device.guessed.get("matmul.flops")
    if curve:
        lines += _row("matmul curve", "", f"guessed: {curve}", width)
    for runtime, rates in device.rates.items():
        lines += _row(
            f"rates.{runtime}",
            ", ".join(f"{k} {v:g}" for k, v in rates.items()),
            origin(device, f"rates.{runtime}"),
            width,
        )
    if device.measured:
        lines += [
            "",
            *textwrap.wrap(
                "measured: " + ", ".join(f"{k} {v}" for k, v in device.measured.items()), width
            ),
        ]
    unknown = [
        what
        for what, value in (("power", device.watts), ("price", device.usd_per_h))
        if value is None
    ]
    if unknown:
        lines += ["", f"not known: {' and '.join(unknown)}"]
    return "\n".join(line.rstrip() for line in lines)


def origin(device: Device, key: str) -> str:
    """Where a figure is from: its source, "guessed: why", or "no source given"."""
    if key in device.sources:
        return device.sources[key]
    return f"guessed: {device.guessed[key]}" if key in device.guessed else "no source given"


def as_json(device: Device) -> dict[str, Any]:
    """Every figure in base units (the unit is part of the key), with sources and guesses as the
    file has them; unknown ones are null."""
    return asdict(device)


def library() -> dict[str, Any]:
    """`plan hardware --json`: all devices and machines that ship, by name."""
    return {
        "devices": {name: as_json(load_device(name)) for name in device_names()},
        "topologies": {name: topology_table(name) for name in topology_names()},
    }


def overview(width: int = WIDTH) -> str:
    """`plan hardware`: the devices that ship, one a line. `*` marks a guessed figure. Columns that
    a narrow terminal has no room for are left out by name."""
    head = (
        "device",
        "TFLOP/s",
        "matmul",
        "memory",
        "GB/s",
        "node",
        "inner GB/s",
        "outer",
        "W",
        "USD/h",
        ALSO,
    )
    rows = [head, *(_summary(load_device(name)) for name in device_names())]
    dropped: list[str] = []
    tables = [_columns(rows, width, dropped), _machines(width, dropped)]
    notes = (
        (
            "TFLOP/s: dense, 16-bit (cpu: 32-bit). matmul: best sustained share of it. Links: GB/s"
            " per device and direction; 7 x 64 mesh, 6 x 45 torus: links x bandwidth of one."
        ),
        (
            "W: the device alone at its limit. USD/h: list price on demand, host and network"
            " included. * guessed, - not known."
        ),
        (
            "`plan hardware NAME` prints every figure with its source, --json all of them. Torus"
            " slices by shape: --hardware tpu-v5e:4x8. Machines by what their providers call them:"
            " --hardware p5.48xlarge"
        ),
    )
    gone = (
        ["Other names: " + ", ".join(f"{row[-1]} ({row[0]})" for row in rows[1:] if row[-1])]
        if ALSO in dropped
        else []
    )
    rest = [name for name in dropped if name != ALSO]
    gone += [f"A wider terminal also shows {', '.join(rest)}."] if rest else []
    wrapped = (line for note in (*notes, *gone) for line in textwrap.wrap(note, min(width, WIDTH)))
    return "\n".join((*tables[0], "", *wrapped, "", *tables[1]))


def topology_table(name: str) -> dict[str, Any]:
    """A machine that ships by name, or a topology file, as written there."""
    ships = "" if exists(name) else machine_named(name)
    return _machine(ships) if ships else read_toml(name)


def describe_topology(name: str, width: int = WIDTH) -> str:
    """`plan hardware NAME` for a machine that ships, or a topology file: its levels, innermost
    first, with their sources."""
    data = topology_table(name)
    chips = (
        data["device"]
        if "device" in data
        else " + ".join(f"{g['devices']} x {g['device']}" for g in data["group"])
    )
    facts = (data.get("summary"), chips, f"figures of {data['date']}" if "date" in data else None)
    lines = [*textwrap.wrap(f"{name}: {', '.join(x for x in facts if x)}", width), ""]
    for level in data["level"]:
        rest = ", ".join(
            f"{key.replace('_', ' ')} {value}"
            for key, value in level.items()
            if key not in ("name", "size", "source")
        )
        lines += _row(
            f"{level['name']} x {level.get('size', 'N')}",
            rest,
            level.get("source", "no source given"),
            width,
        )
    return "\n".join(line.rstrip() for line in lines)


def _machines(width: int, dropped: list[str]) -> list[str]:
    """A line for every topology that ships."""
    rows = [
        (
            name,
            data["device"],
            " + ".join(
                f"{x['name']} {bandwidth_bytes_per_s(x['bandwidth']) / 1e9:g}"
                for x in data["level"]
            ),
            data["summary"],
        )
        for name, data in ((n, _machine(n)) for n in topology_names())
    ]
    return _columns([("--topology", "device", "GB/s per device", "machine"), *rows], width, dropped)


def _columns(rows: Sequence[Sequence[str]], width: int, dropped: list[str]) -> list[str]:
    """Rows in columns, the last of which is wrapped under itself. Columns that do not fit go, and
    their heads are put in `left`."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    begins = [sum(widths[:i]) + _GAP * i for i in range(len(widths))]
    last = max(
        i
        for i, column in enumerate(begins)
        if column + min(LEAST, widths[i]) <= max(width, begins[1])
    )
    dropped += rows[0][last + 1 :]
    lines = []
    for row in rows:
        first, *continued = textwrap.wrap(row[last], max(LEAST, width - begins[last])) or [""]
        cells = [*row[:last], first]
        lines += [
            "  ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=False)).rstrip(),
            *(" " * begins[last] + line for line in continued),
        ]
    return lines


def _machine(name: str) -> dict[str, Any]:
    return tomllib.loads((TOPOLOGIES / f"{name}.toml").read_text())


def _summary(device: Device) -> tuple[str, ...]:
    main = next(k for k in ("bfloat16", "float16", "float32") if k in device.peak_flops_per_s)
    if device.guessed.get("peak.bfloat16") and "float16" in device.peak_flops_per_s:
        main = "float16"  # an emulated bfloat16 is not what the device is bought for
    inner, mark = device.inner, lambda key: "*" if key in device.guessed else ""
    rate = f"{inner.bandwidth_bytes_per_s / 1e9:g}"
    links = (
        f"{2 * inner.torus_dims} x {rate} torus"
        if inner.torus_dims
        else f"{device.node_size - 1} x {rate} mesh"
        if inner.kind == "mesh"
        else rate
    )
    return (
        device.name,
        f"{device.peak_flops_per_s[main] / 1e12:g}" + mark(f"peak.{main}"),
        f"{device.matmul_efficiency[-1]:.2f}{mark('matmul.efficiency')}",
        show_bytes(device.memory_bytes) + mark("memory.capacity"),
        f"{device.memory_bytes_per_s / 1e9:g}" + mark("memory.bandwidth"),
        str(device.node_size),
        links + mark("inner.bandwidth"),
        f"{device.outer.bandwidth_bytes_per_s / 1e9:g}" + mark("outer.bandwidth"),
        f"{device.watts:g}" if device.watts else "-",
        f"{device.usd_per_h:.2f}" if device.usd_per_h else "-",
        device.aliases[0] if device.aliases else "",
    )


def _tiles(tiles: Tiles | None) -> list[tuple[str, str]]:
    if tiles is None:
        return []
    names = ", ".join(f"{m} x {n}" for m, n in tiles.shapes)
    of_sum, adding = tiles.splitting
    return [
        ("products.units", f"{tiles.units} compute units"),
        ("products.tiles", f"{names}, each turned as well"),
        ("products.efficiency", f"{tiles.efficiency:g} of peak within a tile"),
        ("products.start", f"{_micro(tiles.start_s)} a tile"),
        ("products.kernel", f"{_micro(tiles.kernel_s)} a kernel"),
        ("products.sums", f"{_bandwidth(tiles.sums_bytes_per_s)} of partial sums"),
        ("products.splitting", f"{of_sum:g} a byte, {adding:g} to add up"),
        ("products.convolutions", f"{tiles.convolutions:g} of the rates of products"),
    ]


def _link(name: str, link: Link, per_chip: int) -> list[tuple[str, str]]:
    per = {"torus": " per link and direction", "mesh": " to each other device"}.get(link.kind, "")
    rows = [(f"{name}.size", f"{per_chip} devices a chip")] if name == "package" else []
    rows += [
        (f"{name}.bandwidth", _bandwidth(link.bandwidth_bytes_per_s) + per),
        (f"{name}.efficiency", f"{link.efficiency:g}"),
        (f"{name}.latency", _micro(link.latency_s)),
    ]
    if link.all_reduce_bytes_per_s:
        rows.append((f"{name}.all_reduce_bandwidth", _bandwidth(link.all_reduce_bytes_per_s)))
    if link.all_reduce_latency_s:
        rows.append((f"{name}.all_reduce_latency", _micro(link.all_reduce_latency_s)))
    if link.torus_dims:
        rows.append((f"{name}.torus_pod", "at most " + "x".join(map(str, link.torus_pod))))
    return rows


def _row(key: str, value: str, source: str, width: int) -> list[str]:
    """Name, value and source in columns; long texts continue under their own column."""
    room = min(width, WIDTH) - _NAME - 2 * _GAP
    wide = 2 * room // 5
    values = textwrap.wrap(value, wide) or [""]
    texts = textwrap.wrap(source, room - wide, break_on_hyphens=False)
    height = max(len(values), len(texts))
    cells = (
        (
            key if i == 0 else "",
            values[i] if i < len(values) else "",
            texts[i] if i < len(texts) else "",
        )
        for i in range(height)
    )
    return [f"{a:<{_NAME}}  {b:<{wide}}  {c}" for a, b, c in cells]


def _rate(flops_per_s: float) -> str:
    return (
        f"{flops_per_s / 1e12:g} TFLOP/s"
        if flops_per_s >= 1e12
        else f"{flops_per_s / 1e9:g} GFLOP/s"
    )


def _bandwidth(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:g} GB/s"


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:g} us"
