"""Does the price rank strategies as the machine does? `python -m benchmarks.rank_cpu [--hardware FILE] [--models gpt,llama,resnet] [--rounds 7] [--json FILE]`

The devices are 8 virtual ones of this machine, calibrated first (`plan calibrate`) unless --hardware names a file of that. Over forty strategies of three
small models, each pinned in mesh, optimizer level, recompute, microbatches and stages, are priced, emitted and run. Beside each other: the price and the
median of a step's wall time over rounds that go through all strategies of a model; then rank correlations per model and of all. Exit 1 below the mark.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import planner
from planner.commands.emit import write_program
from planner.errors import PlanError
from planner.topology import device
from planner.verify.worker import environment

DEVICES = 8
MARK = 0.8
TIMEOUT_S = 1800.0
MODELS = {
    "gpt": ("zoo:gpt-tiny,layers=4,hidden=256,heads=8,seq=64,vocab=1024", 16),
    "llama": ("zoo:llama-tiny,layers=4,hidden=256,heads=8,kv_heads=8,ff=704,seq=64,vocab=1024", 16),
    "resnet": ("zoo:resnet-tiny,width=64,image=64,blocks=1-1-1", 32),
}
"""name -> (spec, batch of a step)."""
DENSE = ("dp=8", "dp=8,zero=3", "dp=8,micro=2", "dp=8,zero=3,micro=2", "dp=8,recompute=block", "dp=4,tp=2", "dp=4,tp=2,zero=3", "dp=4,tp=2,micro=4", "dp=2,tp=4",
         "dp=2,tp=4,recompute=block", "tp=8", "tp=8,micro=4", "pp=2,dp=4,micro=4", "pp=4,dp=2,micro=8", "pp=2,dp=2,tp=2,micro=4")  # fmt: skip
PINS = {"gpt": DENSE, "llama": DENSE,
        "resnet": ("dp=8", "dp=8,zero=3", "dp=8,micro=2", "dp=8,micro=4", "dp=4,tp=2", "dp=4,tp=2,zero=3", "dp=4,tp=2,micro=4", "dp=2,tp=4", "dp=2,tp=4,micro=4", "tp=8",
                   "tp=8,micro=4")}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One strategy: seconds of a step priced and measured (each round)."""

    model: str
    pins: str
    priced_s: float
    measured_s: tuple[float, ...]

    @property
    def middle_s(self) -> float:
        """Median of the rounds."""
        return median(self.measured_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", default="")
    given = parser.parse_args(arguments)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        hardware = given.hardware or calibrated(Path(folder))
        device(hardware)  # a file that cannot be read fails here, not once a strategy
        for model in given.models.split(","):
            rows += run_model(model, hardware, given.rounds, Path(folder))
            show(model, [r for r in rows if r.model == model])
    lines, worst = scores(rows)
    print("\n".join(lines))
    if given.json:
        Path(given.json).write_text(json.dumps([{"model": r.model, "pins": r.pins, "priced_s": r.priced_s, "measured_s": r.measured_s} for r in rows], indent=1))
    return 0 if worst >= MARK else 1


def calibrated(folder: Path) -> str:
    """A device file measured now."""
    path = folder / "here.toml"
    subprocess.run([sys.executable, "-m", "planner.cli", "calibrate", "--devices", str(DEVICES), "-o", str(path)], check=True, timeout=TIMEOUT_S)
    return str(path)


def run_model(model: str, hardware: str, rounds: int, folder: Path) -> list[Row]:
    """Every strategy of a model priced, then all of them run in one process."""
    source, batch = MODELS[model]
    priced: dict[str, float] = {}
    files: dict[str, str] = {}
    for k, pins in enumerate(PINS[model]):
        try:
            strategy = planner.plan(source, devices=DEVICES, batch=batch, hardware=hardware, pins=pins, precision="fp32", baselines=False)
        except PlanError as e:
            print(f"{model} {pins}: left out, {e.code}: {e.what}")
            continue
        path = folder / f"{model}{k}.py"
        write_program(strategy, source, path, "shard_map", False, True)
        priced[pins], files[pins] = strategy.cost.step_time_s, str(path)
    answer = folder / f"{model}.json"
    request = folder / f"{model}.request.json"
    request.write_text(json.dumps({"files": files, "rounds": rounds, "compute": "float32"}))
    subprocess.run([sys.executable, "-m", "benchmarks.rank_cpu_run", str(request), str(answer)], check=True, timeout=TIMEOUT_S, env=environment(DEVICES))
    measured: Mapping[str, list[float]] = json.loads(answer.read_text())
    return [Row(model, pins, priced[pins], tuple(times)) for pins, times in measured.items()]


def show(model: str, rows: Sequence[Row]) -> None:
    """The rows of a model, fastest first."""
    print(f"\n{model}: {MODELS[model][0]}, batch {MODELS[model][1]}\n  {'strategy':34}{'priced':>10}{'measured':>10}{'least':>10}{'priced/measured':>17}")
    for r in sorted(rows, key=lambda r: r.middle_s):
        print(f"  {r.pins:34}{1e3 * r.priced_s:>7.1f} ms{1e3 * r.middle_s:>7.1f} ms{1e3 * min(r.measured_s):>7.1f} ms{r.priced_s / r.middle_s:>17.2f}", flush=True)


def scores(rows: Sequence[Row]) -> tuple[list[str], float]:
    """(lines to print, the lowest rank correlation of a model and of all: Spearman's)."""
    from scipy.stats import kendalltau, spearmanr

    lines, found = ["", f"  {'':10}{'rows':>6}{'Spearman':>10}{'Kendall':>9}{'Spearman of least':>19}"], []
    names = list(dict.fromkeys(r.model for r in rows))
    for name, mine in [(n, [r for r in rows if r.model == n]) for n in names] + [("all", list(rows))]:
        priced, middle, least = [r.priced_s for r in mine], [r.middle_s for r in mine], [min(r.measured_s) for r in mine]
        rho: Any = spearmanr(priced, middle).statistic
        found.append(float(rho))
        lines.append(f"  {name:10}{len(mine):>6}{rho:>10.2f}{kendalltau(priced, middle).statistic:>9.2f}{spearmanr(priced, least).statistic:>19.2f}")
    return lines, min(found)


if __name__ == "__main__":
    sys.exit(main())
