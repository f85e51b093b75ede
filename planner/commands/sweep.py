"""`plan sweep`: one model planned at many points, and what a training run costs at each."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.commands.common import arguments, tell
from planner.errors import PlanError
from planner.launch.elastic import SUFFIX
from planner.support import console
from planner.support.choices import refuse_twice

if TYPE_CHECKING:
    from planner.whatif.sweep_rows import Point, Row, TrainingRun

MOST_COUNTS, MOST_POINTS, MOST_DEVICES = 64, 256, 1_048_576
FINDING, INTERRUPTED = 1, 130
FEWEST, MAX = "fewest", "max"


def series(text: str, option: str = "devices", example: str = "8,16..512") -> list[int]:
    """Numbers of `8,16..512`, with k and M for thousands of 1024: the dots double the number before
    them up to the one after."""
    from planner.commands.options.values import whole

    numbers: list[int] = []
    for part in text.split(","):
        first, dots, last = (t.strip() for t in part.partition(".."))
        try:
            n, end = whole(first), whole(last if dots else first)
        except argparse.ArgumentTypeError as e:
            raise PlanError(
                "P003", f"--{option}: {e}", help=[f"numbers and doublings, such as {example}"]
            ) from e
        if option == "devices" and end > MOST_DEVICES:
            raise PlanError(
                "P003",
                f"--devices: {end:,} are more than the {MOST_DEVICES:,} that are swept",
                help=["fewer devices: plan FILE --devices N takes any number"],
            )
        if end < n:
            raise PlanError(
                "P003",
                f"--{option}: {part!r} runs backwards",
                help=[f"numbers and doublings, such as {example}"],
            )
        while n <= end:
            numbers.append(n)
            n *= 2
    numbers = list(dict.fromkeys(numbers))
    if len(numbers) > MOST_COUNTS:
        raise PlanError(
            "P003",
            f"--{option}: {len(numbers)} numbers are more than {MOST_COUNTS}",
            help=["fewer of them"],
        )
    return numbers


def prices(text: str | None) -> dict[str, float]:
    """USD per device-hour of `2.4/h` (under "") or `h100=2.4,v5e=1.1` (by hardware)."""
    usd_per_hour: dict[str, float] = {}
    texts: dict[str, str] = {}
    for part in (text or "").split(",") if text else ():
        name, _, value = part.strip().rpartition("=")
        match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)(?:\s*(?:USD)?/h)?", value.strip())
        if not match or not float(match[1]):
            raise PlanError(
                "P003",
                f"--price: {part!r} is not a price",
                help=["USD per device-hour: 2.4/h, or by hardware: h100=2.4,v5e=1.1"],
            )
        refuse_twice("price", name, texts.setdefault(name, value), value)
        usd_per_hour[name] = float(match[1])
    return usd_per_hour


def _by_hardware(paid: dict[str, float], hardware: list[str]) -> dict[str, float]:
    """Prices under the names the hardware was given by; a name may be any of a device's."""
    from costmodels import aliases
    from planner.errors import did_you_mean
    from planner.machine.tpu_slices import named_slice

    def own(name: str) -> str:
        name = named_slice(name)[0]
        return aliases().get(name.lower(), name)

    strange = next(
        (name for name in paid if name and own(name) not in {own(h) for h in hardware}), ""
    )
    if strange:
        raise PlanError(
            "P003",
            f"--price: {strange!r} is not among the hardware",
            help=[h for h in [did_you_mean(strange, hardware)] if h],
        )
    usd_per_hour = {
        h: usd for h in hardware for name, usd in paid.items() if name and own(h) == own(name)
    }
    return usd_per_hour | {name: usd for name, usd in paid.items() if not name}


