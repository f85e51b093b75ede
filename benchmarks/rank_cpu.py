"""Does the price rank strategies as the machine does? `python -m benchmarks.rank_cpu [--hardware
FILE] [--models gpt,llama,resnet] [--rounds 9] [--json FILE]`

The devices are 8 virtual ones of this machine, calibrated first (`plan calibrate`) unless
--hardware names a file of that.

    pool       every combination of the meshes, ZeRO stages, recompute and microbatches below
               that a model has a plan for, each pinned and priced
    drawn      14 of a model's pool: ordered by price it is cut into 14 parts of equal length, of
               each one is drawn (seed 0), before anything has run
    measured   the least wall time of a step over rounds that go through all strategies of a model,
               since disturbances only add (as `plan calibrate` does); beside it the median, and the
               CPU time, of which a machine that others use says more

Printed are rank correlations of price and time per model, their mean, and that of all strategies
pooled. Exit 1 where the mean or the pooled one misses the mark.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

import planner
from planner.commands.programs import write_program
from planner.errors import PlanError
from planner.machine.topology import device
from planner.verify.worker import environment

if TYPE_CHECKING:
    from planner.strategy.strategy import Strategy

DEVICES = 8
MARK = 0.8
DRAWN = 14
"""Strategies of a model that are run."""
TIMEOUT_S = 1800.0
MODELS = {
    "gpt": ("zoo:gpt-tiny,layers=4,hidden=256,heads=8,seq=32,vocab=1024", 32),
    "llama": ("zoo:llama-tiny,layers=4,hidden=256,heads=8,kv_heads=8,ff=704,seq=32,vocab=1024", 32),
    "resnet": ("zoo:resnet-tiny,width=64,image=32,blocks=1-1-1", 64),
}
"""name -> (spec, batch of a step)."""
FLAT = ("dp=8", "dp=4,tp=2", "dp=2,tp=4", "tp=8", "dp=4,sequence=2", "dp=2,sequence=4")
STAGED = ("pp=2,dp=4", "pp=4,dp=2", "pp=2,dp=2,tp=2")
MESHES = {"gpt": (FLAT, STAGED), "llama": (FLAT, STAGED), "resnet": (FLAT[:4], ())}
"""name -> (meshes without, with pipeline stages): the ResNet has no positions and no repeated
blocks."""


@dataclass(frozen=True)
class Row:
    """One strategy: seconds of a step priced, and measured in each round: wall, and CPU of all
    cores."""

    model: str
    pins: str
    priced_s: float
    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hardware", default="")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", default="")
    given = parser.parse_args(arguments)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        hardware = given.hardware or calibrated(Path(folder))
        device(hardware)  # a file that cannot be read fails here, not once a strategy
        for model in given.models.split(","):
            rows += run_model(model, hardware, given.rounds, Path(folder))
            show(model, [r for r in rows if r.model == model])
    lines, reached = scores(rows)
    print("\n".join(lines))
    if given.json:
        Path(given.json).write_text(json.dumps([asdict(r) for r in rows], indent=1))
    return 0 if reached >= MARK else 1


def calibrated(folder: Path) -> str:
    """A device file measured now."""
    path = folder / "here.toml"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "planner.cli",
            "calibrate",
            "--devices",
            str(DEVICES),
            "-o",
            str(path),
        ],
        check=True,
        timeout=TIMEOUT_S,
    )
    return str(path)


def combinations(model: str) -> list[str]:
    """Pins of a model's pool, possible or not."""
    flat, staged = MESHES[model]
    again = ("", ",recompute=block") if staged else ("",)
    found = [
        f"{mesh},zero={zero},micro={micro}{kept}"
        for mesh, zero, micro, kept in product(flat, (0, 1, 3), (1, 2, 4, 8), again)
        if "dp" in mesh or not zero
    ]
    return found + [
        f"{mesh},zero={zero},micro={micro}" for mesh, zero, micro in product(staged, (0, 1), (4, 8))
    ]


