"""Devices as data: figures with units, each with a source; a figure that is a guess is listed as
guessed.

A TOML file in costmodels/hardware/devices (or the user's own):

    name = "h100-sxm"
    kind = "gpu"                          # gpu | tpu | cpu
    node_size = 8                         # devices that share the inner link
    date = "2026-11"                      # when the figures were last looked up
    aliases = ["h100"]                    # optional: other names it goes by; a shipped device only
    [names]                               # optional: what others call it
    spelled = ["H100"]                    # parts of the name that jax or a published run gives it
    kubernetes = "nvidia.com/gpu"         # the resource that pods ask for
    node_label = "NVIDIA-H100-80GB-HBM3"  # value of the label of nodes that have it
    [peak]                                # dense arithmetic per device
    bfloat16 = "989 TFLOP/s"
    [matmul]                              # sustained fraction of peak by FLOPs of one product:
                                          points, a power law between neighbours
    flops = [1e8, 1e9, 1e10, 1e11, 1e12]
    efficiency = [0.05, 0.25, 0.55, 0.72, 0.76]
    [products]                            # optional: products by their extents
                                          # (costmodels.hardware.tiles)
    [memory]
    capacity = "81008 MiB"                # as the runtime reports it
    context = "600 MiB"                   # taken by the driver and the runtime before the first
                                          array
    bandwidth = "3350 GB/s"
    efficiency = 0.84
    on_chip = "64 MiB"                    # optional: a core's own memory, of TPUs (VMEM)
    [kernel]
    launch = "4 us"
    [attention]                           # optional: the fused attention that emitted programs run
    kernel = "cudnn"                      # there: "cudnn" or "splash"
    forward = 0.60; backward = 0.48       # sustained fraction of peak of its products, without
                                          those that a causal mask leaves out; lists where heads
    widths = [64, 128, 256]               # of these widths differ (others count as the next one)
    masked = [0.55, 0.42]                 # optional: what a mask whose terms are added leaves of
                                          forward and backward
    passes = [0.7, 2.9]                   # optional: times that each goes over operands and results
                                          in memory beside its products
    widest_head = 256                     # most elements of a head it takes (default 128)
    latent_head = [192, 128]              # optional: of keys and of values that it takes beside
                                          those as they are (multi-head latent attention)
    [inner]                               # link inside a node, per device and direction
    bandwidth = "450 GB/s"; efficiency = 0.8; latency = "3 us"
    kind = "switch"                       # or "mesh": a link to each other device of the node,
                                          bandwidth is then of one link; "memory": virtual devices
                                          of one host
    all_reduce_bandwidth = "480 GB/s"     # optional: bus bandwidth with in-switch reduction (NVLS),
                                          as measured on a full node
    all_reduce_latency = "70 us"          # with all_reduce_bandwidth: what such a reduction takes
                                          beside its bytes
    torus_dims = 3                        # optional: the link forms a torus; bandwidth is then per
                                          link and direction
    torus_pod = [16, 16, 24]              # with torus_dims: sides of the largest slice
    [outer]                               # between nodes (or slices), per device
    bandwidth = "50 GB/s"; efficiency = 0.8; latency = "10 us"
    [package]                             # optional: a chip that is several devices; they share the
                                          chip's torus links
    size = 2; bandwidth = "600 GB/s"; efficiency = 0.8; latency = "1 us"
    [host]
    bandwidth = "55 GB/s"                 # device <-> host memory
    [power]                               # optional
    device = "700 W"                      # of the device alone, at its limit
    [price]                               # optional
    device = "6.88 USD/h"                 # of one device with its share of the host and the network
    [sources]                             # "table.key" -> where the figure is from
    [guessed]                             # "table.key" -> why this value
    [measured]                            # optional, of a calibrated file: host, device, devices,
                                          cores, jax, runs
    [uncertainty]                         # optional: "table.key" -> relative standard error of a
                                          measured figure
    [rates.megatron]                      # optional: what a runtime profile reaches of these
                                          figures, fitted to runs (costmodels.runtimes.Rates)
    memory = 0.9

A key `efficiency` of `[attention]`, which files of earlier versions have, is accepted and has no
effect: attention without a fused kernel is priced as its products and the passes over its scores.
"""

from __future__ import annotations

