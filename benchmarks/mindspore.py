"""`python -m benchmarks.mindspore`: our plans beside MindSpore's own, for its nets, both judged by
`benchmarks.neutral`.

MindSpore 2.10's strategies and search times were measured (../shared/data/mindspore) and are read,
never run; ours are planned here, one process a plan, in float32 for the mean of the logits on
`h100-sxm` devices. Neither side's own cost model is asked, with one exception that counts against
us: a plan of ours fits only if our whole estimate of its memory does too, activations and all.

Marks (exit code 1 when one is missed):
    gpt, 2 layers, batch 4, 8 devices    as many distinct devices as MindSpore's recursive plan, and
                                         at most half of its payload
    gpt, 48 layers, 8 devices            fits 80 GB with float32 weights, gradients and two moments
    gpt on 12, 24 and 2048 devices       a plan, with at most a tenth of the work padded or repeated
                                         (MindSpore has none)
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.cuts import lay
from benchmarks.mindspore_tables import Case, read_cases, rows, spec, table_of
from benchmarks.neutral import Report, judge
from planner.errors import PlanError

DATA = Path(__file__).parents[2] / "shared" / "data" / "mindspore"
SOLVERS = {
    "recursive_programming": "recursive",
    "dynamic_programming": "dp",
    "sharding_propagation": "recursive",
}
UNPLANNED = (12, 24, 2048)
FITS_BYTES = 80 * 10**9
LOSS = "output:mean"
WIDE = 60  # characters of a case


@dataclass(frozen=True)
class Ours:
    """One plan of ours: the judge's report, our own memory estimate, CPU seconds of the whole
    process and of the search in it."""

    report: Report | None
    memory_bytes: int = 0
    mesh: str = ""
    process_cpu_s: float = 0.0
    search_cpu_s: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Job:
    """What is planned."""

    net: str
    layers: int
    devices: int
    batch: int
    solver: str


class Planned:
    """Plans made so far: one process each, never the same twice."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.known: dict[Job, Ours] = {}

    def __call__(self, job: Job) -> Ours:
        if job not in self.known:
            command = [
                sys.executable,
                "-m",
                "benchmarks.mindspore",
                "--worker",
                json.dumps(asdict(job)),
            ]
            try:
                done = subprocess.run(
                    command,
                    cwd=Path(__file__).parents[1],
                    capture_output=True,
                    text=True,
                    timeout=self.timeout_s,
                )
            except subprocess.TimeoutExpired:
                self.known[job] = Ours(None, error=f"no plan in {self.timeout_s:.0f} s")
                return self.known[job]
            if done.returncode:
                self.known[job] = Ours(
                    None,
                    error=(done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[
                        -1
                    ],
                )
            else:
                data = json.loads(done.stdout.splitlines()[-1])
                self.known[job] = Ours(**{**data, "report": Report(**data["report"])})
        return self.known[job]


def worker(job: Job) -> Ours:
    """Plan in this process. Search time is the CPU time of `planner.plan` less that of reading the
    model once more."""
    import planner
    from planner.workload.model import Model, Workload

    source, batch = spec(job.net, job.layers, job.batch), rows(job.net, job.batch)
    begin = time.process_time()
    strategy = planner.plan(
        source,
        devices=job.devices,
        hardware="h100-sxm",
        batch=batch,
        workload="train",
        solver=job.solver,
        precision="fp32",
        loss=LOSS,
    )
    end = time.process_time()
    Model.open(source, Workload(batch=batch, loss=LOSS), job.devices).graph(1)
    reading = time.process_time() - end
    mesh = " ".join(f"{name}={size}" for name, size in strategy.plan.mesh)
    assert strategy.graph is not None  # it was planned just now
    report = judge(strategy.graph, strategy.plan)
    return Ours(
        report, strategy.cost.memory_per_device_bytes, mesh, end, max(0.0, end - begin - reading)
    )


def theirs(case: Case) -> Report:
    """MindSpore's table on our graph, at its kindest reading."""
    from planner.workload.model import Model, Workload

    graph = Model.open(case.spec, Workload(loss=LOSS)).graph(1)
    return judge(graph, lay(graph, table_of(case, graph), case.devices))


@dataclass(frozen=True)
class Mark:
    """A promise and whether it is kept."""

    text: str
    kept: bool


def compare(
    cases: Sequence[Case], plan: Callable[[Job], Ours], say: Callable[[str], None]
) -> list[Mark]:
    """The table of both sides, a line per measured strategy, and the marks it decides."""
    columns = f"{'wire':>9} {'devices':>8} {'wasted':>7} {'state':>9}"
    say(
        f"{'case':{WIDE}} {'MindSpore: payload':>19} {columns}   {'ours: payload':>14} {columns}"
        f" {'peak':>9}   payload, wire / theirs"
    )
    marks = []
    for case in cases:
        other, job = (
            theirs(case),
            Job(case.net, case.layers, case.devices, case.batch, SOLVERS[case.mode]),
        )
        mine = plan(job)
        say(
            f"{_name(job, case.mode, case.options):{WIDE}} {_cells(other, 19)}  "
            f" {_ours(mine)}{_ratio(mine.report, other)}"
        )
        if (case.net, case.mode, case.devices) != ("gpt", "recursive_programming", 8):
            continue
        if (case.layers, case.batch) == (2, 4):
            kept = (
                mine.report is not None
                and mine.report.devices >= other.devices
                and 2 * mine.report.payload_bytes <= other.payload_bytes
            )
            marks.append(
                Mark(
                    f"{_name(job)}: as many devices and at most half of the payload of MindSpore's"
                    " plan",
                    kept,
                )
            )
        if case.layers == 48:
            fits = (
                mine.report is not None
                and max(mine.report.state_bytes, mine.memory_bytes) <= FITS_BYTES
            )
            there = (
                "fits too"
                if other.state_bytes <= FITS_BYTES
                else f"needs {other.state_bytes / 1e9:.0f} GB for state alone"
            )
            marks.append(Mark(f"{_name(job)}: fits 80 GB (MindSpore's plan {there})", fits))
    return marks


def unplanned(plan: Callable[[Job], Ours], say: Callable[[str], None]) -> list[Mark]:
    """Device counts for which MindSpore has no plan."""
    marks = []
    for net, layers, batch in (("gpt", 2, 64), ("mlp", 8, 64)):
        for devices in UNPLANNED:
            job = Job(net, layers, devices, batch, "recursive")
            mine = plan(job)
            say(f"{_name(job):{WIDE}} {'no plan':>19} {'':>36}   {_ours(mine)}")
            if net == "gpt":
                marks.append(
                    Mark(
                        f"{_name(job)}: at most 10 % of the work padded or repeated",
                        mine.report is not None and mine.report.wasted <= 0.1,
                    )
                )
    return marks


def times(path: Path, plan: Callable[[Job], Ours], say: Callable[[str], None]) -> None:
    """CPU seconds beside MindSpore's: its search and the frontend before it; our search and our
    whole process, reading and imports included."""
    say(
        f"{'CPU seconds':{WIDE}} {'MindSpore: search':>19} {'frontend':>9}   {'ours: search':>13}"
        f" {'whole process':>14}"
    )
    for row in csv.DictReader(path.read_text().splitlines()):
        job = Job(
            row["net"],
            int(row["layers"]),
            int(row["devices"]),
            int(row["batch"]),
            SOLVERS[row["mode"]],
        )
        mine = plan(job)
        options = " ".join(json.loads(row["algo"] or "{}"))
        found = (
            row["search_cpu_s"] if row["done"] == "True" else f"none {row['search_cpu_s']}".strip()
        )
        ours = mine.error or f"{mine.search_cpu_s:13.2f} {mine.process_cpu_s:14.2f}"
        say(
            f"{_name(job, row['mode'], options):{WIDE}} {found:>19}"
            f" {row['frontend_cpu_before_s']:>9}   {ours}"
        )


def _name(job: Job, mode: str = "", options: str = "") -> str:
    searched = " ".join([mode.removesuffix("_programming"), options]).strip()
    return f"{job.net} {job.layers}, batch {job.batch}, {job.devices} devices" + (
        f"; {searched}" if searched else ""
    )


def _cells(report: Report, width: int) -> str:
    moved = f"{report.payload_bytes / 1e6:{width - 3},.0f} MB {report.wire_bytes / 1e6:6,.0f} MB"
    return f"{moved} {report.devices:8} {report.wasted:7.1%} {report.state_bytes / 1e9:6.1f} GB"


def _ours(mine: Ours) -> str:
    return (
        mine.error
        if mine.report is None
        else f"{_cells(mine.report, 14)} {mine.memory_bytes / 1e9:6.1f} GB"
    )


def _ratio(mine: Report | None, other: Report) -> str:
    if mine is None or not other.payload_bytes:
        return ""
    return (
        f"   {mine.payload_bytes / other.payload_bytes:7.2f}"
        f" {mine.wire_bytes / other.wire_bytes:5.2f}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables and the marks; 1 when a mark is missed, 2 when the measurements are not
    there."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mindspore", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=DATA,
        help="folder with strategies.jsonl and times.csv (default: %(default)s)",
    )
    parser.add_argument("--no-times", action="store_true", help="leave out the search times")
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds allowed for one plan (default: %(default)s)",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        try:
            print(json.dumps(asdict(worker(Job(**json.loads(options.worker))))))
        except (PlanError, ValueError) as e:
            print(str(e).splitlines()[0], file=sys.stderr)
            return 1
        return 0
    if not (options.data / "strategies.jsonl").exists():
        print(
            f"no strategies.jsonl in {options.data}: give the folder of MindSpore's measurements"
            " with --data",
            file=sys.stderr,
        )
        return 2

    def say(line: str) -> None:
        print(line, flush=True)

    plan = Planned(options.timeout)
    marks = compare(read_cases(options.data / "strategies.jsonl"), plan, say)
    marks += unplanned(plan, say)
    if not options.no_times:
        say("")
        times(options.data / "times.csv", plan, say)
    say("")
    for mark in marks:
        say(f"{'kept  ' if mark.kept else 'MISSED'} {mark.text}")
    return 0 if all(mark.kept for mark in marks) else 1


if __name__ == "__main__":
    sys.exit(main())
