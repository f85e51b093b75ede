"""What the compiler of the target said of a plan, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from costmodels.hardware.units import show_bytes
from planner.strategy.strategy import Strategy
from planner.strategy.words import tuned_words


def words(plan: Strategy) -> str:
    """The line of the summary; "" for a plan that was not compiled."""
    c = plan.confirmed
    if not c:
        return ""
    no = "; ".join(_row(row) for row in c["rejected"])
    before = f"; {len(c['rejected'])} before it did not ({no})" if no else ""
    if c.get("stopped"):
        return (
            f"{c['target']} not asked to the end (interrupted){f'; rejected: {no}' if no else ''}"
        )
    if not c["fits"]:
        return f"{c['target']} says that it does not fit: {no}"
    recomputed_share = c.get("flops_ratio", 1.0) - 1
    recomputed_text = (
        f", {100 * recomputed_share:.1f} % of products recomputed"
        if recomputed_share > 0.0005
        else ""
    )
    return (
        f"{c['target']} says that it fits: {show_bytes(c['peak_bytes'])} of"
        f" {show_bytes(c['limit_bytes'])} as compiled{recomputed_text}{before}"
    )


def _row(row: Mapping[str, Any]) -> str:
    """A rejected plan in words."""
    parts = [
        " x ".join(f"{a} {n}" for a, n in row["mesh"].items()),
        *([f"ZeRO-{row['zero_stage']}"] if row["zero_stage"] else []),
        *filter(None, [tuned_words(row)]),
    ]
    return f"{', '.join(parts)}: {row['why']}"
