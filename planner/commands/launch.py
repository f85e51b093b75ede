"""`plan launch`: run the program of a plan here, on nodes that join, on listed hosts; or write the scripts that do."""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.commands import console, files
from planner.commands.emit import write_program
from planner.errors import PlanError
from planner.launch.job import Host, Job, check_count, node_slots, read_hosts

if TYPE_CHECKING:
    from planner.launch.join import Seat
    from planner.strategy import Strategy

SCHEDULERS = ("slurm", "mpirun", "kubernetes", "gke-tpu")


def run(args: argparse.Namespace) -> int:
    """`plan launch`."""
    if args.devices is not None:
        from planner.commands import elastic

        return elastic.run(args)
    strategy = files.load(args.strategy)
    hosts = _check(args, strategy)
    nodes = int(strategy.topology["devices"]) // node_slots(strategy)
    job = make_job(args, strategy, args.strategy, args.local or (args.nnodes and args.nnodes[1]) or len(hosts) or nodes)
    if args.to:
        return write([job], args, strategy, hosts)
    if args.nnodes:
        run_seat(args, job, take_seat(args, job.processes, [job.program.read_text(), job.arguments, job.processes]))
        return said_ended(job)
    return supervised(args, job, hosts or local_hosts(job))


def make_job(args: argparse.Namespace, strategy: Strategy, path: str | Path, processes: int, several: bool = False) -> Job:
    """Write the program of a strategy and say how it runs. several: its device count is in its name, beside those of others."""
    source = files.model_of(strategy, path, args.model)
    name, devices = files.stem(source), int(strategy.topology["devices"])
    folder = Path(args.output or f"{name}.launch")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as e:
        raise PlanError("P056", f"cannot make the folder {str(folder)!r}: {e.strerror}", help=["-o a folder in one that exists and is writable"]) from e
    program = folder / f"{name.replace('-', '_')}{f'_{devices}' * several}.py"
    write_program(strategy, source, program, args.backend, False, args.force)
    own = () if source.startswith("zoo:") or "--model-folder" in args.arguments else ("--model-folder", str(Path(source).resolve().parent))
    return Job(name, program, str(strategy.topology["device"]), devices, processes, bool(args.cpu or args.local), (*own, *args.arguments))


def said_ended(job: Job) -> int:
    """The last line of a job that ended well."""
    console.say(f"all {job.processes} processes have ended   logs: {job.program.parent}/rank-*.log")
    return 0


def check_ways(args: argparse.Namespace) -> None:
    """Refuse options of where to run that do not go together."""
    from planner.api import choose

    ways = [f"--{way}" for way in ("local", "nnodes", "to") if getattr(args, way)] or ["--hostfile"] * bool(args.hostfile)
    if len(ways) != 1:
        given = " and ".join(ways) or "none of them"
        raise PlanError("P206", f"one of --local, --nnodes, --hostfile and --to says where to run; given: {given}", help=["plan launch model.plan.json --local 2"])
    if args.to:
        choose("to", args.to, SCHEDULERS)
    if bool(args.nnodes) != bool(args.coordinator):
        raise PlanError("P206", "--nnodes and --coordinator go together", help=["--nnodes 8 --coordinator node0:29400, on every node"])
    if args.hostfile and args.to not in (None, "mpirun"):
        raise PlanError("P206", f"--hostfile is not for --to {args.to}", help=["leave it out, or --to mpirun"])


def _check(args: argparse.Namespace, strategy: Strategy) -> tuple[Host, ...]:
    """Refuse what cannot run, before anything is written; returns the hosts of --hostfile."""
    check_ways(args)
    if args.nnodes and args.nnodes[0] != args.nnodes[1]:
        raise PlanError("P206", f"--nnodes {args.nnodes[0]}..{args.nnodes[1]}: one plan has one number of nodes", help=["plan launch DIR --devices auto, DIR of plan sweep -o DIR"])
    if args.slots:
        raise PlanError("P206", "--slots is for --devices auto: a plan says how many devices its processes have", help=["leave it out"])
    virtual = bool(args.cpu or args.local)
    if args.local or args.nnodes:
        check_count(strategy, args.local or args.nnodes[1], virtual, f"--local {args.local}" if args.local else f"--nnodes {args.nnodes[1]}")
    if args.to in ("kubernetes", "gke-tpu") and not args.image:
        raise PlanError("P206", f"--to {args.to} needs --image", help=["--image NAME of a container image with python3 and jax"])
    devices, slots = int(strategy.topology["devices"]), node_slots(strategy)
    if args.to and not args.hostfile and devices % slots:
        what = f"--to {args.to}: {devices} devices are no whole number of nodes of {slots}"
        raise PlanError("P200", what, help=["plan for whole nodes, or describe the machine with --topology"])
    return read_hosts(Path(args.hostfile), strategy, virtual) if args.hostfile else ()