import math
import tomllib
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from costmodels.collectives import MEMORY
from costmodels.hardware.intake import exists, read_toml
from costmodels.hardware.tiles import KEYS as TILES_KEYS
from costmodels.hardware.tiles import Tiles, tiles_of
from costmodels.hardware.units import (
    UnitError,
    bandwidth_bytes_per_s,
    power_w,
    price_usd_per_h,
    rate_flops_per_s,
    size_bytes,
    time_s,
)
from costmodels.runtimes import Rates, runtime_names

DEVICES = Path(__file__).with_name("devices")
TOPOLOGIES = Path(__file__).with_name("topologies")


_WIDER = {
    "float8_e4m3fn": ("bfloat16", "float16"),
    "float16": ("bfloat16",),
    "bfloat16": ("float16",),
}
_KEYS: dict[str, set[str]] = {
    "names": {"spelled", "kubernetes", "node_label"},
    "matmul": {"flops", "efficiency"},
    "products": TILES_KEYS,
    "attention": {  # efficiency: of earlier versions
        "kernel",
        "forward",
        "backward",
        "widths",
        "masked",
        "passes",
        "widest_head",
        "latent_head",
        "efficiency",
    },
    "memory": {"capacity", "context", "bandwidth", "efficiency", "tile", "on_chip"},
    "kernel": {"launch"},
    "inner": {
        "bandwidth",
        "efficiency",
        "latency",
        "kind",
        "all_reduce_bandwidth",
        "all_reduce_latency",
        "torus_dims",
        "torus_pod",
    },
    "outer": {"bandwidth", "efficiency", "latency"},
    "package": {"size", "bandwidth", "efficiency", "latency"},
    "host": {"bandwidth"},
    "power": {"device"},
    "price": {"device"},
}
_TOP = {
    "name",
    "kind",
    "node_size",
    "date",
    "aliases",
    "peak",
    "sources",
    "guessed",
    "measured",
    "uncertainty",
    "rates",
    *_KEYS,
}


ATTENTION_KERNELS = ("cudnn", "splash")
"""Fused attention: cuDNN's on NVIDIA GPUs from Ampere on, Splash on TPUs."""


SHARES = ("matmul", "memory", "attention", "inner", "outer", "latency", "inner_latency")
"""Fields of Rates that are shares of a rate of the file, and so above 0."""


class DeviceError(ValueError):
    """A device file that cannot be used: what is wrong and where."""


@dataclass(frozen=True)
class Link:
    """One kind of link: per device and direction. all_reduce_bytes_per_s: bus bandwidth of
    in-network reduction, 0 when there is none; all_reduce_latency_s: what it takes beside its
    bytes.

    kind: switch, mesh (bandwidth of one of the links to each other device), torus (bandwidth per
    link and direction) or memory (virtual devices of a host).
    """

    bandwidth_bytes_per_s: float
    efficiency: float
    latency_s: float
    kind: str = "switch"
    all_reduce_bytes_per_s: float = 0.0
    torus_dims: int = 0
    """Dimensions of the torus this link forms, 0 when it forms none."""
    torus_pod: tuple[int, ...] = ()
    """Sides of the largest slice, rising; as many as torus_dims."""
    all_reduce_latency_s: float = 0.0


@dataclass(frozen=True)
class AttentionPass:
    """A pass of fused attention: width: elements of a head; masked: whether the terms of a mask are
    added to scores."""

    backward: bool
    width: int
    masked: bool = False


@dataclass(frozen=True)
class HeadWidths:
    """Elements of heads that a kernel takes. most: of keys, with values brought to the same;
    latent: of keys and of values that it takes beside those, as they are; () where there are
    none."""

    most: int = 128
    latent: tuple[int, ...] = ()

    def as_they_are(self, keys: int, values: int) -> bool:
        """Whether values narrower than keys need no zeros behind them."""
        return (keys, values) == self.latent


@dataclass(frozen=True)
class FusedAttention:
    """The fused attention kernel of a device. kernel: one of ATTENTION_KERNELS; forward, backward:
    sustained fraction of peak of the products of each pass, without those that a causal mask leaves
    out, of heads of `widths` elements, rising (one figure for all where that is empty);
    heads: how wide cuDNN's takes them. masked: what is left of both where the
    terms of a mask are added to scores. passes: how often each pass goes over its operands and
    results in memory beside its products: sums that are kept in float32, sums over rows."""

    kernel: str
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    widths: tuple[int, ...] = ()
    heads: HeadWidths = HeadWidths()
    masked: tuple[float, float] = (1.0, 1.0)
    passes: tuple[float, float] = (0.0, 0.0)

    def efficiency(self, of: AttentionPass) -> float:
        """Fraction of peak of a pass over heads of a width: a kernel computes what it fills up to
        the next width of its own."""
        rates = self.backward if of.backward else self.forward
        masked_share = self.masked[of.backward] if of.masked else 1.0
        if not self.widths:
            return rates[0] * masked_share
        k = min(bisect_left(self.widths, of.width), len(self.widths) - 1)
        return rates[k] * masked_share * min(1.0, of.width / self.widths[k])


