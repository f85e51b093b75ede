"""How long `plan --help` takes, in a process of its own: python -m benchmarks.help_time. Mark: 150 ms, the median of several runs."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

RUNS = 15
MARK_S = 0.150


def help_times_s(runs: int = RUNS) -> list[float]:
    """Seconds of each run, the first (which may compile bytecode) left out."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "planner.cli", "--help"], env=environment, stdout=subprocess.DEVNULL, check=True)
        times.append(time.perf_counter() - start)
    return times[1:]


def main() -> int:
    """Print the figures; exit 1 past the mark."""
    times = help_times_s()
    median = statistics.median(times)
    print(f"plan --help: median {1e3 * median:.0f} ms, fastest {1e3 * min(times):.0f} ms, slowest {1e3 * max(times):.0f} ms of {len(times)} (mark {1e3 * MARK_S:.0f} ms)")
    return int(median > MARK_S)


if __name__ == "__main__":
    sys.exit(main())
