"""Options of the commands about other tools' files: annotate, export, import, tune."""

from __future__ import annotations

import argparse

from planner.commands.options.shared import add_anchor, add_machine, add_workload, saved


def annotate(p: argparse.ArgumentParser) -> None:
    """Options of `plan annotate`."""
    saved(p)
    p.add_argument(
        "-o", dest="output", metavar="FILE.onnx", help="default: MODEL.annotated.onnx here"
    )
    p.add_argument("--force", action="store_true", help="overwrite the file")


def export(p: argparse.ArgumentParser) -> None:
    """Options of `plan export`."""
    saved(p)
    p.add_argument(
        "--to",
        metavar="NAME",
        default="",
        help=(
            "maxtext, hf, levanter, megatron or torchtitan (default: the one that it was planned"
            " --for); of a serving plan vllm or sglang"
        ),
    )
    p.add_argument(
        "-o",
        dest="output",
        metavar="FILE",
        help=(
            "the settings (default: stdout, and their cost to stderr); the ending says the form"
            " (.sh, .args, .py, .toml, .yaml: docs/exchange.md)"
        ),
    )
    p.add_argument("--force", action="store_true", help="overwrite the file")


def _add_configuration(p: argparse.ArgumentParser) -> None:
    """A launcher's configuration and what it trains."""
    p.add_argument(
        "config",
        metavar="CONFIG",
        help=(
            "a configuration: a launch script or its arguments (.sh, .args), YAML, TOML, JSON, or"
            " Python (FILE.py:FUNCTION)"
        ),
    )
    p.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="other values of keys, or variables of the script",
    )
    p.add_argument(
        "--model",
        required=True,
        metavar="FILE",
        help="what it trains: an ONNX file, zoo:NAME[,key=value...], or a Hugging Face config.json",
    )
    p.add_argument(
        "--from",
        dest="kind",
        default="",
        metavar="NAME",
        help="megatron, maxtext, torchtitan, hf or levanter (default: by its keys)",
    )


def import_(p: argparse.ArgumentParser) -> None:
    """Options of `plan import`."""
    _add_configuration(p)
    add_workload(p)
    p.set_defaults(precision="")  # what the configuration says
    add_machine(p)
    g = p.add_argument_group("output")
    g.add_argument(
        "-o", dest="output", metavar="FILE", help="strategy file (default: CONFIG.plan.json)"
    )
    g.add_argument("--quiet", action="store_true", help="no summary and no progress")
    g.add_argument("--force", action="store_true", help="overwrite the file")


def tune(p: argparse.ArgumentParser) -> None:
    """Options of `plan tune`."""
    _add_configuration(p)
    add_workload(p)
    p.set_defaults(precision="")  # what the configuration says
    add_machine(p)
    add_anchor(p)
    p.add_argument(
        "--confirm",
        default="",
        metavar="WHERE",
        help="gpu:h100 or tpu:v5e:4x4: compile the best three, as programs of ours",
    )
    g = p.add_argument_group("output")
    g.add_argument(
        "-o",
        dest="output",
        metavar="FILE",
        help="the better settings (default: CONFIG.tuned and its suffix)",
    )
    g.add_argument("--json", action="store_true", help="what was found as JSON")
    g.add_argument("--quiet", action="store_true", help="no progress")
    g.add_argument("--force", action="store_true", help="overwrite the file")
