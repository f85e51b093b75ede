"""Figures -> a device file. What was measured has its source and standard error; what one process
cannot measure is taken from a device that ships, and says so.

On a known accelerator peaks and bandwidths stay those of the data sheet and what was measured
becomes the share of them that is reached: more than all of a data sheet is an error (another
device, or a clock that lies). A CPU has no data sheet: its best measured rates stand in, and the
shares are of those.
"""

from __future__ import annotations

import os
import socket
import time
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, replace
from decimal import ROUND_DOWN, Context
from typing import Any

from costmodels.hardware.describe import attention_keys
from costmodels.hardware.device import Device, DeviceError, Link, device_spelled, from_table
from costmodels.hardware.tiles import KEYS
from planner.calibrate.fit import AttentionFit, Estimate, Figures, LinkFit
from planner.calibrate.measure import Measured
from planner.calibrate.products import FEWEST, fit_tiles
from planner.errors import PlanError

MOST_OF_SHEET = 1.05
"""Of a data sheet's figure: clocks above the nominal one reach a little more."""
DIGITS = Context(prec=4, rounding=ROUND_DOWN)
Table = dict[str, Any]


def shipped_name(device_kind: str) -> str:
    """The shipped file of a device as jax names it. Raises PlanError P183 for one that is not
    known."""
    if name := device_spelled(device_kind):
        return name
    raise PlanError(
        "P183",
        f"no file ships for {device_kind!r}",
        help=["--hardware NAME: the device whose data sheet it has (`plan hardware` lists them)"],
    )


def table(figures: Figures, measured: Measured, base: Device, name: str) -> Table:
    """The content of a device file (costmodels.hardware.device). Raises PlanError P184 where
    figures exceed the data sheet of `base`."""
    host = measured.kind == "cpu"
    dtypes = ("float32",) if host else ("bfloat16", "float16", "float32")
    main = next(k for k in dtypes if k in base.peak_flops_per_s)
    peak = figures.rate.value if host else base.peak_flops_per_s[main]
    memory = max(figures.fastest_memory, figures.memory.value) if host else base.memory_bytes_per_s
    peaks = (
        {main: peak} | {k: peak * e.value for k, e in figures.others.items()}
        if host
        else dict(base.peak_flops_per_s)
    )
    sources, errors = _measured_sources(figures, main, host)
    sheet = "best measured rate" if host else f"as the file of {base.name}"
    sources = {f"peak.{k}": sheet for k in peaks} | {"memory.bandwidth": sheet} | sources
    sources["memory.capacity"] = (
        f"host memory / {measured.devices} devices" if host else "as the file of " + base.name
    )
    optional = {"tile": base.tile, "on_chip": base.on_chip_bytes}
    copied = ("context", *(k for k, there in optional.items() if there))
    guessed = {f"memory.{k}": f"as the file of {base.name}" for k in copied}
    for fits, assumed in (_attention_sources(figures, base), _products_sources(figures, base)):
        sources, guessed = sources | fits, guessed | assumed
    links: Table = {}
    for link, fit, shipped in (
        ("inner", figures.inner, base.inner),
        ("outer", figures.outer, base.outer),
    ):
        links[link], off, unsure = _link_table(link, fit, shipped, base, host, figures.inner)
        errors |= off
        sources |= {
            k: _said(e, "collectives over group sizes and payloads") for k, e in off.items()
        }
        guessed |= unsure
    (sources if host else guessed)["host.bandwidth"] = (
        "device memory is host memory" if host else f"as the file of {base.name}, not measured"
    )
    return {
        "name": name,
        "kind": measured.kind,
        "node_size": measured.node_size,
        "date": time.strftime("%Y-%m-%d"),
        "measured": {
            "host": socket.gethostname(),
            "device": measured.device,
            "devices": measured.devices,
            "cores": os.cpu_count() or 1,
            "jax": measured.jax,
        },
        "peak": {k: _flops(v) for k, v in peaks.items()},
        **_kernel_tables(figures, measured, base, peak, memory),
        **links,
        "host": {"bandwidth": _rate(memory if host else base.host_bytes_per_s)},
        "sources": sources,
        "guessed": guessed,
        "uncertainty": {k: float(f"{e.error:.2g}") for k, e in errors.items()},
    }


def _attention_sources(figures: Figures, base: Device) -> tuple[dict[str, str], dict[str, str]]:
    """Where the figures of fused attention are from: (measured, as the file says), by
    "table.key"."""
    measured = dict[str, str]()
    if (fit := figures.attention) and base.attention:
        source = f"measured: lengths of causal attention, {fit.off:.0%} off at most"
        measured = {
            f"attention.{k}": f"{source}; {fit.samples} samples"
            for k in ("forward", "backward", "passes")
        }
    keys = [f"attention.{key}" for key in attention_keys(base.attention)]
    unmeasured = f"as the file of {base.name}, not measured"
    return measured, {key: unmeasured for key in keys if key not in measured}


