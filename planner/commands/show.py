"""`plan show`: read-only views of a saved plan: the summary, JSON, one HTML page, a Chrome trace,
plots."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from planner.commands import files
from planner.commands.common import spare, write_text
from planner.errors import PlanError
from planner.support import console

if TYPE_CHECKING:
    from planner.report.html.view import View
    from planner.strategy.strategy import Strategy
    from planner.whatif.reprice import Priced


def run(args: argparse.Namespace) -> int:
    """The summary or the JSON on stdout; or files. Several kinds of files may be asked for at
    once."""
    from planner.commands import serve
    from planner.serving.result import is_serving

    if is_serving(args.strategy):
        return serve.show(args)
    strategy = files.load(args.strategy)
    if args.other and not args.html:
        raise PlanError(
            "P002",
            f"`plan show` does not understand {args.other!r}",
            help=["--html FILE shows two plans side by side", "plan diff tells what changed"],
        )
    if args.json and (args.html or args.trace or args.png):
        raise PlanError(
            "P003",
            "--json prints the strategy, and the other options write files",
            help=["one or the other"],
        )
    for path, start in (
        (args.html, b"<!doctype html>"),
        (args.trace, b'{\n"traceEvents"'),
        (args.png, b"\x89PNG"),
    ):
        if path:
            spare(Path(path), start)
    if args.html:
        _html(args, strategy)
    if args.trace:
        from planner.report.trace import trace

        write_text(
            args.trace,
            trace(_priced(args, strategy)),
            "open it in ui.perfetto.dev or chrome://tracing",
        )
    if args.png:
        from planner.report.html.derive import work_out
        from planner.report.html.plots import png

        png(strategy, work_out(_priced(args, strategy)), Path(args.png))
        console.say(f"wrote {args.png}")
    if args.json:
        console.data(strategy.to_json())
    elif not (args.html or args.trace or args.png):
        from planner.report.summary import summary

        console.data(summary(strategy, console.width(), console.colour(sys.stdout)) + "\n")
        console.say(files.next_steps(args.strategy, strategy))
    return 0


def _priced(args: argparse.Namespace, strategy: Strategy) -> Priced:
    from planner.commands.common import priced_step

    return priced_step(strategy, files.model_of(strategy, args.strategy, args.model))


def _html(args: argparse.Namespace, strategy: Strategy) -> None:
    from planner.report.html.page import page

    views = [_view("A" if args.other else "", args.strategy, strategy, args.model)]
    if args.other:
        other = files.load(args.other)
        same = other.model["sha256"] == strategy.model["sha256"]
        views.append(_view("B", args.other, other, args.model if same else None))
    write_text(args.html, page(views), "open it in a browser")


def _view(letter: str, path: str, strategy: Strategy, model: str | None) -> View:
    """A plan with its detail where the model is found and still the same; a model that was named
    must be."""
    from planner.commands.common import priced_step
    from planner.report.html.derive import work_out
    from planner.report.html.view import View

    try:
        detail = work_out(priced_step(strategy, files.model_of(strategy, path, model)))
    except PlanError as e:
        framework = e.code == "P069"
        if model and not framework:
            raise
        why = (
            f"{e.what}. Drawn from the file alone: operators on the timeline, the memory curve, the"
            " graph’s edges and what each reshard serves are left out."
        )
        console.say(
            f"note: {e.what}"
            + (
                ""
                if framework
                else (
                    "; --model FILE adds the graph's edges, the timeline of operators and the"
                    " memory curve"
                )
            )
        )
        return View(letter, Path(path).name, strategy, None, why)
    return View(letter, Path(path).name, strategy, detail)
