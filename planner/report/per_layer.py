"""`plan explain --untied`: what a plan loses because repeats of a block decide alike
(planner.whatif.per_layer)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costmodels.hardware.units import show_bytes, show_time
from planner.execution.techniques import LOOPED
from planner.report.summary import machine, title
from planner.strategy.strategy import Strategy
from planner.support.text import Style, hang, labelled, percent

if TYPE_CHECKING:
    from planner.whatif.per_layer import PerLayer

SAME = 1e-4
"""Part of a step below which two are called equal: what prices are rounded to, and more."""


def per_layer_text(s: Strategy, p: PerLayer, width: int = 100, colour: bool = False) -> str:
    """What the plan's time is, what it could be with every node deciding for itself, and what is
    proven of that."""
    style = Style(colour)
    head = (
        f"{title(s)} on {machine(s)}: {show_time(s.costs['step_time_s'])} a step,"
        f" {show_bytes(s.costs['memory_per_device_bytes'])} a device"
    )
    loops = s.techniques.get("blocks", LOOPED) == LOOPED
    why = "as one loop over the blocks needs them" if loops else "one for all repeats of a block"
    shared = [f"{p.shared_decisions:,} decisions, {why}", show_time(p.shared_s)]
    layered = [f"{p.layer_decisions:,} decisions"]
    if p.saved > SAME:
        layered.append(f"{show_time(p.per_layer_s)} was found, {percent(p.saved)} less")
    if p.most_saved <= p.saved + SAME:
        layered.append("none saves more" if p.saved > SAME else "no choice is faster")
    else:
        layered.append(
            f"{'none' if p.saved > SAME else 'no choice found is faster, and none'} saves more than"
            f" {percent(p.most_saved)} ({show_time(p.lower_bound_s)})"
        )
    pins = ", pins left out" if s.provenance.get("pins") else ""
    note = (
        f"on the plan's mesh and under its techniques and memory limit{pins}, as far as decisions"
        " settle a step: what the search goes by, not the price of a whole plan"
    )
    return "\n".join(
        [
            *(style.bold(line) for line in hang("", head, width)),
            *labelled("alike", shared, width, style),
            *labelled("apart", layered, width, style),
            *(style.dim(line) for line in hang("", note, width)),
        ]
    )
