"""`plan MODEL --workload infer --prompt N --generate N --concurrency N`: a serving plan; and what
`plan show` and `plan emit` do with its file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from costmodels.runtimes import ENGINES
from planner.commands import files
from planner.errors import PlanError
from planner.support import console

if TYPE_CHECKING:
    from planner.serving.result import Serving

EXAMPLE = "--workload infer --prompt 2048 --generate 256 --concurrency 64"
OPTIONS = ("prompt", "generate", "concurrency")
LENGTHS = ("prompt", "generate")
TARGETS = ("ttft", "tpot")
BESIDE = ("prefill_tokens", "draft")
OTHERS = (
    "calibrate_with",
    "batch",
    "tokens_per_step",
    "shape",
    "pin",
    "mode",
    "strict",
    "tie",
    "loss",
    "logits",
    "shift_labels",
    "ignore_index",
    "trainable",
    "freeze",
    "lora",
    "capacity",
    "imbalance",
    "backend",
    "time_limit",
    "incremental",
    "tables",
)
"""Options that a serving plan does not take."""


def asked(args: argparse.Namespace) -> bool:
    """Whether the options ask for a serving plan. Raises PlanError P222 for a part of them, and for
    what does not go with them."""
    from planner.commands.common import unusual

    asked_for = [n for n in (*OPTIONS, "rate") if getattr(args, n) is not None]
    if not asked_for:
        from planner.serving.result import OBJECTIVES

        alone = (
            f"--objective {args.objective}"
            if args.objective in OBJECTIVES
            else f"--quantize {args.quantize}"
            if args.quantize != "none"
            else ""
        )
        if args.cache_type != "compute":
            alone = alone or f"--cache-type {args.cache_type}"
        beside = (*TARGETS, *BESIDE)
        alone = alone or next(
            (f"--{n.replace('_', '-')}" for n in beside if getattr(args, n) is not None), ""
        )
        alone = alone or ("--pools" if args.pools else "")
        alone = alone or ("--devices fewest" if args.devices == "fewest" else "")
        if alone:
            raise PlanError(
                "P222",
                f"{alone} is said of serving, which needs a prompt, tokens to generate and"
                " sequences",
                help=[EXAMPLE],
            )
        return False
    if args.workload != "infer":
        raise PlanError(
            "P222",
            f"--{asked_for[0]} is said of serving, and the workload is {args.workload}",
            help=["--workload infer"],
        )
    if missing := _missing(args, asked_for):
        raise PlanError(
            "P222",
            f"--{asked_for[0]} without --{missing[0]}",
            help=[f"{EXAMPLE}: tokens, tokens, and sequences at once"],
        )
    if args.launcher and args.launcher not in ENGINES:
        raise PlanError(
            "P222",
            f"a serving plan does not take --for {args.launcher}, which trains",
            help=[f"--for {' or '.join(ENGINES)}, or leave it out"],
        )
    if other := unusual(args, OTHERS):
        raise PlanError(
            "P222",
            f"a serving plan does not take --{other[0].replace('_', '-')}",
            help=[
                "leave it out",
                "leave out --prompt, --generate and --concurrency to plan one pass",
            ],
        )
    return True


def _missing(args: argparse.Namespace, asked_for: list[str]) -> list[str]:
    """Options that must be given beside those that are. Raises PlanError P222 for lengths beside a
    trace, which has its own, and for what needs a rate."""
    needing = [f"--{n}" for n in TARGETS if getattr(args, n) is not None]
    needing += ["--pools"] if args.pools else []
    needing += ["--devices fewest"] if args.devices == "fewest" else []
    if args.rate is None and needing:
        raise PlanError(
            "P222",
            f"{needing[0]} is said of requests that arrive, and there is no --rate",
            help=["--rate 8, in the place of --concurrency"],
        )
    if args.rate is None:
        return [n for n in OPTIONS if n not in asked_for]
    try:
        float(args.rate)
    except ValueError:
        lengths = [n for n in LENGTHS if n in asked_for]
        if lengths and Path(args.rate).is_file():
            raise PlanError(
                "P222",
                f"--{lengths[0]} beside the trace {args.rate}, which says every request's tokens",
                help=["leave it out, or give requests a second: --rate 8"],
            ) from None
        return []
    return [n for n in LENGTHS if n not in asked_for]


def run(args: argparse.Namespace, target: Path | None) -> int:
    """Search, print the summary, write the plan (and the program)."""
    from planner.commands.common import cache, machine, tell, workload
    from planner.commands.programs import refuse_other
    from planner.serving.serve import serve

    if args.emit:
        refuse_other(Path(args.emit), args.force)
    objective, known = "throughput" if args.objective == "step" else args.objective, cache(args)
    with console.live(not args.quiet) as line:
        plan = serve(
            args.model,
            prompt=args.prompt or 1,
            generate=args.generate or 1,
            concurrency=args.concurrency,
            rate=args.rate,
            ttft=args.ttft,
            tpot=args.tpot,
            pools=args.pools,
            draft=args.draft,
            objective=objective,
            quantize=args.quantize,
            cache_type=args.cache_type,
            engine=args.launcher or "",
            prefill_tokens=args.prefill_tokens,
            **{k: v for k, v in machine(args).items() if k != "launcher"},
            dims=workload(args)["dims"],
            solver=args.solver,
            seed=args.seed,
            progress=line.report,
            cache=known,
        )
    if target:
        plan.save(target)
    if args.json:
        console.data(plan.to_json())
    elif not args.quiet:
        _print(plan)
    written = [str(target)] if target else []
    if args.emit:
        written += write(plan, args.model, Path(args.emit), args.force)
    if not args.quiet and written:
        console.say(
            f"wrote {', '.join(written)}"
            + (f"   next: {_next(plan, target)}" if target and not args.emit else "")
        )
    if not args.quiet:
        tell(known)
    return 0


def _next(plan: Serving, target: object) -> str:
    """The command that makes something of a plan's file."""
    engine = plan.shape.engine
    return f"plan export {target} --to {engine}" if engine else f"plan emit {target}"


