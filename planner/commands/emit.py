"""`plan emit`: the sharded JAX program of a plan."""

from __future__ import annotations

import argparse
from pathlib import Path

from planner.commands import files
from planner.commands.programs import write_program
from planner.errors import PlanError
from planner.support import console


def run(args: argparse.Namespace) -> int:
    """`plan emit`."""
    from planner.commands import serve
    from planner.serving.result import is_serving

    if args.runtime_only:
        return _runtime(args)
    if is_serving(args.strategy):
        return serve.emit(args)
    strategy = files.load(args.strategy)
    source = files.model_of(strategy, args.strategy, args.model)
    if args.output == "-":
        from planner.emit.from_strategy import program

        emitted = program(strategy, source, backend=args.backend, unroll=args.unroll)
        if emitted.constants:
            raise PlanError(
                "P063",
                "this program reads constants from a file beside it, so it cannot go to stdout",
                help=["-o FILE.py"],
            )
        console.data(emitted.text)
        return 0
    target = Path(args.output or f"{files.stem(source).replace('-', '_')}.py")
    written = write_program(
        strategy, source, target, args.backend, args.unroll, args.force, args.standalone
    )
    large = files.too_large(strategy)
    run = (
        f"plan verify {args.strategy} (a smaller copy: {large})"
        if large
        else f"python {target} --virtual-devices {strategy.topology['devices']}"
    )
    console.say(f"wrote {', '.join(written)}   next: {run}")
    return 0


def _runtime(args: argparse.Namespace) -> int:
    """`plan emit --runtime-only`: what model.py stands on, anew, and nothing else."""
    from planner.commands.program_folder import refuse_folder, write_folder

    target = Path(args.output or "")
    if args.standalone or not args.output or not target.is_dir():
        raise PlanError(
            "P003",
            "--runtime-only writes the runtime of a program that is there",
            help=["-o the folder of the program, without --standalone"],
        )
    refuse_folder(target, args.force, model=False)
    console.say(f"wrote {', '.join(write_folder(target, ''))}")
    return 0
