"""Emitted programs against the unsharded model and against onnxruntime: every model, workload,
strategy and back end.

    python -m benchmarks.equivalence --models DIR --devices 8

One process per model. Prints the dims used, a row per (model, workload, strategy, back end) and a
summary; exits with 1 when a row fails: an error of outputs, loss, any gradient or any updated
parameter above 1e-4 against the unsharded float32 program, of inference above 1e-3 against
onnxruntime, a mesh axis without work, or a row that never came.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path

from benchmarks.equivalence_models import ZOO, Case, free_dims, with_weights
from benchmarks.equivalence_run import EXCHANGE, Row, run_case
from planner.errors import PlanError
from planner.verify.worker import environment

SOLVERS = ("dp", "recursive", "ilp")
QUICK_COMPILE = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_use_fusion_emitters=false"
)
"""Compiling takes most of the time: machine code is made the quick way. The compiler's passes over
the program (partitioning among them) all run."""
MODEL_S = 3000
"""Limit of one model's process."""
HEAD = (
    f"{'model':44} {'workload':8} {'strategy':15} {'back end':9} {'mesh (* pinned), techniques':51}"
    f" {'error':>8} {'gradient':>8} {'update':>8} {'runtime':>8}  result"
)


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.equivalence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--models", type=Path, help="folder of .onnx files; without it only the zoo's models run"
    )
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument(
        "--shrink",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run models above 50 million parameters shrunk (default)",
    )
    parser.add_argument(
        "--zoo",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="the zoo's tiny models as well (default)",
    )
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument(
        "--quick", action="store_true", help="two strategies, the shard_map back end"
    )
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 when every row passes."""
    args = options(argv)
    if args.one:
        return child(args)
    if args.models is not None and not args.models.is_dir():
        print(f"error: --models {args.models}: no such folder", file=sys.stderr)
        return 2
    sources = [str(p) for p in sorted(args.models.glob("*.onnx"))] if args.models else []
    sources = [s for s in (*sources, *(ZOO if args.zoo else ())) if args.only in s]
    print(
        f"{args.devices} virtual CPU devices, batch {args.batch}, float32; planned for"
        " benchmarks/eager.toml"
    )
    rows: list[Row] = []
    for source in sources:
        rows += run_model(source, args)
    failed = [r for r in rows if not r.ok]
    models = {r.model for r in rows}
    passing = models - {r.model for r in failed}
    worst = max(
        (max(r.error or 0.0, r.gradients or 0.0, r.update or 0.0) for r in rows if r.ok),
        default=0.0,
    )
    runtime = max((r.runtime for r in rows if r.ok and r.runtime is not None), default=0.0)
    print(
        f"\n{len(passing)} of {len(models)} models pass; {len(rows) - len(failed)} of {len(rows)}"
        f" rows; largest error of a passing row {worst:.1e} (bound 1e-4), against onnxruntime"
        f" {runtime:.1e} (bound 1e-3)"
    )
    return 1 if failed or not rows else 0


def run_model(source: str, args: argparse.Namespace) -> list[Row]:
    """Rows of one model, from a process of its own; printed as they come."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.equivalence",
        "--one",
        source,
        "--devices",
        str(args.devices),
        "--batch",
        str(args.batch),
    ]
    command += ["--shrink" if args.shrink else "--no-shrink", *(["--quick"] if args.quick else [])]
    rows: list[Row] = []
    with tempfile.TemporaryFile("w+") as log:
        root = Path(__file__).resolve().parents[1]
        process = subprocess.Popen(
            command,
            env=quick_environment(args.devices),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=root,
        )
        assert process.stdout is not None
        clock = threading.Timer(MODEL_S, process.kill)
        clock.start()
        for line in process.stdout:
            if line.startswith("{"):
                rows.append(Row(**json.loads(line)))
                if len(rows) == 1:
                    print(HEAD)
                print(table_line(rows[-1]), flush=True)
            else:
                print(line.rstrip(), flush=True)
        code = process.wait()
        clock.cancel()
        log.seek(0)
        why = last_words(log.read())
    if code:
        rows.append(
            Row(
                Path(source).name,
                "-",
                "-",
                "-",
                "",
                failure=f"the process ended with code {code}: {why}",
            )
        )
        print(table_line(rows[-1]), flush=True)
    elif absent := missing_rows(rows, args.quick):
        rows.append(
            Row(
                Path(source).name,
                "-",
                "-",
                "-",
                "",
                failure=f"rows that never came: {', '.join(absent)}",
            )
        )
        print(table_line(rows[-1]), flush=True)
    return rows


def last_words(log: str) -> str:
    """What a process that ended early said of it: the first fatal line of a library, else the last
    line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next(
        (line for line in lines if re.match(r"F\d{4}[ \d]|Check failed", line)), (lines or [""])[-1]
    )[:300]


@functools.cache
def quick_environment(devices: int) -> dict[str, str]:
    """Environment of a model's process; without QUICK_COMPILE where this version of jax does not
    know one of its flags (it would abort)."""
    usual = environment(devices)
    quick = {**usual, "XLA_FLAGS": f"{QUICK_COMPILE} {usual['XLA_FLAGS']}"}
    known = (
        subprocess.run(
            [sys.executable, "-c", "import jax; jax.devices()"],
            env=quick,
            capture_output=True,
            check=False,
        ).returncode
        == 0
    )
    return quick if known else usual


def asked(workload: str, quick: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(strategies, back ends) of every model."""
    if quick:
        return ("dp", "tensor-parallel"), ("shard_map",)
    return (
        "data-parallel",
        "tensor-parallel",
        *SOLVERS,
        EXCHANGE,
        *(("sharded-state",) if workload == "train" else ()),
    ), ("shard_map", "jit")


def missing_rows(rows: list[Row], quick: bool) -> list[str]:
    """Rows that were asked for and did not come: a benchmark must not pass by leaving something
    out."""
    there = {(r.workload, r.strategy, r.backend) for r in rows}
    there |= {(w, EXCHANGE, b) for w, _, b in there}  # only of models that can
    wanted = [
        (w, s, b)
        for w in ("infer", "train")
        for s in asked(w, quick)[0]
        for b in asked(w, quick)[1]
    ]
    return [" ".join(key) for key in wanted if key not in there]


def table_line(r: Row) -> str:
    """One row as text."""
    number = lambda e: "-" if e is None else f"{e:.1e}"  # noqa: E731
    result = "ok" if r.ok else f"FAILED {r.failure or r.worst}"
    return (
        f"{r.model[:44]:44} {r.workload:8} {r.strategy:15} {r.backend:9} {r.plan[:51]:51}"
        f" {number(r.error):>8} {number(r.gradients):>8} {number(r.update):>8}"
        f" {number(r.runtime):>8}  {result}"
    )


def child(args: argparse.Namespace) -> int:
    """Rows of one model, a JSON object a line."""
    name = Path(args.one).name
    try:
        with tempfile.TemporaryDirectory() as folder:
            case = Case(
                name,
                with_weights(args.one, Path(folder)),
                args.batch,
                args.devices,
                free_dims(args.one),
                args.shrink,
            )
            for workload in ("infer", "train"):
                for row in run_case(case, workload, *asked(workload, args.quick)):
                    if isinstance(row, Row):
                        finite = {
                            k: 1e30 if isinstance(v, float) and math.isinf(v) else v
                            for k, v in asdict(row).items()
                        }
                        print(json.dumps(finite), flush=True)
                    else:
                        print(row, flush=True)
    except PlanError as e:
        print(json.dumps(asdict(Row(name, "-", "-", "-", "", failure=e.what))), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
