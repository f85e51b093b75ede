"""`plan compare`: every solver and the baselines in one table."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from planner.commands.common import arguments, tell
from planner.errors import PlanError
from planner.support import console

if TYPE_CHECKING:
    from planner.strategy.strategy import Strategy


SOLVERS = ("dp", "recursive", "ilp")
NO_PLAN = 3


def compare(args: argparse.Namespace) -> int:
    """Every solver on the same model and machine, then the baselines."""
    import planner.api as api
    from planner.report.tables import comparison

    if args.mode in ("manual", "propagate"):
        raise PlanError(
            "P018",
            f"--mode {args.mode!r}: there is nothing to compare solvers on",
            help=["one of auto, data-parallel, semi-auto, hybrid"],
        )
    rows: list[tuple[str, Strategy | str]] = []
    common = arguments(args)
    for name in SOLVERS:
        with console.live(True) as line:
            try:
                strategy = api.plan(
                    args.model,
                    progress=line.report,
                    **{**common, "solver": name},
                    baselines=not rows,
                )
            except PlanError as e:
                if e.exit_code != NO_PLAN:
                    raise
                rows.append((name, e.what))
                continue
        if strategy.solver.get("stopped") == "interrupt":
            raise KeyboardInterrupt
        rows.append((name, strategy))
    console.data(comparison(rows, console.width(), console.colour(sys.stdout)))
    tell(common["cache"])
    return 0 if any(not isinstance(r, str) for _, r in rows) else NO_PLAN
