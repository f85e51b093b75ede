"""Our predictions beside three compilers, for programs that fill a device: collectives, products,
arguments, outputs, peak memory.

    python -m benchmarks.compilers [--target cpu,gpu:h100,tpu:v5e:2x4] [--case SUBSTRING] [--compute
    bfloat16] [--rows FILE.jsonl] [--output FILE]

Programs are unrolled training steps (AdamW) of one block each of an MLP, GPT, Llama, a mixture of
experts and a ResNet, on meshes 2 x 4 and 2 x 2 x 2, written for both back ends. On 2 x 4 the batch
is cut over "data" and the model over "model" (Megatron; Llama also its sequence) with optimizer
state over "data"; on 2 x 2 x 2 batch and state are cut over "pod" and "data"; "hybrid" cuts the
batch so and the state over "data" alone. Nothing is run. Each program compiles in a process of its
own; rows kept with --rows are not compiled again, only their memory is priced as it is now. GPU and
TPU compilers are the extras gpu-compiler and tpu-compiler; a target whose compiler is absent is
said to be left out. Marks: see `MARKS`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.hand_plans import data_parallel, megatron, mlp_megatron
from costmodels.hardware.device import load_device
from planner.emit.program import emit
from planner.emit.writer import Training
from planner.errors import PlanError
from planner.execution.plan import Plan
from planner.graph.ir import Graph
from planner.sharding.rule import Split
from planner.verify.ahead import PADDING
from planner.verify.report import Figure

ROOT = Path(__file__).parents[1]
MODELS = {
    "mlp": ("zoo:mlp,layers=4,hidden=8192,in=8192,out=8192", 8192),
    "gpt-block": ("zoo:gpt,layers=1,hidden=2048,heads=16,tied=1", 16),
    "llama-block": ("zoo:llama3-8b,layers=1,seq=2048,vocab=32000", 8),
    "moe-block": ("zoo:mixtral-8x7b,layers=1,hidden=2048,heads=16,ff=3584,seq=1024", 16),
    "resnet-block": ("zoo:resnet50,blocks=1-1-1-1", 512),
}
"""name -> (zoo model, global batch): large enough for 1 GB a device in most programs."""
CUBE = (("pod", 2), ("data", 2), ("model", 2))
MESHES = {"2x4": (("data", 2), ("model", 4)), "2x2x2": CUBE, "hybrid": CUBE}
HYBRID = ("mlp", "gpt-block")
"""Models that are compiled with state over some of the batch's axes, too."""
TARGETS = ("cpu", "gpu:h100", "tpu:v5e:2x4")
COMPUTE = {"cpu": ("float32",), "gpu": ("bfloat16", "float32"), "tpu": ("bfloat16",)}
"""What each kind of target compiles: the CPU compiler would widen bfloat16 collectives, the TPU
compiler takes minutes for float32."""
MARKS = (
    (
        "collective bytes exact, or named by a pass and within 1 %: shard_map on cpu in float32, on"
        " gpu in bfloat16"
    ),
    "collective differences together within 1 %: jit on gpu",
    "dot FLOPs, argument and output bytes exact: cpu and gpu, shard_map",
    "peak memory of 1 GB or more within 10 %, mean within 5 %: gpu",
    "peak memory of 1 GB or more within 25 %: tpu",
)
LARGE = 10**9
UNNAMED = ("seen in no pass", "as emitted")
"""Words of differences that no compiler pass is behind."""


@dataclass(frozen=True)
class Case:
    """One program on one target."""

    model: str
    mesh: str
    backend: str
    target: str
    compute: str

    @property
    def name(self) -> str:
        """As printed, and matched by --case."""
        return f"{self.model}/{self.mesh}/{self.backend}/{self.target}/{self.compute}"


def cases(targets: Sequence[str], compute: str = "") -> Iterator[Case]:
    """Every program on every target."""
    for target in targets:
        for dtype in COMPUTE[target.partition(":")[0]]:
            for model in MODELS:
                for mesh in MESHES if model in HYBRID else list(MESHES)[:2]:
                    for backend in ("shard_map", "jit"):
                        if not compute or compute == dtype:
                            yield Case(model, mesh, backend, target, dtype)


