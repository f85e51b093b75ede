"""`plan FILE`: search, print the summary, write the strategy (and the program)."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodels.hardware.intake import irregular
from planner.commands import files
from planner.commands.common import arguments, cache, machine, pins, tell, unusual, workload
from planner.errors import PlanError
from planner.support import console
from planner.support.choices import choose

if TYPE_CHECKING:
    from planner.strategy.strategy import Strategy

INTERRUPTED, FINDING = 130, 1
RECORDED = (
    "devices",
    "hardware",
    "topology",
    "batch",
    "tokens_per_step",
    "memory_limit",
    "memory_reserve",
)
"""Options that a strategy file already answers."""
ANSWERED = (
    "workload",
    "precision",
    "runtime",
    "optimizer",
    "lr",
    "objective",
    "solver",
    "loss",
    "logits",
    "lora",
    "imbalance",
    "capacity",
    "tables",
    "ignore_index",
    "shift_labels",
    "incremental",
    "dim",
    "shape",
    "trainable",
    "freeze",
    "tie",
)
"""So are these, where they are not as usual."""


def run(args: argparse.Namespace) -> int:
    """The main verb."""
    choose("backend", args.backend, ("shard_map", "jit"))
    if args.emit and args.mode != "manual":  # there the file says the precision
        from planner.search.build_request import emitted_recipe

        emitted_recipe(args.precision)
    from planner.commands import serve

    serving = serve.asked(args)
    target = _target(args)
    _refuse_before_search(args, target, serving)
    if serving:
        return serve.run(args, target)
    options = arguments(args)
    strategy = _strategy(args, options)
    interrupted = "interrupt" in (strategy.solver.get("stopped"), strategy.confirmed.get("stopped"))
    if target:
        strategy.save(target)
    if args.json:
        console.data(strategy.to_json())
    elif not args.quiet:
        from planner.report.summary import summary

        console.data(summary(strategy, console.width(), console.colour(sys.stdout)) + "\n")
    written = [str(target)] if target else []
    if args.emit and not interrupted:
        from planner.commands.programs import write_program

        written += write_program(
            strategy, args.model, Path(args.emit), args.backend, False, args.force
        )
    if not args.quiet and written:
        console.say(
            ("interrupted: " if interrupted else "")
            + f"wrote {', '.join(written)}"
            + (f"   {files.next_steps(target, strategy)}" if target and not args.emit else "")
        )
    if not args.quiet:
        tell(options["cache"])
        if (known := options["cache"]) is not None and known.alike and not args.incremental:
            console.say(
                f"most operators are as in {known.alike}: --incremental keeps that plan for them"
                " and solves the rest, in less time"
            )
    return (
        INTERRUPTED
        if interrupted
        else FINDING
        if strategy.confirmed and not strategy.confirmed["fits"]
        else 0
    )


def _refuse_before_search(args: argparse.Namespace, target: Path | None, serving: bool) -> None:
    """Raises PlanError for what no search could mend. What is wrong with the options is reported
    before a file in the way: there --force would not help."""
    if serving and args.confirm:
        raise PlanError(
            "P003",
            "--confirm compiles plans of a training step or of one forward pass, and a serving plan"
            " is neither",
            help=["leave out --confirm"],
        )
    try:
        _refuse_others(args, target)
    except PlanError:
        if not serving:
            _refuse_typed(args)
        raise


def _strategy(args: argparse.Namespace, options: dict[str, Any]) -> Strategy:
    """What is planned, or checked and priced where the mode is manual. An interrupt before the
    first plan stays an interrupt."""
    import planner.api as api

    with console.live(not args.quiet) as line:
        try:
            if args.mode == "manual":
                return _manual(args)
            return api.plan(
                args.model,
                progress=line.report,
                backend=args.backend if args.emit else "",
                incremental=args.incremental,
                confirm=args.confirm,
                **options,
            )
        except PlanError as e:
            if line.interrupted and e.code == "P026":
                raise KeyboardInterrupt from e
            raise


def _target(args: argparse.Namespace) -> Path | None:
    """Where the strategy goes; None with --json alone. What can be refused is refused before the
    search."""
    if args.json and not args.output:
        return None
    if args.output == "-":
        raise PlanError(
            "P056", "cannot write '-': -o names a file", help=["--json prints the strategy"]
        )
    path = Path(args.output or f"{files.stem(args.model)}.plan.json")
    other = irregular(path.stat().st_mode) if path.exists() else ""
    if other or not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise PlanError(
            "P056",
            f"cannot write {str(path)!r}",
            detail=[other or f"{path.parent} is no folder one may write in"],
            help=["-o a file in a folder that exists and is writable"],
        )
    return path


def _refuse_others(args: argparse.Namespace, target: Path | None) -> None:
    """Raises PlanError P053 where a file to be written is of another model, or of no plan at
    all."""
    if args.emit:
        from planner.commands.programs import refuse_other

        refuse_other(Path(args.emit), args.force)
    if target is not None and target.exists() and not args.force:
        _refuse_other(target, args)


def _refuse_typed(args: argparse.Namespace) -> None:
    """Raises what a search of these options is refused for before it begins."""
    import planner.api as api

    if args.mode != "manual":
        request = api.make_request(
            **machine(args),
            workload=args.workload,
            mode=args.mode,
            solver=args.solver,
            objective=args.objective,
            optimizer=args.optimizer,
            pins=None if (pinned := pins(args)) == "annotated" else pinned,
            incremental=args.incremental,
            cache=cache(args),
        )
        api.open_model(args.model, request.topology.devices, **workload(args)).graph(1)


def _refuse_other(path: Path, args: argparse.Namespace) -> None:
    """Raises PlanError P053 where a file is no strategy, or one of another model."""
    try:
        old = _recorded(path)
    except PlanError as e:
        raise PlanError(
            "P053",
            f"{path} exists and is not a strategy that this version reads",
            help=["-o another file, or --force"],
        ) from e
    mine = _named(args.model)
    if old.model["name"] not in (mine, _served_name(path, args.model)):
        raise PlanError(
            "P053",
            f"{path} exists and is a strategy of {old.model['name']!r}, not of {mine!r}",
            help=["-o another file, or --force"],
        )
    if not _same_model(old, args):
        raise PlanError(
            "P053",
            f"{path} exists and is a strategy of another {mine!r}",
            detail=[f"that of {old.provenance.get('source', 'an unknown place')}"],
            help=["-o another file, or --force"],
        )


def _named(source: str) -> str:
    """What a strategy calls the model of a source."""
    return source if source.startswith("zoo:") else Path(source).name


def _served_name(path: Path, source: str) -> str:
    """What the plan of a file calls the model, where it serves it with a cache that nobody asked
    for."""
    from planner.serving.cached import with_cache
    from planner.serving.result import is_serving

    return _named(str(with_cache(source))) if is_serving(path) else ""


def _recorded(path: Path) -> Strategy:
    """The strategy of a file, of a serving plan that of its steps."""
    from planner.serving.result import Serving, is_serving

    return Serving.load(path).step if is_serving(path) else files.load(path)


def _same_model(old: Strategy, args: argparse.Namespace) -> bool:
    """Whether a strategy is of the model to be planned, perhaps at other sizes, with other adapters
    or edited since. A zoo name says it all, and so does the file it was made from; a file of the
    same name elsewhere is held to be the same when it has as many parameters.
    """
    import planner.api as api

    source = str(old.provenance.get("source", ""))
    if args.model.startswith("zoo:") or (
        source and Path(source).resolve() == Path(args.model).resolve()
    ):
        return True
    adapted = args.lora or (old.workload.get("training") or {}).get("lora")
    return bool(adapted) or bool(
        api.open_model(args.model, args.devices or 1, **workload(args)).plain.parameters
        == old.model["parameters"]
    )


def _manual(args: argparse.Namespace) -> Strategy:
    from planner.whatif.reprice import manual

    if args.confirm:
        raise PlanError(
            "P059",
            "--mode manual takes the plan as it is, and --confirm chooses among several",
            help=["plan verify STRATEGY --target " + args.confirm],
        )
    if not args.pin:
        raise PlanError(
            "P059",
            "--mode manual checks and prices a given strategy: which one?",
            help=["--pin strategy.json"],
        )
    typed = [name for name in RECORDED if getattr(args, name) is not None]
    typed += unusual(args, ANSWERED)
    if typed:
        raise PlanError(
            "P059",
            "--mode manual takes machine and workload from the strategy:"
            f" --{typed[0].replace('_', '-')} says them again",
            help=["change them in the strategy file, or plan again"],
        )
    given_plan = files.load(args.pin[0])
    strategy = manual(given_plan, args.model)
    moved = [
        n
        for n, row in strategy.tensors.items()
        if n in given_plan.tensors and given_plan.tensors[n]["layout"] != row["layout"]
    ]
    if moved and not args.quiet:
        console.say(
            f"note: layouts follow from the splits of nodes; {len(moved)} in the file did not and"
            f" are written anew, first {moved[0]}"
        )
    return strategy
