"""Marks of `plan launch`: several processes equal one; jobs whose ranks are killed resume to the
same parameters.

    python -m benchmarks.launching [--kills 20] [--steps 10] [--folder DIR]

Each case runs 10 steps as 1 x 8, 2 x 4 and 4 x 2 processes x virtual devices through the command
itself, and compares losses and exported parameters. Then one job of two processes is started again
and again; each time a random rank is killed (SIGKILL) at a random step, until --kills are reached
and the job may end: its parameters are held against an uninterrupted run of the same plan (bit for
bit) and of another plan on half the devices that resumes midway. Prints one row a case and exits
with 1 when a mark is missed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import planner

MARK = 1e-5
FARTHEST = 0.01
"""No weight moves as far in a few steps of 1e-4: what does is another weight under its name."""
CASES = {
    "gpt data": ("zoo:gpt-tiny", "dp=8,zero=0"),
    "gpt tensor": ("zoo:gpt-tiny", "tp=8"),
    "gpt pipeline": ("zoo:gpt-tiny", "pp=2,dp=4,micro=4"),
    "gpt level 3": ("zoo:gpt-tiny", "dp=8,zero=3"),
    "gpt mixed": ("zoo:gpt-tiny", "pp=2,dp=2,tp=2,micro=4"),
    "resnet data": ("zoo:resnet-tiny", "dp=8,zero=0"),
    "resnet tensor": ("zoo:resnet-tiny", "tp=8"),
    "resnet pipeline": ("zoo:resnet-tiny", "pp=2,dp=4,micro=4"),
    "resnet level 3": ("zoo:resnet-tiny", "dp=8,zero=3"),
    "resnet mixed": ("zoo:resnet-tiny", "dp=4,tp=2"),
}
KILLED, OTHER = "dp=4,tp=2,zero=1", "pp=2,tp=2,micro=2"
"""The plan on eight devices whose ranks are killed, and the one on four that goes on where it was
stopped."""


def saved_plan(model: str, pins: str, file: Path, devices: int = 8) -> Path:
    """The strategy of a case, in float32 so that runs can be compared closely."""
    planner.plan(
        model,
        devices=devices,
        hardware="cpu",
        precision="fp32",
        batch=16,
        pins=pins,
        baselines=False,
    ).save(file)
    return file


def command(plan: Path, processes: int, folder: Path, *arguments: str) -> list[str]:
    """`plan launch --local` with arguments for the program."""
    return [
        sys.executable,
        "-m",
        "planner.cli",
        "launch",
        str(plan),
        "--local",
        str(processes),
        "-o",
        str(folder),
        "--timeout",
        "300",
        "--",
        *arguments,
    ]


def run(
    plan: Path, processes: int, folder: Path, *arguments: str
) -> tuple[list[float], dict[str, np.ndarray]]:
    """(losses, parameters) of a run to its end."""
    file = folder.with_suffix(".safetensors").resolve()
    done = subprocess.run(
        command(plan, processes, folder, *arguments, "--export", str(file)),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return [float(x) for x in re.findall(r"loss (\S+)", done.stdout)], parameters(file)


def parameters(file: Path) -> dict[str, np.ndarray]:
    """What a program exported, by name."""
    from planner.emit.runtime.files.frame import read_safetensors

    return dict(read_safetensors(file))


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """Largest difference of any element."""
    assert a.keys() == b.keys()
    return max(float(np.abs(a[k] - b[k]).max()) for k in a)


def equal(folder: Path, steps: int) -> bool:
    """1 x 8, 2 x 4 and 4 x 2 of every case."""
    good = True
    for name, (model, pins) in CASES.items():
        plan = saved_plan(model, pins, folder / f"{name.replace(' ', '-')}.json")
        one_losses, one = run(plan, 1, folder / f"{plan.stem}-1", "--steps", str(steps))
        started = run(plan, 1, folder / f"{plan.stem}-0", "--steps", "0")[1]
        for n in (2, 4):
            losses, many = run(plan, n, folder / f"{plan.stem}-{n}", "--steps", str(steps))
            error = max(
                distance(one, many),
                max(abs(a - b) for a, b in zip(one_losses, losses, strict=True)),
            )
            moved = distance(one, started)
            good &= error <= MARK < moved < FARTHEST
            print(
                f"{name:16} {n} x {8 // n}   largest difference from 1 x 8: {error:.1e}  "
                f" parameters moved by {moved:.1e}",
                flush=True,
            )
    return good


def killed(
    plan: Path, folder: Path, kills: int, steps: int, dice: random.Random
) -> tuple[int, float]:
    """Run a job to its end through `kills` kills. Returns (kills done, the longest a job took to
    end after one, in seconds)."""
    done, longest = 0, 0.0
    while True:
        places = (
            "--checkpoints",
            str(folder / "saved"),
            "--save-every",
            "2",
            "--export",
            str(folder / "end.safetensors"),
        )
        job = subprocess.Popen(
            command(plan, 2, folder, "--steps", str(steps), *places),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert job.stdout and job.stderr
        left, at = dice.randint(1, 4), 0.0
        for line in job.stdout:
            left -= line.startswith("step ")
            if left == 0 and done < kills:
                victim = dice.choice(ranks_of(job.pid))
                time.sleep(dice.random() / 4)
                os.kill(victim, signal.SIGKILL)
                done, at, left = done + 1, time.monotonic(), -1
        said = job.stderr.read()
        if job.wait() == 0:
            return done, longest
        if not at or not re.search(
            r"error\[P204\]: rank [01] was killed by SIGKILL; the job was ended\n  log: ", said
        ):
            raise SystemExit(f"a job ended otherwise than it should: {said}")
        longest = max(longest, time.monotonic() - at)


def ranks_of(launcher: int) -> list[int]:
    """Processes that a launcher started (Linux)."""
    return [int(p) for p in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def resumed(folder: Path, kills: int, seed: int) -> bool:
    """Bit for bit under the same plan after kills; within the mark under another plan on half the
    devices."""
    steps = 2 * max(kills, 4)
    plan, other = (
        saved_plan("zoo:gpt-tiny", KILLED, folder / "killed.json"),
        saved_plan("zoo:gpt-tiny", OTHER, folder / "other.json", 4),
    )
    _, whole = run(plan, 2, folder / "whole", "--steps", str(steps))
    (folder / "killed").mkdir()
    done, longest = killed(plan, folder / "killed", kills, steps, random.Random(seed))
    same = distance(whole, parameters(folder / "killed" / "end.safetensors"))
    half = steps // 2
    run(
        plan,
        2,
        folder / "first",
        "--steps",
        str(half),
        "--checkpoints",
        str(folder / "saved"),
        "--save-every",
        str(steps),
    )
    losses, after = run(
        other, 2, folder / "second", "--steps", str(steps), "--checkpoints", str(folder / "saved")
    )
    apart = distance(whole, after)
    print(
        f"killed {done} times, ended at most {longest:.1f} s after a kill; {steps} steps, largest"
        f" difference from the uninterrupted run: {same:.1e}",
        flush=True,
    )
    print(
        f"resumed at step {half} by {OTHER} on 4 devices ({len(losses)} steps): {apart:.1e}",
        flush=True,
    )
    return same == 0 and apart <= MARK and done == kills and len(losses) == steps - half


def main() -> int:
    """Print the marks."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--kills", type=int, default=20)
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--only", choices=("equal", "resumed"))
    p.add_argument("--folder", type=Path, help="keep programs and logs here")
    args = p.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    good = (args.only == "resumed" or equal(folder, args.steps)) & (
        args.only == "equal" or resumed(folder, args.kills, args.seed)
    )
    if not args.folder:
        shutil.rmtree(folder)
    print("all marks met" if good else "a mark was missed")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
