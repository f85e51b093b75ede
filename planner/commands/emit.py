"""`plan emit` writes the program of a plan and the weights beside it; `plan verify` compiles and
runs it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from planner.commands import files
from planner.commands.programs import write_program
from planner.errors import PlanError
from planner.support import console

if TYPE_CHECKING:
    pass

FINDING = 1
COMPUTE = {"plan": "", "bfloat16": "bfloat16", "float32": "float32"}
"""`--compute` -> dtype; "" is as the plan computes."""


def run(args: argparse.Namespace) -> int:
    """`plan emit`."""
    from planner.commands import serve
    from planner.serving.result import is_serving

    if is_serving(args.strategy):
        return serve.emit(args)
    strategy = files.load(args.strategy)
    source = files.model_of(strategy, args.strategy, args.model)
    if args.output == "-":
        from planner.emit.from_strategy import program

        made = program(strategy, source, backend=args.backend, unroll=args.unroll)
        if made.constants:
            raise PlanError(
                "P063",
                "this program reads constants from a file beside it, so it cannot go to stdout",
                help=["-o FILE.py"],
            )
        console.data(made.text)
        return 0
    target = Path(args.output or f"{files.stem(source).replace('-', '_')}.py")
    written = write_program(strategy, source, target, args.backend, args.unroll, args.force)
    large = files.too_large(strategy)
    run = (
        f"plan verify {args.strategy} (a smaller copy: {large})"
        if large
        else f"python {target} --virtual-devices {strategy.topology['devices']}"
    )
    console.say(f"wrote {', '.join(written)}   next: {run}")
    return 0


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
