"""`plan explain --untied`: what a plan loses because repeats of a block decide alike
(planner.whatif.per_layer)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costmodels.hardware.units import show_bytes, show_time
from planner.report.summary import machine, title
from planner.strategy.strategy import Strategy
from planner.support.words import Style, hang, labelled, percent

if TYPE_CHECKING:
    from planner.whatif.per_layer import Untied

SAME = 1e-4
"""Part of a step below which two are called equal: what prices are rounded to, and more."""


def untied_words(s: Strategy, u: Untied, width: int = 100, colour: bool = False) -> str:
    """What the plan's time is, what it could be with every node deciding for itself, and what is
    proven of that."""
    style = Style(colour)
    head = (
        f"{title(s)} on {machine(s)}: {show_time(s.costs['step_time_s'])} a step,"
        f" {show_bytes(s.costs['memory_per_device_bytes'])} a device"
    )
    alike, each = (
        [f"{u.decisions:,} decisions, as one loop over the blocks needs them", show_time(u.tied_s)],
        [f"{u.untied:,} decisions"],
    )
    if u.found > SAME:
        each.append(f"{show_time(u.found_s)} was found, {percent(u.found)} less")
    if u.most <= u.found + SAME:
        each.append("none saves more" if u.found > SAME else "no choice is faster")
    else:
        each.append(
            f"{'none' if u.found > SAME else 'no choice found is faster, and none'} saves more than"
            f" {percent(u.most)} ({show_time(u.least_s)})"
        )
    pins = ", pins left out" if s.provenance.get("pins") else ""
    note = (
        f"on the plan's mesh and under its techniques and memory limit{pins}, as far as decisions"
        " settle a step: what the search goes by, not the price of a whole plan"
    )
    return "\n".join(
        [
            *(style.bold(line) for line in hang("", head, width)),
            *labelled("alike", alike, width, style),
            *labelled("apart", each, width, style),
            *(style.dim(line) for line in hang("", note, width)),
        ]
    )
