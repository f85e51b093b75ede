"""What a plan sends between devices and how its weights are cut, as `plan explain` shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from costmodels.hardware.units import show_bytes, show_time
from planner.report.notation import extent_names, residual, short_labels
from planner.strategy.notation import spell_weight, weight_groups
from planner.strategy.strategy import Strategy
from planner.support.text import LONGEST, Style, labelled, short

SHOWN_WEIGHTS = 6


def traffic(c: Mapping[str, Any], width: int, style: Style) -> list[str]:
    """The bytes that a device sends in a step by kind and axes, those that it waits for longest
    first. c: the costs of a plan's file."""
    exposed = c.get("exposed_s_by_collective", {})
    rows = []
    for kind, axes in c["communication_bytes_per_device"].items():
        for axis, cell in axes.items():
            seconds = exposed.get(f"{kind} {axis}", 0.0)
            rows.append(
                (
                    seconds,
                    cell["payload"],
                    (
                        f"{kind} over {axis} {show_bytes(cell['payload'])} (exposed"
                        f" {show_time(seconds)})"
                    ),
                )
            )
    rows.sort(key=lambda r: (-r[0], -r[1]))
    return labelled(
        "traffic",
        [text for _, _, text in rows] or ["none: no device waits for another"],
        width,
        style,
        " · ",
    )


def layouts(strategy: Strategy, width: int, style: Style) -> list[str]:
    """How the heaviest weights lie on the mesh, and what is between blocks."""
    groups = [g for g in weight_groups(strategy) if len(g.shape) > 1] or weight_groups(strategy)
    names = extent_names(strategy)
    labels = short_labels([g.label for g in groups])
    items = [
        f"{short(labels[g.label], LONGEST)} {spell_weight(g, names)}"
        for g in groups[:SHOWN_WEIGHTS]
    ]
    if len(groups) > SHOWN_WEIGHTS:
        items.append(f"and {len(groups) - SHOWN_WEIGHTS} more")
    x = residual(strategy, names)
    if x:
        items.append(f"between blocks {x}")
    legend = ", ".join(
        f"{letter} {n:,}"
        for n, letter in names.items()
        if any(n in g.shape for g in groups[:SHOWN_WEIGHTS])
    )
    if legend:
        items.append(style.dim(f"({legend})"))
    return labelled("layouts", items, width, style)
