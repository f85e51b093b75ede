"""Published configurations of experts beside the plans chosen here, both priced by the same model.

    python -m benchmarks.experts [--only WORD] [--save FILE]

Each row is a model, machine, batch and the degrees of parallelism that a published run was given.
They are pinned (`--pin`), and everything they leave open (splits of operators, microbatches,
recompute, the ZeRO stage where none is published) is searched: the expert's configuration at
its best. The chosen plan has nothing pinned. Exit status 1 where a chosen plan does not fit or is
slower than a pinned one that fits (both within the machine's memory).

Sources: Narayanan et al. 2021, table 1 (GPT of 1.7 to 1,008 billion parameters on A100); the Llama
3 paper, table 4; IBM's fms-fsdp (Llama 2 under FSDP); NVIDIA's Llama 3 70B on 64 H100; Google's
tpu-recipes (Mixtral 8x7B on TPU v6e).
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import planner
from costmodels.hardware.units import show_bytes, show_time
from planner.errors import PlanError
from planner.strategy.strategy import Strategy

TIE = 1e-3
"""Plans this near each other are ties for the search."""


@dataclass(frozen=True)
class Expert:
    """A published configuration: batch is the global one, pins as after --pin."""

    name: str
    source: str
    hardware: str
    devices: int
    batch: int
    pins: str


def _gpt(
    billions: str,
    layers: int,
    hidden: int,
    heads: int,
    tensor: int,
    stages: int,
    devices: int,
    batch: int,
) -> Expert:
    """A row of Narayanan et al. 2021, table 1: sequence 2048, vocabulary 51200, no optimizer
    sharding."""
    spec = f"zoo:gpt,layers={layers},hidden={hidden},heads={heads},seq=2048,vocab=51200"
    pins = ",".join(
        f"{k}={n}"
        for k, n in (("tp", tensor), ("pp", stages), ("dp", devices // tensor // stages))
        if n > 1
    )
    return Expert(f"GPT {billions}B", spec, "a100-80gb", devices, batch, f"{pins},zero=0")


EXPERTS = (
    _gpt("1.7", 24, 2304, 24, 1, 1, 32, 512),
    _gpt("3.6", 30, 3072, 32, 2, 1, 64, 512),
    _gpt("7.5", 36, 4096, 32, 4, 1, 128, 512),
    _gpt("18.4", 40, 6144, 48, 8, 1, 256, 1024),
    _gpt("39.1", 48, 8192, 64, 8, 2, 512, 1536),
    _gpt("76.1", 60, 10240, 80, 8, 4, 1024, 1792),
    _gpt("145.6", 80, 12288, 96, 8, 8, 1536, 2304),
    _gpt("310.1", 96, 16384, 128, 8, 16, 1920, 2160),
    _gpt("529.6", 105, 20480, 128, 8, 35, 2520, 2520),
    _gpt("1008", 128, 25600, 160, 8, 64, 3072, 3072),
    Expert("Llama-2 7B", "zoo:llama2-7b", "a100-80gb", 128, 256, "dp=128,zero=3"),
    Expert("Llama-2 13B", "zoo:llama2-13b", "a100-80gb", 128, 256, "dp=128,zero=3"),
    Expert("Llama-2 70B", "zoo:llama2-70b", "a100-80gb", 128, 256, "dp=128,zero=3"),
    Expert("Llama-3 70B", "zoo:llama3-70b", "h100-sxm", 64, 128, "tp=4,pp=8,dp=2"),
    Expert("Llama-3 405B", "zoo:llama3-405b", "h100-sxm", 8192, 2048, "tp=8,pp=16,dp=64"),
    Expert("Llama-3 405B", "zoo:llama3-405b", "h100-sxm", 16384, 2048, "tp=8,pp=16,dp=128"),
    Expert("Mixtral 8x7B", "zoo:mixtral-8x7b", "tpu-v6e", 256, 3072, "dp=256,zero=3"),
)


def pinned(expert: Expert) -> Strategy | None:
    """The expert's configuration at its best; None where it does not fit here."""
    try:
        return planner.plan(
            expert.source,
            devices=expert.devices,
            hardware=expert.hardware,
            batch=expert.batch,
            pins=expert.pins,
            baselines=False,
        )
    except PlanError as e:
        if e.exit_code != 3:
            raise
        return None


def _figures(found: Strategy | None) -> str:
    return (
        f"{show_time(found.cost.step_time_s):>8s}"
        f" {show_bytes(found.cost.memory_per_device_bytes):>9s}"
        if found
        else f"{'':8s} {'too large':>9s}"
    )


def main() -> int:
    """Price every row and print the table."""
    parser = argparse.ArgumentParser(
        description="Published configurations beside the plans chosen here."
    )
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--save", type=Path, help="also write the table here")
    args = parser.parse_args()
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    say(
        f"{'model':14s} {'hardware':10s} {'devices':>7s} {'batch':>6s}  {'published':24s}"
        f" {'step':>8s} {'memory':>9s}   {'chosen':>8s} {'memory':>9s} {'ratio':>6s}  {'CPU s':>6s}"
    )
    worse = 0
    for e in EXPERTS:
        if args.only.lower() not in e.name.lower():
            continue
        expert, began = pinned(e), time.process_time()
        chosen = planner.plan(e.source, devices=e.devices, hardware=e.hardware, batch=e.batch)
        took = time.process_time() - began
        bad = expert is not None and chosen.cost.step_time_s > expert.cost.step_time_s * (1 + TIE)
        worse += bad
        ratio = f"{chosen.cost.step_time_s / expert.cost.step_time_s:.3f}" if expert else ""
        mesh = " x ".join(f"{a['name']} {a['size']}" for a in chosen.mesh)
        say(
            f"{e.name:14s} {e.hardware:10s} {e.devices:7,d} {e.batch:6,d}  {e.pins:24s}"
            f" {_figures(expert)}   {_figures(chosen)} {ratio:>6s}  {took:6.1f} "
            f" {mesh}{'   SLOWER' if bad else ''}"
        )
    say(
        f"{'MISSED' if worse else 'kept'}: {worse} chosen plans slower than the published"
        " configuration"
    )
    if args.save:
        args.save.write_text("\n".join(lines) + "\n")
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
