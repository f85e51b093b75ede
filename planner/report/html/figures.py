"""How figures are written on the page: the terminal's units, with a micro sign and tebibytes, and
never a unit apart from its number."""

from __future__ import annotations

import re

from planner.support import text

NARROW = "\u202f"
MINUS = "\u2212"
_QUANTITY = re.compile(r"(\d) (%|[KMGTP]?i?B\b|[mu]?s\b|[EPTGM]?FLOP\b)")


def prose(sentence: str) -> str:
    """A sentence of the terminal, its figures written as on the page."""
    return _QUANTITY.sub(lambda m: m[1] + NARROW + ("µs" if m[2] == "us" else m[2]), sentence)


def time(seconds: float) -> str:
    """`6.02 s`, `197 ms`, `12 µs`."""
    return (
        "0 s"
        if seconds == 0
        else text.show_time(seconds).replace(" us", " µs").replace(" ", NARROW)
    )


def size(size_bytes: float) -> str:
    """`70.9 GiB`, `7.1 TiB`."""
    if abs(size_bytes) >= 1024**4:
        return f"{size_bytes / 1024**4:,.1f}{NARROW}TiB"
    return text.show_bytes(size_bytes).replace(" ", NARROW)


def share(value: float) -> str:
    """`63.7 %`; what rounds to nothing is `under 0.1 %`."""
    return f"<{NARROW}0.1{NARROW}%" if 0 < value < 5e-4 else f"{100 * value:.1f}{NARROW}%"


def count(value: float) -> str:
    """`8.03 B`, `10,882`."""
    return text.count(value).replace(" ", NARROW)


def signed(value: float, shown: str) -> str:
    """A difference with its sign: `+12 ms`."""
    return (MINUS if value < 0 else "+") + shown


def extra(seconds: float) -> str:
    """What an alternative adds to the step."""
    return "same" if seconds == 0 else signed(seconds, time(abs(seconds)))


def change(before: float, after: float) -> str:
    """`+3.2 %`, `=`; from nothing `new`, to a multiple `×2.4`."""
    if before == after:
        return "="
    if not before:
        return "new"
    ratio = after / before
    if ratio >= 2 or ratio <= 0:
        return f"×{ratio:.1f}" if ratio > 0 else "none"
    return (
        signed(ratio - 1, f"{abs(100 * (ratio - 1)):.1f}{NARROW}%")
        if abs(ratio - 1) >= 5e-4
        else "≈"
    )


def plural(n: int, one: str, many: str = "") -> str:
    """`1 node`, `3,033 nodes`."""
    return f"{n:,}{NARROW}{one if n == 1 else many or one + 's'}"
