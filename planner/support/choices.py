"""Values of options: a wrong one of a closed set is refused with the nearest right one, two for the
same name as a contradiction."""

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


def refuse_twice(option: str, name: str, before: str, value: str) -> None:
    """Raise PlanError P003 where an option says two things of one name."""
    if before != value:
        raise PlanError(
            "P003",
            f"--{option} {name} is given twice, {before} and {value}".replace("  ", " "),
            help=["leave one of them"],
        )
