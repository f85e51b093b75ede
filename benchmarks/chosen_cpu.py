"""Is the chosen plan fastest where it is run? `python -m benchmarks.chosen_cpu [--hardware FILE] [--rounds 9] [--cases 0,1,...] [--json FILE]`

Ten cases of a model on so many virtual devices of this machine, calibrated first (`plan calibrate`) unless --hardware names a file of that. Of each, the plan
that the search chooses and three pinned ones are emitted and run side by side: data parallel, ZeRO-3, and tensor parallelism as Megatron's under data parallel.
A case holds where the chosen plan's step (the least of the rounds) takes no longer than that of each of the three; a pinned plan whose program is the chosen
one's is that program. Exit 1 where fewer than eight cases hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import planner
from benchmarks.rank_cpu import calibrated, run_programs
from planner.topology import device

LEAST_HELD = 8
CASES = (
    ("zoo:gpt-tiny,hidden=256,heads=8,seq=32,vocab=1024", 8, 32), ("zoo:gpt-tiny,hidden=256,heads=8,seq=32,vocab=1024", 4, 16),
    ("zoo:gpt-tiny,hidden=512,heads=8,seq=32,vocab=512", 8, 8), ("zoo:llama-tiny,hidden=256,heads=8,kv_heads=8,ff=704,seq=32,vocab=1024", 8, 32),
    ("zoo:llama-tiny,hidden=256,heads=8,kv_heads=8,ff=704,seq=32,vocab=1024", 2, 8), ("zoo:llama-tiny,hidden=512,heads=8,kv_heads=8,ff=1408,seq=32,vocab=512", 4, 4),
    ("zoo:resnet-tiny,width=64,image=32,blocks=1-1-1", 8, 64), ("zoo:resnet-tiny,width=64,image=32,blocks=1-1-1", 4, 32),
    ("zoo:mlp,layers=4,hidden=1024", 8, 64), ("zoo:mlp,layers=4,hidden=512", 4, 512),
)  # fmt: skip
"""(model, devices, batch of a step)."""
CHOSEN = "chosen"
PINNED = {"data parallel": "dp={0},zero=0,micro=1", "ZeRO-3": "dp={0},zero=3,micro=1", "Megatron": "dp={1},tp=2,tensor=megatron,zero=0,micro=1"}
"""name -> pins, of all devices {0} and half of them {1}."""


@dataclass(frozen=True)
class Case:
    """A case: seconds of a step of each plan, priced and measured (the least of the rounds); how the chosen plan is cut."""

    model: str
    devices: int
    batch: int
    chosen: str
    priced_s: Mapping[str, float]
    least_s: Mapping[str, float]

    @property
    def ratios(self) -> dict[str, float]:
        """The chosen plan's measured step over that of each pinned one: at most 1 where it is no slower."""
        return {name: self.least_s[CHOSEN] / self.least_s[name] for name in PINNED}

    @property
    def holds(self) -> bool:
        """Whether no pinned plan is faster."""
        return max(self.ratios.values()) <= 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    print(f"\n{held} of {len(found)} chosen plans are no slower than data parallel, ZeRO-3 and Megatron (mark: {LEAST_HELD} of {len(CASES)})")
    if given.json:
        Path(given.json).write_text(json.dumps([asdict(case) for case in found], indent=1))
    return 0 if held >= LEAST_HELD else 1


def run_case(source: str, devices: int, batch: int, hardware: str, rounds: int, folder: Path) -> Case:
    """Plan a case four times, run what differs."""
    asked = {CHOSEN: ""} | {name: pins.format(devices, devices // 2) for name, pins in PINNED.items()}
    plans = {name: planner.plan(source, devices=devices, batch=batch, hardware=hardware, pins=pins or None, precision="fp32", baselines=False) for name, pins in asked.items()}
    same = {name: next(other for other in plans if plans[other].plan == plan.plan) for name, plan in plans.items()}
    measured = run_programs({name: (plan, source) for name, plan in plans.items() if same[name] == name}, rounds, folder, devices)
    mesh = " ".join(f"{a}={n}" for a, n in plans[CHOSEN].mesh_shape)
    return Case(source, devices, batch, mesh, {name: plan.cost.step_time_s for name, plan in plans.items()}, {name: min(measured[same[name]][0]) for name in plans})


def line(case: Case) -> str:
    """One case for people."""
    times = "   ".join(f"{name} {1e3 * case.least_s[name]:.0f} ms ({ratio:.2f})" for name, ratio in case.ratios.items())
    return f"{'holds ' if case.holds else 'MISSED'} {case.model}, {case.devices} devices, batch {case.batch}: chosen [{case.chosen}] {1e3 * case.least_s[CHOSEN]:.0f} ms   {times}"


if __name__ == "__main__":
    sys.exit(main())
