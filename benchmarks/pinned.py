"""Whether pins beat the free search: random subsets of pins against the free plan of the same model.

    python -m benchmarks.pinned [--draws 500] [--seed 1] [--only WORD] [--save FILE]

A draw takes one of CASES and pins one to four things at random: degrees of the mesh, the ZeRO
stage, recompute, microbatches, virtual stages, and how blocks run. The rest is searched. As the
free search may choose all that a pinned one may, and both are priced by one cost model, no draw
should be faster than the free plan by more than TIE. Draws that contradict the machine or the batch, or of which nothing
fits, are counted and prove nothing. Exit status 1 where pins win.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import planner
from costmodels.hardware.units import show_time
from planner.errors import PlanError
from planner.machine.mesh_choices import divisors
from planner.strategy.strategy import Strategy

TIE = 5e-3
"""Pins within this share of the free plan's step have found nothing."""
MOST_PINS = 4
WIDEST = {"tp": 8, "pp": 16, "cp": 16, "ep": 16}
"""Degrees that are drawn at most; data takes what is left, or is drawn too."""
OTHERS = {
    "zero": ("0", "1", "2", "3"),
    "recompute": ("none", "selective", "block"),
    "micro": ("1", "2", "4", "8", "16", "32", "64"),
    "vpp": ("2", "4"),
    "blocks": ("looped", "written-out"),
}


@dataclass(frozen=True)
class Case:
    """A model on a machine; launcher "" is any plan, in programs that are emitted. limit_gib:
    memory that a plan may take, where that is less than the device's."""

    spec: str
    hardware: str
    devices: int
    batch: int
    launcher: str = ""
    limit_gib: float | None = None

    def plan(self, pins: str | None) -> Strategy:
        """The plan with some pins, or the free one."""
        return planner.plan(
            self.spec,
            devices=self.devices,
            hardware=self.hardware,
            batch=self.batch,
            launcher=self.launcher,
            memory_limit_bytes=None if self.limit_gib is None else int(self.limit_gib * 2**30),
            pins=pins,
            baselines=pins is None,
            remedies=False,
        )

    @property
    def name(self) -> str:
        """In a line of output."""
        way = f" --for {self.launcher}" if self.launcher else ""
        way += f" in {self.limit_gib:g} GiB" if self.limit_gib else ""
        return f"{self.spec.removeprefix('zoo:')} on {self.devices} {self.hardware}{way}"


SMALL = (
    ("zoo:llama3-8b,layers=8", "h100-sxm", 16, 32),
    ("zoo:gpt,layers=12,hidden=2048,heads=16,seq=2048,vocab=51200", "a100-80gb", 8, 64),
    ("zoo:llama3-8b", "tpu-v5e", 64, 128),
)
LARGE = (
    ("zoo:llama3-8b", "h100-sxm", 64, 512),
    ("zoo:gpt3-175b", "h100-sxm", 128, 1536),
    ("zoo:llama3-70b", "h100-sxm", 512, 1024),
)
LONG = (
    ("zoo:llama3-8b,seq=131072", "h100-sxm", 64, 8),
    ("zoo:llama3-8b,seq=65536", "h100-sxm", 256, 16),
)
EXPERTS = (
    ("zoo:mixtral-8x7b", "h100-sxm", 64, 256),
    ("zoo:deepseek-moe-16b,seq=4096", "h100-sxm", 32, 128),
)
OTHER = (
    ("zoo:gpt2-medium", "h100-sxm", 8, 64),
    ("zoo:t5-large", "a100-80gb", 16, 128),
    ("zoo:vit-l16", "h100-sxm", 8, 256),
    ("zoo:resnet50", "h100-sxm", 16, 512),
    ("zoo:llama3-70b", "tpu-v5p", 256, 512),
)
SHORT = (
    ("zoo:llama3-8b,layers=8", "h100-sxm", 8, 64, "", 24.0),
    ("zoo:gpt2-medium", "h100-sxm", 8, 64, "", 6.0),
    ("zoo:t5-large", "a100-80gb", 8, 64, "", 12.0),
    ("zoo:llama3-8b", "h100-sxm", 64, 512, "", 40.0),
)
CASES = (
    *(Case(*row) for row in (*SMALL, *LONG, *EXPERTS, *OTHER)),
    *(Case(*row) for row in LARGE),
    *(Case(*row, "megatron") for row in LARGE),
    *(Case(*row) for row in SHORT),
)


def draw(case: Case, dice: random.Random) -> str:
    """One to four pins of a case, as after --pin."""
    degrees = [
        "tp",
        "pp",
        "cp",
        "dp",
        *(["ep"] if "moe" in case.spec or "x7b" in case.spec else []),
    ]
    names = dice.sample([*degrees, *OTHERS], dice.randint(1, MOST_PINS))
    pins, left = [], case.devices
    for name in names:
        if name in OTHERS:
            pins.append(f"{name}={dice.choice(OTHERS[name])}")
            continue
        sizes = [d for d in divisors(left) if 1 < d <= WIDEST.get(name, case.devices)]
        if not sizes:
            continue
        size = dice.choice(sizes)
        left //= size
        pins.append(f"{name}={size}")
    return ",".join(pins)


def main() -> int:
    """Draw, compare, print."""
    parser = argparse.ArgumentParser(description="Random pins beside the free plan.")
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="draws of cases whose name contains this")
    parser.add_argument("--save", type=Path, help="also write the lines here")
    args = parser.parse_args()
    dice, free, count = random.Random(args.seed), dict[Case, Strategy](), Counter[str]()
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    for _ in range(args.draws):
        case = dice.choice(CASES)
        pins = draw(case, dice)
        if args.only not in case.name or not pins:
            continue
        if case not in free:
            free[case] = case.plan(None)
            say(f"{case.name}: {show_time(free[case].cost.step_time_s)} free")
        try:
            found = case.plan(pins)
        except PlanError as e:
            count["nothing fits" if e.exit_code == 3 else "contradict"] += 1
            continue
        ratio = found.cost.step_time_s / free[case].cost.step_time_s
        count["compared"] += 1
        if ratio < 1 - TIE:
            count["won"] += 1
            mesh = " x ".join(f"{a['name']} {a['size']}" for a in found.mesh)
            say(f"{case.name} --pin {pins}: {ratio:.4f} of the free plan  {mesh}   FASTER")
    say(
        f"{'MISSED' if count['won'] else 'kept'}: pins won {count['won']} of {count['compared']}"
        f" compared draws; {count['contradict']} contradict the machine or the batch, of"
        f" {count['nothing fits']} nothing fits"
    )
    if args.save:
        args.save.write_text("\n".join(lines) + "\n")
    return int(count["won"] > 0)


if __name__ == "__main__":
    sys.exit(main())
