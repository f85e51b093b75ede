"""What starting a job and writing scripts for a cluster share: its folder, its program, its number
of processes and its limits of time."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.commands import files
from planner.commands.programs import write_program
from planner.errors import PlanError
from planner.launch.job import Host, Job
from planner.launch.kubernetes import Asked, on_volume
from planner.launch.schedulers import SCHEDULERS, Submission
from planner.launch.scripts import plain_name
from planner.support import console

if TYPE_CHECKING:
    from planner.launch.join import Seat
    from planner.strategy.strategy import Strategy


WRITES = ("--checkpoints", "--log", "--export", "--profile")
"""Options of programs that name what they write."""
TRIAL_STEPS = 3
"""What a program takes that is not told how many."""


@contextmanager
def running(args: argparse.Namespace, folder: Path) -> Iterator[None]:
    """A job of this folder. Nodes that join (--nnodes) may share it; otherwise one job at a time
    runs there. Ctrl-C says what is left."""
    from planner.launch.processes import alone

    with nullcontext() if args.nnodes else alone(folder):
        try:
            yield
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"the job was ended   program and logs: {folder}   with --checkpoints the same"
                " command goes on"
            ) from None


def folder_of(args: argparse.Namespace, source: str) -> Path:
    """The folder of a job, made where there is none."""
    return files.made_folder(args.output or f"{files.stem(source)}.launch")


def make_job(
    args: argparse.Namespace,
    strategy: Strategy,
    path: str | Path,
    processes: int,
    several: bool = False,
) -> Job:
    """Write the program of a strategy and say how it runs. several: its device count is in its
    name, beside those of others."""
    source = files.model_of(strategy, path, args.model)
    name, devices = files.stem(source), int(strategy.topology["devices"])
    folder = folder_of(args, source)
    plain = (
        re.sub(r"[^A-Za-z0-9_.]+", "_", name).lstrip(".") or "program"
    )  # a key of a ConfigMap, and a word of scripts
    program = folder / f"{plain}{f'_{devices}' * several}.py"
    write_program(strategy, source, program, args.backend, False, args.force)
    folder_option = (
        ()
        if source.startswith("zoo:") or "--model-folder" in args.arguments
        else ("--model-folder", str(Path(source).resolve().parent))
    )
    return Job(
        name=name,
        program=program,
        device=str(strategy.topology["device"]),
        devices=devices,
        processes=processes,
        virtual=bool(args.cpu or args.local),
        arguments=(*folder_option, *args.arguments),
    )


def said_ended(job: Job) -> int:
    """The last line of a job that ended well."""
    console.say(f"all {job.processes} processes have ended   logs: {job.program.parent}/rank-*.log")
    return 0


def check_ways(args: argparse.Namespace) -> None:
    """Refuse options of where to run that do not go together."""
    from planner.support.choices import choose

    ways = [f"--{way}" for way in ("local", "nnodes", "to") if getattr(args, way)] or [
        "--hostfile"
    ] * bool(args.hostfile)
    if len(ways) != 1:
        ways_text = " and ".join(ways) or "none of them"
        raise PlanError(
            "P206",
            f"one of --local, --nnodes, --hostfile and --to says where to run; given: {ways_text}",
            help=["plan launch model.plan.json --local 2"],
        )
    if args.to:
        choose("to", args.to, tuple(SCHEDULERS))
    if bool(args.nnodes) != bool(args.coordinator):
        raise PlanError(
            "P206",
            "--nnodes and --coordinator go together",
            help=["--nnodes 8 --coordinator node0:29400, on every node"],
        )
    if args.hostfile and args.to and not SCHEDULERS[args.to].takes_hosts:
        raise PlanError(
            "P206", f"--hostfile is not for --to {args.to}", help=["leave it out, or --to mpirun"]
        )


def check_meant(args: argparse.Namespace, strategy: Strategy) -> None:
    """A program alone takes a few steps on random data, to be tried: nobody means that of a
    cluster, nor so few steps of data of theirs, so both say how far to train. Raises PlanError
    P214."""
    options = {word.partition("=")[0] for word in args.arguments}
    trial = bool(args.cpu or args.local) and not args.to and "--data" not in options
    if strategy.workload["kind"] != "train" or "--steps" in options or trial:
        return
    way = next(f"--{way}" for way in ("to", "nnodes", "hostfile", "local") if getattr(args, way))
    devices, on = (
        int(strategy.topology["devices"]),
        ("the data" if "--data" in options else "random data"),
    )
    raise PlanError(
        "P214",
        f"{way}: nothing behind -- says how far {devices} device{'s' * (devices > 1)} would train,"
        f" which would be {TRIAL_STEPS} steps on {on}",
        help=[
            "-- --data DIR --steps 10000 --checkpoints DIR",
            f"-- --steps {TRIAL_STEPS} where that is what you mean",
        ],
    )


def limit_s(args: argparse.Namespace, strategy: Strategy) -> int:
    """Seconds after which a run is ended: --time; else, where the scheduler has a default limit,
    twice what its steps take at the slow end of the plan's range, and half an hour to come up. 0
    for none."""
    if (
        args.time is not None
        or not SCHEDULERS[args.to].default_limit
        or strategy.workload["kind"] != "train"
    ):
        return round(args.time or 0)
    steps = _value(args.arguments, "--steps") or str(TRIAL_STEPS)
    return (
        int(1800 + 2 * int(steps) * float(strategy.costs["step_time_range_s"][1]))
        if steps.isdecimal()
        else 0
    )


def _value(arguments: Sequence[str], option: str) -> str:
    """What a program's arguments say of an option, "" where they say nothing."""
    words = [w for word in arguments for w in word.split("=", 1)]
    return words[words.index(option) + 1] if option in words[:-1] else ""


