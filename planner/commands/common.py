"""What several commands share: keyword arguments of `planner.plan` from parsed options, the cache
that the user chose, a saved plan priced anew, and text files written for the user.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodels.hardware.intake import opened
from planner.cache.folder import Cache
from planner.errors import PlanError
from planner.support import console
from planner.support.choices import choose, refuse_twice

if TYPE_CHECKING:
    from planner.strategy.strategy import Strategy
    from planner.whatif.reprice import Priced


def arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `planner.plan` from the options that the planning commands share."""
    return {
        **machine(args),
        "mode": args.mode,
        "solver": getattr(args, "solver", "auto"),
        "pins": pins(args),
        "objective": args.objective,
        "time_limit_s": args.time_limit,
        "seed": args.seed,
        "strict": args.strict,
        "cache": cache(args),
        **workload(args),
    }


def pins(args: argparse.Namespace) -> Any:
    """What `planner.plan` takes as pins: every --pin of a command line as one. `annotated`, and the
    strategy of --mode manual, stand alone."""
    from planner.pins.pins import joined_pins

    named = tuple(dict.fromkeys(args.pin or ()))
    if len(named) > 1 and args.mode == "manual":
        raise PlanError(
            "P059",
            "--mode manual takes one strategy, and --pin names " + " and ".join(map(repr, named)),
            help=[f"--pin {named[0]}"],
        )
    if len(named) > 1 and "annotated" in named:
        raise PlanError(
            "P003",
            "--pin annotated takes the model's own annotations, and another --pin is beside it",
            help=["leave one of them"],
        )
    return joined_pins(named)


def unusual(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """The options of `plan MODEL`, among these names, that have another value than where nobody
    gives them."""
    from planner.commands.options import plans

    parser = argparse.ArgumentParser(add_help=False)
    plans.make(parser)
    return [name for name in names if getattr(args, name) != parser.get_default(name)]


def cache(args: argparse.Namespace) -> Cache | None:
    """Where searches are kept; None where the user wants none."""
    if args.no_cache and args.cache is not None:
        raise PlanError(
            "P003", "--cache and --no-cache contradict each other", help=["give one of them"]
        )
    return None if args.no_cache else Cache.chosen(args.cache)


def tell(known: Cache | None) -> None:
    """Say which searches were spared, and where none can be kept."""
    if known is not None and (text := known.said()):
        console.say(text)
    if known is not None and known.faults.messages:
        console.say(
            f"the cache failed and was left aside ({known.faults.messages[0]}): a fault of the"
            " planner's, the plan stands; MESHWRIGHT_DEBUG=1 shows where"
        )
    if known is not None and known.faults.unwritten:
        console.say(
            f"nothing is kept for another run: the cache {known.folder} cannot be written"
            f" ({known.faults.unwritten}); --cache another folder, or --no-cache"
        )


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """The options that say what it runs on, for `planner.api.make_request` and `planner.plan`."""
    from planner.search.options import DEFAULT_PRECISION

    return {
        "devices": getattr(args, "devices", None),
        "hardware": args.hardware,
        "topology": getattr(args, "topology", None),
        "runtime": args.runtime,
        **({"launcher": w} if (w := getattr(args, "launcher", "")) else {}),
        "memory_limit_bytes": _size(args, "memory_limit"),
        "memory_reserve_bytes": _size(args, "memory_reserve"),
        **({"calibrate_with": w} if (w := getattr(args, "calibrate_with", "")) else {}),
        "precision": args.precision or DEFAULT_PRECISION,
    }


def _once(option: str, pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The pairs of an option that may be given several times, by name. Raises PlanError P003 where
    a name has two values."""
    values: dict[str, str] = {}
    for name, value in pairs:
        refuse_twice(option, name, values.setdefault(name, value), value)
    return values


def workload(args: argparse.Namespace) -> dict[str, Any]:
    """The options that say what is run, for `planner.api.open_model` and `planner.plan`."""

    choose("workload", args.workload, ("train", "infer"))
    return {
        "workload": args.workload,
        "batch": args.batch,
        "tokens_per_step": args.tokens_per_step,
        "dims": {k: 0 if v == "0" else _whole("dim", v) for k, v in _once("dim", args.dim).items()},
        "shapes": {
            k: tuple(_whole("shape", n) for n in v.split(","))
            for k, v in _once("shape", args.shape).items()
        },
        "loss": args.loss,
        "logits": args.logits,
        "shift_labels": args.shift_labels,
        "trainable": tuple(args.trainable),
        "freeze": tuple(args.freeze),
        "tie": tuple(args.tie),
        "ignore_index": args.ignore_index,
        "lora": args.lora,
        "optimizer": args.optimizer,
        "lr": args.lr,
        "tables": args.tables,
        "imbalance": args.imbalance,
        "capacity": args.capacity,
    }


def _whole(option: str, text: str) -> int:
    from planner.commands.options.values import whole

    try:
        return whole(text)
    except argparse.ArgumentTypeError as e:
        raise PlanError(
            "P003", f"--{option}: {e}", help=["--dim seq=4096 or --shape ids=8,128"]
        ) from e


def _size(args: argparse.Namespace, name: str) -> int | None:
    from costmodels.hardware.units import UnitError, size_bytes

    text = getattr(args, name)
    try:
        return None if text is None else size_bytes(text)
    except UnitError as e:
        raise PlanError(
            "P003", f"--{name.replace('_', '-')}: {e}", help=["a number and a unit, such as 80GiB"]
        ) from e


def spare(path: Path, start: bytes) -> None:
    """A file that holds something else than this command writes there, a plan perhaps, is left
    alone."""
    try:
        with opened(path) as f:
            beginning = f.read(len(start))
    except OSError:
        return  # nothing there, or nothing that can be read: writing says what is wrong
    if beginning and beginning != start:
        raise PlanError(
            "P053",
            f"{path} exists and is not what this option writes",
            help=["name another file, or remove this one"],
        )


def write_text(path: str, text: str, next_step: str) -> None:
    """Write a file and say what to do with it."""
    from planner.support.atomic_write import write_atomically

    write_atomically(Path(path), text)
    console.say(f"wrote {path}   {next_step}")


def priced(strategy: Strategy, source: str) -> Priced:
    """A strategy on its model with the recorded machine. PlanError when the model is another
    one."""
    from planner.machine.topology import from_json
    from planner.whatif.reprice import own_model, reprice

    model = own_model(strategy, source)
    return reprice(strategy, model, from_json(strategy.topology))


def priced_step(strategy: Strategy, source: str) -> Priced:
    """`priced`, as a device runs the step; with islands, one of that which the others wait for."""
    from planner.pricing.islands import as_priced

    whole = priced(strategy, source)
    flow, pricer = as_priced(whole.base, whole.flow, whole.runs, whole.pricer)
    return replace(whole, flow=flow, pricer=pricer, plan=flow.plan)
