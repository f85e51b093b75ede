"""Mutated models through the reader, and a sample of them through the whole planner: a graph or one
PlanError, nothing else.

    python -m benchmarks.fuzz --inputs 20000 --seed 1

Sound models (the zoo's small ones, onnx's own operator tests, and the small files of --models) are
edited as graphs or as bytes. A worker process with 2 GiB of memory reads one after another; it is
replaced when it has worked for 10 CPU-seconds (or waited for 120) without an answer. Of what is
read, every `--plan-every`-th graph of at most 200 nodes is also planned on a tiny machine and its
program parsed. Prints the outcomes by code and exits with 1 after a traceback, a hang or a dead
worker. `--replay N` runs one input in this process.
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import os
import random
import resource
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MOST_S, MOST_BYTES = 10.0, 2 << 30
PLAN_S = 30.0
"""CPU-seconds of planning one input, which has a time limit of its own (2 s of search)."""
PLAN_NODES = 200
START_S = 60.0
"""CPU-seconds in which a worker makes its sound models."""
PATIENCE = 12
"""Limits of waiting are so many times those of work: on a busy machine a worker may not get to
run."""
ZOO = (
    "zoo:mlp-tiny",
    "zoo:gpt-tiny",
    "zoo:llama-tiny",
    "zoo:mixtral-tiny",
    "zoo:bert-tiny",
    "zoo:t5-tiny",
    "zoo:vit-tiny",
    "zoo:unet-tiny",
    "zoo:resnet-tiny",
    "zoo:resnet-tiny,training=1",
    "zoo:dlrm-tiny",
    "zoo:ssm-tiny",
    "zoo:lstm-tiny",
)
SMALL_BYTES = 300_000


def sound_models(cases: bool, folder: Path | None) -> list[list[Any]]:
    """Groups of sound models; a group is drawn first, so that few zoo models weigh as much as many
    operator tests."""
    import models_zoo
    from planner.reader.onnx.file import load

    groups: list[list[Any]] = [[models_zoo.build(spec) for spec in ZOO]]
    if cases:
        groups.append(operator_tests())
    if folder is not None:
        groups.append(
            [load(p) for p in sorted(folder.glob("*.onnx")) if p.stat().st_size <= SMALL_BYTES]
        )
    return [g for g in groups if g]


def operator_tests() -> list[Any]:
    """onnx's node tests, operands after the first as initializers in every second one."""
    import warnings

    import numpy as np
    from onnx import numpy_helper

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.loader import load_model_tests

        found = load_model_tests(kind="node")
    models = [case.model for case in found if case.model is not None]
    for k, case in enumerate(found):
        given = case.data_sets[0][0] if case.data_sets else []
        if k % 2 and case.model is not None and all(isinstance(x, np.ndarray) for x in given):
            for value, array in zip(list(case.model.graph.input)[1:], given[1:], strict=False):
                case.model.graph.initializer.append(numpy_helper.from_array(array, value.name))
                case.model.graph.input.remove(value)
    return models


def make(
    groups: list[list[Any]], seed: int, index: int
) -> tuple[bytes, dict[str, Any], random.Random]:
    """Input number `index`: the file's bytes and the options it is read with. Follows from seed and
    index alone."""
    from benchmarks.fuzz_mutate import damaged, edited, size

    r = random.Random(f"{seed}/{index}")
    model = r.choice(r.choice(groups))
    data = (
        damaged(model.SerializeToString(), r)
        if r.random() < 0.15
        else edited(model, r).SerializeToString()
    )
    options: dict[str, Any] = {"devices": r.choice((1, 2, 4, 8))}
    if r.random() < 0.3:
        options["batch"] = r.choice((1, 3, 8, 64))
    if r.random() < 0.2:
        options["dims"] = {r.choice(("seq", "N", "batch", "H")): abs(size(r)) + 1}
    if r.random() < 0.05:
        options["tokens_per_step"] = r.choice((1, 64, 4096))
    return data, options, r


