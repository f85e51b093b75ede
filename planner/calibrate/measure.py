"""Starts the process that measures, so that the caller never imports jax and a crash or a hang of
it is an error message."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from planner.calibrate.cases import Sample
from planner.errors import PlanError
from planner.verify.failure import FILLER
from planner.verify.worker import environment

TIMEOUT_S = 1200.0
ROUNDS_S = 240.0
"""After this no further round is begun."""


@dataclass(frozen=True)
class Measured:
    """What a process found. kind: cpu, gpu or tpu. device: as jax calls it. memory_bytes: what it
    may allocate on one, 0 when it does not say."""

    kind: str
    device: str
    devices: int
    node_size: int
    jax: str
    memory_bytes: int
    samples: tuple[Sample, ...]


def platform() -> str:
    """What jax computes on here: asked in a process of its own, since asking takes the devices."""
    code = "import jax; print(jax.local_devices()[0].platform, len(jax.local_devices()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        raise PlanError(
            "P181",
            "jax finds no device to measure",
            detail=done.stderr.strip().splitlines()[-1:],
            help=["pip install jax, or its build for the accelerator"],
        )
    return done.stdout.split()[0]


def last_said(log: str) -> list[str]:
    """The last line of a process's log that says something, at most one: what failed."""
    lines = (line.strip() for line in reversed(log.splitlines()))
    return [line for line in lines if line and not FILLER.match(line)][:1]


def measure(
    devices: int | None, node_size: int | None, quick: bool, say: Callable[[str], None]
) -> Measured:
    """Samples of the devices here; on a CPU of `devices` virtual ones (8 when not given).
    node_size: devices of a node, all when not given.

    Raises PlanError P181: no jax, no device, fewer devices than asked for, a process that fails or
    does not end; P182: a node size that does not divide.
    """
    kind = platform()
    count = devices or (8 if kind == "cpu" else 0)
    if node_size and count and count % node_size:
        raise PlanError(
            "P182",
            f"--node-size {node_size} does not divide {count} devices",
            help=["a divisor of the devices"],
        )
    if kind == "cpu":
        say(f"measuring {count} virtual devices that share {os.cpu_count()} cores, all at once")
    return _run(
        count, node_size or 0, quick, environment(count) if kind == "cpu" else dict(os.environ)
    )


def _run(devices: int, node_size: int, quick: bool, env: dict[str, str]) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder, "request.json"), Path(folder, "answer.json")
        request.write_text(
            json.dumps(
                {
                    "devices": devices,
                    "node_size": node_size,
                    "quick": quick,
                    "time_limit_s": ROUNDS_S / (4 if quick else 1),
                }
            )
        )
        root = str(Path(__file__).resolve().parents[2])
        env = {
            **env,
            "PYTHONPATH": os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p),
        }
        command = [sys.executable, "-m", "planner.calibrate.worker", str(request), str(answer)]
        try:
            done = subprocess.run(
                command,
                env=env,
                timeout=TIMEOUT_S,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                check=False,
            )
        except subprocess.TimeoutExpired as e:
            raise PlanError(
                "P181",
                f"measuring did not end within {TIMEOUT_S:g} s",
                help=["--quick, or fewer --devices"],
            ) from e
        if not answer.exists():
            raise PlanError(
                "P181",
                f"measuring failed: the process ended with code {done.returncode}",
                detail=last_said(done.stderr),
                help=["fewer --devices"],
            )
        fields = json.loads(answer.read_text())
    return Measured(
        fields["kind"],
        fields["device"],
        fields["devices"],
        fields["node_size"],
        fields["jax"],
        fields["memory_bytes"],
        tuple(Sample.from_json(s) for s in fields["samples"]),
    )
