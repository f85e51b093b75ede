"""Groups of devices by their numbers: 8xh100-sxm, and of several kinds 8xh100-sxm+8xa100-80gb."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Mapping
from typing import Any

from planner.errors import PlanError

_GROUP = re.compile(r"(?P<count>\d{1,8})x(?P<device>.+)")
_BEHIND = re.compile(r"(?P<device>.+?)[:x*](?P<count>\d{1,8})")


def named_groups(hardware: str) -> tuple[tuple[int, str], ...]:
    """((8, "h100-sxm"), (8, "a100-80gb")) of such a name, () of any other, such as a file's. Raises
    PlanError P012 where part of it reads so and part does not, or a group has no device."""
    parts = hardware.split("+")
    matches = [_GROUP.fullmatch(part.strip()) for part in parts]
    if not any(matches) or (len(parts) == 1 and os.path.exists(hardware)):
        return ()
    groups = tuple((int(m["count"]), m["device"].strip()) for m in matches if m)
    if len(groups) < len(parts) or min(n for n, _ in groups) < 1:
        raise PlanError(
            "P012",
            f"{hardware!r} names no groups of devices",
            help=["COUNTxDEVICE joined by +: --hardware 8xh100-sxm+8xa100-80gb"],
        )
    return groups


def counted_behind(hardware: str, devices: Container[str]) -> str:
    """What to type for a number behind one of these devices, h100:8 or h100x8; "" for other
    names."""
    match = _BEHIND.fullmatch(hardware.lower())
    known = match and match["device"] in devices
    return f"--hardware {match['count']}x{match['device']}" if match and known else ""


def recorded_name(topology: Mapping[str, Any]) -> str:
    """What --hardware takes for the machine that a strategy's file records."""
    if groups := topology.get("groups"):
        return "+".join(f"{g['devices']}x{g['device']}" for g in groups)
    return str(topology.get("hardware") or topology["device"])
