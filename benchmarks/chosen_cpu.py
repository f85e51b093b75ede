"""Is the chosen plan fastest where it is run? `python -m benchmarks.chosen_cpu [--hardware FILE]
[--rounds 9] [--cases 0,1,...] [--json FILE]`

Ten cases of a model on so many virtual devices of this machine, calibrated first (`plan calibrate`)
unless --hardware names a file of that. Of each, the plan that the search chooses and three pinned
ones are emitted and run side by side: data parallel, ZeRO-3, and tensor parallelism as Megatron's
under data parallel. A case holds where the chosen plan's step (the least of the rounds) takes no
longer than that of each of the three; a pinned plan whose program is the chosen one's, or compiled
to the same instructions, is that program. Exit 1 where fewer than eight cases hold.

Every round runs all programs of a case, so that rounds are pairs: beside it are printed the median
over rounds of the chosen plan's step over each pinned one's, an interval that holds that median 19
times in 20 (order statistics), and the ratio of the least CPU time. A case that misses but whose
intervals all reach 1 is one that the run cannot tell from one that holds; such cases are counted
apart.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path
from statistics import median

import planner
from benchmarks.rank_cpu import calibrated, run_programs
from planner.machine.topology import device

LEAST_HELD = 8
CASES = (
    ("zoo:gpt-tiny,hidden=256,heads=8,seq=32,vocab=1024", 8, 32),
    ("zoo:gpt-tiny,hidden=256,heads=8,seq=32,vocab=1024", 4, 16),
    ("zoo:gpt-tiny,hidden=512,heads=8,seq=32,vocab=512", 8, 8),
    ("zoo:llama-tiny,hidden=256,heads=8,kv_heads=8,ff=704,seq=32,vocab=1024", 8, 32),
    ("zoo:llama-tiny,hidden=256,heads=8,kv_heads=8,ff=704,seq=32,vocab=1024", 2, 8),
    ("zoo:llama-tiny,hidden=512,heads=8,kv_heads=8,ff=1408,seq=32,vocab=512", 4, 4),
    ("zoo:resnet-tiny,width=64,image=32,blocks=1-1-1", 8, 64),
    ("zoo:resnet-tiny,width=64,image=32,blocks=1-1-1", 4, 32),
    ("zoo:mlp,layers=4,hidden=1024", 8, 64),
    ("zoo:mlp,layers=4,hidden=512", 4, 512),
)
"""(model, devices, batch of a step)."""
CHOSEN = "chosen"
PINNED = {
    "data parallel": "dp={0},zero=0,micro=1",
    "ZeRO-3": "dp={0},zero=3,micro=1",
    "Megatron": "dp={1},tp=2,tensor=megatron,zero=0,micro=1",
}
"""name -> pins, of all devices {0} and half of them {1}."""


@dataclass(frozen=True)
class Case:
    """A case: seconds of a step of each plan, priced, and measured in every round (wall, and of all
    cores); how the chosen plan is cut."""

    model: str
    devices: int
    batch: int
    chosen: str
    priced_s: Mapping[str, float]
    wall_s: Mapping[str, tuple[float, ...]]
    cpu_s: Mapping[str, tuple[float, ...]]

    @property
    def least_s(self) -> dict[str, float]:
        """The least step of each plan."""
        return {name: min(times) for name, times in self.wall_s.items()}

    @property
    def ratios(self) -> dict[str, float]:
        """The chosen plan's measured step over that of each pinned one: at most 1 where it is no
        slower."""
        return {name: self.least_s[CHOSEN] / self.least_s[name] for name in PINNED}

    def paired(self, name: str) -> tuple[float, float, float]:
        """(lower end, median, upper end) of the chosen plan's step over a pinned one's, round by
        round."""
        return interval(
            [a / b for a, b in zip(self.wall_s[CHOSEN], self.wall_s[name], strict=True)]
        )

    @property
    def holds(self) -> bool:
        """Whether no pinned plan is faster."""
        return max(self.ratios.values()) <= 1.0

    @property
    def undecided(self) -> bool:
        """Whether it misses, and no interval of the rounds says so."""
        return not self.holds and all(self.paired(name)[0] <= 1.0 for name in PINNED)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(lower end, median, upper end) of a 95 % interval of the median: the order statistics that a
    sign test leaves; all of the range for fewer than six values."""
    row, n = sorted(values), len(values)
    cut = 0
    while 2 * sum(comb(n, k) for k in range(cut + 1)) / 2**n <= 0.05:
        cut += 1
    cut = max(0, cut - 1)
    return row[cut], median(row), row[n - 1 - cut]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hardware", default="")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cases", default=",".join(str(k) for k in range(len(CASES))))
    parser.add_argument("--json", default="")
    given = parser.parse_args(arguments)
    found: list[Case] = []
    with tempfile.TemporaryDirectory() as folder:
        hardware = given.hardware or calibrated(Path(folder))
        device(hardware)
        for k in given.cases.split(","):
            found.append(run_case(*CASES[int(k)], hardware, given.rounds, Path(folder)))
            print(line(found[-1]), flush=True)
    held = sum(case.holds for case in found)
    print(
        f"\n{held} of {len(found)} chosen plans are no slower than data parallel, ZeRO-3 and"
        f" Megatron (mark: {LEAST_HELD} of {len(CASES)}); {sum(case.undecided for case in found)}"
        " more cannot be told from that in this run"
    )
    if given.json:
        Path(given.json).write_text(json.dumps([asdict(case) for case in found], indent=1))
    return 0 if held >= LEAST_HELD else 1


def run_case(
    source: str, devices: int, batch: int, hardware: str, rounds: int, folder: Path
) -> Case:
    """Plan a case four times, run what differs."""
    asked = {CHOSEN: ""} | {
        name: pins.format(devices, devices // 2) for name, pins in PINNED.items()
    }
    plans = {
        name: planner.plan(
            source,
            devices=devices,
            batch=batch,
            hardware=hardware,
            pins=pins or None,
            precision="fp32",
            baselines=False,
        )
        for name, pins in asked.items()
    }
    same = {
        name: next(other for other in plans if plans[other].plan == plan.plan)
        for name, plan in plans.items()
    }
    measured = run_programs(
        {name: (plan, source) for name, plan in plans.items() if same[name] == name},
        rounds,
        folder,
        devices,
    )
    mesh = " ".join(f"{a}={n}" for a, n in plans[CHOSEN].mesh_shape)
    return Case(
        source,
        devices,
        batch,
        mesh,
        {name: plan.cost.step_time_s for name, plan in plans.items()},
        {name: measured[same[name]][0] for name in plans},
        {name: measured[same[name]][1] for name in plans},
    )


def line(case: Case) -> str:
    """One case for people: the chosen plan over each pinned one."""
    rows = [
        f"{'holds ' if case.holds else 'unsure' if case.undecided else 'MISSED'} {case.model},"
        f" {case.devices} devices, batch {case.batch}: chosen [{case.chosen}]"
        f" {1e3 * case.least_s[CHOSEN]:.0f} ms"
    ]
    for name, ratio in case.ratios.items():
        low, middle, high = case.paired(name)
        cpu = min(case.cpu_s[CHOSEN]) / min(case.cpu_s[name])
        rows.append(
            f"       {name:14} {1e3 * case.least_s[name]:4.0f} ms   least {ratio:.2f}   median"
            f" {middle:.2f} ({low:.2f} to {high:.2f})   CPU {cpu:.2f}"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