@dataclass(frozen=True)
class Device:
    """One accelerator (or a CPU used as one)."""

    name: str
    kind: str
    node_size: int
    peak_flops_per_s: Mapping[str, float]
    matmul_flops: tuple[float, ...]
    matmul_efficiency: tuple[float, ...]
    memory_bytes: int
    context_bytes: int
    memory_bytes_per_s: float
    memory_efficiency: float
    launch_s: float
    inner: Link
    outer: Link
    host_bytes_per_s: float
    package: Link | None = None
    package_size: int = 1
    """Devices of one chip; they share its inner links."""
    sources: Mapping[str, str] = field(default_factory=dict)
    guessed: Mapping[str, str] = field(default_factory=dict)
    date: str = ""
    """When the figures were last looked up, or measured; "" when the file does not say."""
    aliases: tuple[str, ...] = ()
    watts: float | None = None
    """Power of the device alone at its limit; None where nobody publishes it."""
    usd_per_h: float | None = None
    """Price of one device for an hour, host and network included; None where none is known."""
    measured: Mapping[str, str] = field(default_factory=dict)
    """Of a calibrated file: where and with what it was measured."""
    uncertainty: Mapping[str, float] = field(default_factory=dict)
    """"table.key" -> relative standard error of a measured figure."""
    rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Runtime profile -> fields of costmodels.runtimes.Rates that were fitted to runs on this
    device."""
    tile: tuple[int, int] | None = None
    """Rows and lanes that arrays are stored in whole tiles of (costmodels.capacity); None where
    they are packed."""
    on_chip_bytes: int = 0
    """A core's own memory, of TPUs, which kernels cut their tiles for; 0 where it is not known."""
    spelled: tuple[str, ...] = ()
    """Parts of the names that jax and published runs give it."""
    kubernetes: str = "nvidia.com/gpu"
    """The resource that pods ask for, "" where they ask for none."""
    node_label: str = ""
    """Value of the label of Kubernetes nodes that have it, "" where none is known."""
    attention: FusedAttention | None = None
    """The fused attention that emitted programs run there; None for none."""
    tiles: Tiles | None = None
    """How its library multiplies matrices; None where products are priced by FLOPs alone."""
    file: str = ""
    """Where a device that does not ship was read from."""
    anchor: str = ""
    """Name of the model that a step was measured of, to which `rates` were scaled."""

    @property
    def attention_kernel(self) -> str:
        """Name of the fused attention, "" for none."""
        return self.attention.kernel if self.attention else ""

    @property
    def head_widths(self) -> HeadWidths:
        """How wide heads are that the fused attention takes."""
        return self.attention.heads if self.attention else HeadWidths(0)

    @property
    def source(self) -> str:
        """What `load_device` makes this device from again: its file, or the name of one that
        ships."""
        return self.file or self.name

    def peak(self, dtype: str) -> float:
        """FLOP/s of a type; types without a figure of their own run at the nearest wider one's
        rate."""
        for name in (dtype, *_WIDER.get(dtype, ())):
            if name in self.peak_flops_per_s:
                return self.peak_flops_per_s[name]
        return self.peak_flops_per_s.get("float32") or min(self.peak_flops_per_s.values())

    def efficiency(self, flops: float) -> float:
        """Sustained fraction of peak of one product of that many FLOPs: a power law between the
        points of the file, level outside them."""
        xs, ys = self.matmul_flops, self.matmul_efficiency
        if flops <= xs[0]:
            return ys[0]
        for (x0, x1), (y0, y1) in zip(pairwise(xs), pairwise(ys), strict=True):
            if flops <= x1:
                return y0 * (flops / x0) ** (math.log(y1 / y0) / math.log(x1 / x0))
        return ys[-1]


def device_names() -> tuple[str, ...]:
    """Names of the devices that ship."""
    return tuple(sorted(p.stem for p in DEVICES.glob("*.toml")))


