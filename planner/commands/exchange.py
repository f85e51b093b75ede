"""`plan export` writes a plan as another launcher's settings, `plan import` prices such
settings."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodels.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS
from planner.commands import files
from planner.errors import PlanError
from planner.support import console
from planner.support.choices import choose

if TYPE_CHECKING:
    from planner.interop.price import Configuration, Handover
    from planner.machine.topology import Topology
    from planner.strategy.strategy import Strategy
    from planner.workload.model import Model


def export(args: argparse.Namespace) -> int:
    """`plan export`: the settings go to the file (or stdout), what they cost to the terminal."""
    from planner.serving.result import is_serving

    if is_serving(args.strategy):
        return _export_serving(args)
    from planner.interop.price import hand_over, refuse_dear
    from planner.report.commands import options_of
    from planner.support.atomic_write import write_atomically

    strategy = files.load(args.strategy)
    to = args.to or str(strategy.provenance.get("launcher", ""))
    if not to:
        raise PlanError(
            "P003",
            "export for which launcher?",
            help=["--to NAME (plan export --help); plan ... --for NAME says it before"],
        )
    source = files.model_of(strategy, args.strategy, args.model)
    with console.live(True, "pricing what is rounded"):
        handover = hand_over(strategy, source, to, Path(args.output or "").suffix)
    try:
        refuse_dear(handover, to, strategy, str(source))
    except PlanError:
        console.say(cost_of(handover))
        raise
    if args.output in (None, "-"):
        console.data(handover.text)
        console.say(cost_of(handover))
        return 0
    target = _new_file(args)
    write_atomically(target, handover.text)
    console.data(cost_of(handover) + "\n")
    options = " ".join(options_of(strategy, configured=True))
    read = " ".join([str(target), *handover.behind])
    console.say(f"wrote {target}   next: plan import {read} --model {source} {options}")
    return 0


def _new_file(args: argparse.Namespace) -> Path:
    """The file of -o. Raises PlanError P053 where there is one and no --force."""
    target = Path(args.output)
    if target.exists() and not args.force:
        raise PlanError("P053", f"{target} exists", help=["-o another file, or --force"])
    return target


def _export_serving(args: argparse.Namespace) -> int:
    """`plan export` of a serving plan: a script that starts an engine."""
    from planner.serving.engines import ENGINES, hand_over
    from planner.serving.result import Serving
    from planner.support.atomic_write import write_atomically

    if not args.to:
        raise PlanError(
            "P003", "export for which engine?", help=[f"--to {' or --to '.join(ENGINES)}"]
        )
    choose("to", args.to, tuple(ENGINES))
    handover = hand_over(Serving.load(args.strategy), args.to)
    if args.output in (None, "-"):
        console.data(handover.text)
        console.say(handover.cost)
        return 0
    target = _new_file(args)
    write_atomically(target, handover.text)
    console.data(handover.cost + "\n")
    console.say(f"wrote {target}   next: MODEL=... bash {shlex.quote(str(target))}")
    return 0


def cost_of(handover: Handover) -> str:
    """What handing over costs, a line a rounding, each beside the one before; then what has no
    price."""
    from costmodels.hardware.units import show_bytes, show_time
    from planner.support.text import table

    rows, before = [["", "step", "change", "memory", "fits"]], 0.0
    for row in handover.rows:
        if row.cost is None:
            rows.append([row.reason, "no price", "", "", row.why])
            continue
        step = float(row.cost["step_time_s"])
        rows.append(
            [
                row.reason,
                show_time(step),
                f"{100 * (step / before - 1):+.1f} %" if before else "",
                show_bytes(row.cost["memory_per_device_bytes"]),
                row.cost["fit"],
            ]
        )
        before = step
    return "\n".join(
        [
            *table(rows, right=(1, 2, 3)),
            *(f"not said there, not priced: {x}" for x in handover.inexpressible),
            *(f"not said there: {x}" for x in handover.to_set),
        ]
    )


def import_(args: argparse.Namespace) -> int:
    """`plan import`: a launcher's configuration as a priced strategy."""
    import planner.api as api
    from planner.commands.common import machine
    from planner.interop.keys import function_of
    from planner.interop.price import as_priced, priced
    from planner.report.commands import options_of

    started = time.monotonic()
    topology = api.make_request(**machine(args)).topology
    configuration, model = opened(args, topology)
    request = api.make_request(
        **machine(args) | precision_of(args, configuration, args.runtime), optimizer=args.optimizer
    )
    configuration = as_priced(configuration, request)
    file, function = function_of(args.config)
    target = Path(args.output or f"{function or file.stem}.plan.json")
    if target.exists() and not args.force:
        raise PlanError("P053", f"{target} exists", help=["-o another file, or --force"])
    assumed = (
        f"configuration {Path(args.config).name} of {configuration.launcher}",
        *configuration.notes,
        *api.assumptions(model, request, args.hardware, args.topology),
    )
    with console.live(not args.quiet) as line:
        strategy = priced(
            model,
            replace(request, baselines=False),
            configuration.settings,
            _provenance(args, started),
            assumed,
            line.report,
        )
    unproven = {"name": "import", "status": "feasible", "bound_s": None, "gap": None}
    strategy = replace(strategy, solver={**strategy.solver, **unproven})
    strategy.save(target)
    if not args.quiet:
        _say(args, strategy, configuration)
    options = " ".join(options_of(strategy))
    console.say(
        f"wrote {target}   next: plan {args.model} {options} -o best.json"
        f" · plan diff {target} best.json"
    )
    return 0