def _print(plan: Serving) -> None:
    from planner.serving.report import summary

    console.data(summary(plan, console.width(), console.colour(sys.stdout)) + "\n")


def show(args: argparse.Namespace) -> int:
    """`plan show` of a serving plan."""
    from planner.serving.result import Serving

    plan = Serving.load(args.strategy)
    if other := next((n for n in ("trace", "png", "other") if getattr(args, n)), ""):
        raise PlanError(
            "P223",
            f"--{other} is of one step, and {args.strategy} is a serving plan",
            help=["--html FILE.html, --json, or no option"],
        )
    if args.html:
        from planner.commands.common import spare, write_text
        from planner.report.html.page import page
        from planner.report.html.view import View

        spare(Path(args.html), b"<!doctype html>")
        views = [
            View(letter, what, s, None, "")
            for letter, what, s in (("A", "prompts", plan.prompts), ("B", "step", plan.step))
        ]
        write_text(args.html, page(views), "open it in a browser")
    elif args.json:
        console.data(plan.to_json())
    else:
        _print(plan)
    return 0


def emit(args: argparse.Namespace) -> int:
    """`plan emit` of a serving plan."""
    from planner.serving.result import Serving

    plan = Serving.load(args.strategy)
    if args.backend != "shard_map":
        raise PlanError(
            "P224",
            f"serving programs are written for shard_map, not for {args.backend}",
            help=["leave out --backend"],
        )
    source = files.model_of(plan.step, args.strategy, args.model)
    if args.output == "-":
        raise PlanError(
            "P063",
            "a serving program may read constants and weights from a file beside it, so it does not"
            " go to stdout",
            help=["-o FILE.py"],
        )
    target = Path(args.output or f"{files.stem(source).replace('-', '_')}.py")
    written = write(plan, source, target, args.force, args.standalone)
    console.say(
        f"wrote {', '.join(written)}   next: python {target} --virtual-devices"
        f" {plan.step.topology['devices']}"
    )
    return 0


def write(
    plan: Serving, source: str, target: Path, force: bool, standalone: bool = False
) -> list[str]:
    """Write the program and what it needs beside it; the names written."""
    from planner.commands.programs import write_files
    from planner.serving.serve import program, reopened

    return write_files(
        lambda weights, folder: program(plan, source, weights_file=weights, model_folder=folder),
        lambda: reopened(plan, source, quantized=False)[0],
        target,
        force,
        standalone,
    )