def judge(
    data: bytes, options: dict[str, Any], folder: Path, plan: bool, workload: str
) -> tuple[str, int]:
    """What becomes of one input ("read", "planned", or the code of its PlanError) and how many
    nodes its graph has. Anything else propagates."""
    from planner.errors import PlanError
    from planner.graph.ir import Graph
    from planner.reader.onnx.file import parse

    path = folder / "model.onnx"
    try:
        if not plan:
            from planner.reader import read_model

            graph = read_model(parse(data, "model"), folder, **options)
            assert isinstance(graph, Graph)
            return "read", len(graph.nodes)
        path.write_bytes(data)
        from planner.api import plan as search
        from planner.emit.from_strategy import program

        devices = max(options.pop("devices"), 2)
        found = search(
            path,
            devices=devices,
            hardware="cpu",
            workload=workload,
            time_limit_s=2.0,
            baselines=False,
            **options,
        )
        try:
            ast.parse(program(found, path).text)
        except PlanError as error:
            return f"planned, no program: {error.code}", 0
        return "planned", 0
    except PlanError as error:
        text = str(error)
        assert text.startswith(f"error[{error.code}]: ") and error.code != "P000", text
        return error.code, 0


def place(error: BaseException) -> str:
    """The type of an exception and the deepest line of ours it passed."""
    ours = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if str(ROOT) in f.filename and "benchmarks" not in f.filename
    ]
    last = ours[-1] if ours else traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error)[:100]}"


def worker(args: argparse.Namespace) -> int:
    """Runs inputs first..last-1; a line before and after each."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    groups = sound_models(args.cases, args.models)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    read = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "w.bin").write_bytes(b"\0" * 4096)
        (folder / "link.bin").symlink_to("/etc/passwd")
        for index in range(args.first, args.inputs):
            print(json.dumps({"start": index}), flush=True)
            start = time.perf_counter()
            data, options, r = make(groups, args.seed, index)
            try:
                outcome, nodes = judge(data, dict(options), folder, False, "")
                small = outcome == "read" and nodes <= PLAN_NODES
                read += small
                if small and args.plan_every and read % args.plan_every == 0:
                    print(json.dumps({"plan": index}), flush=True)
                    outcome = (
                        "then "
                        + judge(data, dict(options), folder, True, r.choice(("train", "infer")))[0]
                    )
            except Exception as error:  # what is looked for: anything but a PlanError
                outcome = f"traceback: {place(error)}"
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(
                json.dumps(
                    {
                        "end": index,
                        "outcome": outcome,
                        "time_s": time.perf_counter() - start,
                        "peak_bytes": peak,
                    }
                ),
                flush=True,
            )
    return 0


class Workers:
    """Runs workers one after another, each from where the last one stopped."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.counts: collections.Counter[str] = collections.Counter()
        self.faults: list[tuple[int, str]] = []
        self.slowest = {"read": (0.0, -1), "planned": (0.0, -1)}
        self.peak_bytes, self.jump = 0, (0, -1)

    def run(self) -> None:
        """All inputs."""
        at = 0
        while at < self.args.inputs:
            at = self._one(at)

    def _one(self, first: int) -> int:
        """One worker from an input on; returns where the next one begins."""
        a = self.args
        command = [
            sys.executable,
            "-m",
            "benchmarks.fuzz",
            "--inputs",
            str(a.inputs),
            "--seed",
            str(a.seed),
            "--first",
            str(first),
            "--plan-every",
            str(a.plan_every),
        ]
        command += [
            "--cases" if a.cases else "--no-cases",
            *(["--models", str(a.models)] if a.models else []),
            "--worker",
        ]
        at, limit = first, [START_S]
        with (
            tempfile.TemporaryFile("w+") as log,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, cwd=ROOT) as process,
        ):
            for line in _lines(process, limit):
                if line is None:
                    process.kill()
                    process.wait()
                    self._add(at, f"hang: no answer after {limit[0]:.0f} s of work", limit[0])
                    return at + 1
                row = json.loads(line)
                if "start" in row:
                    at, limit[0] = row["start"], MOST_S
                elif "plan" in row:
                    limit[0] = PLAN_S
                else:
                    self._add(at, row["outcome"], row["time_s"])
                    if at > first:  # the first input's peak is that of the sound models
                        self.jump = max(self.jump, (row["peak_bytes"] - self.peak_bytes, at))
                    self.peak_bytes = row["peak_bytes"]
                    at += 1
            code = process.wait()
            log.seek(0)
            tail = log.read().strip().splitlines()[-1:]
        if code:
            self._add(at, f"dead worker: exit code {code}: {''.join(tail)[:200]}", 0.0)
            return at + 1 if limit[0] != START_S else a.inputs
        return at

    def _add(self, index: int, outcome: str, time_s: float) -> None:
        kind = outcome.partition(":")[0]
        self.counts[kind if kind in ("traceback", "hang", "dead worker") else outcome] += 1
        if kind not in ("hang", "dead worker"):
            stage = "planned" if outcome.startswith("then") else "read"
            self.slowest[stage] = max(self.slowest[stage], (time_s, index))
        if kind in ("traceback", "hang", "dead worker"):
            self.faults.append((index, outcome))
            print(f"input {index}: {outcome}", flush=True)
        if sum(self.counts.values()) % 2000 == 0:
            print(
                f"{sum(self.counts.values())} inputs, {len(self.faults)} faults",
                file=sys.stderr,
                flush=True,
            )


