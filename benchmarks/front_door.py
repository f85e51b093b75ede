"""Graphs by the front door: the installed `plan` with its default options on every graph of a
folder, as a user would type it.

    python -m benchmarks.front_door FOLDER [--only TEXT] [--workload train|infer|both] [--no-run]

Each graph (.onnx, or .onnx.gz unpacked first) is planned twice, the cache cold and warm, which must
give the same strategy; the program is written, run for two steps on virtual devices and verified.
What an error asks for (dims without a value) is given as its help says. Prints a markdown table, a
row per graph and workload; exit 1 where anything ended otherwise than well or in one clear line. A
`manifest.json` in the folder may say for a graph: `devices` (8), `dims` (values by name; else 16),
`weights` ("absent": a model of full size, whose program is not run here). tests/front_door walks
the graphs of the project the same way.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 900
"""One command; far above what any takes, so that a hang is a finding and not a lost afternoon."""
NO_PLAN_FITS = {"P021", "P026"}
"""Codes whose exit code is 3 (docs/errors.md)."""
DEVELOPERS = (
    "MESHWRIGHT_CACHE",
    "MESHWRIGHT_DEBUG",
    "XLA_FLAGS",
    "JAX_PLATFORMS",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "NPROC",
)
"""Variables that tests and developers set and users do not."""


@dataclass(frozen=True)
class Step:
    """A command that was run, and what it said."""

    name: str
    argv: tuple[str, ...]
    code: int
    out: str
    err: str
    seconds: float

    @property
    def refusal(self) -> str:
        """The code of the error it ended with, if it ended with one."""
        found = re.search(r"^error\[(P\d{3})\]: \S", self.err, re.MULTILINE)
        return found[1] if self.code and found else ""

    @property
    def message(self) -> str:
        """The error's first line, or what was said last."""
        lines = [line for line in (self.out + self.err).splitlines() if line.strip()]
        return next(
            (line for line in lines if line.startswith("error[")),
            lines[-1] if lines else "said nothing",
        )

    @property
    def fault(self) -> str:
        """What is wrong with this end, whatever was expected; empty where it is a good one."""
        said = self.out + self.err
        if "Traceback (most recent call last)" in said:
            return "a traceback"
        if "[P000]" in said:
            return "P000"
        if re.search(r"^\S*:?\d*:? ?\w*Warning: ", self.err, re.MULTILINE):
            return "a warning of a library"
        if self.code == 0:
            return "exit 0 with an error" if re.search(r"^error", self.err, re.MULTILINE) else ""
        if self.name == "verify" and self.code == 1:
            return "NOT VERIFIED"
        if not self.refusal:
            return f"exit {self.code} without an error's code"
        if self.code != (3 if self.refusal in NO_PLAN_FITS else 2):
            return f"exit {self.code} with {self.refusal}"
        return ""


@dataclass(frozen=True)
class Walk:
    """A graph from the file to the verified program, as far as it went. `fault` says what went
    wrong; a refusal alone is none."""

    graph: str
    workload: str
    steps: tuple[Step, ...]
    fault: str = ""

    @property
    def end(self) -> str:
        """`planned`, `emitted`, `run` or `verified`; `NAME CODE` where a command refused; `NAME:
        FAULT` otherwise."""
        last = self.steps[-1]
        if self.fault:
            return f"{last.name}: {self.fault}"
        if last.refusal:
            return f"{last.name} {last.refusal}"
        return {
            "plan": "planned",
            "plan again": "planned",
            "emit": "emitted",
            "run": "run",
            "verify": "verified",
        }[last.name]


@dataclass(frozen=True)
class Graph:
    """A graph of a folder, and what its manifest says of it."""

    path: Path
    entry: dict[str, Any]

    @property
    def name(self) -> str:
        """The file without what it is packed in."""
        return self.path.name.removesuffix(".gz").removesuffix(".onnx")

    def unpack(self, folder: Path) -> Path:
        """A copy of its own to work on."""
        content = self.path.read_bytes()
        to = folder / f"{self.name}.onnx"
        to.write_bytes(gzip.decompress(content) if self.path.suffix == ".gz" else content)
        return to


def graphs(folder: Path) -> list[Graph]:
    """The graphs of a folder, by name."""
    manifest = folder / "manifest.json"
    entries = json.loads(manifest.read_text()) if manifest.exists() else {}
    entries = entries if isinstance(entries, dict) else {}  # of other tools, a list
    found = [
        Graph(p, {}) for p in sorted(folder.iterdir()) if p.name.endswith((".onnx", ".onnx.gz"))
    ]
    return [Graph(g.path, entries.get(g.name, {})) for g in found]


def environment(home: Path) -> dict[str, str]:
    """A user's: nothing that developers set, and a cache where a user's would be, but of this
    folder."""
    return {k: v for k, v in os.environ.items() if k not in DEVELOPERS} | {
        "XDG_CACHE_HOME": str(home)
    }