def run(args: argparse.Namespace) -> int:
    """One row per point; a point that does not work says why and is no failure of the others."""
    import planner.api as api
    from planner.report.sweep import as_json, sweep_text
    from planner.whatif.sweep import Sweeper
    from planner.whatif.sweep_rows import run_of

    asked, points = _asked(args), _points(args)
    paid = _by_hardware(prices(args.price), [p.hardware for p in points])
    sweeper = Sweeper(args.model, _common(args), lambda line: console.live(True, line), api.plan)
    rows: list[Row] = []
    stopped = ended = False
    keep = _keeper(args)
    try:
        for row in _rows(sweeper, points, args):  # what is done stays when the next is interrupted
            rows.append(row)
            keep(row)
            if sweeper.left_s == 0.0:
                ended = True
                break
    except KeyboardInterrupt:
        stopped = True
    fitting = [r for r in rows if r.strategy is not None]
    if not fitting:
        if stopped:
            raise KeyboardInterrupt
        raise next(r.error for r in rows if r.error is not None)
    runs: list[TrainingRun | None] = [
        run_of(r, args.tokens, paid) if args.tokens and r.strategy is not None else None
        for r in rows
    ]
    if args.json:
        console.data(json.dumps(as_json(args.model, rows, runs, asked), indent=2, sort_keys=True))
    else:
        console.data(
            sweep_text(args.model, rows, runs, asked, console.width(), console.colour(sys.stdout))
        )
        tell(sweeper.common["cache"])
    if ended and (done := len({r.point for r in rows})) < len(points):
        console.say(
            f"--time-limit: {done} of {len(points)} points were planned in {args.time_limit:g} s"
        )
    if stopped:
        console.say("interrupted: these are the rows that were done")
        return INTERRUPTED
    return FINDING if asked.question and asked.best(rows, runs) is None else 0


def _keeper(args: argparse.Namespace) -> Callable[[Row], None]:
    """What stores the plan of a row in the folder -o, by model, hardware, devices and sizes;
    nothing without a folder."""
    from planner.commands.files import made_folder, stem

    if args.output is None:
        return lambda row: None
    folder, taken = made_folder(args.output, parents=True), list[str]()

    def keep(row: Row) -> None:
        """Save a row's plan; a second one of the same name gets a number."""
        if row.strategy is None:
            return
        sizes = [f"{k}{v}" for k, v in row.point.dims] + (
            [f"batch{row.strategy.workload['batch']}"] if row.point.batch else []
        )
        name = "-".join(
            [
                stem(args.model),
                Path(row.point.hardware).stem.replace(":", "-"),
                str(row.devices),
                *sizes,
            ]
        )
        taken.append(name)
        again = taken.count(name)
        row.strategy.save(folder / f"{name}{f'-{again}' if again > 1 else ''}{SUFFIX}")

    return keep


def _asked(args: argparse.Namespace) -> Any:
    """What is to be answered; options that answer nothing without others are refused."""
    from planner.report.sweep import Asked

    for name in ("deadline", "budget", "price"):
        if getattr(args, name) is not None and args.tokens is None:
            raise PlanError(
                "P003",
                f"--{name} is about a whole run: how many tokens has it?",
                help=["--tokens 2T"],
            )
    return Asked(args.tokens, args.deadline, args.budget, args.pareto)