def lost_with_a_pod(arguments: Sequence[str], volume: str) -> list[str]:
    """`OPTION PATH` of what a program writes into its pod's own file system, which goes with the
    pod: the volume is mounted at /data."""
    written = ((option, _value(arguments, option)) for option in WRITES)
    return [
        f"{option} {path}"
        for option, path in written
        if path and "://" not in path and not (volume and Path("/data") in Path(path).parents)
    ]


def write(
    jobs: Sequence[Job], args: argparse.Namespace, strategy: Strategy, hosts: tuple[Host, ...] = ()
) -> int:
    """Scripts or manifests beside the program. jobs: several for a scheduler that picks by its
    allocation."""
    from planner.support.atomic_write import write_atomically

    scheduler, job, limit = SCHEDULERS[args.to], jobs[0], limit_s(args, strategy)
    cluster = Asked(
        image=args.image,
        volume=args.volume,
        tpu=args.to == "gke-tpu",
        rdma=args.rdma,
        labels=tuple(args.node_label),
        time_s=limit,
        queue=args.queue,
    )
    texts = scheduler.files(
        Submission(
            jobs=jobs,
            strategy=strategy,
            python=args.python or "python3",
            hosts=hosts,
            limit_s=limit,
            cluster=cluster,
        )
    )
    if scheduler.in_config_map and (why := on_volume(job)):
        console.say(
            f"note: no ConfigMap holds the program ({why}): copy {job.program.parent}/ to"
            f" {plain_name(job.name)}/ on the volume {args.volume}"
        )
    if scheduler.in_config_map and (lost := lost_with_a_pod(args.arguments, args.volume)):
        console.say(
            f"note: {' and '.join(lost)}: in the pod's own file system, and gone with it; --volume"
            " CLAIM mounts one at /data"
        )
    paths = [job.program.parent / file for file in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        write_atomically(path, text)
    console.say(
        f"wrote {', '.join(str(j.program) for j in jobs)},"
        f" {', '.join(map(str, paths))}   next: {scheduler.submit(paths[0])}"
    )
    return 0


def local_hosts(job: Job) -> tuple[Host, ...]:
    """All processes of a job on this machine."""
    return tuple(Host("localhost", job.slots) for _ in range(job.processes))


def supervised(
    args: argparse.Namespace, job: Job, hosts: tuple[Host, ...], servers: int = 0
) -> int:
    """All processes started from here: those of other hosts through ssh, in the same folder there.
    servers: so many of the tables too, which end when the others have."""
    from planner.launch.join import free_port
    from planner.launch.processes import Process, supervise

    local = [h.name in ("localhost", "127.0.0.1", socket.gethostname()) for h in hosts]
    coordinator = f"{'127.0.0.1' if all(local) else socket.gethostname() if local[0] else hosts[0].name.rpartition('@')[2]}:{free_port()}"  # noqa: E501
    python, program, folder = (
        args.python or sys.executable,
        str(job.program.resolve()),
        job.program.parent,
    )
    ports = [free_port() for _ in range(servers)]
    serving = [
        Process(
            k,
            job.serving(python, program, k, servers, port),
            folder / f"server-{k}.log",
            role="server",
        )
        for k, port in enumerate(ports)
    ]
    if servers:
        job = replace(
            job,
            arguments=(*job.arguments, "--tables", ",".join(f"127.0.0.1:{port}" for port in ports)),
        )
        console.say(
            f"tables lie on {servers} server{'s' * (servers > 1)} here   logs:"
            f" {folder}/server-*.log"
        )
    processes = []
    for i, host in enumerate(hosts):
        words, log = job.command(python, program, coordinator, str(i)), folder / f"rank-{i}.log"
        if local[i]:
            processes.append(Process(i, words, log))
            continue
        variables = [f"{k}={v}" for k, v in job.environment().items()]
        remote = f"cd {shlex.quote(str(Path.cwd()))} && exec env {shlex.join([*variables, *words])}"
        processes.append(
            Process(i, ("ssh", "-tt", "-o", "BatchMode=yes", host.name, remote), log, host.name)
        )  # -tt: what runs there ends with the connection
    supervise(processes, _environment(job), args.timeout, console.data, servers=serving)
    return said_ended(job)


def take_seat(
    args: argparse.Namespace, nodes: int, same: Any, suffice: Callable[[int], int] | None = None
) -> Seat:
    """This node's place among those that join at --coordinator. same: what must be equal on all of
    them."""
    from planner.launch.join import join

    digest = hashlib.sha256(repr(same).encode()).hexdigest()
    return join(
        args.coordinator, nodes, digest, args.timeout, socket.gethostname(), console.say, suffice
    )


def run_seat(args: argparse.Namespace, job: Job, seat: Seat) -> None:
    """This node's process of a job whose nodes have joined."""
    from planner.launch.processes import Process, supervise

    words = job.command(
        args.python or sys.executable, str(job.program.resolve()), seat.coordinator, str(seat.rank)
    )
    console.say(f"this node is rank {seat.rank} of {job.processes}")
    why = "was interrupted"
    try:
        supervise(
            [Process(seat.rank, words, job.program.parent / f"rank-{seat.rank}.log")],
            _environment(job),
            args.timeout,
            console.data,
            seat.stopped,
        )
        why = ""
    except PlanError as e:
        why = f"failed: {e.what}"
        raise
    finally:
        seat.leave(why)


def _environment(job: Job) -> dict[str, str]:
    """The job's variables before those that are set."""
    return {
        name: f"{value} {os.environ[name]}" if name in os.environ else value
        for name, value in job.environment().items()
    }
