"""Options of the commands that make plans, show, explain and compare them."""

from __future__ import annotations

import argparse

from planner.commands.options.shared import (
    add_anchor,
    add_cache,
    add_machine,
    add_model,
    add_search,
    add_serving,
    saved,
)
from planner.commands.options.values import amount, duration


def make(p: argparse.ArgumentParser) -> None:
    """Options of the main verb."""
    add_model(p)
    add_machine(p, serving=True)
    add_anchor(p)
    add_search(p).add_argument(
        "--incremental",
        action="store_true",
        help=(
            "keep what was decided for most of a model planned before (in the cache) and solve what"
            " changed; without it all is searched"
        ),
    )
    add_serving(p)
    p.add_argument(
        "--confirm",
        default="",
        metavar="WHERE",
        help=(
            "gpu:h100 or tpu:v5e:4x4: compile the best plans (three at most) without the hardware"
            " and take the first that the compiler says fits"
        ),
    )
    g = p.add_argument_group("output")
    g.add_argument(
        "-o", dest="output", metavar="FILE", help="strategy file (default: MODEL.plan.json)"
    )
    g.add_argument(
        "--emit", metavar="DIR|FILE.py", help="also write the program, as `plan emit -o` does"
    )
    g.add_argument(
        "--backend",
        default="shard_map",
        metavar="NAME",
        help="of --emit: shard_map (default) or jit",
    )
    g.add_argument("--json", action="store_true", help="the strategy on stdout, no summary")
    g.add_argument("--quiet", action="store_true", help="no summary and no progress")
    g.add_argument("--force", action="store_true", help="overwrite files of other models")


def show(p: argparse.ArgumentParser) -> None:
    """Options of `plan show`."""
    saved(p)
    p.add_argument(
        "other", nargs="?", metavar="OTHER.json", help="with --html: a second plan beside the first"
    )
    p.add_argument("--json", action="store_true", help="the strategy as JSON")
    p.add_argument("--html", metavar="FILE.html", help="write one self-contained page")
    p.add_argument(
        "--trace",
        metavar="FILE.json",
        help="write one step as a Chrome trace for Perfetto (needs the model)",
    )
    p.add_argument(
        "--png",
        metavar="FILE.png",
        help="write timeline and memory as a picture (needs the model and matplotlib)",
    )


# Long: a call per option.
def explain(p: argparse.ArgumentParser) -> None:
    """Options of `plan explain`."""
    saved(p)
    p.add_argument(
        "node",
        nargs="?",
        metavar="NODE_OR_TENSOR",
        help=(
            "a node, tensor, parameter or part of its name (as the file has it; with --model priced"
            " anew)"
        ),
    )
    p.add_argument(
        "--price",
        action="store_true",
        help=(
            "formula, inputs and constants of NODE's price, with file, line and source of each"
            " (needs the model)"
        ),
    )
    p.add_argument(
        "--pins",
        action="store_true",
        help=(
            "what each pin that the plan was made under costs: a search without it each (needs the"
            " model)"
        ),
    )
    p.add_argument(
        "--untied",
        action="store_true",
        help=(
            "what is lost because repeated blocks decide alike: what each deciding for itself could"
            " save (needs the model)"
        ),
    )
    p.add_argument(
        "--minimal-pins",
        action="store_true",
        help=(
            "the fewest annotations that --mode propagate makes this plan of, as a file for --pin"
            " (needs the model)"
        ),
    )
    p.add_argument(
        "--without",
        metavar="NODES",
        help=(
            "what missing nodes cost: the plan made anew without node 3, or 3,5 (numbered from 0;"
            " needs the model)"
        ),
    )
    p.add_argument(
        "--slow",
        metavar="NODE=SHARE",
        help=(
            "what a node at a share of its speed costs, such as 3=0.8: all wait for it, or it is"
            " left out (needs the model)"
        ),
    )
    p.add_argument(
        "--json", action="store_true", help="with --without or --slow: the figures as JSON"
    )


def diff(p: argparse.ArgumentParser) -> None:
    """Options of `plan diff`."""
    p.add_argument("before", metavar="A.json")
    p.add_argument("after", metavar="B.json")


def check(p: argparse.ArgumentParser) -> None:
    """Options of `plan check`."""
    p.add_argument("model", metavar="FILE", help="the model as it is now")
    p.add_argument(
        "--against", required=True, metavar="STRATEGY.json", help="the committed baseline"
    )
    p.add_argument(
        "--tolerance",
        default="step=2%,memory=5%",
        metavar="LIST",
        help="largest growth allowed (default step=2%%,memory=5%%)",
    )
    p.add_argument(
        "--budget",
        metavar="FILE.toml",
        help="absolute limits per model: step_time, memory, devices",
    )
    p.add_argument(
        "--format",
        default="text",
        metavar="NAME",
        help="text (default), markdown, github, json, junit, badge",
    )
    p.add_argument(
        "--write",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="the same report in another format to a file: markdown=report.md; as often as wanted",
    )
    add_cache(p)


def compare(p: argparse.ArgumentParser) -> None:
    """Options of `plan compare`."""
    add_model(p)
    add_machine(p)
    add_anchor(p)
    add_search(p, solver=False)


def sweep(p: argparse.ArgumentParser) -> None:
    """Options of `plan sweep`."""
    add_model(p, many=True)
    add_machine(p, many=True)
    g = p.add_argument_group("a whole run")
    g.add_argument(
        "--tokens",
        type=amount,
        metavar="N",
        help=(
            "tokens (or samples) to train on, such as 2T: days, device-hours, cost and energy of"
            " each row"
        ),
    )
    g.add_argument(
        "--price",
        metavar="P",
        help=(
            "USD per device-hour, 2.4/h or h100=2.4,v5e=1.1 (default: the dated list price of the"
            " hardware)"
        ),
    )
    g.add_argument(
        "--deadline",
        type=duration,
        metavar="T",
        help="30d, 12h or 2w: which rows keep it, and which does so most cheaply",
    )
    g.add_argument(
        "--budget", type=amount, metavar="USD", help="1M: which row is done first within it"
    )
    add_search(p)
    p.add_argument(
        "--pareto",
        action="store_true",
        help="the plans of each point that no other betters in both time and memory",
    )
    p.add_argument("--json", action="store_true", help="rows and answers as JSON")
    p.add_argument(
        "-o",
        dest="output",
        metavar="DIR",
        help=(
            "store the plan of each row there (made if need be): for plan show, emit, and launch"
            " --devices auto"
        ),
    )