def _products_sources(figures: Figures, base: Device) -> tuple[dict[str, str], dict[str, str]]:
    """Where the figures of products by their extents are from, as `_attention_sources`."""
    if base.tiles is None:
        return {}, {}
    count, fitted = len(figures.products), ("efficiency", "start", "kernel", "sums")
    source = f"measured: products of rising size by their extents; {count} samples"
    measured = {f"products.{k}": source for k in fitted if count >= FEWEST}
    unmeasured = f"as the file of {base.name}, not measured"
    return measured, {
        key: unmeasured for k in sorted(KEYS) if (key := f"products.{k}") not in measured
    }


def _measured_sources(
    figures: Figures, main: str, host: bool
) -> tuple[dict[str, str], dict[str, Estimate]]:
    """(where measured figures of kernels are from, their estimates), by "table.key". host: the
    types beside the main one are measured too."""
    errors = {
        "matmul.efficiency": figures.rate,
        "memory.efficiency": figures.memory,
        "kernel.launch": figures.launch,
    }
    how = {
        "matmul.efficiency": "products of rising size, all devices at once",
        "memory.efficiency": "arrays scaled and summed",
        "kernel.launch": "a chain of products of 8 x 8",
    }
    if host:
        errors |= {f"peak.{k}": e for k, e in figures.others.items()}
        how |= {f"peak.{k}": f"its products beside those of {main}" for k in figures.others}
    sources = {"node_size": "devices that were measured together"}
    return sources | {k: _said(e, how[k]) for k, e in errors.items()}, errors


def _kernel_tables(
    figures: Figures, measured: Measured, base: Device, peak: float, memory: float
) -> Table:
    """The tables matmul, memory and kernel. peak, memory: the rates that shares are of."""
    sizes, shares = _curve(figures, base, peak)
    return {
        "matmul": {"flops": sizes, "efficiency": shares},
        "memory": {
            "capacity": _bytes(_capacity(measured, base)),
            "context": _bytes(base.context_bytes),
            "bandwidth": _rate(memory),
            "efficiency": _share(figures.memory.value / memory, "memory", base),
            **({"tile": list(base.tile)} if base.tile else {}),
            **({"on_chip": _bytes(base.on_chip_bytes)} if base.on_chip_bytes else {}),
        },
        "kernel": {"launch": _time(figures.launch.value)},
        **_products(figures, base, tuple(sizes), tuple(shares)),
        **({"attention": _attention(figures.attention, base)} if base.attention else {}),
    }


def _curve(figures: Figures, base: Device, peak: float) -> tuple[list[float], list[float]]:
    """FLOPs of products, and the share of the peak that they reach, in the file's digits: where
    small products all take a launch, rates rise as FLOPs do, and digits that were rounded up would
    rise faster."""
    sizes = [float(f"{x:.6g}") for x, _ in figures.curve]
    shares = [_share(y / peak, "products", base) for _, y in figures.curve]
    for i in range(1, len(shares)):
        most = shares[i - 1] * sizes[i] / sizes[i - 1]
        shares[i] = min(shares[i], float(DIGITS.create_decimal_from_float(most)))
    return sizes, shares


def _products(
    figures: Figures, base: Device, sizes: tuple[float, ...], shares: tuple[float, ...]
) -> Table:
    """The table products of a device with tiles: as measured where that is enough, else the file's.
    sizes, shares: the curve, whose end is what long steps sustain."""
    if base.tiles is None:
        return {}
    rate = base.memory_bytes_per_s
    here = replace(
        base,
        matmul_flops=sizes,
        matmul_efficiency=shares,
        memory_efficiency=min(1.0, figures.memory.value / rate),
        launch_s=figures.launch.value,
    )
    tiles = fit_tiles(here, figures.products) or base.tiles
    return {
        "products": {
            "units": tiles.units,
            "tiles": [list(x) for x in tiles.shapes],
            "efficiency": float(f"{tiles.efficiency:.4g}"),
            "start": _time(tiles.start_s),
            "kernel": _time(tiles.kernel_s),
            "sums": _rate(tiles.sums_bytes_per_s),
            "splitting": list(tiles.splitting),
            "convolutions": tiles.convolutions,
        }
    }