def _common(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `planner.plan` that all points share."""
    once = argparse.Namespace(
        **{**vars(args), "batch": None, "dim": [], "devices": None, "hardware": None}
    )
    common = arguments(once)
    for name in ("devices", "hardware", "topology", "batch", "tokens_per_step"):
        common.pop(name)
    return {
        **common,
        "dims": {k: series(v, "dim")[0] for k, v in args.dim if len(series(v, "dim")) == 1},
    }


def _points(args: argparse.Namespace) -> list[Point]:
    """Hardware by sizes by batches by devices, in the order given."""
    from planner.machine.tpu_slices import named_slice
    from planner.search.options import DEFAULT_HARDWARE
    from planner.support.choices import choose
    from planner.whatif.sweep_rows import Point

    hardware = list(
        dict.fromkeys(
            h.strip() for h in (args.hardware or DEFAULT_HARDWARE).split(",") if h.strip()
        )
    )
    dims = _dims(args)
    batches: list[int | str | None] = (
        [None]
        if args.batch is None
        else [MAX]
        if args.batch == MAX
        else [*series(args.batch, "batch", "64,256..1024")]
    )
    no_counts = args.devices in (None, FEWEST)
    counts: list[int | None] = [None] if no_counts else [*series(args.devices)]
    devices_of = _own_devices(args, hardware)
    if args.scaling is not None:
        choose("scaling", args.scaling, ("strong", "weak"))
    _refuse_contradictions(args)
    combinations = itertools.product(hardware, itertools.product(*dims), batches, counts)
    points = [
        Point(h, None if named_slice(h)[1] else n or devices_of.get(h), d, b, args.tokens_per_step)
        for h, d, b, n in combinations
    ]
    points = list(dict.fromkeys(points))
    if len(points) > MOST_POINTS:
        raise PlanError(
            "P003",
            f"{len(points)} points are more than {MOST_POINTS}",
            help=["fewer devices, sizes or batches"],
        )
    return points


def _dims(args: argparse.Namespace) -> list[list[tuple[str, int]]]:
    """(name, size) pairs of each dimension that has several sizes. Raises PlanError P003 where one
    is given twice."""
    twice = next((k for i, (k, _) in enumerate(args.dim) if k in dict(args.dim[:i])), "")
    if twice:
        raise PlanError(
            "P003",
            f"--dim {twice} is given twice",
            help=[f"--dim {twice}={','.join(v for k, v in args.dim if k == twice)}"],
        )
    return [
        [(k, n) for n in sizes]
        for k, sizes in ((k, series(v, f"dim {k}", "4k,8k..128k")) for k, v in args.dim)
        if len(sizes) > 1
    ]


def _own_devices(args: argparse.Namespace, hardware: list[str]) -> dict[str, int | None]:
    """Hardware -> the devices of its own description, where --devices is left out. Raises PlanError
    where that leaves none, or where slices and --devices both say how many."""
    from planner.machine.tpu_slices import named_slice
    from planner.whatif.sweep import own_devices

    devices_of = {h: own_devices(h) for h in hardware} if args.devices is None else {}
    if args.devices is None and not all(named_slice(h)[1] or devices_of[h] for h in hardware):
        raise PlanError("P017", "how many devices?", help=["--devices 8,16..512, or fewest"])
    if args.devices is not None and all(named_slice(h)[1] for h in hardware):
        raise PlanError(
            "P014",
            f"--devices {args.devices}, but slices say how many devices they have:"
            f" {', '.join(hardware)}",
            help=["leave --devices out"],
        )
    return devices_of


def _refuse_contradictions(args: argparse.Namespace) -> None:
    """Raises PlanError P003 where two options contradict each other."""
    fewest, largest = args.devices == FEWEST, args.batch == MAX
    clashes = {
        "--batch and --tokens-per-step": args.batch and args.tokens_per_step,
        "--devices fewest and --batch max": fewest and largest,
        "--pareto and --batch max": args.pareto and largest,
        "--pareto and --devices fewest": args.pareto and fewest,
        "--scaling and --batch max": args.scaling and largest,
        "--tokens-per-step and --batch max": args.tokens_per_step and largest,
    }
    for what, both in clashes.items():
        if both:
            raise PlanError("P003", f"{what} contradict each other", help=["give one of them"])


def _rows(sweeper: Any, points: list[Point], args: argparse.Namespace) -> Iterator[Row]:
    """Rows as they are planned; under --scaling with the batch that follows from the first of their
    series."""
    from dataclasses import replace

    first: dict[tuple[Any, ...], tuple[int, int]] = {}
    for point in points:
        key = (point.hardware, point.dims, point.batch)
        if args.scaling and key in first:
            n, batch = first[key]
            grown = batch if args.scaling == "strong" else max(1, batch * (point.devices or n) // n)
            point = replace(point, batch=grown, tokens_per_step=None)
        if args.pareto:
            yield from sweeper.front(point)
            continue
        row = sweeper.row(point)
        if args.scaling and key not in first:
            if row.strategy is not None:
                first[key] = row.devices, row.strategy.workload["batch"]
            elif isinstance(point.batch, int) and point.devices:
                first[key] = point.devices, point.batch
        yield row
