"""`plan cache`: what earlier runs left in the cache of searches, how large it is, and a way to be
rid of it."""

from __future__ import annotations

import argparse

from planner.cache.folder import MOST_BYTES, MOST_TABLES_BYTES, VARIABLE, Cache
from planner.errors import PlanError
from planner.support import console


def run(args: argparse.Namespace) -> int:
    """The sizes go to stdout; what was removed to the terminal. Raises PlanError P056."""
    from costmodels.hardware.units import show_bytes
    from planner.support.text import table

    known = Cache.chosen(args.cache)
    if known is None:
        console.say(
            f"nothing is kept: {VARIABLE} is off, or there is no home (--cache DIR names a folder)"
        )
        return 0
    if args.clear:
        try:
            count, size = known.clear()
        except OSError as e:
            raise PlanError(
                "P056",
                f"cannot clear the cache {str(known.folder)!r}",
                detail=[str(e)],
                help=["--cache a folder of one's own"],
            ) from e
        console.say(
            f"removed {count} file{'s' if count != 1 else ''} ({show_bytes(size)}) from"
            f" {known.folder}"
        )
        return 0
    rows = [["", "files", "size", "at most"]]
    sizes_by_name = known.held()
    for name, most in (
        ("searches and readings", MOST_BYTES),
        ("tables of moves", MOST_TABLES_BYTES),
    ):
        sizes = sizes_by_name[name]
        rows.append(
            [
                name,
                str(len(sizes)),
                show_bytes(sum(sizes)),
                show_bytes(most) + (" with tables" if most == MOST_BYTES else ""),
            ]
        )
    console.data("\n".join([str(known.folder), *table(rows, right=(1, 2, 3))]) + "\n")
    return 0