def run(name: str, argv: tuple[str, ...], folder: Path) -> Step:
    """A command in the folder."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            argv,
            cwd=folder,
            env=environment(folder / "cache"),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return Step(name, argv, -1, "", f"no answer in {LIMIT_S} s", LIMIT_S)
    return Step(name, argv, done.returncode, done.stdout, done.stderr, time.monotonic() - start)


def asked_dims(step: Step, values: dict[str, int]) -> tuple[str, ...]:
    """The options that the help of P140 asks for, filled in."""
    names = re.findall(r"--dim (\S+)=\?", step.err) if step.refusal == "P140" else []
    return tuple(word for n in names for word in ("--dim", f"{n}={values.get(n, 16)}"))


def decided(strategy: Path) -> dict[str, Any]:
    """A strategy without when and where it was made."""
    content: dict[str, Any] = json.loads(strategy.read_text())
    content.pop("provenance", None)
    return content


def ran(step: Step, workload: str) -> bool:
    """Whether a program told two steps, with losses that are numbers."""
    losses = re.findall(r"^step \d+ +loss (-?\d+\.\d+)", step.out, re.MULTILINE)
    return (
        len(losses) == 2
        if workload == "train"
        else len(re.findall(r"^step \d+ +outputs ", step.out, re.MULTILINE)) == 2
    )


def walk(graph: Graph, workload: str, folder: Path, execute: bool = True) -> Walk:
    """Plan cold and warm; then, unless told not to, write the program, run two steps of it where it
    is small, verify it."""
    plan = str(Path(sys.executable).with_name("plan"))
    model, steps = graph.unpack(folder), []
    strategy = folder / f"{graph.name}.plan.json"
    devices = str(graph.entry.get("devices", 8))

    def end(fault: str = "") -> Walk:
        return Walk(graph.name, workload, tuple(steps), fault or steps[-1].fault)

    def go(name: str, *argv: str) -> Step:
        steps.append(run(name, argv, folder))
        return steps[-1]

    typed: tuple[str, ...] = (
        plan,
        model.name,
        "--devices",
        devices,
        *(("--workload", "infer") if workload == "infer" else ()),
    )
    cold = go("plan", *typed)
    if more := asked_dims(cold, graph.entry.get("dims", {})):
        typed += more
        cold = go("plan", *typed)
    if cold.code or cold.fault:
        again = run("plan again", typed, folder)
        return end(
            ""
            if (again.code, again.message) == (cold.code, cold.message) or cold.fault
            else "another answer the second time"
        )
    first = decided(strategy)
    warm = go("plan again", *typed)
    if warm.code or warm.fault:
        return end("refused the second time" if warm.refusal else "")
    if decided(strategy) != first:
        return end("another strategy from the cache")
    if "from the cache" not in warm.err:
        return end("searched again")
    if not execute:
        return end()
    emitted = go("emit", plan, "emit", strategy.name, "-o", "program.py")
    if emitted.code or emitted.fault:
        return end()
    if graph.entry.get("weights") != "absent":
        program = go(
            "run", sys.executable, "program.py", "--virtual-devices", devices, "--steps", "2"
        )
        if program.code or program.fault or not ran(program, workload):
            return end(program.fault or "no two steps")
        go("verify", plan, "verify", strategy.name)
    return end()


def main(argv: list[str] | None = None) -> int:
    """The table; 1 where a graph met a fault."""
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.front_door",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("folder", type=Path)
    p.add_argument("--only", default="", help="graphs whose name contains this")
    p.add_argument("--workload", choices=("train", "infer", "both"), default="both")
    p.add_argument("--no-run", action="store_true", help="plans alone")
    args = p.parse_args(argv)
    if not args.folder.is_dir():
        print(f"error: {args.folder}: no such folder", file=sys.stderr)
        return 2
    kinds = ("train", "infer") if args.workload == "both" else (args.workload,)
    print(
        "| graph | workload | ends | plan, again, emit, run, verify (s) | it said"
        " |\n|---|---|---|---|---|",
        flush=True,
    )
    faults = total = 0
    for done in walks(
        [g for g in graphs(args.folder) if args.only in g.name], kinds, not args.no_run
    ):
        total, faults = total + 1, faults + bool(done.fault)
        told = (
            done.steps[-1].message.replace("|", "\\|")[:140]
            if done.fault or done.steps[-1].refusal
            else ""
        )
        print(
            f"| {done.graph} | {done.workload} | {done.end} |"
            f" {', '.join(f'{s.seconds:.1f}' for s in done.steps)} | {told} |",
            flush=True,
        )
    print(f"\n{total - faults} of {total} ended well or in one clear line")
    return int(faults > 0)


def walks(found: list[Graph], kinds: tuple[str, ...], execute: bool) -> Iterator[Walk]:
    """Every graph under every workload, each in a folder of its own with a cold cache."""
    for graph in found:
        for kind in kinds:
            with tempfile.TemporaryDirectory() as scratch:
                yield walk(graph, kind, Path(scratch), execute)


if __name__ == "__main__":
    sys.exit(main())
