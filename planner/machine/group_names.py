"""Groups of devices of several kinds, by name: 8xh100-sxm+8xa100-80gb."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from planner.errors import PlanError

_GROUP = re.compile(r"(?P<count>\d{1,8})x(?P<device>.+)")


def named_groups(hardware: str) -> tuple[tuple[int, str], ...]:
    """((8, "h100-sxm"), (8, "a100-80gb")) of such a name, () of any other. Raises PlanError P012
    where part of it reads so and part does not, or a group has no device."""
    parts = hardware.split("+")
    matches = [_GROUP.fullmatch(part.strip()) for part in parts]
    if len(parts) < 2 or not any(matches):
        return ()
    groups = tuple((int(m["count"]), m["device"].strip()) for m in matches if m)
    if len(groups) < len(parts) or min(n for n, _ in groups) < 1:
        raise PlanError(
            "P012",
            f"{hardware!r} names no groups of devices",
            help=["COUNTxDEVICE joined by +: --hardware 8xh100-sxm+8xa100-80gb"],
        )
    return groups


def recorded_name(topology: Mapping[str, Any]) -> str:
    """What --hardware takes for the machine that a strategy's file records."""
    if groups := topology.get("groups"):
        return "+".join(f"{g['devices']}x{g['device']}" for g in groups)
    return str(topology.get("hardware") or topology["device"])
