"""The process that measures: `python -m planner.calibrate.worker REQUEST ANSWER` (both JSON). Rounds go through all cases, so that a disturbance of the
machine falls on a round of everything and not on one case; of each case the median of the rounds counts.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from planner.calibrate.cases import Sample, cases
from planner.calibrate.programs import Timed, build

MOST_TURNS = 4096


def prepare(program: Timed, target_s: float) -> None:
    """Choose how often a case runs in one timing: such that the runs, and not what is around them, take about target_s."""
    program.seconds(1)
    program.turns, taken = 1, 0.0
    while program.turns < MOST_TURNS:
        taken = program.seconds(1 + program.turns) - program.seconds(1)
        if taken > target_s / 2:
            break
        program.turns = min(MOST_TURNS, program.turns * (4 if taken < target_s / 8 else 2))


def summary(program: Timed, times: list[float]) -> Sample:
    """Median and relative half distance of the quartiles."""
    middle = median(times)
    low, _, high = quantiles(times, n=4, method="inclusive")
    return Sample(program.case, middle, (high - low) / 2 / abs(middle) if middle else math.inf, len(times))


def measure(devices: list[Any], node_size: int, kind: str, quick: bool, deadline: float) -> list[Sample]:
    """Samples of every case, after as many rounds as are asked for, or fewer (three at least) when time runs out."""
    programs = [build(case, devices) for case in cases(len(devices), node_size, kind, quick)]
    for program in programs:
        prepare(program, 0.01 if quick else 0.03)
    rounds: list[list[float]] = []
    while len(rounds) < (5 if quick else 9) and (len(rounds) < 3 or time.monotonic() < deadline):
        rounds.append([program.one() for program in programs])
    return [summary(program, [times[i] for times in rounds]) for i, program in enumerate(programs)]


def main(request: str, answer: str) -> None:
    """Measure what the request asks for."""
    import jax

    asked = json.loads(Path(request).read_text())
    found = jax.local_devices()
    if len(found) < asked["devices"]:
        sys.exit(f"{asked['devices']} devices were asked for, {len(found)} are here")
    devices = found[: asked["devices"]] if asked["devices"] else found
    first = devices[0]
    kind = first.platform if first.platform in ("cpu", "tpu") else "gpu"
    node_size = asked["node_size"] or len(devices)
    samples = measure(devices, node_size, kind, asked["quick"], time.monotonic() + asked["time_limit_s"])
    stats = first.memory_stats() or {} if kind != "cpu" else {}
    told = {"kind": kind, "device": first.device_kind, "devices": len(devices), "node_size": node_size, "jax": jax.__version__,
            "memory_bytes": int(stats.get("bytes_limit", 0)), "samples": [s.to_json() for s in samples]}  # fmt: skip
    Path(answer).write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
