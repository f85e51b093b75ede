"""`plan verify`: the program of a plan compiled and run here, predicted beside actual."""

from __future__ import annotations

import argparse
import sys

from planner.commands import files
from planner.support import console

FINDING = 1
COMPUTE = {"plan": "", "bfloat16": "bfloat16", "float32": "float32"}
"""`--compute` -> dtype; "" is as the plan computes."""


def verify(args: argparse.Namespace) -> int:
    """`plan verify`: exit 1 when what was compiled or computed is not what was planned."""
    from planner.support.choices import choose
    from planner.verify.worker import TIMEOUT_S
    from planner.verify.worker import verify as check

    choose("compute", args.compute, tuple(COMPUTE))
    strategy = files.load(args.strategy)
    source = files.model_of(strategy, args.strategy, args.model)
    limit = args.time_limit or TIMEOUT_S
    what = (
        f"for {args.target}"
        if args.target != "cpu"
        else "on virtual devices"
        if args.no_run
        else "and running it on virtual devices"
    )
    with console.live(True, f"compiling the program {what} (at most {limit:.0f} s, --time-limit)"):
        report = check(
            strategy,
            source,
            backend=args.backend,
            target=args.target,
            run=not args.no_run,
            tolerance=args.tolerance,
            compute=COMPUTE[args.compute],
            unroll=args.unroll,
            timeout_s=limit,
        )
    console.data(report.text(console.width(), console.colour(sys.stdout)))
    return 0 if report.ok else FINDING