def _attention(fit: AttentionFit | None, base: Device) -> Table:
    """The table attention: as measured, else the file's."""
    table = asdict(base.attention) if base.attention else {}
    if heads := table.pop("heads", None):
        table |= {"widest_head": heads["most"], "latent_head": heads["latent"]}
    if fit is None:
        return table
    peak = base.peak_flops_per_s["bfloat16"]
    return table | {
        "widths": list(fit.widths),
        "forward": [_share(x / peak, "attention", base) for x in fit.forward],
        "backward": [_share(x / peak, "attention", base) for x in fit.backward],
        "passes": [float(f"{x:.4g}") for x in fit.passes],
    }


def _link_table(
    name: str, fit: LinkFit | None, shipped: Link, base: Device, host: bool, inner: LinkFit | None
) -> tuple[Table, dict[str, Estimate], dict[str, str]]:
    """(a link's table, estimates by "link.key", guesses by "link.key")."""
    if fit is None or shipped.kind == "torus":
        same = host and inner is not None and name == "outer"
        link = (
            Link(inner.bandwidth.value, 1.0, inner.latency.value)
            if same and inner is not None
            else shipped
        )
        why = (
            "one node was measured; as its inner link"
            if same
            else f"not measured; as the file of {base.name}"
        )
        table: Table = {
            "bandwidth": _rate(link.bandwidth_bytes_per_s),
            "efficiency": link.efficiency,
            "latency": _time(link.latency_s),
        }
        if name == "inner":
            table |= (
                {"kind": link.kind}
                if link.kind != "torus"
                else {"torus_dims": link.torus_dims, "torus_pod": list(link.torus_pod)}
            )
        return (
            table,
            {},
            dict.fromkeys((f"{name}.bandwidth", f"{name}.efficiency", f"{name}.latency"), why),
        )
    sheet = fit.bandwidth.value if host else shipped.bandwidth_bytes_per_s
    table = {
        "bandwidth": _rate(sheet),
        "efficiency": _share(fit.bandwidth.value / sheet, f"the {name} link", base),
        "latency": _time(fit.latency.value),
    }
    errors = {f"{name}.efficiency": fit.bandwidth, f"{name}.latency": fit.latency}
    if name == "inner":
        table["kind"] = fit.kind
    if fit.bus and fit.bus_latency and name == "inner":
        table |= {
            "all_reduce_bandwidth": _rate(fit.bus.value),
            "all_reduce_latency": _time(fit.bus_latency.value),
        }
        errors |= {
            "inner.all_reduce_bandwidth": fit.bus,
            "inner.all_reduce_latency": fit.bus_latency,
        }
    return (
        table,
        errors,
        {
            f"{name}.bandwidth": (
                "what was measured, efficiency included" if host else f"as the file of {base.name}"
            )
        },
    )


def _capacity(measured: Measured, base: Device) -> int:
    if measured.kind == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // measured.devices
    return base.memory_bytes


def _share(value: float, what: str, base: Device) -> float:
    if not 0 < value <= MOST_OF_SHEET:
        raise PlanError(
            "P184",
            f"{what}: {value:.3g} of what the file of {base.name} calls all there is",
            help=["--hardware with the device that this is"],
        )
    return float(f"{min(value, 1.0):.4g}")


def _said(e: Estimate, what: str) -> str:
    return f"measured: {what}; {e.samples} samples"


def _flops(value: float) -> str:
    return f"{value / 1e9:.4f} GFLOP/s"


def _rate(value: float) -> str:
    return f"{value / 1e9:.4f} GB/s"


def _bytes(value: int) -> str:
    return f"{value / 2**20:.0f} MiB"


def _time(value: float) -> str:
    return f"{value * 1e6:.4f} us"


def text(content: Mapping[str, Any], title: str) -> str:
    """A device file as TOML, checked by reading it back as `--hardware` does. Raises PlanError P180
    for what no device can be."""
    lines = [f"# {title}"]
    lines += [f"{key} = {_value(v)}" for key, v in content.items() if not isinstance(v, Mapping)]
    for key, rows in content.items():
        if isinstance(rows, Mapping):
            lines += _section(key, rows)
    toml = "\n".join(lines) + "\n"
    try:
        from_table(tomllib.loads(toml), "the profile")
    except DeviceError as e:
        raise PlanError(
            "P180",
            "what was measured makes no device file",
            detail=[str(e)],
            help=["run again when the machine does nothing else, without --quick"],
        ) from e
    return toml


def _section(key: str, rows: Mapping[str, Any]) -> list[str]:
    inner = {k: v for k, v in rows.items() if isinstance(v, Mapping)}
    plain = [
        f"{k if k.isidentifier() else _value(k)} = {_value(v)}"
        for k, v in rows.items()
        if k not in inner
    ]
    lines = ["", f"[{key}]", *plain] if plain else []
    for k, v in inner.items():
        lines += _section(f"{key}.{k}", v)
    return lines


def _value(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    return repr(value)
