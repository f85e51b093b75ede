"""Which of several stored plans runs on the devices that came up.

`plan sweep -o DIR` stores a plan for each device count. Of P processes with s devices each, a plan
of n devices takes the least p <= P with p | n and n / p <= s; on real devices n = p * s, since a
process sees all that its node has. The plan of most devices that finds such a p is taken: what is
left over stays idle.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import PlanError
from planner.launch.job import NVIDIA, TPU, node_slots, shipped
from planner.strategy.strategy import Strategy

SUFFIX = ".plan.json"


@dataclass(frozen=True)
class Stored:
    """A plan and the file it lies in."""

    path: Path
    strategy: Strategy

    @property
    def devices(self) -> int:
        """The number of devices that the plan is for."""
        return int(self.strategy.topology["devices"])

    @property
    def slots(self) -> int:
        """Devices of a node, as planned."""
        return node_slots(self.strategy)


@dataclass(frozen=True)
class Choice:
    """A stored plan and the processes that run it."""

    stored: Stored
    processes: int


def table(folder: Path, plans: Sequence[Stored]) -> tuple[Stored, ...]:
    """The plans in the order of their devices. Raises PlanError P208 where there are none, or where
    a count leaves a choice or a checkpoint could not move between them."""
    if not plans:
        raise PlanError(
            "P208",
            f"{folder} holds no stored plans (*{SUFFIX})",
            help=["plan sweep MODEL --devices 8,16..64 --batch 512 -o DIR"],
        )
    ordered = tuple(sorted(plans, key=lambda s: (s.devices, s.path.name)))
    for a, b in zip(ordered, ordered[1:], strict=False):
        different = next(
            (k for k, v in _identity(a.strategy).items() if _identity(b.strategy)[k] != v), ""
        )
        if different:
            raise PlanError(
                "P208",
                f"{a.path.name} and {b.path.name} differ in their {different}: a run cannot move"
                " from one to the other",
                help=["a folder for each"],
            )
        if a.devices == b.devices:
            raise PlanError(
                "P208",
                f"{a.path.name} and {b.path.name} are both for {a.devices} devices: which is"
                " meant?",
                help=["keep one of them in the folder"],
            )
    return ordered


def _identity(strategy: Strategy) -> dict[str, Any]:
    """What must be equal for a checkpoint of one plan to go on under another with the same
    meaning."""
    w = strategy.workload
    sizes = {k: strategy.model[k] for k in ("name", "parameters")}
    return {
        "model": sizes,
        "device": strategy.topology["device"],
        "batch": w["batch"],
        **{k: w.get(k) for k in ("kind", "dims", "shapes", "training", "precision")},
    }


def choose(plans: Sequence[Stored], processes: int, slots: int, virtual: bool) -> Choice | None:
    """The plan of most devices that fits on `processes` processes of `slots` devices, and how many
    of them run it; None when none fits."""
    for stored in reversed(plans):
        counts = [
            p
            for p in range(1, processes + 1)
            if stored.devices % p == 0 and stored.devices // p <= slots
        ]
        if counts and (virtual or (stored.slots == slots and stored.devices == counts[0] * slots)):
            return Choice(stored, counts[0])
    return None


def chosen(
    plans: Sequence[Stored], processes: int, slots: int, virtual: bool
) -> tuple[Choice, str]:
    """The choice, and a line that says it. Raises PlanError P208 when no stored plan fits."""
    choice = choose(plans, processes, slots, virtual)
    came = (
        f"{processes} process{'es' if processes > 1 else ''} of {slots}"
        f" device{'s' if slots > 1 else ''} came up"
    )
    stored = ", ".join(f"{s.devices:,}" for s in plans)
    if choice is None:
        raise PlanError(
            "P208",
            f"{came}, and no stored plan fits: they are for {stored} devices, nodes of"
            f" {', '.join(map(str, sorted({s.slots for s in plans})))}",
            help=[
                f"plan sweep MODEL --devices {processes * slots} into the same folder",
                "--slots N where a process has another number of devices",
            ],
        )
    idle = processes * slots - choice.stored.devices
    rest = f"; {idle} of them stay idle: plans are stored for {stored}" if idle else ""
    return (
        choice,
        (
            f"{came}: {choice.stored.path.name}, {choice.stored.devices} devices in"
            f" {choice.processes}"
            f" process{'es' if choice.processes > 1 else ''}{rest}"
        ),
    )


def devices_here(
    device: str, environment: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> int:
    """Accelerators of a kind that a process on this machine sees, by what its driver shows (Linux);
    0 where that cannot be told.

    TPU hosts show /dev/accel0 .. or, from v5 on, groups /dev/vfio/0 ..; NVIDIA's driver
    /dev/nvidia0 .., of which CUDA_VISIBLE_DEVICES leaves some.
    """
    resource = shipped(device).kubernetes
    if resource == TPU:
        return _count(root / "dev", r"accel\d+") or _count(root / "dev" / "vfio", r"\d+")
    if resource != NVIDIA:
        return 0
    here = _count(root / "dev", r"nvidia\d+")
    shown = environment.get("CUDA_VISIBLE_DEVICES")
    return (
        here
        if shown is None
        else min(here, len([word for word in shown.split(",") if word.strip() not in ("", "-1")]))
    )


def _count(folder: Path, pattern: str) -> int:
    return (
        sum(bool(re.fullmatch(pattern, p.name)) for p in folder.iterdir()) if folder.is_dir() else 0
    )
