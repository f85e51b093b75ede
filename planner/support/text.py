"""How figures, lines and tables are written in a terminal: every view shares these few functions.

Text is made of plain strings; a `Style` adds ANSI codes only where colour is asked for, and widths
are counted without them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from costmodels.hardware.units import show_bytes, show_time
from planner.support.emphasis import ANSI, emphasised, one_line

__all__ = [
    "Style",
    "bar",
    "count",
    "flops",
    "hang",
    "labelled",
    "listed",
    "pack",
    "percent",
    "short",
    "show_bytes",
    "show_time",
    "signed_time",
    "table",
    "visible",
]

_QUANTITY = re.compile(r"(\d) (%|[KMGT]?i?B\b|[mu]?s\b|[EPTGM]?FLOP\b)")
_LARGE = ((1e12, "T"), (1e9, "B"), (1e6, "M"))
_FLOPS = ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))
LABEL = 8
"""Columns of the label in front of a line."""
LONGEST = 30
"""Columns of a parameter's name."""


@dataclass(frozen=True)
class Style:
    """ANSI emphasis, or none."""

    colour: bool = False

    def _wrap(self, code: str, text: str) -> str:
        return emphasised(code, text) if self.colour and text else text

    def bold(self, text: str) -> str:
        """Headings and the figures one looks for."""
        return self._wrap("1", text)

    def dim(self, text: str) -> str:
        """What may be skipped."""
        return self._wrap("2", text)

    def good(self, text: str) -> str:
        """Fits, verified, within tolerance."""
        return self._wrap("32", text)

    def warn(self, text: str) -> str:
        """Tight, or worth a look."""
        return self._wrap("33", text)

    def bad(self, text: str) -> str:
        """Does not fit, regressed, wrong."""
        return self._wrap("31", text)

    def fit(self, fit: str) -> str:
        """yes, tight or no in its colour."""
        return {"yes": self.good, "tight": self.warn}.get(fit, self.bad)(fit)


def visible(text: str) -> int:
    """Columns a text takes in a terminal."""
    return len(ANSI.sub("", text))


def count(n: float) -> str:
    """A count for people: "1,124", "4.2 M", "8.03 B"."""
    for scale, unit in _LARGE:
        if n >= scale * (0.9995 if scale > 1e6 else 1.0):  # 999.9 M has three digits as 1 B alone
            return f"{n / scale:.3g} {unit}"
    return f"{n:,.0f}"


def flops(n: float, digits: int = 4) -> str:
    """FLOPs for people: "30.42 PFLOP"."""
    for scale, unit in _FLOPS:
        if n >= scale:
            return f"{n / scale:.{digits}g} {unit}"
    return f"{n:,.0f} FLOP"


def percent(share: float) -> str:
    """A share as a percentage, with a digit more when it is small."""
    value = 100 * share
    return f"{value:.1f} %" if abs(value) >= 0.1 or value == 0 else f"{value:.2g} %"


def signed_time(seconds: float) -> str:
    """A difference of times, with its sign: "+12.3 ms"."""
    return ("-" if seconds < 0 else "+") + show_time(abs(seconds))


def short(text: str, width: int) -> str:
    """A name cut in the middle to `width` columns, its two ends kept: they tell repeated names
    apart."""
    if len(text) <= width:
        return text
    head = max((width - 3) // 3, 0)
    return text[:head] + "..." + text[len(text) - (width - 3 - head) :]


def pack(items: Iterable[str], width: int, indent: int = LABEL, gap: str = "   ") -> list[str]:
    """Items side by side on lines of at most `width` columns after `indent`; an item longer than a
    line is wrapped at spaces."""
    room = max(width - indent, 20)
    lines: list[str] = []
    for item in map(one_line, items):
        if lines and visible(lines[-1]) + len(gap) + visible(item) <= room:
            lines[-1] += gap + item
        elif visible(item) <= room or item != ANSI.sub("", item):
            lines.append(item)
        else:
            lines += _wrapped(item, room)
    return lines


def labelled(
    label: str, items: Iterable[str], width: int, style: Style, gap: str = "   "
) -> list[str]:
    """A label and its items, continued under the first item; nothing when there are no items."""
    lines = pack(items, width, LABEL, gap)
    return [
        (style.bold(f"{label:<{LABEL}}") if i == 0 else " " * LABEL) + line
        for i, line in enumerate(lines)
    ]


def hang(label: str, text: str, width: int) -> list[str]:
    """Prose wrapped to `width` columns, continued under the end of its label."""
    return _wrapped(label + text, width, " " * len(label))


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Lines broken at spaces, but never between a number and its unit."""
    joined = _QUANTITY.sub("\\1\u00a0\\2", text)
    lines = textwrap.wrap(
        joined, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
    return [line.replace("\u00a0", " ") for line in lines]


def table(rows: Sequence[Sequence[str]], right: Iterable[int] = (), gap: str = "   ") -> list[str]:
    """Rows as aligned columns; `right` lists the columns aligned to the right."""
    if not rows:
        return []
    right, rows = set(right), [[one_line(cell) for cell in row] for row in rows]
    widths = [max(visible(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            (" " * (w - visible(c)) + c) if i in right else (c + " " * (w - visible(c)))
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(gap.join(cells).rstrip())
    return lines


def bar(parts: Sequence[tuple[float, str]], total: float, columns: int) -> str:
    """Parts of a whole as a bar: each (value, one character) takes its share of the columns, the
    rest is dots.

    Ends are rounded cumulatively, so that the bar never outgrows its columns and no rounding is
    lost.
    """
    text, run = "", 0.0
    for value, mark in parts:
        run += value
        text += mark * (round(columns * min(1.0, run / total)) - len(text) if total > 0 else 0)
    return text + "." * (columns - len(text))


def listed(names: Sequence[str]) -> str:
    """`model, workload and machine`."""
    return " and ".join(x for x in (", ".join(names[:-1]), names[-1]) if x)


def fitted(
    rows: Sequence[Sequence[str]], width: int, right: Sequence[int], gap: str = "  "
) -> list[str]:
    """A table whose last column is wrapped under itself where the terminal is too narrow, but not
    between the name of an axis and its size."""
    rest = sum(max(visible(r[i]) for r in rows) + len(gap) for i in range(len(rows[0]) - 1))
    room = max(NARROWEST, width - rest)
    wrapped: list[Sequence[str]] = []
    for row in rows:
        words = _AXIS.sub("\\1\u00a0\\2", row[-1])
        lines = (
            textwrap.wrap(words, room, break_long_words=False, break_on_hyphens=False)
            if visible(words) > room
            else [words]
        )
        first, *continued = (line.replace("\u00a0", " ") for line in lines)
        wrapped += [[*row[:-1], first], *([*[""] * (len(row) - 1), line] for line in continued)]
    return table(wrapped, right, gap)


_AXIS = re.compile(r"\b([a-z]\w*) (\d+)\b")


NARROWEST = 14
"""Columns the last column of a table keeps, however narrow the terminal."""