def graph_of(model: str) -> Graph:
    """The training graph."""
    import models_zoo
    from planner.graph.repeats import hoist
    from planner.reader import read_model
    from planner.workload.loss import add_loss

    spec, batch = MODELS[model]
    return hoist(add_loss(read_model(models_zoo.build(spec), batch=batch)))


def plan_of(model: str, mesh: str, graph: Graph) -> Plan:
    """The plan of a model on a mesh, made on two axes; with three the batch's axis is two."""
    shape = MESHES[mesh]
    if model == "resnet-block":
        return Plan(
            shape, data_parallel(graph, shape), zero_stage=1, zero_axes=tuple(a for a, _ in shape)
        )
    flat = shape if len(shape) == 2 else (("data", shape[0][1] * shape[1][1]), shape[2])
    splits = (
        mlp_megatron(graph, flat)
        if model == "mlp"
        else megatron(graph, flat, sequence=model == "llama-block")
    )
    if len(shape) == 3:
        splits = {
            n: Split.of(
                {
                    f: [b for a in axes for b in (("pod", "data") if a == "data" else (a,))]
                    for f, axes in s.pairs
                }
            )
            for n, s in splits.items()
        }
    return Plan(
        shape, splits, zero_stage=1, zero_axes=("pod", "data") if mesh == "2x2x2" else ("data",)
    )


def planned(case: Case, graph: Graph, plan: Plan) -> dict[str, int]:
    """Predicted memory of a device by part, bytes."""
    from costmodels.precision import recipe_in
    from planner.verify.ahead import planned_memory
    from planner.verify.targets import parse_target

    target = parse_target(case.target, plan.devices)
    return planned_memory(
        graph,
        plan,
        recipe_in(case.compute),
        f"jax-{case.backend}",
        unroll=True,
        device=None if target.kind == "cpu" else load_device(target.name),
    )