@cache
def aliases() -> Mapping[str, str]:
    """Other names of the devices that ship -> their own."""
    files = {name: tomllib.loads((DEVICES / f"{name}.toml").read_text()) for name in device_names()}
    return {alias: name for name, data in files.items() for alias in data.get("aliases", ())}


@cache
def spellings() -> Mapping[str, str]:
    """Part of a device's name as others write it -> the device that ships, the longest first."""
    pairs = [(text, name) for name in device_names() for text in load_device(name).spelled]
    return dict(sorted(pairs, key=lambda pair: (-len(pair[0]), pair[0])))


def device_spelled(text: str) -> str:
    """Name of the shipped device that a text of jax or of a published run means, "" for none."""
    lower = text.lower()
    return next((name for part, name in spellings().items() if part.lower() in lower), "")


def topology_names() -> tuple[str, ...]:
    """Names of the machines that ship: topology files whose outermost size follows from the device
    count."""
    return tuple(sorted(p.stem for p in TOPOLOGIES.glob("*.toml")))


@cache
def _machine_aliases() -> Mapping[str, str]:
    """Other names of the machines that ship, as their providers write them -> their own."""
    files = {
        name: tomllib.loads((TOPOLOGIES / f"{name}.toml").read_text()) for name in topology_names()
    }
    return {alias: name for name, data in files.items() for alias in data.get("aliases", ())}


def machine_named(name: str) -> str:
    """The machine that ships by its own name or another one (in any case), "" for none."""
    lower = name.lower()
    return lower if lower in topology_names() else _machine_aliases().get(lower, "")


def load_device(name: str) -> Device:
    """A shipped device by name or alias (in any case), or a device file by path, which is read
    anew. Raises DeviceError with the file and the key."""
    lower = name.lower()
    shipped = lower if lower in device_names() else aliases().get(lower, "")
    return _shipped(shipped) if shipped else _of_file(Path(name), name)


@cache
def _shipped(name: str) -> Device:
    return replace(_of_file(DEVICES / f"{name}.toml", name), file="")


def _of_file(path: Path, name: str) -> Device:
    try:
        data = read_toml(path)
    except OSError as e:
        raise DeviceError(
            f"{path} cannot be read: {e.strerror}"
            if exists(path)
            else f"no device {name!r} ships and there is no such file"
        ) from e
    except ValueError as e:
        raise DeviceError(f"{path}: {e}") from e
    return replace(from_table(data, str(path)), file=str(path.resolve()))


def from_table(data: Mapping[str, Any], where: str) -> Device:
    """A Device from a parsed file. Raises DeviceError for missing or unknown keys, wrong units and
    impossible values."""
    try:
        _known(data)
        return _device(_Table.of(data))
    except KeyError as e:
        raise DeviceError(f"{where}: key {e.args[0]!r} is missing") from e
    except (UnitError, ValueError, TypeError, AttributeError) as e:
        raise DeviceError(f"{where}: {e}") from e


class _Table(dict[str, Any]):
    """A table of a file, which says of a missing key in which table it is missing."""

    name = ""

    @classmethod
    def of(cls, data: Mapping[str, Any], name: str = "") -> _Table:
        """A table with the tables in it."""
        table = cls(
            (k, cls.of(v, f"{name}{k}.") if isinstance(v, Mapping) else v) for k, v in data.items()
        )
        table.name = name
        return table

    def __missing__(self, key: str) -> Any:
        raise KeyError(f"{self.name}{key}")


