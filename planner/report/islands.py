"""Shares of devices of several kinds in one step: microbatches of each, time, and who waits."""

from __future__ import annotations

from costmodels.hardware.units import show_time
from planner.sharding.layout import ISLAND
from planner.strategy.strategy import Strategy
from planner.support.text import percent


def shares(strategy: Strategy) -> list[str]:
    """`8 x h100-sxm: 6 of 8 microbatches, 10.2 s` for each kind, and what sums between islands
    take; nothing where all devices have equal shares."""
    c, total = strategy.costs, strategy.techniques["microbatches"]
    rows = c.get("islands", ())
    items = []
    for row in rows:
        microbatches, idle = row["microbatches"], 1 - row["busy_s"] / c["step_time_s"]
        islands_text = (
            f" in {len(microbatches)} islands ({'+'.join(map(str, microbatches))})"
            if len(microbatches) > 1
            else ""
        )
        waits = f", waits {percent(idle)}" if idle >= 5e-4 else ""
        items.append(
            f"{row['devices']} x {row['device']}: {sum(microbatches)} of {total}"
            f" microbatches{islands_text},"
            f" {show_time(row['busy_s'])}{waits}"
        )
    between = sum(
        seconds
        for what, seconds in c.get("exposed_s_by_collective", {}).items()
        if ISLAND in what.split(" ", 1)[-1].split("+")
    )
    return [*items, f"sums between islands {show_time(between)}"] if items else []
