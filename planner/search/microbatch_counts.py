"""Numbers of microbatches that leave no device a part of a row, of batches and groups of devices
that are no powers of two."""

from __future__ import annotations

from planner.machine.mesh_choices import divisors

APART = 1.5
"""How many times the next fewer each number is, so that there are few of them; a guess."""


def with_whole_rows(rows: int, most: int) -> tuple[int, ...]:
    """Numbers that divide the rows of a group of devices, one row at a time the largest, none
    above most."""
    counts: list[int] = []
    for n in reversed(divisors(rows)):
        if n <= most and (not counts or n * APART <= counts[-1]):
            counts.append(n)
    return tuple(reversed(counts))
