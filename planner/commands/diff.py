"""`plan diff`: what changed between two plans, and why."""

from __future__ import annotations

import argparse
import sys

from planner.commands import files
from planner.support import console


def diff(args: argparse.Namespace) -> int:
    """What changed between two plans, and why."""
    from planner.report.diff import render
    from planner.strategy.diff import compare

    console.data(
        render(
            compare(files.load(args.before), files.load(args.after)),
            console.width(),
            console.colour(sys.stdout),
        )
    )
    return 0