def drawn(pool: Mapping[str, Strategy], count: int) -> dict[str, Strategy]:
    """`count` strategies of a pool over the whole range of its prices (module docstring), cheapest
    first."""
    order = sorted(pool, key=lambda pins: (pool[pins].cost.step_time_s, pins))
    count = min(count, len(order))
    choose = random.Random(0)
    picked = [
        choose.choice(order[k * len(order) // count : (k + 1) * len(order) // count])
        for k in range(count)
    ]
    return {pins: pool[pins] for pins in picked}


def run_model(model: str, hardware: str, rounds: int, folder: Path) -> list[Row]:
    """A model's pool priced, what is drawn of it run in one process."""
    source, batch = MODELS[model]
    pool: dict[str, Strategy] = {}
    for pins in combinations(model):
        try:
            pool[pins] = planner.plan(
                source,
                devices=DEVICES,
                batch=batch,
                hardware=hardware,
                pins=pins,
                precision="fp32",
                baselines=False,
            )
        except PlanError as e:
            print(f"{model} {pins}: no plan, {e.code}: {e.what}")
    chosen = drawn(pool, DRAWN)
    prices = [s.cost.step_time_s for s in pool.values()]
    print(
        f"{model}: {len(pool)} plans of {1e3 * min(prices):.0f} to {1e3 * max(prices):.0f} ms,"
        f" {len(chosen)} drawn",
        flush=True,
    )
    measured = run_programs({pins: (s, source) for pins, s in chosen.items()}, rounds, folder)
    return [Row(model, pins, chosen[pins].cost.step_time_s, *measured[pins]) for pins in chosen]


def run_programs(
    strategies: Mapping[str, tuple[Strategy, str]],
    rounds: int,
    folder: Path,
    devices: int = DEVICES,
) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
    """(wall seconds, CPU seconds) of a step in each round, by name, of the emitted programs of
    (strategy, model) side by side in one process."""
    files = {}
    for k, (name, (strategy, source)) in enumerate(strategies.items()):
        files[name] = str(folder / f"program{k}.py")
        write_program(strategy, source, Path(files[name]), "shard_map", False, True)
    request, answer = folder / "request.json", folder / "answer.json"
    request.write_text(json.dumps({"files": files, "rounds": rounds, "compute": "float32"}))
    subprocess.run(
        [sys.executable, "-m", "benchmarks.rank_cpu_run", str(request), str(answer)],
        check=True,
        timeout=TIMEOUT_S,
        env=environment(devices),
    )
    told: dict[str, list[list[float]]] = json.loads(answer.read_text())
    return {
        name: (tuple(wall for wall, _ in pairs), tuple(cpu for _, cpu in pairs))
        for name, pairs in told.items()
    }


def show(model: str, rows: Sequence[Row]) -> None:
    """The rows of a model, fastest first."""
    print(
        f"\n{model}: {MODELS[model][0]}, batch {MODELS[model][1]}\n "
        f" {'strategy':40}{'priced':>10}{'least':>10}{'median':>10}{'CPU':>10}{'priced/least':>14}"
    )
    for r in sorted(rows, key=lambda r: min(r.wall_s)):
        times = "".join(
            f"{1e3 * t:>7.0f} ms"
            for t in (r.priced_s, min(r.wall_s), median(r.wall_s), min(r.cpu_s))
        )
        print(f"  {r.pins:40}{times}{r.priced_s / min(r.wall_s):>14.2f}", flush=True)


def scores(rows: Sequence[Row]) -> tuple[list[str], float]:
    """(lines to print; the lower of two rank correlations, Spearman's: the mean over models, and
    that of all rows)."""
    names = list(dict.fromkeys(r.model for r in rows))
    table = {name: correlations([r for r in rows if r.model == name]) for name in names}
    table["mean"] = tuple(fmean(row[k] for row in table.values()) for k in range(4))
    table["pooled"] = correlations(rows)
    counts = {name: sum(r.model == name for r in rows) for name in names}
    lines = [
        "",
        (
            f"  {'':10}{'rows':>6}{'Spearman':>10}{'Kendall':>9}{'Spearman of medians':>21}{'of CPU time':>13}"
        ),
    ]
    lines += [
        f"  {name:10}{counts.get(name, len(rows)):>6}{row[0]:>10.2f}{row[1]:>9.2f}{row[2]:>21.2f}{row[3]:>13.2f}"
        for name, row in table.items()
    ]
    return lines, min(table["mean"][0], table["pooled"][0])


def correlations(rows: Sequence[Row]) -> tuple[float, ...]:
    """Of prices with the least times (Spearman, Kendall), with medians and with CPU times
    (Spearman)."""
    from scipy.stats import kendalltau, spearmanr

    priced, least = [r.priced_s for r in rows], [min(r.wall_s) for r in rows]
    others = ([median(r.wall_s) for r in rows], [min(r.cpu_s) for r in rows])
    return tuple(
        float(x)
        for x in (
            spearmanr(priced, least).statistic,
            kendalltau(priced, least).statistic,
            *(spearmanr(priced, o).statistic for o in others),
        )
    )


if __name__ == "__main__":
    sys.exit(main())