def opened(args: argparse.Namespace, topology: Topology) -> tuple[Configuration, Model]:
    """A configuration and the model that it trains. Raises PlanError P190, P191."""
    import planner.api as api
    from planner.commands.common import workload
    from planner.interop.model_sizes import hold, layers_of
    from planner.interop.price import LAUNCHERS, read_configuration
    from planner.machine.topology import domain_of
    from planner.pins.launcher_space import choose_launcher

    if args.kind:
        choose_launcher("from", args.kind, tuple(LAUNCHERS))
    devices = topology.devices

    def layers() -> int:
        """Of the model, where the configuration counts layers instead of stages."""
        return layers_of(api.open_model(args.model, devices, **workload(args)).plain)

    configuration = read_configuration(
        args.config, devices, args.kind, domain_of(topology), args.overrides, layers
    )
    _refuse_contradictions(args, configuration)
    batch = configuration.settings.batch
    model = api.open_model(
        args.model, devices, **{**workload(args), "batch": batch, "tokens_per_step": None}
    )
    hold(configuration.claims, model.plain, args.config)
    _same_length(model, configuration, args.config)
    unasked = args.workload == "train" and args.optimizer == DEFAULT_OPTIMIZER
    if unasked and configuration.keys.optimizer:
        return _with_its_optimizer(args, configuration, model)
    return configuration, model


def _with_its_optimizer(
    args: argparse.Namespace, configuration: Configuration, model: Model
) -> tuple[Configuration, Model]:
    """What `opened` returns of a file that names an optimizer that is priced unasked (Muon): with
    it, or with AdamW's steps alone where all weights of the model take them."""
    from planner.ops.matrices import hidden_matrices

    optimizer = configuration.keys.optimizer
    if OPTIMIZERS[optimizer].orthogonalises and not hidden_matrices(model.graph()):
        note = (
            f"{optimizer} takes AdamW's steps but for matrices of hidden layers, and the model has"
            " none: all of it is priced with AdamW"
        )
        return replace(configuration, notes=(*configuration.notes, note)), model
    args.optimizer = optimizer
    return configuration, model.under(optimizer=optimizer)


def precision_of(
    args: argparse.Namespace, configuration: Configuration, runtime: str
) -> dict[str, str]:
    """The option that says in which precision a configuration is priced under a runtime: its own
    where no other is asked for. Nothing where neither says one."""
    from planner.interop.price import precision_under

    precision = args.precision or precision_under(runtime, configuration.settings.precision)
    return {"precision": precision} if precision else {}


def _refuse_contradictions(args: argparse.Namespace, configuration: Configuration) -> None:
    """Raises PlanError P191 where an option says otherwise than the configuration."""
    from planner.interop.launchers import hf

    batch = configuration.settings.batch
    if args.batch not in (None, batch):
        raise PlanError(
            "P191",
            f"--batch {args.batch}, and {args.config} says {batch}",
            help=["leave --batch out"],
        )
    if args.workload != "train" and (
        configuration.launcher != hf.NAME or not configuration.settings.runs_inference
    ):
        raise PlanError(
            "P191", f"{args.config} is a configuration of training", help=["--workload train"]
        )