def cpu_s(pid: int) -> float:
    """CPU-seconds that a process has used; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _lines(process: Any, limit: list[float]) -> Iterator[str | None]:
    """Lines of a process's stdout; None when it works for limit[0] CPU-seconds, or lets PATIENCE
    times as long pass, without one."""
    handle, rest = process.stdout.fileno(), b""
    work, clock = cpu_s(process.pid), time.monotonic()
    while True:
        ready, _, _ = select.select([handle], [], [], 0.5)
        if not ready:
            if (
                cpu_s(process.pid) - work > limit[0]
                or time.monotonic() - clock > PATIENCE * limit[0]
            ):
                yield None
                return
            continue
        work, clock = cpu_s(process.pid), time.monotonic()
        chunk = os.read(handle, 1 << 16)
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (x.decode() for x in lines)


def replay(args: argparse.Namespace) -> int:
    """One input in this process, with its traceback; `--keep FILE` writes it."""
    data, options, r = make(sound_models(args.cases, args.models), args.seed, args.replay)
    if args.keep:
        args.keep.write_bytes(data)
    print(f"{len(data)} bytes, {options}")
    with tempfile.TemporaryDirectory() as folder:
        print(judge(data, dict(options), Path(folder), False, "")[0])
        if args.plan_every:
            print(judge(data, dict(options), Path(folder), True, r.choice(("train", "infer")))[0])
    return 0


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 when every input ends in a graph, a plan or a PlanError, in time."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--models",
        type=Path,
        help="folder with more sound .onnx files (those up to 300 kB are used)",
    )
    parser.add_argument(
        "--cases",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="start from onnx's operator tests as well (default)",
    )
    parser.add_argument(
        "--plan-every",
        type=int,
        default=20,
        metavar="N",
        help="plan every Nth input that is read; 0: none (default 20)",
    )
    parser.add_argument(
        "--replay", type=int, metavar="N", help="run input N here and show its traceback"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="with --replay: write the input to a file"
    )
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        return worker(args)
    if args.replay is not None:
        return replay(args)
    start, runs = time.perf_counter(), Workers(args)
    runs.run()
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{args.inputs} inputs, seed {args.seed}: {time.perf_counter() - start:.0f} s,"
        f" {cpu.ru_utime + cpu.ru_stime:.0f} CPU-seconds; "
        + "; ".join(
            f"slowest {stage} {s:.2f} s (input {k})" for stage, (s, k) in runs.slowest.items()
        )
        + f"; largest growth of a worker's peak memory {runs.jump[0] / 2**20:.0f} MiB (input"
        f" {runs.jump[1]})"
    )
    for outcome, n in sorted(runs.counts.items(), key=lambda p: (-p[1], p[0])):
        print(f"{n:8d}  {outcome}")
    print(f"{len(runs.faults)} faults (tracebacks, hangs, dead workers)")
    return 1 if runs.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