def _device(data: Mapping[str, Any]) -> Device:
    """The Device of a parsed file. KeyError and ValueError say what is wrong with it."""
    memory = data["memory"]
    capacity_bytes = _above_zero(size_bytes(memory["capacity"]), "memory.capacity")
    context_bytes = size_bytes(memory["context"])
    if context_bytes >= capacity_bytes:
        raise ValueError(
            f"memory.context {memory['context']} leaves nothing of memory.capacity"
            f" {memory['capacity']}"
        )
    points, values = _curve(data["matmul"])
    peak = {str(k): rate_flops_per_s(v) for k, v in data["peak"].items()}
    if not peak or not all(peak.values()):
        raise ValueError("[peak] needs a rate above 0 for at least one type")
    inner, package = _link(data["inner"]), data.get("package")
    if package and not inner.torus_dims:
        raise ValueError("[package] describes chips of a torus; [inner] has no torus_dims")
    return Device(
        name=str(data["name"]),
        kind=_choice(data["kind"], ("gpu", "tpu", "cpu"), "kind"),
        node_size=count(data["node_size"], "node_size"),
        peak_flops_per_s=peak,
        matmul_flops=points,
        matmul_efficiency=values,
        memory_bytes=capacity_bytes,
        context_bytes=context_bytes,
        memory_bytes_per_s=_above_zero(
            bandwidth_bytes_per_s(memory["bandwidth"]), "memory.bandwidth"
        ),
        memory_efficiency=fraction(memory["efficiency"], "memory.efficiency"),
        launch_s=time_s(data["kernel"]["launch"]),
        attention=_attention(data.get("attention", {})),
        inner=inner,
        outer=_link(data["outer"]),
        host_bytes_per_s=_above_zero(
            bandwidth_bytes_per_s(data["host"]["bandwidth"]), "host.bandwidth"
        ),
        package=_link(package) if package else None,
        package_size=count(package["size"], "package.size") if package else 1,
        tile=_tile(memory["tile"]) if "tile" in memory else None,
        tiles=tiles_of(data["products"]) if "products" in data else None,
        on_chip_bytes=size_bytes(memory["on_chip"]) if "on_chip" in memory else 0,
        rates=known_rates(data.get("rates", {})),
        **_about(data),
    )


