"""Price beside measured time on one accelerator: `python -m benchmarks.one_device [--hardware FILE]
[--rounds 20]`

Blocks of GPT-2, Llama and ResNet, forward and as a training step, on the GPU that jax sees, which
is calibrated first (`plan calibrate --devices 1`) unless --hardware names a file of that. Exit 1
where a price is off by more than 10 %. Without a GPU there is nothing to hold prices against: it
says so and ends with 0.
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
from statistics import median

import planner
from planner.calibrate.measure import platform
from planner.commands.programs import write_program

MARK = 0.10
TIMEOUT_S = 1800.0
BLOCKS = {
    "GPT-2": ("zoo:gpt2-small,layers=4,seq=1024", 8),
    "Llama": ("zoo:llama3-8b,layers=2,seq=2048", 2),
    "ResNet": ("zoo:resnet50", 64),
}
"""name -> (spec, batch)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hardware", default="")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args(arguments)
    found = platform()
    if found in ("cpu", "tpu"):
        print(f"jax sees a {found} and no GPU: no prices were held against one")
        return 0
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        hardware = given.hardware or str(Path(folder, "here.toml"))
        if not given.hardware:
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "planner.cli",
                    "calibrate",
                    "--devices",
                    "1",
                    "-o",
                    hardware,
                ],
                check=True,
                timeout=TIMEOUT_S,
            )
        priced, measured = prices(hardware, Path(folder)), times(given.rounds, Path(folder))
        for name, seconds in measured.items():
            off = priced[name] / median(seconds) - 1
            worst = max(worst, abs(off))
            print(
                f"  {name:20}{1e3 * priced[name]:>9.2f} ms priced{1e3 * median(seconds):>9.2f} ms"
                f" measured{off:>+8.1%}"
            )
    return 0 if worst <= MARK else 1


def prices(hardware: str, folder: Path) -> dict[str, float]:
    """Seconds of every block, forward and training, under the file; their programs and the request
    for the process that runs them are left in the folder."""
    priced: dict[str, float] = {}
    files: dict[str, str] = {}
    for block, (source, batch) in BLOCKS.items():
        for workload in ("infer", "train"):
            strategy = planner.plan(
                source,
                devices=1,
                batch=batch,
                hardware=hardware,
                workload=workload,
                baselines=False,
                mode="data-parallel",
            )
            name = f"{block} {workload}"
            path = folder / f"{name.replace(' ', '_')}.py"
            write_program(strategy, source, path, "shard_map", False, True)
            priced[name], files[name] = strategy.cost.step_time_s, str(path)
    (folder / "request.json").write_text(json.dumps({"files": files, "compute": ""}))
    return priced


def times(rounds: int, folder: Path) -> dict[str, list[float]]:
    """Measured seconds of the programs in the folder, one process."""
    request, answer = folder / "request.json", folder / "answer.json"
    request.write_text(json.dumps({**json.loads(request.read_text()), "rounds": rounds}))
    root = str(Path(__file__).resolve().parents[1])
    subprocess.run(
        [sys.executable, "-m", "benchmarks.rank_cpu_run", str(request), str(answer)],
        check=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": root},
    )
    found: dict[str, list[list[float]]] = json.loads(answer.read_text())
    return {name: [wall for wall, _ in pairs] for name, pairs in found.items()}


if __name__ == "__main__":
    sys.exit(main())
