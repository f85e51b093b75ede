"""`plan diff` in words."""

from __future__ import annotations

from costmodels.hardware.units import show_bytes, show_time
from planner.strategy.diff import Change, Diff, Figure
from planner.support.text import Style, hang, listed, percent, table

SHOWN = 12


def quantity(value: float, unit: str) -> str:
    """A figure with its unit."""
    if unit == "s":
        return show_time(value)
    if unit == "B":
        return show_bytes(value)
    return percent(value) if unit == "share" else f"{value:,.0f}"


def change(figure: Figure) -> str:
    """`+3.2 %`, "new" from zero, "" when equal; of less than a digit shows, that digit."""
    if figure.change == 0:
        return ""
    if figure.change == float("inf"):
        return "new"
    moved = 100 * figure.change
    return f"{moved:+.1f} %" if abs(moved) >= 0.05 else f"{moved:+.1g} %"


def render(d: Diff, width: int = 100, colour: bool = False) -> str:
    """The causes, the changes by section, and the figures that moved."""
    style = Style(colour)
    if not d.causes:
        return "no difference: the same decisions at the same price"
    names = d.names[0] if d.names[0] == d.names[1] else f"{d.names[0]} -> {d.names[1]}"
    cause = {"search": "the search: model, workload, machine and cost model are the same"}.get(
        d.causes[0], listed(d.causes)
    )
    lines = hang("", f"{names}: the difference comes from {cause}", width)
    lines[0] = style.bold(lines[0])
    lines += [line for text in _gain(d) for line in hang("  ", text, width)]
    for section in dict.fromkeys(c.section for c in d.changes):
        of_section = [c for c in d.changes if c.section == section]
        lines += [
            "",
            style.bold(section),
            *(line for c in of_section[:SHOWN] for line in _change(c, width)),
        ]
        if len(of_section) > SHOWN:
            lines.append(f"  and {len(of_section) - SHOWN} more")
    moved = [f for f in d.figures if f.before or f.after]
    rows = [
        ["", "before", "after", "change"],
        *(
            [f.what, quantity(f.before, f.unit), quantity(f.after, f.unit), change(f)]
            for f in moved
        ),
    ]
    return "\n".join([*lines, "", *table(rows, right=(1, 2, 3))])


def _change(c: Change, width: int) -> list[str]:
    """A change; what does not fit on its line continues deeper than the next one begins."""
    first, *continued = hang("  ", _words(c), width)
    return (
        [first, *hang("      ", " ".join(line.strip() for line in continued), width)]
        if continued
        else [first]
    )


def _gain(d: Diff) -> list[str]:
    """What the second plan saves, of which parts of a step it comes, and how sure that is; nothing
    where the step times are equal."""
    saved, parts = d.gain
    before = next(f.before for f in d.figures if f.what == "step")
    if not saved or not before:
        return []
    moved = ", ".join(
        f"{f.what} {'-' if f.before > f.after else '+'}{show_time(abs(f.before - f.after))}"
        for f in parts
        if abs(f.before - f.after) >= 0.01 * abs(saved)
    )
    text = (
        f"{'faster' if saved > 0 else 'slower'} by {show_time(abs(saved))} a step"
        f" ({percent(abs(saved) / before)})" + (f": {moved}" if moved else "")
    )
    a, b = (f"{show_time(low)} to {show_time(high)}" for low, high in d.ranges)
    return [
        text,
        f"ranges {a} and {b} "
        + ("overlap: a tie by the nominal error of the cost model" if d.tie else "do not overlap"),
    ]


def _words(c: Change) -> str:
    if not c.before:
        return f"+ {c.what}" + ("" if c.after == "new" else f": {c.after}")
    return f"- {c.what}" if not c.after else f"{c.what}: {c.before} -> {c.after}"
