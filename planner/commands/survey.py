"""`plan compare`, `ops`, `hardware`, `solve`: tables before and beside a plan."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from planner.commands.common import arguments, tell, workload
from planner.errors import PlanError
from planner.support import console

if TYPE_CHECKING:
    from planner.strategy.strategy import Strategy
    from planner.workload.model import Model

SOLVERS = ("dp", "recursive", "ilp")
ANY_SIZE = 128
"""What `plan ops` takes for dims without a value."""
FINDING, NO_PLAN = 1, 3


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


def ops(args: argparse.Namespace) -> int:
    """Coverage: per operator how often, its rule or why it has none, and its share of the FLOPs.
    With --parameters: the weights and which of them train."""
    from planner.analysis.facts import GraphFacts
    from planner.report.tables import coverage

    model = _open_any_size(args)
    if args.parameters:
        from planner.report.parameters import parameter_table

        console.data(parameter_table(model.plain, console.width(), console.colour(sys.stdout)))
        return 0
    base = GraphFacts.of(model.graph(1), training=args.workload == "train")
    console.data(coverage(base, console.width(), console.colour(sys.stdout)))
    return 0


def _open_any_size(args: argparse.Namespace) -> Model:
    """The model; symbolic dims that nobody gave are `ANY_SIZE`: which operators have rules depends
    on no size, and their shares hardly do."""
    import planner.api as api

    options = workload(args)
    model: Model = api.open_model(args.model, 1, **options)
    try:
        model.graph(1)
    except PlanError as e:
        open_dims = [name for line in e.help for name in re.findall(r"--dim ([^\s=]+)=\?", line)]
        if e.code != "P140" or not open_dims:
            raise
        model = api.open_model(
            args.model,
            1,
            **{**options, "dims": {**options["dims"], **dict.fromkeys(open_dims, ANY_SIZE)}},
        )
        model.graph(1)
        console.say(
            f"note: {', '.join(open_dims)} taken as {ANY_SIZE}"
            f" ({' '.join(f'--dim {name}=N' for name in open_dims)})"
        )
    return model


def hardware(args: argparse.Namespace) -> int:
    """The devices and machines that ship, or one with the source of every figure."""
    from costmodels.hardware.describe import (
        as_json,
        describe,
        describe_topology,
        library,
        overview,
        topology_table,
    )
    from costmodels.hardware.device import topology_names
    from planner.machine.topology import device
    from planner.machine.topology_file import from_file, is_topology

    name = args.name
    if not name:
        table, text = library(), overview(console.width())
    elif is_topology(name):
        from_file(name, None)  # refuses what a plan would refuse
        table, text = topology_table(name), describe_topology(name, console.width())
    elif name in topology_names() and not Path(name).exists():
        table, text = topology_table(name), describe_topology(name, console.width())
    else:
        chip = device(name)
        table, text = as_json(chip), describe(chip, console.width())
    console.data(json.dumps(table, indent=2, sort_keys=True) if args.json else text)
    return 0


def solve(args: argparse.Namespace) -> int:
    """A bare problem in the contest's JSON."""
    from planner.solvers.iopddl import solve_file

    return solve_file(args.problem, args.time_limit, args.solver, args.output, args.seed).exit_code
