"""`plan launch`: run the program of a plan here, on nodes that join, on listed hosts; or write the
scripts that do."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

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
from planner.launch.job import Host, check_count, node_slots, read_hosts
from planner.launch.schedulers import SCHEDULERS

if TYPE_CHECKING:
    from planner.strategy.strategy import Strategy


def run(args: argparse.Namespace) -> int:
    """`plan launch`."""
    if args.devices is not None:
        from planner.commands import elastic

        return elastic.run(args)
    strategy = files.load(args.strategy)
    hosts = _check(args, strategy)
    nodes = int(strategy.topology["devices"]) // node_slots(strategy)
    processes = args.local or (args.nnodes and args.nnodes[1]) or len(hosts) or nodes
    if args.to:
        return write([make_job(args, strategy, args.strategy, processes)], args, strategy, hosts)
    with running(args, folder_of(args, files.model_of(strategy, args.strategy, args.model))):
        job = make_job(args, strategy, args.strategy, processes)
        if args.nnodes:
            run_seat(
                args,
                job,
                take_seat(
                    args, job.processes, [job.program.read_text(), job.arguments, job.processes]
                ),
            )
            return said_ended(job)
        own_servers = (
            args.local
            and (strategy.workload.get("training") or {}).get("tables") == "server"
            and "--tables" not in job.arguments
        )
        return supervised(args, job, hosts or local_hosts(job), job.processes if own_servers else 0)


def _check(args: argparse.Namespace, strategy: Strategy) -> tuple[Host, ...]:
    """Refuse what cannot run, before anything is written; returns the hosts of --hostfile."""
    check_ways(args)
    if args.nnodes and args.nnodes[0] != args.nnodes[1]:
        raise PlanError(
            "P206",
            f"--nnodes {args.nnodes[0]}..{args.nnodes[1]}: one plan has one number of nodes",
            help=["plan launch DIR --devices auto, DIR of plan sweep -o DIR"],
        )
    if args.slots:
        raise PlanError(
            "P206",
            "--slots is for --devices auto: a plan says how many devices its processes have",
            help=["leave it out"],
        )
    virtual = bool(args.cpu or args.local)
    if args.local or args.nnodes:
        check_count(
            strategy,
            args.local or args.nnodes[1],
            virtual,
            f"--local {args.local}" if args.local else f"--nnodes {args.nnodes[1]}",
        )
    if args.to and SCHEDULERS[args.to].needs_image and not args.image:
        raise PlanError(
            "P206",
            f"--to {args.to} needs --image",
            help=["--image NAME of a container image with python3 and jax"],
        )
    devices, slots = int(strategy.topology["devices"]), node_slots(strategy)
    if args.to and not args.hostfile and devices % slots:
        what = f"--to {args.to}: {devices} devices are no whole number of nodes of {slots}"
        raise PlanError(
            "P200", what, help=["plan for whole nodes, or describe the machine with --topology"]
        )
    hosts = read_hosts(Path(args.hostfile), strategy, virtual) if args.hostfile else ()
    check_meant(args, strategy)
    return hosts