def write(jobs: Sequence[Job], args: argparse.Namespace, strategy: Strategy, hosts: tuple[Host, ...] = ()) -> int:
    """Scripts or manifests beside the program. jobs: several for SLURM alone, which picks by its allocation."""
    from planner.launch.kubernetes import manifests, on_volume
    from planner.launch.scripts import mpirun, plain_name, slurm
    from planner.strategy import write_atomically

    python, job = args.python or "python3", jobs[0]
    if args.to == "slurm":
        made = {"job.sbatch": slurm(jobs, python)}
    elif args.to == "mpirun":
        made = {"mpirun.sh": mpirun(job, python, hosts)}
    else:
        made = manifests(job, strategy, args.image, args.volume, args.to == "gke-tpu")
        if why := on_volume(job):
            console.say(f"note: no ConfigMap holds the program ({why}): copy {job.program.parent}/ to {plain_name(job.name)}/ on the volume {args.volume}")
    for file, text in made.items():
        write_atomically(job.program.parent / file, text)
    first = job.program.parent / next(iter(made))
    how = {"slurm": f"cd {job.program.parent} && sbatch {first.name}", "mpirun": f"bash {first}"}.get(args.to, f"kubectl apply -f {first}")
    console.say(f"wrote {', '.join(str(j.program) for j in jobs)}, {', '.join(str(job.program.parent / f) for f in made)}   next: {how}")
    return 0


def local_hosts(job: Job) -> tuple[Host, ...]:
    """All processes of a job on this machine."""
    return tuple(Host("localhost", job.slots) for _ in range(job.processes))


def supervised(args: argparse.Namespace, job: Job, hosts: tuple[Host, ...]) -> int:
    """All processes started from here: those of other hosts through ssh, in the same folder there."""
    from planner.launch.join import free_port
    from planner.launch.processes import Process, supervise

    local = [h.name in ("localhost", "127.0.0.1", socket.gethostname()) for h in hosts]
    coordinator = f"{'127.0.0.1' if all(local) else socket.gethostname() if local[0] else hosts[0].name.rpartition('@')[2]}:{free_port()}"
    made = []
    for i, host in enumerate(hosts):
        words = job.command(args.python or sys.executable, str(job.program.resolve()), coordinator, str(i))
        log = job.program.parent / f"rank-{i}.log"
        if local[i]:
            made.append(Process(i, words, log))
            continue
        variables = [f"{k}={v}" for k, v in job.environment().items()]
        remote = f"cd {shlex.quote(str(Path.cwd()))} && exec env {shlex.join([*variables, *words])}"
        made.append(Process(i, ("ssh", "-tt", "-o", "BatchMode=yes", host.name, remote), log, host.name))  # -tt: what runs there ends with the connection
    supervise(made, _environment(job), args.timeout, console.data)
    return said_ended(job)


def take_seat(args: argparse.Namespace, nodes: int, same: Any, suffice: Callable[[int], int] | None = None) -> Seat:
    """This node's place among those that join at --coordinator. same: what must be equal on all of them."""
    from planner.launch.join import join

    digest = hashlib.sha256(repr(same).encode()).hexdigest()
    return join(args.coordinator, nodes, digest, args.timeout, socket.gethostname(), console.say, suffice)


def run_seat(args: argparse.Namespace, job: Job, seat: Seat) -> None:
    """This node's process of a job whose nodes have joined."""
    from planner.launch.processes import Process, supervise

    words = job.command(args.python or sys.executable, str(job.program.resolve()), seat.coordinator, str(seat.rank))
    console.say(f"this node is rank {seat.rank} of {job.processes}")
    why = "was interrupted"
    try:
        supervise([Process(seat.rank, words, job.program.parent / f"rank-{seat.rank}.log")], _environment(job), args.timeout, console.data, seat.stopped)
        why = ""
    except PlanError as e:
        why = f"failed: {e.what}"
        raise
    finally:
        seat.leave(why)


def _environment(job: Job) -> dict[str, str]:
    """The job's variables before those that are set."""
    return {name: f"{value} {os.environ[name]}" if name in os.environ else value for name, value in job.environment().items()}
