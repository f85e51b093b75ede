"""What is launched: a program, its arguments, and how the planned devices are divided among
processes.

Devices are numbered process by process and laid out in the mesh row-major with the innermost axis
last, so that inner axes fall inside processes, and processes of neighbouring rank are neighbours on
the inner links. Every process holds the same number of devices.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from costmodels.hardware.device import Device, device_names, load_device
from costmodels.hardware.intake import SMALL_BYTES, read_text
from planner.errors import PlanError
from planner.strategy.strategy import Strategy

TPU_HOST_CHIPS = 4
"""Chips of a host in a TPU slice of several hosts (all generations from v4 on)."""


NVIDIA, AMD, TPU = "nvidia.com/gpu", "amd.com/gpu", "google.com/tpu"
"""Resources that devices are in Kubernetes (`kubernetes` of their files)."""


def shipped(device: str) -> Device:
    """The device that ships whose name a plan's device has or begins with; of any other nothing is
    known, and it is taken for one like the H100."""
    names = [name for name in device_names() if device.startswith(name)]
    if names:
        return load_device(max(names, key=len))
    return replace(load_device("h100-sxm"), node_label="")


@dataclass(frozen=True)
class Host:
    """A line of a host file: where a process runs and how many devices it has."""

    name: str
    slots: int


@dataclass(frozen=True)
class Job:
    """A program for `devices` devices, run by `processes` processes of `slots` devices each;
    `virtual`: on CPU devices in place of the planned ones."""

    name: str
    program: Path
    device: str
    devices: int
    processes: int
    virtual: bool
    arguments: tuple[str, ...] = ()

    @property
    def slots(self) -> int:
        """Devices of a process."""
        return self.devices // self.processes

    def command(self, python: str, program: str, coordinator: str, process: str) -> tuple[str, ...]:
        """The words that run one process. `coordinator`: HOST:PORT of process 0, or "auto"."""
        devices_option = ("--virtual-devices", str(self.slots)) if self.virtual else ()
        place = (
            ()
            if coordinator == "auto"
            else ("--processes", str(self.processes), "--process", process)
        )
        return (
            python,
            program,
            *devices_option,
            "--coordinator",
            coordinator,
            *place,
            *self.arguments,
        )

    def serving(
        self, python: str, program: str, part: int, parts: int, port: int
    ) -> tuple[str, ...]:
        """The words that run a server of the tables: a part of them, with the values and seed of
        the others."""
        devices_option = ("--virtual-devices", str(self.slots)) if self.virtual else ()
        return (
            python,
            program,
            *devices_option,
            "--serve",
            f"{part}/{parts}",
            "--port",
            str(port),
            *self.arguments,
        )

    def environment(self) -> dict[str, str]:
        """Variables of every process: XLA may run collectives beside computation on GPUs (on TPUs
        it does so by itself)."""
        gpu = not self.virtual and shipped(self.device).kubernetes in (NVIDIA, AMD)
        return {"XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=true"} if gpu else {}


def node_slots(strategy: Strategy) -> int:
    """Devices of a node, as planned: the innermost level of links, or the chips of a TPU host."""
    levels = strategy.topology["levels"]
    torus = prod(level["size"] for level in levels if level["kind"] == "torus")
    inner = int(levels[0]["size"]) if levels else 1
    return (
        min(TPU_HOST_CHIPS, torus)
        if shipped(str(strategy.topology["device"])).kubernetes == TPU
        else inner
    )


def check_count(strategy: Strategy, processes: int, virtual: bool, what: str) -> None:
    """Refuse a number of processes that the planned devices cannot be divided among, or whose
    processes are no nodes of the plan."""
    devices = int(strategy.topology["devices"])
    if devices % processes:
        fit = [str(n) for n in range(1, devices + 1) if devices % n == 0]
        shown = ", ".join(fit) if len(fit) < 10 else f"{', '.join(fit[:8])} ... {devices}"
        raise PlanError(
            "P200",
            f"{what}: {devices} devices cannot be divided evenly among {processes} processes",
            help=[f"one of {shown}"],
        )
    slots = node_slots(strategy)
    if not virtual and devices // processes != slots:
        nodes = f"{devices // slots} node{'s' if devices // slots > 1 else ''}"
        raise PlanError(
            "P200",
            f"{what}: the plan has {slots} devices a node, so {devices} devices are {nodes}, not"
            f" {processes}",
            detail=[f"inner axes of the mesh {_mesh(strategy)} would leave their links"],
            help=[
                f"{nodes}; or plan again with --topology for nodes of {devices // processes}; or"
                " --cpu to try it on virtual devices"
            ],
        )


def _mesh(strategy: Strategy) -> str:
    return ", ".join(f"{a}={n}" for a, n in strategy.mesh_shape) or "of one device"


def read_hosts(path: Path, strategy: Strategy, virtual: bool) -> tuple[Host, ...]:
    """The hosts of a file, for a plan. Raises PlanError: as `parse_hosts`, and P200 where the slots
    are not the plan's devices."""
    hosts = parse_hosts(path)
    devices = int(strategy.topology["devices"])
    if sum(h.slots for h in hosts) != devices:
        raise PlanError(
            "P200",
            f"{path} has {sum(h.slots for h in hosts)} slots, the plan {devices} devices",
            help=["as many slots as devices, or plan again with --devices"],
        )
    check_count(strategy, len(hosts), virtual, str(path))
    return hosts


def parse_hosts(path: Path) -> tuple[Host, ...]:
    """Hosts in the order of their ranks from a file of lines `HOST slots=N [rank=I]`; # begins a
    comment. A host may have several lines.

    Raises PlanError P201 for lines that cannot be read, P200 where hosts have different slots or
    there are none.
    """
    rows: list[tuple[int | None, Host]] = []
    try:
        lines = read_text(path, SMALL_BYTES).splitlines()
    except (OSError, ValueError) as e:
        raise PlanError(
            "P201",
            f"cannot read the host file {str(path)!r}: {e}",
            help=["a text file, a line a host: HOST slots=8"],
        ) from e
    for i, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            match = re.fullmatch(
                r"([A-Za-z0-9][A-Za-z0-9._:@-]*) slots=([1-9]\d{0,5})(?: rank=(\d{1,6}))?",
                " ".join(words),
            )
            if not match:
                raise PlanError(
                    "P201",
                    f"{path}:{i}: cannot read {line.strip()[:80]!r}",
                    help=["HOST slots=N, and rank=I on every line or on none"],
                )
            rows.append(
                (None if match[3] is None else int(match[3]), Host(match[1], int(match[2])))
            )
    ranks = [rank for rank, _ in rows if rank is not None]
    if ranks:
        if sorted(ranks) != list(range(len(rows))):
            raise PlanError(
                "P201",
                f"{path}: ranks {ranks} of {len(rows)} hosts",
                help=[f"every rank from 0 to {len(rows) - 1} once, or none"],
            )
        rows.sort(key=lambda row: row[0] or 0)
    hosts = tuple(host for _, host in rows)
    slots = sorted({h.slots for h in hosts})
    if len(slots) != 1:
        what = (
            f"{path} has hosts of {' and '.join(map(str, slots))} slots"
            if slots
            else f"{path} names no host"
        )
        raise PlanError(
            "P200", what, help=["hosts of the same size: axes of a mesh are cut evenly"]
        )
    return hosts
