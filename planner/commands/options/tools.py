"""Options of the commands about the planner itself: ops, hardware, solve, cache, calibrate."""

from __future__ import annotations

import argparse

from planner.commands.options.shared import add_model
from planner.commands.options.values import seconds, whole


def ops(p: argparse.ArgumentParser) -> None:
    """Options of `plan ops`."""
    add_model(p)
    p.add_argument(
        "--parameters",
        action="store_true",
        help="the weights instead: labels, shapes, what they feed, whether they train",
    )


def hardware(p: argparse.ArgumentParser) -> None:
    """Options of `plan hardware`."""
    p.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="a shipped device or machine, or a device file: every figure with its source",
    )
    p.add_argument("--json", action="store_true", help="the same as JSON, in base units")


def solve(p: argparse.ArgumentParser) -> None:
    """Options of `plan solve`."""
    p.add_argument(
        "problem",
        metavar="PROBLEM.json",
        help="a problem in the IOPDDL contest's JSON, gzipped or not",
    )
    p.add_argument(
        "--time-limit",
        type=seconds,
        default=60.0,
        metavar="S",
        help="seconds, reading included (default 60)",
    )
    p.add_argument(
        "--solver", default="auto", metavar="NAME", help="auto (default), dp, recursive, ilp"
    )
    p.add_argument("--seed", type=int, default=0, metavar="N")
    p.add_argument("-o", dest="output", metavar="FILE", help="write the choice: one JSON array")


def cache(p: argparse.ArgumentParser) -> None:
    """Options of `plan cache`."""
    p.add_argument(
        "--cache",
        metavar="DIR",
        help="the folder (default: MESHWRIGHT_CACHE, or ~/.cache/meshwright): --cache build/plans",
    )
    p.add_argument(
        "--clear", action="store_true", help="remove what is kept there, and nothing else"
    )


def calibrate(p: argparse.ArgumentParser) -> None:
    """Options of `plan calibrate`."""
    p.add_argument(
        "-o",
        dest="output",
        required=True,
        metavar="FILE.toml",
        help="the device file to write, for --hardware",
    )
    p.add_argument(
        "--hardware",
        metavar="NAME|FILE",
        help=(
            "the device whose data sheet this is (default: the shipped one that jax names); with"
            " --runs, the one to start from"
        ),
    )
    p.add_argument("--force", action="store_true", help="overwrite FILE.toml")
    g = p.add_argument_group("measure the devices here")
    g.add_argument(
        "--devices",
        type=whole,
        metavar="N",
        help="how many (default: all; on a CPU 8 virtual ones)",
    )
    g.add_argument(
        "--node-size",
        type=whole,
        metavar="N",
        help=(
            "devices of a node, where they are of several: links are then measured inside nodes and"
            " between them"
        ),
    )
    g.add_argument(
        "--quick", action="store_true", help="fewer sizes and rounds: seconds instead of a minute"
    )
    g = p.add_argument_group("or learn from runs that were measured")
    g.add_argument(
        "--runs",
        metavar="FILE.jsonl",
        help=(
            "one run a line (docs/calibrate.md): fits what a cluster reaches of the device's"
            " figures"
        ),
    )