def _about(data: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a Device that no price of a step reads: where its figures are from, what it draws
    and costs, what others call it."""
    power, price, names = data.get("power"), data.get("price"), data.get("names", {})
    return {
        "spelled": tuple(str(text) for text in names.get("spelled", ())),
        "kubernetes": str(names.get("kubernetes", "nvidia.com/gpu")),
        "node_label": str(names.get("node_label", "")),
        "sources": {str(k): str(v) for k, v in data.get("sources", {}).items()},
        "guessed": {str(k): str(v) for k, v in data.get("guessed", {}).items()},
        "date": str(data.get("date", "")),
        "aliases": tuple(str(a) for a in data.get("aliases", ())),
        "watts": None if power is None else _above_zero(power_w(power["device"]), "power.device"),
        "usd_per_h": None
        if price is None
        else _above_zero(price_usd_per_h(price["device"]), "price.device"),
        "measured": {str(k): str(v) for k, v in data.get("measured", {}).items()},
        "uncertainty": {
            str(k): fraction(v, f"uncertainty of {k}")
            for k, v in data.get("uncertainty", {}).items()
        },
    }


def _known(data: Mapping[str, Any]) -> None:
    """A misspelt optional key must not be ignored in silence."""
    for table, keys in {"": _TOP, **_KEYS}.items():
        content = data.get(table, {}) if table else data
        if not isinstance(content, dict):
            raise ValueError(f"[{table}] is a table of keys, not {content!r}")
        for key in content:
            if key not in keys:
                raise ValueError(
                    f"key {f'{table}.{key}'.lstrip('.')!r} is not known here; known:"
                    f" {', '.join(sorted(keys))}"
                )


def _attention(table: Mapping[str, Any]) -> FusedAttention | None:
    """The fused attention of a file; of earlier versions' files none."""
    if set(table) <= {"efficiency"}:
        return None
    widths = tuple(count(x, "attention.widths") for x in table.get("widths", ()))
    if list(widths) != sorted(set(widths)):
        raise ValueError(f"attention.widths: {list(widths)} do not rise")
    return FusedAttention(
        _choice(table["kernel"], ATTENTION_KERNELS, "attention.kernel"),
        _fractions(table["forward"], "attention.forward", len(widths) or 1),
        _fractions(table["backward"], "attention.backward", len(widths) or 1),
        widths,
        HeadWidths(
            count(table.get("widest_head", 128), "attention.widest_head"), _latent_head(table)
        ),
        _two(_fractions(table.get("masked", [1.0, 1.0]), "attention.masked", 2)),
        _two(_numbers(table.get("passes", [0.0, 0.0]), "attention.passes", 2)),
    )


def _latent_head(table: Mapping[str, Any]) -> tuple[int, ...]:
    """Elements of keys and of values, the second fewer; () where the file has none."""
    widths = tuple(count(x, "attention.latent_head") for x in table.get("latent_head", ()))
    if widths and (len(widths) != 2 or widths[0] <= widths[1]):
        raise ValueError(
            f"attention.latent_head: {list(widths)} are not elements of keys and, fewer, of values"
        )
    return widths


def _fractions(value: Any, where: str, wanted: int) -> tuple[float, ...]:
    """So many fractions; one may stand without a list."""
    listed = value if isinstance(value, list) else [value]
    if len(listed) != wanted:
        raise ValueError(f"{where}: {len(listed)} figures where {wanted} are wanted")
    return tuple(fraction(x, where) for x in listed)


def _numbers(value: Any, where: str, wanted: int) -> tuple[float, ...]:
    """So many numbers of at least 0."""
    listed = value if isinstance(value, list) else [value]
    wrong = [x for x in listed if isinstance(x, bool) or not isinstance(x, int | float) or x < 0]
    if len(listed) != wanted or wrong or not all(math.isfinite(x) for x in listed):
        raise ValueError(f"{where}: {wanted} numbers of at least 0 are wanted, not {value!r}")
    return tuple(float(x) for x in listed)


def _two(values: tuple[float, ...]) -> tuple[float, float]:
    first, second = values
    return first, second


def known_rates(table: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """What runtimes reach, by name: fields of Rates, numbers at least 0, and above it where they
    are shares of a rate. ValueError for others."""
    names = {f.name for f in fields(Rates)}
    for runtime, row in table.items():
        for key, value in row.items():
            if runtime not in runtime_names() or key not in names:
                raise ValueError(
                    f"key {f'rates.{runtime}.{key}'!r} is not known here; runtimes:"
                    f" {', '.join(runtime_names())}; rates: {', '.join(sorted(names))}"
                )
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not 0 <= value < 1e3
                or (value == 0 and key in SHARES)
            ):
                least = "above" if key in SHARES else "at least"
                raise ValueError(f"rates.{runtime}.{key} is a number {least} 0, not {value!r}")
    return {str(runtime): {k: float(v) for k, v in row.items()} for runtime, row in table.items()}


def _curve(table: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    points, values = (
        tuple(float(x) for x in table["flops"]),
        tuple(float(x) for x in table["efficiency"]),
    )
    if (
        len(points) != len(values)
        or not points
        or list(points) != sorted(set(points))
        or points[0] <= 0
        or not all(0 < v <= 1 for v in values)
    ):
        raise ValueError("[matmul] needs as many efficiencies (0..1) as rising FLOPs")
    for (x0, y0), (x1, y1) in pairwise(zip(points, values, strict=True)):
        if not y0 <= y1 <= y0 * x1 / x0:
            raise ValueError(
                f"[matmul] efficiency {y0:g} -> {y1:g} between {x0:g} and {x1:g} FLOPs: it must"
                " rise, and no faster than the FLOPs do"
            )
    return points, values


def _tile(value: Any) -> tuple[int, int]:
    rows, lanes = (count(n, "memory.tile") for n in value)
    return rows, lanes


def _link(table: Mapping[str, Any]) -> Link:
    dims = int(table.get("torus_dims", 0))
    pod = tuple(sorted(count(n, "torus_pod") for n in table.get("torus_pod", ())))
    if dims not in (0, 2, 3) or len(pod) != dims:
        raise ValueError("a torus link has torus_dims = 2 or 3 and as many sides in torus_pod")
    bus = (
        _above_zero(bandwidth_bytes_per_s(table["all_reduce_bandwidth"]), "all_reduce_bandwidth")
        if "all_reduce_bandwidth" in table
        else 0.0
    )
    delay = time_s(table["all_reduce_latency"]) if "all_reduce_latency" in table else 0.0
    if delay and not bus:
        raise ValueError("all_reduce_latency belongs to all_reduce_bandwidth")
    kind = (
        "torus"
        if dims
        else _choice(table.get("kind", "switch"), ("switch", "mesh", MEMORY), "link kind")
    )
    return Link(
        _above_zero(bandwidth_bytes_per_s(table["bandwidth"]), "bandwidth"),
        fraction(table["efficiency"], "efficiency"),
        time_s(table["latency"]),
        kind,
        bus,
        dims,
        pod,
        delay,
    )


def _above_zero(value: Any, what: str) -> Any:
    if not value > 0:
        raise ValueError(f"{what} must be above 0")
    return value


def _choice(value: object, known: tuple[str, ...], what: str) -> str:
    if value not in known:
        raise ValueError(f"{what} {value!r}: one of {', '.join(known)}")
    return str(value)


def fraction(value: object, what: str) -> float:
    """A number above 0 and at most 1. ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ValueError(f"{what} is a number above 0 and at most 1, not {value!r}")
    return float(value)


def count(value: object, what: str) -> int:
    """A whole number of at least 1. ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what} is a whole number of at least 1, not {value!r}")
    return value
