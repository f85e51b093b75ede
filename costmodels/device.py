"""Devices as data: figures with units, each with a source; a figure that is a guess is listed as guessed.

A TOML file in costmodels/devices (or the user's own):

    name = "h100-sxm"
    kind = "gpu"                          # gpu | tpu | cpu
    node_size = 8                         # devices that share the inner link
    [peak]                                # dense arithmetic per device
    bfloat16 = "989 TFLOP/s"
    [matmul]                              # sustained fraction of peak by FLOPs of one product: points, linear in log FLOPs between them
    flops = [1e8, 1e9, 1e10, 1e11, 1e12]
    efficiency = [0.05, 0.25, 0.55, 0.72, 0.76]
    [memory]
    capacity = "81559 MiB"                # as the runtime reports it
    context = "600 MiB"                   # taken by the driver and the runtime before the first array
    bandwidth = "3350 GB/s"
    efficiency = 0.84
    [kernel]
    launch = "4 us"
    [inner]                               # link inside a node, per device and direction
    bandwidth = "450 GB/s"; efficiency = 0.8; latency = "3 us"; kind = "switch"
    all_reduce_bandwidth = "480 GB/s"     # optional: bus bandwidth with in-switch reduction (NVLS), as measured
    [outer]                               # between nodes, per device
    bandwidth = "50 GB/s"; efficiency = 0.8; latency = "10 us"
    [host]
    bandwidth = "55 GB/s"                 # device <-> host memory
    [sources]                             # "table.key" -> where the figure is from
    [guessed]                             # "table.key" -> why this value
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from costmodels.units import UnitError, bandwidth_bytes_per_s, rate_flops_per_s, size_bytes, time_s

DEVICES = Path(__file__).with_name("devices")


class DeviceError(ValueError):
    """A device file that cannot be used: what is wrong and where."""


@dataclass(frozen=True)
class Link:
    """One kind of link: per device and direction. all_reduce_bytes_per_s: bus bandwidth of in-network reduction, 0 when there is none."""

    bandwidth_bytes_per_s: float
    efficiency: float
    latency_s: float
    kind: str = "switch"
    all_reduce_bytes_per_s: float = 0.0
    torus_dims: int = 0
    """Dimensions of the torus this link forms (0: a switch); bandwidth is then per link and direction."""


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
    sources: Mapping[str, str] = field(default_factory=dict)
    guessed: Mapping[str, str] = field(default_factory=dict)

    def peak(self, dtype: str) -> float:
        """FLOP/s of a type; types without a figure of their own run at the nearest wider one's rate."""
        for name in (dtype, *{"float8_e4m3fn": ("bfloat16",), "int8": ("bfloat16",), "float16": ("bfloat16",), "bfloat16": ("float16", "float32")}.get(dtype, ())):
            if name in self.peak_flops_per_s:
                return self.peak_flops_per_s[name]
        return self.peak_flops_per_s.get("float32") or min(self.peak_flops_per_s.values())

    def efficiency(self, flops: float) -> float:
        """Sustained fraction of peak of one product of that many FLOPs (linear in log FLOPs between the points of the file)."""
        xs, ys = self.matmul_flops, self.matmul_efficiency
        if flops <= xs[0]:
            return ys[0]
        for (x0, x1), (y0, y1) in zip(zip(xs, xs[1:], strict=False), zip(ys, ys[1:], strict=False), strict=True):
            if flops <= x1:
                return y0 + (y1 - y0) * (math.log(flops) - math.log(x0)) / (math.log(x1) - math.log(x0))
        return ys[-1]


def device_names() -> tuple[str, ...]:
    """Names of the devices that ship."""
    return tuple(sorted(p.stem for p in DEVICES.glob("*.toml")))


@cache
def load_device(name: str) -> Device:
    """A shipped device by name, or a device file by path. Raises DeviceError with the file and the key."""
    path = DEVICES / f"{name}.toml" if name in device_names() else Path(name)
    try:
        data = tomllib.loads(path.read_text())
    except OSError as e:
        raise DeviceError(f"no device {name!r} ships and there is no such file") from e
    except tomllib.TOMLDecodeError as e:
        raise DeviceError(f"{path}: {e}") from e
    return from_table(data, str(path))


def _link(table: Mapping[str, Any]) -> Link:
    return Link(
        bandwidth_bytes_per_s(table["bandwidth"]), float(table["efficiency"]), time_s(table["latency"]), str(table.get("kind", "switch")),
        bandwidth_bytes_per_s(table["all_reduce_bandwidth"]) if "all_reduce_bandwidth" in table else 0.0, int(table.get("torus_dims", 0)),
    )  # fmt: skip


def from_table(data: Mapping[str, Any], where: str) -> Device:
    """A Device from a parsed file."""
    try:
        matmul, memory = data["matmul"], data["memory"]
        points, values = tuple(float(x) for x in matmul["flops"]), tuple(float(x) for x in matmul["efficiency"])
        if len(points) != len(values) or not points or list(points) != sorted(set(points)) or not all(0 < v <= 1 for v in values):
            raise DeviceError(f"{where}: [matmul] needs as many efficiencies (0..1) as rising FLOPs")
        return Device(
            str(data["name"]), str(data["kind"]), int(data["node_size"]), {k: rate_flops_per_s(v) for k, v in data["peak"].items()}, points, values,
            size_bytes(memory["capacity"]), size_bytes(memory["context"]), bandwidth_bytes_per_s(memory["bandwidth"]), float(memory["efficiency"]),
            time_s(data["kernel"]["launch"]), _link(data["inner"]), _link(data["outer"]), bandwidth_bytes_per_s(data["host"]["bandwidth"]),
            {str(k): str(v) for k, v in data.get("sources", {}).items()}, {str(k): str(v) for k, v in data.get("guessed", {}).items()},
        )  # fmt: skip
    except UnitError as e:
        raise DeviceError(f"{where}: {e}") from e
    except KeyError as e:
        raise DeviceError(f"{where}: key {e.args[0]!r} is missing") from e
    except (TypeError, AttributeError) as e:
        raise DeviceError(f"{where}: {e}") from e
