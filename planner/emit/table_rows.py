"""Rows of the tables of parameters: those of blocks that are written out once for all repeats, as a
comprehension that counts them, so that a program stays a page to read."""

from __future__ import annotations

from collections.abc import Sequence

from planner.emit.source import literal

LEAST = 6
"""Lines that a comprehension, which takes a few of its own, has to spare."""


def table_rows(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Lines of a table of (parameter, its row as text; "" in a set of names), in the same order. A
    stretch of blocks whose names differ in their first number alone, which counts, and whose rows
    are equal is one comprehension."""
    lines: list[str] = []
    counted = [(*_counted(name), row) for name, row in rows]
    start = 0
    while start < len(rows):
        period, repeats = _stretch(counted, start)
        if period * (repeats - 1) >= LEAST:
            lines += _comprehension(counted[start : start + period], repeats)
            start += period * repeats
        else:
            name, row = rows[start]
            lines.append(f"    {literal(name)}{row and ': '}{row},")
            start += 1
    return lines


def _counted(name: str) -> tuple[str, int]:
    """A name with * for its first part that is a number, and that number; -1 where there is
    none."""
    parts = name.split(".")
    for k, part in enumerate(parts):
        if part.isascii() and part.isdecimal() and str(int(part)) == part and "*" not in name:
            return ".".join([*parts[:k], "*", *parts[k + 1 :]]), int(part)
    return name, -1


def _stretch(rows: Sequence[tuple[str, int, str]], start: int) -> tuple[int, int]:
    """Length of the block that begins at a row, and how often it recurs."""
    pattern, first, row = rows[start]
    if first < 0:
        return 1, 1
    same = (k for k in range(start + 1, len(rows)) if rows[k] == (pattern, first + 1, row))
    period = next(same, start) - start
    if period <= 0 or any(n != first for _, n, _ in rows[start : start + period]):
        return 1, 1
    repeats = 1
    while all(
        start + repeats * period + j < len(rows)
        and rows[start + repeats * period + j]
        == (rows[start + j][0], first + repeats, rows[start + j][2])
        for j in range(period)
    ):
        repeats += 1
    return period, repeats


def _comprehension(block: Sequence[tuple[str, int, str]], repeats: int) -> list[str]:
    first = block[0][1]
    counts = f"range({first}, {first + repeats})" if first else f"range({repeats})"
    if block[0][2]:
        return [
            "    **{",
            '        k.replace("*", str(i)): row',
            f"        for i in {counts}",
            "        for k, row in {",
            *(f"            {literal(name)}: {row}," for name, _, row in block),
            "        }.items()",
            "    },",
        ]
    return [
        "    *(",
        '        k.replace("*", str(i))',
        f"        for i in {counts}",
        "        for k in [",
        *(f"            {literal(name)}," for name, _, _ in block),
        "        ]",
        "    ),",
    ]
