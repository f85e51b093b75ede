"""Options of the commands about emitted programs: emit, launch, weights, verify."""

from __future__ import annotations

import argparse

from planner.commands.options.shared import add_model, saved
from planner.commands.options.values import duration, positive, seconds, span, whole


def emit(p: argparse.ArgumentParser) -> None:
    """Options of `plan emit`."""
    saved(p)
    p.add_argument(
        "--backend",
        default="shard_map",
        metavar="NAME",
        help="shard_map (default: explicit collectives) or jit",
    )
    p.add_argument(
        "--unroll",
        action="store_true",
        help="repeated blocks as a loop in Python instead of lax.scan (serving: always)",
    )
    p.add_argument(
        "-o",
        dest="output",
        metavar="DIR|FILE.py",
        help=(
            "a folder: model.py, which is yours to edit, beside the runtime; or FILE.py: all in one"
            " file (default: MODEL.py here; - for stdout)"
        ),
    )
    p.add_argument(
        "--standalone", action="store_true", help="one file, whatever the name after -o ends in"
    )
    p.add_argument(
        "--runtime-only",
        action="store_true",
        help="write the runtime of the folder after -o anew, and leave model.py alone",
    )
    p.add_argument(
        "--force",
        action="store_true",
        help="overwrite a file that this command did not write, or that was edited since",
    )


def launch(p: argparse.ArgumentParser) -> None:
    """Options of `plan launch`; what follows -- is the program's."""
    saved(p)
    p.add_argument(
        "--devices",
        metavar="auto",
        help=(
            "STRATEGY is a folder of plan sweep -o DIR: the plan of most devices that fits those"
            " that came up"
        ),
    )
    _add_launch_places(p.add_argument_group("where (one of these)"))
    g = p.add_argument_group("how")
    _add_launch_processes(g)
    _add_launch_scripts(g)
    g.add_argument(
        "-o",
        dest="output",
        metavar="DIR",
        help="folder of program, logs and scripts (default MODEL.launch)",
    )
    g.add_argument(
        "--force", action="store_true", help="overwrite a program that this command did not write"
    )
    p.set_defaults(arguments=())


def _add_launch_places(g: argparse._ArgumentGroup) -> None:
    """Where `plan launch` starts the processes, or the kind of files it writes instead."""
    g.add_argument(
        "--local",
        type=whole,
        metavar="N",
        help="N processes on this machine, on virtual CPU devices",
    )
    g.add_argument(
        "--nnodes",
        type=span,
        metavar="N",
        help=(
            "this node is one of N that run this command (of 2..8 with --devices auto); ranks are"
            " given as they join"
        ),
    )
    g.add_argument(
        "--hostfile",
        metavar="FILE",
        help="lines HOST slots=N [rank=I]: a process on each, through ssh",
    )
    g.add_argument(
        "--to",
        metavar="KIND",
        help="write files instead: slurm, mpirun, kubernetes, gke-tpu, skypilot or xpk",
    )


def _add_launch_processes(g: argparse._ArgumentGroup) -> None:
    """How the processes of `plan launch` join, what they run on and for how long they are waited
    for."""
    g.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="with --nnodes: where nodes join, an address of one of them",
    )
    g.add_argument(
        "--slots",
        type=whole,
        metavar="N",
        help=(
            "with --devices auto: devices of a process (default: those that are here, else a node"
            " of the plans)"
        ),
    )
    g.add_argument(
        "--timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="seconds for nodes to join, and for processes to write nothing (default 600)",
    )
    g.add_argument(
        "--cpu",
        action="store_true",
        help="virtual CPU devices in place of the planned ones (--local implies it)",
    )
    g.add_argument(
        "--backend",
        default="shard_map",
        metavar="NAME",
        help="of the program: shard_map (default) or jit",
    )
    g.add_argument(
        "--python",
        metavar="FILE",
        help="the interpreter that runs it (default this one; python3 in scripts)",
    )


def _add_launch_scripts(g: argparse._ArgumentGroup) -> None:
    """What the files that `plan launch --to` writes ask a cluster for."""
    g.add_argument(
        "--image",
        default="",
        metavar="NAME",
        help="with --to kubernetes, gke-tpu, skypilot, xpk: a container image with jax",
    )
    g.add_argument(
        "--volume",
        default="",
        metavar="CLAIM",
        help=(
            "with --to kubernetes, gke-tpu: a PersistentVolumeClaim, at /data; with skypilot: a"
            " volume or gs://, s3://; with xpk: a storage of its own"
        ),
    )
    g.add_argument(
        "--time",
        type=duration,
        metavar="T",
        help=(
            "with --to: a run's limit, such as 90m, 12h or 3d (default for slurm: twice what"
            " --steps take)"
        ),
    )
    g.add_argument(
        "--node-label",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="with --to kubernetes: of its nodes (default: the GPU's product)",
    )
    g.add_argument(
        "--rdma",
        default="rdma/ib",
        metavar="NAME",
        help="with --to kubernetes: what GPUs of several nodes ask for, or none (default rdma/ib)",
    )
    g.add_argument(
        "--queue",
        default="",
        metavar="NAME",
        help="with --to kubernetes, gke-tpu: the LocalQueue of Kueue that admits the job",
    )


def weights(p: argparse.ArgumentParser) -> None:
    """Options of `plan weights`."""
    add_model(p)
    g = p.add_argument_group("checkpoint")
    g.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="DIR",
        help="folder with model.safetensors, or its shards and index",
    )
    g.add_argument(
        "--back",
        metavar="FILE",
        help=(
            "write DIR anew, as the folder -o, with the values that a program's --export wrote to"
            " this file"
        ),
    )
    g.add_argument(
        "--partial",
        action="store_true",
        help="parameters that DIR lacks are left out: programs draw them anew",
    )
    g.add_argument(
        "-o",
        dest="output",
        metavar="FILE.safetensors",
        help="what to write, for a program's --weights (default: only say what matches)",
    )
    g.add_argument("--force", action="store_true", help="overwrite the file")


def verify(p: argparse.ArgumentParser) -> None:
    """Options of `plan verify`."""
    saved(p)
    p.add_argument(
        "--backend",
        default="shard_map",
        metavar="NAME",
        help="shard_map (default) or jit, as for plan emit, whose program is what is compiled",
    )
    p.add_argument("--unroll", action="store_true", help="the program of plan emit --unroll")
    p.add_argument(
        "--target",
        default="cpu",
        metavar="WHERE",
        help=(
            "cpu (virtual devices, default), gpu:h100 or tpu:v5e:4x4: compiled without the hardware"
        ),
    )
    p.add_argument(
        "--compute",
        default="plan",
        metavar="TYPE",
        help="with another target than cpu: plan (default), bfloat16 or float32",
    )
    p.add_argument("--no-run", action="store_true", help="compile and compare figures, run nothing")
    p.add_argument(
        "--tolerance",
        type=positive,
        metavar="X",
        help=(
            "cpu: largest error of outputs and gradients (default 1e-4); else: largest difference"
            " of a judged figure"
        ),
    )
    p.add_argument(
        "--time-limit",
        type=seconds,
        metavar="S",
        help="seconds for compiling and running (default 900)",
    )
