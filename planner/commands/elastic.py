"""`plan launch DIR --devices auto`: of the plans that `plan sweep -o DIR` stored, the one for the
devices that came up."""

from __future__ import annotations

import argparse
from pathlib import Path

from planner.commands import files
from planner.commands.launching import (
    check_meant,
    check_ways,
    folder_of,
    local_hosts,
    make_job,
    run_seat,
    running,
    said_ended,
    supervised,
    take_seat,
    write,
)
from planner.errors import PlanError
from planner.launch.elastic import SUFFIX, Choice, Stored, choose, chosen, devices_here, table
from planner.launch.job import Job, parse_hosts
from planner.launch.schedulers import SCHEDULERS
from planner.support import console


def run(args: argparse.Namespace) -> int:
    """What came up is known beforehand (--local, --hostfile), by joining (--nnodes), or to the
    allocation alone (--to slurm)."""
    if args.devices != "auto":
        raise PlanError(
            "P206",
            f"--devices {args.devices!r}: a stored plan says how many devices it is for",
            help=["plan launch DIR --devices auto, DIR of plan sweep -o DIR"],
        )
    check_ways(args)
    if args.to and not SCHEDULERS[args.to].picks_plan:
        raise PlanError(
            "P206",
            f"--to {args.to} writes a fixed number of processes",
            help=["--to slurm, whose script picks by its allocation; or launch one plan"],
        )
    folder = Path(args.strategy)
    if not folder.is_dir():
        raise PlanError(
            "P208",
            f"--devices auto picks among the plans of a folder, and {args.strategy} is none",
            help=["plan sweep MODEL --devices 8,16..64 -o DIR"],
        )
    plans = table(folder, [Stored(p, files.load(p)) for p in sorted(folder.glob(f"*{SUFFIX}"))])
    if args.to:
        return _by_allocation(args, plans)
    if args.nnodes:
        return _by_joining(args, plans)
    virtual = bool(args.cpu or args.local)
    hosts = parse_hosts(Path(args.hostfile)) if args.hostfile else ()
    check_meant(args, plans[-1].strategy)
    choice = _said(
        plans, args.local or len(hosts), hosts[0].slots if hosts else _slots(args, plans), virtual
    )
    with running(
        args,
        folder_of(args, files.model_of(choice.stored.strategy, choice.stored.path, args.model)),
    ):
        job = _job(args, choice)
        return supervised(args, job, hosts[: choice.processes] or local_hosts(job))


def _slots(args: argparse.Namespace, plans: tuple[Stored, ...]) -> int:
    """Devices of a process: as given; on real devices those that are here; else those of a node as
    planned."""
    real = not (args.cpu or args.local)
    device = str(plans[-1].strategy.topology["device"])
    return int(
        args.slots
        or (devices_here(device) if real and not args.to else 0)
        or max(s.slots for s in plans)
    )


def _said(plans: tuple[Stored, ...], processes: int, slots: int, virtual: bool) -> Choice:
    choice, line = chosen(plans, processes, slots, virtual)
    console.say(line)
    return choice


def _job(args: argparse.Namespace, choice: Choice) -> Job:
    return make_job(args, choice.stored.strategy, choice.stored.path, choice.processes)


def _by_joining(args: argparse.Namespace, plans: tuple[Stored, ...]) -> int:
    """Every node knows the plans; how many nodes there are, all learn when they have their
    ranks."""
    (least, most), slots, virtual = args.nnodes, _slots(args, plans), bool(args.cpu)
    chosen(plans, most, slots, virtual)  # refused at once where not even all of them would do
    check_meant(args, plans[-1].strategy)

    def suffice(joined: int) -> int:
        choice = choose(plans, joined, slots, virtual) if joined >= least else None
        return choice.processes if choice else 0

    seat = take_seat(
        args,
        most,
        [[(s.path.name, s.strategy.to_json()) for s in plans], args.arguments, args.nnodes, slots],
        suffice,
    )
    choice = _said(plans, seat.joined, slots, virtual)
    with running(
        args,
        folder_of(args, files.model_of(choice.stored.strategy, choice.stored.path, args.model)),
    ):
        job = _job(args, choice)
        run_seat(args, job, seat)
    return said_ended(job)


def _by_allocation(args: argparse.Namespace, plans: tuple[Stored, ...]) -> int:
    """A program of every plan for whole nodes, and the script that picks one of them."""
    slots = _slots(args, plans)
    choices = {
        n: choose(plans, n, slots, args.cpu)
        for n in sorted({-(-s.devices // slots) for s in plans})
    }
    whole = {n: c for n, c in choices.items() if c and c.stored.devices == n * slots}
    if not whole:
        raise PlanError(
            "P208",
            f"no stored plan is for whole nodes of {slots} devices",
            help=["--slots N: devices of a node"],
        )
    check_meant(args, plans[-1].strategy)
    jobs = [
        make_job(args, c.stored.strategy, c.stored.path, n, several=True) for n, c in whole.items()
    ]
    return write(jobs, args, plans[-1].strategy)
