"""`plan check`: the gate for continuous integration."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from planner.commands import files
from planner.errors import NO_PLAN, PlanError
from planner.support import console
from planner.support.choices import choose

if TYPE_CHECKING:
    from planner.strategy.strategy import Strategy

FINDING = 1


def refuse_missing(baseline: Strategy, source: str, against: str) -> None:
    """Raises PlanError P101 where there is no such file and one beside it holds the baseline's
    model."""
    if (
        not source.startswith("zoo:")
        and not Path(source).exists()
        and (renamed := files.renamed(baseline, source))
    ):
        raise PlanError(
            "P101",
            f"there is no file {source!r}",
            detail=[f"{renamed[0]!r} holds the model that {against} was made for"],
            help=[f"plan check {renamed[0]} --against {against}"],
        )


def read_writes(texts: Sequence[str], formats: Sequence[str]) -> list[tuple[str, Path]]:
    """(format, file) of each `--write NAME=FILE`. Raises PlanError P018."""
    writes = []
    for text in texts:
        name, _, file = text.partition("=")
        choose("write", name, formats)
        if not file:
            raise PlanError("P018", f"--write {text!r}: no file", help=[f"--write {name}=FILE"])
        writes.append((name, Path(file)))
    return writes


def run(args: argparse.Namespace) -> int:
    """Exit 1 past tolerance or budget, 3 when nothing fits any more."""
    from planner.commands.common import cache, tell
    from planner.report.check import FORMATS, text
    from planner.support.atomic_write import write_atomically
    from planner.whatif.gate import check, tolerances

    choose("format", args.format, tuple(FORMATS))
    writes = read_writes(args.write, tuple(FORMATS))
    allowed, known = tolerances(args.tolerance), cache(args)
    baseline = files.load(args.against)
    refuse_missing(baseline, args.model, args.against)
    report = check(
        baseline,
        args.model,
        tolerance=allowed,
        budget=args.budget,
        baseline=args.against,
        cache=known,
    )
    output = (
        text(report, console.width(), console.colour(sys.stdout))
        if args.format == "text"
        else FORMATS[args.format](report)
    )
    for name, file in writes:
        write_atomically(file, FORMATS[name](report) + "\n")
    console.data(output)
    tell(known)
    return NO_PLAN if "best" in report.reasons else 0 if report.ok else FINDING
