"""What the cache of searches spares: python -m benchmarks.recalled [--quick].

Each row is a whole `plan` process, asked three times: without a cache, with one that does not know it yet, and with one that does. Between rows the cache stays, so that
a row shows what a changed model, batch or machine finds of the rows before: nothing, for all costs are others. Printed: user CPU seconds, and what the command says of the cache.
Exit status 1 when a strategy differs from the one without a cache in anything but its provenance, or when the third process searched.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner.cache import OFF, VARIABLE

BASE = ("zoo:llama3-8b", 64, 512)
ROWS: tuple[tuple[str, str, int, int], ...] = (
    ("Llama-3 8B, 64 devices", *BASE),
    ("one layer more", "zoo:llama3-8b,layers=33", *BASE[1:]),
    ("twice the batch", BASE[0], 64, 1024),
    ("FFN 14,336 to 16,384", "zoo:llama3-8b,ff=16384", *BASE[1:]),
    ("twice the devices", BASE[0], 128, 512),
    ("Llama-3 405B, 4,096 devices", "zoo:llama3-405b", 4096, 2048),
)


def timed(source: str, devices: int, batch: int, folder: Path, cache: str) -> tuple[float, dict[str, Any], str]:
    """One `plan` process: user CPU seconds, its strategy without provenance, and what it said of the cache."""
    command = [sys.executable, "-m", "planner.cli", source, "--devices", str(devices), "--batch", str(batch), "-o", str(folder / "p.json"), "--force"]
    before = os.times().children_user
    done = subprocess.run(command, env={**os.environ, VARIABLE: cache}, capture_output=True, text=True, check=True)
    strategy = json.loads((folder / "p.json").read_text())
    del strategy["provenance"]
    said = [line.partition(" from the cache")[0] for line in done.stderr.splitlines() if " from the cache" in line]
    return os.times().children_user - before, strategy, "".join(said) or "none"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="What the cache of searches spares.")
    parser.add_argument("--quick", action="store_true", help="without the largest model")
    options = parser.parse_args(argv)
    wrong = 0
    print(f"{'plan':28s} {'no cache':>9s} {'first':>7s} {'second':>7s} {'ratio':>6s}  recalled first, second")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for label, source, devices, batch in ROWS[: -1 if options.quick else None]:
            runs = [timed(source, devices, batch, folder, cache) for cache in (OFF, str(folder / "cache"), str(folder / "cache"))]
            (alone, made, _), (first, kept, found), (second, again, spared) = runs
            print(f"{label:28s} {alone:7.2f} s {first:5.2f} s {second:5.2f} s {second / alone:6.2f}  {found}, {spared}", flush=True)
            wrong += made != kept or made != again or spared == "none"
    print("every strategy equal, every second search recalled" if not wrong else f"{wrong} rows are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
