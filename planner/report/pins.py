"""`plan explain --pins`: what each pin costs (planner.whatif.pin_prices), a row as each search
ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from costmodels.hardware.units import show_bytes, show_time
from planner.report.summary import machine, title
from planner.report.tables import mesh_words, technique_words
from planner.strategy.strategy import Strategy
from planner.support.text import Style, fitted, hang, signed_time

if TYPE_CHECKING:
    from planner.whatif.pin_prices import PinPrice


def pin_prices(
    s: Strategy, rows: Sequence[PinPrice], width: int = 100, colour: bool = False
) -> str:
    """A table: each pin, what a step takes without it, what the pin costs, and the plan there would
    be."""
    style, table_rows = (
        Style(colour),
        [["without the pin", "step", "it costs", "memory", "the plan then"]],
    )
    for row in rows:
        if row.without is None:
            table_rows.append([row.pin, "-", "", "", row.refused])
            continue
        c = row.without.costs
        matters = row.binds or row.pays
        price = style.warn(signed_time(row.saved_s)) if matters else "nothing"
        plan = (
            mesh_words(dict(row.without.mesh_shape)) + technique_words(row.without.techniques)
            if matters
            else "as it is, or no faster"
        )
        table_rows.append(
            [
                row.pin,
                show_time(c["step_time_s"]),
                price,
                show_bytes(c["memory_per_device_bytes"]),
                plan,
            ]
        )
    head = (
        f"{title(s)} on {machine(s)}: {show_time(s.costs['step_time_s'])} a step,"
        f" {show_bytes(s.costs['memory_per_device_bytes'])} a device, with its pins"
    )
    note = (
        "each row is a search under all the other pins; prices do not add up, since one pin can"
        " hold what another does"
    )
    if any(row.pays for row in rows):
        note += "; a price below 0: the search alone does not look at what is pinned"
    return "\n".join(
        [
            *(style.bold(line) for line in hang("", head, width)),
            *fitted(table_rows, width, (1, 2, 3)),
            *(style.dim(line) for line in hang("", note, width)),
        ]
    )