def again(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a file with its memory predicted anew: what was compiled holds as long as programs
    are the same, prices change more often."""
    case = case_of(row)
    graph = graph_of(case.model)
    memory = planned(case, graph, plan_of(case.model, case.mesh, graph))
    more = sum(memory.values()) - sum(row["memory"].values())
    return {
        **row,
        "memory": memory,
        "figures": [
            {**f, "predicted": f["predicted"] + more} if f["what"] in ("peak", "temporaries") else f
            for f in row["figures"]
        ],
    }


def check(case: Case, named: bool) -> dict[str, Any]:
    """Compile one program and put the figures side by side. Runs in a process made for the target.
    named: compile again where collectives or products differ, for the passes."""
    from planner.verify import ahead
    from planner.verify.targets import parse_target

    start = time.perf_counter()
    graph = graph_of(case.model)
    plan = plan_of(case.model, case.mesh, graph)
    target = parse_target(case.target, plan.devices)
    memory = planned(case, graph, plan)
    program = emit(
        graph,
        plan,
        workload="train",
        backend=case.backend,
        unroll=True,
        training=Training("adamw"),
        compute=case.compute,
    )  # type: ignore[arg-type]
    found = ahead.check(
        graph,
        plan,
        program,
        target,
        memory,
        workload="train",
        backend=case.backend,
        optimizer="adamw",
        compute=case.compute,
        named=named,
    )
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        **asdict(case),
        "named": named,
        "figures": [asdict(f) for f in found.figures],
        "differences": list(found.differences),
        "nodes": len(graph.nodes),
        "memory": memory,
        "host_bytes": used.ru_maxrss * 1024,
        "cpu_s": round(used.ru_utime, 1),
        "seconds": round(time.perf_counter() - start, 1),
    }


def run(case: Case, timeout_s: float, named: bool) -> dict[str, Any]:
    """`check` in a process of its own; a row with "failed" where it came to nothing."""
    from planner.verify.targets import parse_target
    from planner.verify.worker import environment

    target = parse_target(case.target, 8)
    command = [
        sys.executable,
        "-m",
        "benchmarks.compilers",
        "--one",
        json.dumps(asdict(case)),
        *([] if named else ["--no-passes"]),
    ]
    try:
        done = subprocess.run(
            command,
            env={**environment(8, target.kind), **target.environment()},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {**asdict(case), "failed": f"not compiled within {timeout_s:g} s"}
    rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not rows:
        return {
            **asdict(case),
            "failed": (done.stderr.strip().splitlines() or ["no output"])[-1][:200],
        }
    return dict(json.loads(rows[-1]))


def show(row: dict[str, Any]) -> str:
    """The lines of one program."""
    name = name_of(row)
    if "failed" in row:
        return f"{name:56} FAILED: {row['failed']}"
    by = by_name(row)
    peak = by["peak"]
    assert peak.predicted is not None
    traffic = by["all collectives"]
    lines = [
        f"{name:56} collectives {traffic.compiled / 2**20:>8,.1f} MiB {_apart(traffic):>10}   FLOPs"
        f" {_apart(by['dot FLOPs'])}{_padding(by)}   arguments {_apart(by['argument bytes'])}  "
        f" outputs {_apart(by['output bytes'])}   peak {peak.predicted / 2**30:.3f} predicted,"
        f" {peak.compiled / 2**30:.3f} GiB compiled, ratio {peak.predicted / peak.compiled:.3f}  "
        f" host {row['host_bytes'] / 2**30:.2f} GiB, {row['cpu_s']} s cpu"
    ]
    for figure in by.values():
        if figure.what.partition(" over ")[1] and figure.distance:
            lines.append(
                f"      {figure.what}: predicted {figure.predicted:,} B, compiled"
                f" {figure.compiled:,} B"
            )
    return "\n".join([*lines, *(f"      - {line}" for line in row["differences"])])


def by_name(row: dict[str, Any]) -> dict[str, Figure]:
    """The figures of a row."""
    return {f["what"]: Figure(**f) for f in row["figures"]}


def _padding(by: dict[str, Figure]) -> str:
    return f" and {by[PADDING].compiled:,} of padding" if PADDING in by else ""


def _apart(figure: Figure) -> str:
    return (
        "exact" if not figure.distance else f"{figure.distance / max(figure.predicted or 0, 1):.3%}"
    )


def marks(rows: list[dict[str, Any]]) -> Iterator[tuple[str, bool, str]]:
    """(mark, kept, figures) of every mark that some row can show."""
    good = [(r, by_name(r)) for r in rows if "failed" not in r]

    def pick(kind: str, backend: str = "", compute: str = "") -> list[dict[str, Figure]]:
        return [
            f
            for r, f in good
            if r["target"].startswith(kind) and backend in r["backend"] and compute in r["compute"]
        ]

    explicit = [
        (r, f["all collectives"])
        for r, f in good
        if r["backend"] == "shard_map"
        and (r["target"][:3], r["compute"]) in (("cpu", "float32"), ("gpu", "bfloat16"))
    ]
    exact = [not f.distance for _, f in explicit]
    named = [
        f.distance <= 0.01 * (f.predicted or 0)
        and not any(w in line for line in r["differences"] for w in UNNAMED)
        and r.get("named", True)
        for r, f in explicit
    ]
    if explicit:
        rest = sum(n and not e for n, e in zip(named, exact, strict=True))
        yield MARKS[0], all(named), f"{sum(exact)} of {len(explicit)} exact, {rest} named by a pass"
    placed = [f["all collectives"] for f in pick("gpu", "jit")]
    if placed:
        near = sum(f.distance <= 0.01 * (f.predicted or 0) for f in placed)
        jit = [
            r
            for r, f in good
            if r["target"].startswith("gpu")
            and r["backend"] == "jit"
            and f["all collectives"].distance
        ]
        blank = sum(
            not r.get("named", True) or any(UNNAMED[0] in line for line in r["differences"])
            for r in jit
        )
        yield (
            MARKS[1],
            near == len(placed),
            f"{near} of {len(placed)} within; programs with bytes that no pass explains: {blank}",
        )
    both = pick("cpu", "shard_map") + pick("gpu", "shard_map")
    if both:
        counts = {
            w: sum(not f[w].distance for f in both)
            for w in ("dot FLOPs", "argument bytes", "output bytes")
        }
        padded = sum(PADDING in f for f in both)
        yield (
            MARKS[2],
            all(n == len(both) for n in counts.values()),
            ", ".join(f"{w} {n} of {len(both)}" for w, n in counts.items())
            + (
                f"; in {padded} of them a pass padded products, which is named and counted apart"
                if padded
                else ""
            ),
        )
    for kind, limit, mean, mark in (("gpu", 0.10, 0.05, MARKS[3]), ("tpu", 0.25, 0.25, MARKS[4])):
        off = [
            abs((f["peak"].predicted or 0) / f["peak"].compiled - 1)
            for f in pick(kind)
            if f["peak"].compiled >= LARGE
        ]
        if off:
            kept = max(off) <= limit and statistics.mean(off) <= mean
            yield (
                mark,
                kept,
                (
                    f"{sum(o <= limit for o in off)} of {len(off)} within {limit:.0%}, mean"
                    f" {statistics.mean(off):.1%}, worst {max(off):.1%}"
                ),
            )


def available(text: str) -> bool:
    """Whether a target's compiler is installed; says what to install when not."""
    from planner.verify.targets import parse_target, require

    try:
        require(parse_target(text, 8))
    except PlanError as e:
        print(f"{text} left out: {e.what} ({e.help[0]})", flush=True)
        return False
    return True


def main(argv: list[str] | None = None) -> int:
    """Print the lines of every program and the marks; exit code 1 when a mark is missed or a
    program failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compilers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--target", default=",".join(TARGETS), help="targets of eight devices, joined by commas"
    )
    parser.add_argument(
        "--case",
        default="",
        help="only programs whose name contains this, such as gpt-block/2x4/jit",
    )
    parser.add_argument("--compute", default="", choices=("", "bfloat16", "float32"))
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds for one program (default 600)",
    )
    parser.add_argument(
        "--rows",
        type=Path,
        help="JSON lines: programs found there are not compiled again, new ones are added",
    )
    parser.add_argument("--output", type=Path, help="also write what is printed to a file")
    parser.add_argument(
        "--no-passes",
        action="store_true",
        help="compile each program once: what is behind differences is not named",
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        from planner.verify.ahead import leave

        print(json.dumps(check(Case(**json.loads(args.one)), not args.no_passes)))
        leave(0)
    rows, said = [], []
    kept = saved(args.rows) if args.rows else {}

    def say(line: str) -> None:
        print(line, flush=True)
        said.append(line)
        if args.output:
            args.output.write_text("\n".join(said) + "\n")

    targets = args.target.split(",")
    here = [t for t in targets if available(t)]
    for case in cases(targets, args.compute):
        if args.case not in case.name or (case.name not in kept and case.target not in here):
            continue
        row = (
            again(kept[case.name])
            if case.name in kept
            else run(case, args.timeout, not args.no_passes)
        )
        rows.append(row)
        say(show(row))
        if args.rows and case.name not in kept and "failed" not in row:
            with args.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
    missed = sum("failed" in r for r in rows) + (not rows)
    for mark, fine, figure in marks(rows):
        missed += not fine
        say(f"{'kept  ' if fine else 'MISSED'}  {mark}: {figure}")
    return 1 if missed else 0


def saved(path: Path) -> dict[str, dict[str, Any]]:
    """Rows of a file by the name of their program; the last of a name counts."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {name_of(row): row for row in rows}


def name_of(row: dict[str, Any]) -> str:
    """What the program of a row is called."""
    return case_of(row).name


def case_of(row: dict[str, Any]) -> Case:
    """The program of a row, to be compiled or priced again."""
    return Case(**{k: row[k] for k in ("model", "mesh", "backend", "target", "compute")})


if __name__ == "__main__":
    raise SystemExit(main())
