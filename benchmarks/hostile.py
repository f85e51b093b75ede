"""Malformed, tricky and malicious files through the whole command: a plan, or one `error[...]`
line; never a traceback, a hang or a side effect.

    python -m benchmarks.hostile --dir DIR

DIR holds .onnx files and a manifest.json of {file: {what, kind, expect}}. Each file is planned by
`plan FILE --devices 8` in a process of its own (for inference where nothing in it trains), in a
folder that holds nothing else. What is planned is also emitted, parsed and run on 8 virtual
devices, and must leave no file where it has no business. Exits with 1 when a file is not dealt with
as its manifest row expects.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.fuzz import cpu_s

ROOT = Path(__file__).resolve().parents[1]
MOST_S, MOST_BYTES = 10.0, 2 << 30
WAITING = 6
"""Waiting may take so many times the limit of work: on a busy machine a process may not get to
run."""
HEAD = (
    f"{'file':42} {'kind':14} {'expected':8} {'got':24} {'seconds':>7} {'cpu':>5} {'MiB':>5} "
    " result"
)


@dataclass(frozen=True)
class Outcome:
    """One process: exit code (None: stopped at the time limit), what it printed, wall and CPU
    seconds, peak resident bytes."""

    code: int | None
    text: str
    wall_s: float
    cpu_s: float
    peak_bytes: int


@dataclass(frozen=True)
class Row:
    """One file. got: "plan", "plan (infer)", an error code, or what went wrong; fault: "" when all
    is as expected."""

    file: str
    kind: str
    expected: str
    got: str
    outcome: Outcome
    fault: str

    def line(self) -> str:
        """The row as text."""
        o = self.outcome
        return (
            f"{self.file[:42]:42} {self.kind[:14]:14} {self.expected:8} {self.got[:24]:24}"
            f" {o.wall_s:7.2f} {o.cpu_s:5.2f} {o.peak_bytes / 2**20:5.0f} "
            f" {'ok' if not self.fault else 'FAILED ' + self.fault}"
        )


def expected(row: dict[str, Any]) -> str:
    """What a manifest row asks for, from the first words of its text: "plan", "refuse" or
    "either"."""
    text = str(row.get("expect", "")).strip().lower()
    either = " or " in text.split(";")[0].partition("->")[0] and (
        "or clear" in text or "or assume" in text or "or error" in text
    )
    if text.startswith(("ok", "plan ok")) and not either:
        return "plan"
    if text.startswith("clear") and not either:
        return "refuse"
    return "either"


def run(command: list[str], cwd: Path, limit_s: float, environment: dict[str, str]) -> Outcome:
    """Runs a command in a process group of its own; at the limit of CPU-seconds (WAITING times that
    of wall time) the whole group is stopped."""
    with tempfile.TemporaryFile() as log:
        start, seen = time.perf_counter(), 0
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        while True:
            seen = max(seen, peak_bytes(process.pid))
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                break
            if cpu_s(process.pid) > limit_s or time.perf_counter() - start > WAITING * limit_s:
                os.killpg(process.pid, signal.SIGKILL)
                _, _, usage = os.wait4(process.pid, 0)
                break
            time.sleep(0.01)
        process.returncode = -1 if code is None else code  # reaped above
        wall = time.perf_counter() - start
        log.seek(0)
        text = log.read(1 << 20).decode("utf-8", "replace")
    # What a process was forked from counts in its ru_maxrss: above the peak of this one it is the
    # command's own, else what was seen of that.
    most = usage.ru_maxrss * 1024
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Outcome(code, text, wall, usage.ru_utime + usage.ru_stime, most if most > own else seen)


def peak_bytes(pid: int) -> int:
    """Peak resident bytes of a process since it runs its own program; 0 where it is gone."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def settings(folder: Path) -> dict[str, str]:
    """The environment of a child: its own temporary folder, no cache of searches, no debugging
    switches."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("MESHWRIGHT_DEBUG", "XLA_FLAGS", "JAX_PLATFORMS")
    }
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(folder),
        "NO_COLOR": "1",
        "JAX_PLATFORMS": "cpu",
        "MESHWRIGHT_CACHE": "off",
    }


def judge(outcome: Outcome) -> tuple[str, str]:
    """(what happened, fault) of a planning process."""
    if outcome.code is None:
        return "hang", f"no answer after {MOST_S:.0f} s of work"
    if "Traceback (most recent call last)" in outcome.text or outcome.code < 0:
        return (
            "traceback",
            next(iter(outcome.text.strip().splitlines()[-1:]), f"signal {-outcome.code}")[:160],
        )
    errors = [x for x in outcome.text.splitlines() if x.startswith("error[")]
    if outcome.peak_bytes > MOST_BYTES:
        return "blow-up", f"{outcome.peak_bytes / 2**30:.1f} GiB"
    if outcome.code == 0 and not errors:
        return "plan", ""
    if outcome.code in (2, 3) and len(errors) == 1 and not errors[0].startswith("error[P000]"):
        return errors[0][6:10], ""
    return (
        f"exit {outcome.code}",
        next(iter(errors or outcome.text.strip().splitlines()[-1:]), "no message")[:160],
    )


def strangers(root: Path, allowed: set[str]) -> list[str]:
    """Files below a folder that nobody asked for."""
    return sorted(
        str(p.relative_to(root))
        for p in root.rglob("*")
        if p.is_file() and str(p.relative_to(root)) not in allowed
    )


def marks() -> set[str]:
    """Entries of the real temporary folder that a payload may have made."""
    return {name for name in os.listdir(tempfile.gettempdir()) if "pwned" in name.lower()}


def examine(path: Path, row: dict[str, Any], execute: bool) -> Row:
    """Plans one file in a fresh folder; what can be planned is emitted and (unless told not to)
    run. Nothing else may appear."""
    want, before = expected(row), marks()
    with tempfile.TemporaryDirectory() as name:
        work, scratch = Path(name) / "work", Path(name) / "scratch"
        work.mkdir()
        scratch.mkdir()
        shutil.copy(path, work / path.name)
        outside = Path(name) / "outside.bin"
        outside.write_bytes(b"\0" * 4096)
        (work / "symlink.bin").symlink_to(outside)
        given = {
            f"work/{path.name}",
            "work/symlink.bin",
            "outside.bin",
            "work/p.json",
            "work/program.py",
            "work/program.safetensors",
        }
        plan = [sys.executable, "-m", "planner.cli", path.name, "--devices", "8", "-o", "p.json"]
        outcome = run(plan, work, MOST_S, settings(scratch))
        got, fault = judge(outcome)
        if got == "P034":
            second = run([*plan, "--workload", "infer"], work, MOST_S, settings(scratch))
            outcome = replace(
                second,
                wall_s=max(second.wall_s, outcome.wall_s),
                peak_bytes=max(second.peak_bytes, outcome.peak_bytes),
            )
            got, fault = judge(second)
            got = "plan (infer)" if got == "plan" else got
        planned = got.startswith("plan")
        if not fault and planned != (want == "plan") and want != "either":
            fault = f"expected {want}: {row.get('expect', '')[:80]}" + (
                "" if planned else " | " + outcome.text.strip().splitlines()[0][:120]
            )
        if not fault and planned:
            told, fault = check_program(work, scratch, execute)
            got += told
        left = strangers(Path(name), given) + sorted(marks() - before)
        if not fault and left:
            fault = f"left behind: {', '.join(left[:4])}"
    return Row(path.name, str(row.get("kind", "")), want, got, outcome, fault)


def check_program(work: Path, scratch: Path, execute: bool) -> tuple[str, str]:
    """(what to add to the outcome, fault): the plan is emitted, parsed, looked through, and run; an
    operator without a kernel may be refused."""
    made = run(
        [sys.executable, "-m", "planner.cli", "emit", "p.json", "-o", "program.py"],
        work,
        MOST_S,
        settings(scratch),
    )
    what, fault = judge(made)
    if fault or what != "plan":
        return f", emit {what}", fault
    try:
        tree = ast.parse((work / "program.py").read_text())
    except (SyntaxError, ValueError) as error:
        return "", f"the program does not parse: {error}"
    bad = [
        n.id
        for n in ast.walk(tree)
        if isinstance(n, ast.Name)
        and n.id in ("eval", "exec", "__import__", "compile", "nan", "inf")
    ]
    bad += [
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and n.attr in ("system", "popen", "Popen")
    ]
    if bad:
        return "", f"the program names {bad[0]}"
    if not execute:
        return "", ""
    done = run(
        [sys.executable, "program.py", "--virtual-devices", "8", "--steps", "1"],
        work,
        60,
        settings(scratch),
    )
    return ", ran", (
        ""
        if done.code == 0
        else (
            f"the program ended with {done.code}:"
            f" {''.join(done.text.strip().splitlines()[-1:])[:160]}"
        )
    )


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 when every file is dealt with as expected."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hostile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--dir", type=Path, required=True, help="folder with .onnx files and manifest.json"
    )
    parser.add_argument("--only", default="", help="files whose name contains this")
    parser.add_argument(
        "--run",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run emitted programs on virtual devices (default)",
    )
    args = parser.parse_args(argv)
    manifest_file = args.dir / "manifest.json"
    manifest: dict[str, Any] = (
        json.loads(manifest_file.read_text()) if manifest_file.is_file() else {}
    )
    files = (
        sorted(p for p in args.dir.glob("*.onnx") if args.only in p.name)
        if args.dir.is_dir()
        else []
    )
    if not files:
        print(f"error: no .onnx files in {args.dir}", file=sys.stderr)
        return 2
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(
        f"limits {MOST_S:.0f} CPU-seconds and {MOST_BYTES >> 20} MiB; seconds, CPU and peak memory"
        f" are of the planning process\n{HEAD}"
    )
    rows: list[Row] = []
    for path in files:
        rows.append(examine(path, manifest.get(path.name, {}), args.run))
        print(rows[-1].line(), flush=True)
    failed = [r for r in rows if r.fault]
    print(
        f"\n{len(rows) - len(failed)} of {len(rows)} files as expected;"
        f" {sum(r.got.startswith('plan') for r in rows)} planned, longest"
        f" {max(r.outcome.cpu_s for r in rows):.1f} CPU-seconds, most memory"
        f" {max(r.outcome.peak_bytes for r in rows) / 2**20:.0f} MiB"
    )
    missing = sorted(set(manifest) - {p.name for p in args.dir.glob("*.onnx")})
    if missing:
        print(f"in the manifest and not in the folder: {', '.join(missing)}")
    return 1 if failed or missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
