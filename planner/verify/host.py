"""What this host has, and what compiling takes of it."""

from __future__ import annotations

import os
from pathlib import Path

from costmodels.hardware.units import show_bytes
from planner.errors import PlanError
from planner.verify.targets import Target

HOST_BASE_BYTES = {"cpu": 600 * 10**6, "gpu": 600 * 10**6, "tpu": 1200 * 10**6}
HOST_NODE_BYTES = 2 * 10**6
"""Memory of this host that compiling takes: a base and so much per operator written out. Above
every program measured (benchmarks/RESULTS.md)."""


def host_bytes() -> int:
    """Memory of this host, or of the control group this process may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(name).read_text()))
        except (OSError, ValueError):
            continue
    return total


def free_bytes() -> int:
    """Memory that this host has free now, as far as the system tells; else all of it."""
    try:
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return min(host_bytes(), int(rows["MemAvailable"].split()[0]) * 1024)
    except (OSError, ValueError, KeyError):
        return host_bytes()


def host_need_bytes(target: Target, nodes: int) -> int:
    """Memory of this host that compiling a training step of so many operators takes, at most."""
    return HOST_BASE_BYTES[target.kind] + nodes * HOST_NODE_BYTES


def refuse_if_too_large(target: Target, nodes: int, available: int) -> None:
    """Raise PlanError P166 when compiling would take more memory than this host has free."""

    need = host_need_bytes(target, nodes)
    if need > available:
        raise PlanError(
            "P166",
            f"compiling {nodes:,} operators takes about {show_bytes(need)} of this host,"
            f" {show_bytes(available)} are free",
            help=["fewer layers (repeated blocks compare alike), or a host with more memory"],
        )
