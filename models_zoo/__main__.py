"""`python -m models_zoo`: what the zoo has, with counts; `python -m models_zoo NAME[,option=value]
-o FILE` writes a model.

stdout is data, stderr is talk; exit code 2 for bad input, as `plan` does.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import PlanError
from planner.support import console
from planner.support.atomic_write import write_atomically
from planner.support.command_line import Parser
from planner.support.text import count as spelled
from planner.support.text import fitted, flops

if TYPE_CHECKING:
    import onnx

    from models_zoo.spec import Family, Value

WIDTH = 132  # columns of the listing where the terminal has fewer
EXAMPLES = """examples:
  python -m models_zoo                                          every preset with parameters and FLOPs
  python -m models_zoo llama3-8b,layers=4,seq=2k -o small.onnx  write a model without weights
  python -m models_zoo gpt-tiny,weights=inline -o tiny.onnx     with seeded weights
  python -m models_zoo config.json -o model.onnx                from a Hugging Face configuration"""  # noqa: E501


def parser() -> Parser:
    """The options."""
    p = Parser(
        "python -m models_zoo",
        "List the models of the zoo, or write one as an ONNX file whose weights are nowhere.",
        EXAMPLES,
    )
    p.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help=(
            "a preset with options, such as llama3-8b,layers=4, or a Hugging Face config.json;"
            " none: list all"
        ),
    )
    p.add_argument(
        "-o",
        dest="output",
        type=Path,
        metavar="FILE",
        help="write the ONNX file (without: count the model)",
    )
    p.add_argument("--json", action="store_true", help="the listing as JSON, numbers exact")
    p.add_argument("--force", action="store_true", help="overwrite the file")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code. Never raises for bad input."""
    try:
        args = parser().read(list(sys.argv[1:] if argv is None else argv))
        if args.output is not None and args.name is None:
            raise PlanError(
                "P003",
                "-o writes one model: which?",
                help=["python -m models_zoo NAME -o FILE", "python -m models_zoo lists the names"],
            )
        if args.output is not None:
            return _write(args)
        return _list(args)
    except BrokenPipeError:  # the reader of stdout has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except PlanError as e:
        print(e, file=sys.stderr)
        return e.exit_code


def _model(name: str) -> onnx.ModelProto:
    import models_zoo
    from models_zoo.hf_config import from_config

    return from_config(name) if name.endswith(".json") else models_zoo.build(name)


def _write(args: argparse.Namespace) -> int:

    path: Path = args.output
    if path.is_dir():
        raise PlanError(
            "P056",
            f"cannot write {str(path)!r}: it is a folder",
            help=["-o a file in a folder that exists and is writable"],
        )
    if path.exists() and not args.force:
        raise PlanError("P053", f"{path} exists", help=["-o another file, or --force"])
    model = _model(args.name)
    write_atomically(path, model.SerializeToString())
    print(f"wrote {path}   next: plan {path} --devices 8", file=sys.stderr)
    return 0


def _list(args: argparse.Namespace) -> int:
    """All presets, or the one that is named, counted."""
    import json

    import models_zoo
    from models_zoo.count import as_json, count

    if args.name is not None and args.name.endswith(".json"):
        raise PlanError(
            "P003",
            "counting takes presets; a config.json can be written",
            help=[f"python -m models_zoo {args.name} -o FILE, then plan ops FILE"],
        )
    start = time.perf_counter()
    if args.name is None:
        chosen: list[tuple[Family, str, str, dict[str, Value]]] = [
            (family, name, name, {}) for family, name in models_zoo.listed()
        ]
    else:
        family, name, values = models_zoo.find(args.name)
        chosen = [(family, name, args.name.removeprefix("zoo:"), values)]
    counted = [
        (f, title, f.presets[n], count(f, n, f.presets[n], values))
        for f, n, title, values in chosen
    ]
    if args.json:
        print(json.dumps([as_json(title, f, p, c) for f, title, p, c in counted], indent=1))
        return 0
    rows = [["name", "family", "parameters", "FLOPs", "a sample", "batch", "description"]]
    for f, title, p, c in counted:
        active = f" ({spelled(c.active)})" if c.active != c.parameters else ""
        rows.append(
            [
                title,
                f.name,
                spelled(c.parameters) + active,
                flops(c.flops),
                c.sample,
                f"{p.batch:,}",
                p.description,
            ]
        )
    console.data("\n".join(fitted(rows, max(console.width(), WIDTH), (2, 3, 5))))
    console.say(
        f"{len(counted)} model{'s' * (len(counted) > 1)}, counted in"
        f" {time.perf_counter() - start:.1f} s; parameters (those a token passes); FLOPs: one"
        " sample forward, multiply-adds times 2; batch: the preset's, for --batch"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
