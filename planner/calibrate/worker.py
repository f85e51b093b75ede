"""The process that measures: `python -m planner.calibrate.worker REQUEST ANSWER` (both JSON).
Rounds go through all cases, so that a disturbance of the machine falls on a round of everything and
not on one case; of each case the least of the rounds counts.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import quantiles
from typing import Any

from planner.calibrate.cases import Sample, cases
from planner.calibrate.programs import Timed, build

LEAST_ITERATIONS, MOST_ITERATIONS = 4, 4096


def prepare(program: Timed, target_s: float) -> None:
    """Choose how often a case runs in one timing: such that the runs, and not what is around them,
    take about target_s. A pause of the machine makes one timing long and not two: the shorter
    counts."""
    program.seconds(1)
    program.iterations = LEAST_ITERATIONS
    while program.iterations < MOST_ITERATIONS:
        taken = min(program.seconds(1 + program.iterations) for _ in range(2)) - min(
            program.seconds(1) for _ in range(2)
        )
        if taken > target_s / 2:
            break
        program.iterations = min(
            MOST_ITERATIONS, program.iterations * (4 if taken < target_s / 8 else 2)
        )


def summary(program: Timed, short: list[float], long: list[float]) -> Sample:
    """Seconds of one run: what many runs take less what one takes, of both the least of the rounds,
    since disturbances only add. Spread: half the distance between the quartiles of the former over
    its median, which says how disturbed the machine was."""
    low, middle, high = quantiles(long, n=4, method="inclusive")
    return Sample(
        program.case,
        (min(long) - min(short)) / program.iterations / program.kernels,
        (high - low) / 2 / middle,
        len(long),
    )


def measure(
    devices: list[Any], node_size: int, kind: str, quick: bool, deadline: float
) -> list[Sample]:
    """Samples of every case, after as many rounds as are asked for, or fewer (three at least) when
    time runs out. Attention is left out where the device has no kernel for it."""
    programs = list[Timed]()
    for case in cases(len(devices), node_size, kind, quick):
        try:
            programs.append(build(case, devices))
        except (RuntimeError, ValueError) as e:  # of jax and of its compiler
            if case.kind != "attention":
                raise
            print(f"no attention of {case.edge} elements a head: {e}", file=sys.stderr)
    for program in programs:
        prepare(program, 0.015 if quick else 0.05)
    short: list[list[float]] = []
    long: list[list[float]] = []
    while len(long) < (5 if quick else 9) and (len(long) < 3 or time.monotonic() < deadline):
        rounds = [
            (program.seconds(1), program.seconds(1 + program.iterations)) for program in programs
        ]
        short.append([s for s, _ in rounds])
        long.append([t for _, t in rounds])
    return [
        summary(program, [times[i] for times in short], [times[i] for times in long])
        for i, program in enumerate(programs)
    ]


def main(request: str, answer: str) -> None:
    """Measure what the request asks for."""
    import jax

    asked = json.loads(Path(request).read_text())
    local = jax.local_devices()
    if len(local) < asked["devices"]:
        sys.exit(f"{asked['devices']} devices were asked for, {len(local)} are here")
    devices = local[: asked["devices"]] if asked["devices"] else local
    first = devices[0]
    kind = first.platform if first.platform in ("cpu", "tpu") else "gpu"
    node_size = asked["node_size"] or len(devices)
    samples = measure(
        devices, node_size, kind, asked["quick"], time.monotonic() + asked["time_limit_s"]
    )
    stats = first.memory_stats() or {} if kind != "cpu" else {}
    fields = {
        "kind": kind,
        "device": first.device_kind,
        "devices": len(devices),
        "node_size": node_size,
        "jax": jax.__version__,
        "memory_bytes": int(stats.get("bytes_limit", 0)),
        "samples": [s.to_json() for s in samples],
    }
    Path(answer).write_text(json.dumps(fields))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
