"""Which way to cut long sequences: `python -m benchmarks.long_context [--only WORD] [--compile]`.

Llama-3 8B on H100, eight sequences a step: what is chosen, and the best plan of each of four ways to
cut attention over an axis "sequence", everything else open. Prices, from the command's own search;
--compile compiles what is chosen of the longest sequences for H100 without one and prints the peak
and the clock beside (docs/verify.md; minutes a program).

    all-gather   queries are cut, every device has all keys (in blocks: no fused kernel takes a
                 device's own positions under a causal mask)
    ring         queries and keys are cut, keys travel (balanced: every device an n-th of the pairs)
    all-to-all   heads are cut inside attention, positions elsewhere (Ulysses)
    product      a ring over one axis, heads over another
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

import planner
from costmodels.hardware.units import show_bytes, show_time
from planner.errors import PlanError
from planner.pins.pins import Pins, from_table
from planner.strategy.strategy import Strategy
from planner.verify.worker import verify

MODEL, BATCH = "zoo:llama3-8b", 8
LENGTHS = {131072: (64, 256), 524288: (128, 256), 1048576: (256, 512)}
"""Tokens of a sequence -> numbers of devices."""
DEGREES = (2, 4, 8, 16, 32, 64)
WAYS: Mapping[str, tuple[Mapping[str, list[str]], tuple[int, ...]]] = {
    "all-gather": ({"s": ["sequence"]}, DEGREES),
    "ring": ({"ring": ["sequence"]}, DEGREES),
    "all-to-all": ({"g": ["sequence"]}, DEGREES[:3]),
    "product": ({"ring": ["sequence"], "g": ["tensor"]}, DEGREES),
}
"""Way -> how it splits attention, and into how many pieces "sequence" may cut (Llama-3 8B has eight
heads of keys)."""


@dataclass(frozen=True)
class Found:
    """What was planned: way, "" for what is chosen, and the plan, None where nothing fits."""

    tokens: int
    devices: int
    way: str
    strategy: Strategy | None


def pinned(way: str) -> Pins:
    """The pins of a way."""
    split, degrees = WAYS[way]
    pins = replace(from_table({"*Attention": {"split": dict(split)}}), mesh={"sequence": degrees})
    return replace(pins, mesh={**pins.mesh, "tensor": DEGREES[:3]}) if way == "product" else pins


def planned(tokens: int, devices: int, way: str) -> Found:
    """The best plan of a way."""
    try:
        strategy = planner.plan(
            f"{MODEL},seq={tokens}",
            devices=devices,
            batch=BATCH,
            hardware="h100-sxm",
            pins=pinned(way) if way else None,
            baselines=False,
        )
    except PlanError as e:
        if e.exit_code != 3:
            raise
        return Found(tokens, devices, way, None)
    return Found(tokens, devices, way, strategy)


HEADER = "| tokens | devices | way | mesh | step | tokens/s/device | memory |\n|---|---|---|---|---|---|---|"


def line(found: Found, fastest_s: float) -> str:
    """A row of the table. fastest_s: the step of what is chosen."""
    way, s = found.way or "chosen", found.strategy
    if s is None:
        return f"| {found.tokens:,} | {found.devices} | {way} | - | nothing fits | - | - |"
    step, memory = (s.costs[key] for key in ("step_time_s", "memory_per_device_bytes"))
    mesh = " x ".join(f"{a['name']} {a['size']}" for a in s.mesh)
    speed = found.tokens * BATCH / step / found.devices
    cells = (
        f"{found.tokens:,}",
        str(found.devices),
        way,
        mesh,
        f"{show_time(step)} ({step / fastest_s:.2f}x)",
        f"{speed:,.0f}",
        show_bytes(memory),
    )
    return f"| {' | '.join(cells)} |"


def compiled(found: Found) -> str:
    """What the compiler says of a plan."""
    strategy = found.strategy
    assert strategy is not None
    source = f"{MODEL},seq={found.tokens}"
    report = verify(strategy, source, target="gpu:h100", named=False, timeout_s=3600)
    clock, planned_bytes = report.clock, int(strategy.costs["memory_per_device_bytes"])
    assert clock is not None
    return (
        f"{found.tokens:,} tokens on {found.devices}: kernels {show_time(clock.compiled_s)} where"
        f" {show_time(clock.priced_s or 0)} were priced, exposed"
        f" {show_time(clock.collectives.exposed_s)} where"
        f" {show_time(clock.collectives.priced_exposed_s)} were, peak"
        f" {show_bytes(clock.peak_bytes)} where {show_bytes(planned_bytes)} were planned"
        f" ({clock.peak_bytes / planned_bytes - 1:+.1%})"
    )


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 where a pinned way is faster than what is chosen by more than half a per
    cent."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=0, help="sequences of this length alone")
    parser.add_argument("--compile", action="store_true", help="compile what is chosen")
    args = parser.parse_args(argv)
    print(HEADER)
    beaten = False
    for tokens, numbers in LENGTHS.items():
        for devices in numbers if args.tokens in (0, tokens) else ():
            chosen = planned(tokens, devices, "")
            step = chosen.strategy.costs["step_time_s"] if chosen.strategy else float("inf")
            print(line(chosen, step), flush=True)
            if args.compile and chosen.strategy:
                print(compiled(chosen), flush=True)
                continue
            for way in WAYS:
                other = planned(tokens, devices, way)
                print(line(other, step), flush=True)
                if other.strategy is not None:
                    beaten |= other.strategy.costs["step_time_s"] < step / 1.005
    return int(beaten)


if __name__ == "__main__":
    sys.exit(main())
