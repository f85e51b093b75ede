"""`plan check`: the gate for continuous integration."""

from __future__ import annotations

import argparse
import sys

from planner.commands import console, files
from planner.errors import NO_PLAN

FINDING = 1


def run(args: argparse.Namespace) -> int:
    """Exit 1 past tolerance or budget, 3 when nothing fits any more."""
    from planner.api import choose
    from planner.check import check, tolerances
    from planner.commands.make import cache, tell
    from planner.report.check import FORMATS, text

    choose("format", args.format, tuple(FORMATS))
    allowed, known = tolerances(args.tolerance), cache(args)
    report = check(files.load(args.against), args.model, tolerance=allowed, budget=args.budget, baseline=args.against, cache=known)
    said = text(report, console.width(), console.colour(sys.stdout)) if args.format == "text" else FORMATS[args.format](report)
    console.data(said)
    tell(known)
    return NO_PLAN if "best" in report.reasons else 0 if report.ok else FINDING
