"""`plan ops`: which operators of a model have rules, and which weights train."""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING

from planner.commands.common import workload
from planner.errors import PlanError
from planner.support import console

if TYPE_CHECKING:
    from planner.workload.model import Model


ANY_SIZE = 128
"""What `plan ops` takes for dims without a value."""


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