def annotate(args: argparse.Namespace) -> int:
    """`plan annotate`: the ONNX file with the plan in it."""
    from planner.interop.onnx_annotations.write import annotate as annotated
    from planner.support.atomic_write import write_atomically

    strategy = files.load(args.strategy)
    source = files.model_of(strategy, args.strategy, args.model)
    target = Path(args.output or f"{files.stem(source)}.annotated.onnx")
    if target.exists() and not args.force:
        raise PlanError("P053", f"{target} exists", help=["-o another file, or --force"])
    annotated_model = annotated(strategy, source)
    write_atomically(target, annotated_model.model.SerializeToString())
    notes = (
        [f"{_plural(annotated_model.pending, 'result')} pending, written as reduced"]
        if annotated_model.pending
        else []
    )
    notes += (
        [
            f"{_plural(len(annotated_model.beyond), 'split')} in the metadata alone:"
            f" {', '.join(annotated_model.beyond[:3])}"
            + (" ..." if len(annotated_model.beyond) > 3 else "")
        ]
        if annotated_model.beyond
        else []
    )
    if target.parent.resolve() != Path(source).parent.resolve() and any(
        t.external_data for t in annotated_model.model.graph.initializer
    ):
        notes.append(
            f"its weights stay where they are: the file reads them beside itself, as {source} does"
        )
    for note in notes:
        console.say(f"note: {note}")
    onward = f"   next: plan {target} {machine_of(strategy)} --pin annotated"
    if strategy.techniques.get("islands"):
        onward = ""  # islands follow from --hardware, and are not pinned
    console.say(f"wrote {target}: {annotated_model.nodes} nodes annotated{onward}")
    return 0


def _plural(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def machine_of(strategy: Strategy) -> str:
    """The options under which another plan is priced as this one was."""
    from planner.machine.group_names import recorded_name
    from planner.search.options import DEFAULT_HARDWARE, DEFAULT_PRECISION, DEFAULT_RUNTIME

    hardware, runtime = recorded_name(strategy.topology), strategy.workload["runtime"]
    options = [f"--devices {strategy.topology['devices']}"]
    options += [f"--hardware {hardware}"] if hardware != DEFAULT_HARDWARE else []
    precision = strategy.workload["precision"]
    options += [f"--runtime {runtime}"] if runtime != DEFAULT_RUNTIME else []
    return " ".join([*options, *([f"--precision {precision}"] * (precision != DEFAULT_PRECISION))])


def _provenance(args: argparse.Namespace, started: float) -> dict[str, Any]:
    from datetime import UTC, datetime

    from planner.search.to_strategy import COST_MODEL_VERSION, TOOL_VERSION

    return {
        "tool": TOOL_VERSION,
        "cost_model": COST_MODEL_VERSION,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "source": str(args.model),
        "configuration": str(args.config),
        "read_s": round(time.monotonic() - started, 3),
    }


def _same_length(model: Any, configuration: Configuration, path: str) -> None:
    """A price of rows of another length is not that of the configuration."""
    from planner.interop.settings import row_length

    length = row_length(model.plain)
    if configuration.settings.length and length and length != configuration.settings.length:
        raise PlanError(
            "P191",
            f"{path} says rows of {configuration.settings.length} tokens, the model has rows of"
            f" {length}",
            help=["--dim, zoo:NAME,seq=N, or an export of that length"],
        )


def _say(args: argparse.Namespace, strategy: Strategy, configuration: Configuration) -> None:
    from planner.interop.unread import told
    from planner.report.summary import summary

    console.data(summary(strategy, console.width(), console.colour(sys.stdout)) + "\n")
    for note in configuration.notes:
        console.say(f"note: {note}")
    if configuration.unread:
        console.say(
            f"note: {_plural(len(configuration.unread), 'key')} of {args.config} not read:"
            f" {told(configuration.unread)}"
        )
    if strategy.costs["fit"] == "no":
        console.say("note: by this price it does not fit; the plan is kept for comparison")
