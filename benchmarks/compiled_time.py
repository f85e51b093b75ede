"""Emitted programs compiled for chips that are not there: the price of each beside the roofline of
its compiled kernels, part by part, and its peak beside the planned one (docs/verify.md).

    python -m benchmarks.compiled_time                                 all whose compiler is there
    python -m benchmarks.compiled_time --target gpu:h100,tpu:v5p       those of these targets
    python -m benchmarks.compiled_time --only llama --parts            some, with their parts

Marks: price over roofline within 0.9 to 1.1 for the whole step (kernels and what waits for
collectives), within 0.8 to 1.25 for each part that takes above 3 % of it; compiled peak within 5 %
of the planned one on GPUs, 10 % on TPUs. Sums of gradients over microbatches are priced with the
optimizer and compiled among copies, so those two are one part here. Exit status 1 where a mark is
missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import planner
from costmodels.hardware.units import show_bytes, show_time
from planner.errors import PlanError
from planner.pins.pins import from_table, parse_pins
from planner.verify.clock import COPIES, OPTIMIZER, Clock
from planner.verify.worker import verify

WHOLE, PART, LEAST_PART = (0.9, 1.1), (0.8, 1.25), 0.03
PEAK = {"gpu": 0.05, "tpu": 0.1}
TOGETHER = f"{COPIES}, {OPTIMIZER}"
RING = {"*Attention": {"split": {"ring": ["sequence"]}}}
HEADS = {"*Attention": {"split": {"g": ["sequence"]}}}
"""All-to-all: heads are cut over the axis that cuts the sequence elsewhere."""


@dataclass(frozen=True)
class Case:
    """A plan to compile. pins: of the mesh and techniques, "" for what is chosen."""

    model: str
    devices: int
    batch: int
    pins: str
    hardware: str = "h100-sxm"
    target: str = "gpu:h100"
    workload: str = "train"
    nodes: Mapping[str, object] | None = None

    @property
    def name(self) -> str:
        """As the table calls it."""
        kind = {"train": "", "infer": ", inference"}[self.workload]
        special = "" if self.nodes is None else ", ring" if self.nodes is RING else ", all-to-all"
        return (
            f"{self.model}, {self.devices} devices, batch {self.batch}{kind},"
            f" {self.pins or 'chosen'}{special}, {self.target}"
        )


def llama(layers: int, seq: int) -> str:
    """Llama-3 8B of so many layers."""
    return f"llama3-8b,layers={layers},seq={seq}"


V5E, V5P = ("v5e:2x4", "tpu:v5e:2x4"), ("v5p:2x2x2", "tpu:v5p:2x2x2")
V6E = ("v6e:2x4", "tpu:v6e:2x4")
CASES = (
    # Llama-3 8B as documentation plans it, and at longer sequences.
    Case("llama3-8b", 64, 512, ""),
    Case("llama3-8b,seq=32768", 64, 128, ""),
    Case("llama3-8b,seq=65536", 64, 64, ""),
    Case("llama3-8b,seq=131072", 64, 64, ""),
    Case("gpt2-xl", 16, 512, ""),
    # Dense decoders under one technique each.
    Case(llama(2, 2048), 8, 32, "dp=8"),
    Case(llama(2, 8192), 8, 8, "dp=8"),
    Case(llama(2, 32768), 8, 8, "dp=8"),
    Case(llama(4, 8192), 8, 16, "dp=8,micro=2"),
    Case(llama(4, 8192), 8, 8, "dp=8,zero=3"),
    Case(llama(4, 8192), 8, 8, "dp=8,zero=3,recompute=block"),
    Case(llama(4, 8192), 8, 8, "tp=8"),
    Case(llama(4, 8192), 8, 8, "dp=2,tp=4"),
    Case(llama(4, 8192), 8, 8, "dp=4,tp=2,recompute=block-keep"),
    Case(llama(8, 4096), 8, 32, "pp=2,dp=4,micro=4"),
    Case(llama(8, 4096), 8, 32, "pp=4,dp=2,micro=8"),
    Case(llama(2, 32768), 8, 4, "sequence=8,micro=1", nodes=RING),
    Case(llama(2, 32768), 8, 4, "sequence=8,micro=1", nodes=HEADS),
    Case(llama(4, 131072), 8, 1, "sequence=8,micro=1,recompute=block", nodes=RING),
    Case("llama3-70b,layers=2,seq=8192", 8, 8, "dp=8,zero=3"),
    Case("mistral-7b,layers=4,seq=8192", 8, 8, "dp=8"),
    Case("gpt2-small", 8, 64, ""),
    Case("gpt2-small", 8, 64, "dp=8,recompute=none"),
    Case("gpt2-medium", 8, 64, "dp=4,tp=2"),
    Case("gpt3-175b,layers=2", 8, 8, "tp=8"),
    # Experts, encoders, encoder and decoder, images, state spaces.
    Case("mixtral-8x7b,layers=2,seq=4096", 8, 16, "expert=8"),
    Case("mixtral-8x7b,layers=2,seq=4096", 8, 16, ""),
    Case("mixtral-8x7b,layers=4,seq=4096", 8, 16, "dp=8,zero=3,recompute=block"),
    Case("deepseek-moe-16b,layers=4,seq=4096", 8, 16, "expert=8"),
    Case("bert-large", 8, 256, "dp=8"),
    Case("t5-large", 8, 64, "dp=8"),
    Case("t5-base", 8, 64, "dp=4,tp=2"),
    Case("vit-l16", 8, 256, "dp=8"),
    Case("vit-h14", 8, 128, "dp=8,zero=3"),
    Case("dit-xl-2", 8, 128, "dp=8"),
    Case("unet-sd15", 8, 32, "dp=8"),
    Case("resnet50", 8, 1024, "dp=8"),
    Case("mamba2-130m", 8, 64, "dp=8"),
    # Forward alone: a prefill's work.
    Case(llama(4, 2048), 8, 64, "tp=8", workload="infer"),
    Case(llama(4, 8192), 8, 16, "dp=8", workload="infer"),
    Case("mixtral-8x7b,layers=2,seq=4096", 8, 16, "expert=8", workload="infer"),
    Case("bert-large", 8, 256, "dp=8", workload="infer"),
    Case("llama3-8b", 8, 16, "tp=8", workload="infer"),
    Case(llama(4, 32768), 8, 8, "sequence=8", workload="infer"),
    Case("gpt2-xl", 8, 32, "dp=8", workload="infer"),
    Case("gpt2-small", 8, 512, "dp=4,tp=2", workload="infer"),
    Case("deepseek-moe-16b,layers=4,seq=4096", 8, 16, "expert=8", workload="infer"),
    Case("t5-large", 8, 64, "dp=8", workload="infer"),
    Case("vit-l16", 8, 256, "dp=8", workload="infer"),
    Case("dit-xl-2", 8, 128, "dp=8", workload="infer"),
    Case("unet-sd15", 8, 32, "dp=8", workload="infer"),
    Case("resnet50", 8, 1024, "dp=8", workload="infer"),
    Case("mamba2-130m", 8, 64, "dp=8", workload="infer"),
    # TPUs.
    Case(llama(2, 8192), 8, 8, "dp=8", *V5E),
    Case(llama(2, 8192), 8, 8, "dp=8", *V5P),
    Case(llama(4, 8192), 8, 8, "dp=8,zero=3", *V5P),
    Case(llama(4, 8192), 8, 8, "tp=8", *V5P),
    Case(llama(2, 32768), 8, 4, "sequence=8,micro=1", *V5P, nodes=RING),
    Case("gpt2-small", 8, 64, "dp=8", *V5P),
    Case("mixtral-8x7b,layers=2,seq=4096", 8, 16, "dp=8,zero=3", *V5P),
    Case("mixtral-8x7b,layers=2,seq=4096", 8, 16, "dp=8,zero=3", *V6E),
    Case("deepseek-moe-16b,layers=4,seq=4096", 8, 16, "dp=8,zero=3", *V5P),
    Case("deepseek-moe-16b,layers=4,seq=4096", 8, 16, "dp=8,zero=3", *V6E),
    Case("deepseek-moe-16b,layers=4,seq=4096", 8, 16, "dp=8", *V5P, workload="infer"),
)


@dataclass(frozen=True)
class Row:
    """What was found of a case. planned_bytes: the peak as planned."""

    case: Case
    clock: Clock
    planned_bytes: int

    @property
    def priced_s(self) -> float | None:
        """The step: kernels, and what waits."""
        kernels = self.clock.priced_s
        return None if kernels is None else kernels + self.clock.collectives.priced_exposed_s

    @property
    def compiled_s(self) -> float:
        """The same of the compiled program."""
        return self.clock.compiled_s + self.clock.collectives.exposed_s

    @property
    def ratio(self) -> float | None:
        """Price over roofline of the whole."""
        return None if self.priced_s is None else self.priced_s / self.compiled_s

    @property
    def parts(self) -> dict[str, float]:
        """Price over roofline of every part that takes enough of the step."""
        sums: dict[str, tuple[float, float]] = {}
        for p in self.clock.parts:
            if p.priced_s is None:
                return {}
            name = TOGETHER if p.part in (COPIES, OPTIMIZER) else p.part
            priced, compiled = sums.get(name, (0.0, 0.0))
            sums[name] = priced + p.priced_s, compiled + p.compiled_s
        return {
            name: priced / compiled if compiled else float("inf")
            for name, (priced, compiled) in sums.items()
            if max(priced, compiled) > LEAST_PART * self.compiled_s
        }

    @property
    def peak(self) -> float:
        """Compiled over planned peak."""
        return self.clock.peak_bytes / self.planned_bytes

    @property
    def missed(self) -> list[str]:
        """The marks that it misses, a word each."""
        ratio, most = self.ratio, PEAK[self.case.target.partition(":")[0]]
        return [
            *(["whole"] if ratio is not None and not WHOLE[0] <= ratio <= WHOLE[1] else []),
            *(p for p, r in self.parts.items() if not PART[0] <= r <= PART[1]),
            *(["peak"] if abs(self.peak - 1) > most else []),
        ]


def timed(case: Case) -> Row:
    """A case planned and compiled. PlanError where its compiler is not installed."""
    pins = parse_pins(case.pins)
    if case.nodes:
        pins = replace(pins, nodes=from_table(dict(case.nodes)).nodes)
    strategy = planner.plan(
        f"zoo:{case.model}",
        devices=case.devices,
        batch=case.batch,
        hardware=case.hardware,
        workload=case.workload,
        pins=pins,
        baselines=not case.pins,  # what is chosen is what the plain command chooses
    )
    report = verify(strategy, f"zoo:{case.model}", target=case.target, named=False)
    assert report.clock is not None
    return Row(case, report.clock, int(strategy.costs["memory_per_device_bytes"]))


HEADER = (
    "| program | priced | compiled | price / roofline | parts beyond 0.8 to 1.25 | exposed priced"
    " | compiled | peak planned | compiled |\n|---|---|---|---|---|---|---|---|---|"
)


def line(row: Row) -> str:
    """A row of the table."""
    beyond = [f"{p} {r:.2f}" for p, r in row.parts.items() if not PART[0] <= r <= PART[1]]
    sent = row.clock.collectives
    cells = [
        row.case.name,
        "-" if row.priced_s is None else show_time(row.priced_s),
        show_time(row.compiled_s),
        "-" if row.ratio is None else f"{row.ratio:.2f}",
        ", ".join(beyond) or "none",
        show_time(sent.priced_exposed_s),
        show_time(sent.exposed_s),
        show_bytes(row.planned_bytes),
        f"{show_bytes(row.clock.peak_bytes)} ({row.peak - 1:+.0%})",
    ]
    return f"| {' | '.join(cells)} |"


def marks(rows: Sequence[Row]) -> list[str]:
    """How many rows keep each mark."""
    told = [r for r in rows if r.ratio is not None]
    whole = sum("whole" not in r.missed for r in told)
    parts = [p for r in told for p in r.parts.values()]
    within = sum(PART[0] <= p <= PART[1] for p in parts)
    low = min((r.ratio for r in told if r.ratio is not None), default=1.0)
    return [
        f"{whole} of {len(told)} programs within {WHOLE[0]} to {WHOLE[1]} of their roofline;"
        f" lowest price {low:.2f}",
        f"{within} of {len(parts)} parts above 3 % within {PART[0]} to {PART[1]}",
        f"{sum('peak' not in r.missed for r in rows)} of {len(rows)} peaks within their mark",
    ]


def main() -> int:
    """Print the table as it grows, then how many marks are kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="", help="targets, separated by commas")
    parser.add_argument("--only", default="", help="programs whose name has this word")
    parser.add_argument("--parts", action="store_true", help="every part of every program")
    options = parser.parse_args()
    rows = list[Row]()
    print(HEADER)
    for case in CASES:
        if options.only in case.name and any(
            case.target.startswith(t) for t in options.target.split(",")
        ):
            try:
                rows.append(timed(case))
            except PlanError as e:
                print(f"| {case.name} | {e.code}: {e.what} |", flush=True)
            else:
                print(line(rows[-1]), flush=True)
    print("\n" + "\n".join(marks(rows)))
    for row in rows if options.parts else ():
        print(f"\n{row.case.name}\n" + "\n".join(row.clock.lines(100)))
    return int(any(r.missed for r in rows))


if __name__ == "__main__":
    sys.exit(main())
