"""`plan check`: the gate for continuous integration."""

from __future__ import annotations

import argparse
import sys

from planner.commands import console, files

FINDING = 1


def run(args: argparse.Namespace) -> int:
    """Exit 1 past tolerance or budget, or when nothing fits any more: for the gate that is a regression too."""
    from planner.api import choose
    from planner.check import check, tolerances
    from planner.report.check import FORMATS, text

    choose("format", args.format, tuple(FORMATS))
    allowed = tolerances(args.tolerance)
    report = check(files.load(args.against), args.model, tolerance=allowed, budget=args.budget, baseline=args.against)
    said = text(report, console.width(), console.colour(sys.stdout)) if args.format == "text" else FORMATS[args.format](report)
    console.data(said)
    return 0 if report.ok else FINDING
