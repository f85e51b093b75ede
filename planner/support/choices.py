"""Options with a closed set of values: a wrong one is refused with the nearest right one."""

from __future__ import annotations

from collections.abc import Sequence

from planner.errors import PlanError, did_you_mean


def choose(option: str, value: str, known: Sequence[str]) -> None:
    """Raise PlanError unless the value is known."""
    if value not in known:
        raise PlanError(
            "P018",
            f"--{option} {value!r}: unknown",
            help=[h for h in (did_you_mean(value, known), f"one of {', '.join(known)}") if h],
        )
