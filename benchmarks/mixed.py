"""Two kinds of device in one job, by price: unequal shares beside equal ones, beside the faster kind
alone, and beside the sum of both kinds' speeds.

    python -m benchmarks.mixed [--only llama]

A row is a model at a batch on 8 or 64 of each kind. Speed is samples a second of the best plan; the
mark is 95 % of the sum of what each kind reaches alone with the same batch, at one batch of each
model at least (not every batch is dealt out well in whole microbatches; the planner names one that
is), and never less than the faster kind alone. Exits with 1 where either is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import planner
from costmodels.hardware.units import show_time
from planner.strategy.strategy import Strategy

MARK = 0.95


@dataclass(frozen=True)
class Row:
    """groups: (devices, device) of each kind, the faster first."""

    source: str
    batch: int
    groups: tuple[tuple[int, str], tuple[int, str]]

    @property
    def machine(self) -> str:
        """As `--hardware` takes it."""
        return "+".join(f"{n}x{name}" for n, name in self.groups)


H100, A100 = "h100-sxm", "a100-80gb"
ROWS = (
    Row("zoo:llama3-8b", 512, ((8, H100), (8, A100))),
    Row("zoo:llama3-8b", 2048, ((64, H100), (64, A100))),
    Row("zoo:gpt2-xl", 512, ((8, H100), (8, A100))),
    Row("zoo:gpt2-xl", 896, ((8, H100), (8, A100))),
    Row("zoo:bert-large", 4096, ((8, H100), (8, A100))),
    Row("zoo:bert-large", 16384, ((8, H100), (8, A100))),
    Row("zoo:vit-l16", 4096, ((8, H100), (8, A100))),
    Row("zoo:vit-l16", 16384, ((8, H100), (8, A100))),
    Row("zoo:mixtral-8x7b,layers=8", 512, ((8, H100), (8, A100))),
    Row("zoo:mixtral-8x7b,layers=8", 2048, ((8, H100), (8, A100))),
    Row("zoo:llama3-8b", 768, ((16, H100), (8, A100))),
    Row("zoo:llama3-8b", 512, ((8, "h200-sxm"), (8, H100))),
    Row("zoo:gpt2-small", 8, ((8, H100), (8, A100))),
)


@dataclass(frozen=True)
class Measured:
    """Seconds of a step: in shares by speed or as the planner chose, in equal shares, of each kind
    alone."""

    together: Strategy
    even_s: float
    alone_s: tuple[float, float]

    @property
    def step_s(self) -> float:
        """Of the plan that was chosen."""
        return float(self.together.costs["step_time_s"])

    @property
    def of_sum(self) -> float:
        """Speed over the sum of both kinds' speeds."""
        return (1 / self.step_s) / sum(1 / s for s in self.alone_s)

    @property
    def shares(self) -> str:
        """Microbatches by island, or which devices run alone."""
        turns = self.together.techniques.get("islands")
        if turns:
            return "+".join(map(str, turns))
        return f"{self.together.topology['devices']} x {self.together.topology['device']} alone"


def measure(row: Row) -> Measured:
    """Plans of a row."""
    together = planner.plan(row.source, hardware=row.machine, batch=row.batch)
    even = together.baselines.get("even_shares")
    alone = [
        planner.plan(row.source, hardware=name, devices=n, batch=row.batch, baselines=False)
        for n, name in row.groups
    ]
    fast, slow = (float(s.costs["step_time_s"]) for s in alone)
    even_s = float(even["step_time_s"]) if even else float("nan")
    return Measured(together, even_s, (fast, slow))


def line(row: Row, m: Measured) -> str:
    """A row of the table."""
    fast, slow = m.alone_s
    even = show_time(m.even_s) if m.even_s == m.even_s else "-"
    busy = " / ".join(
        f"{100 * (1 - r['busy_s'] / m.step_s):.1f} %" for r in m.together.costs.get("islands", ())
    )
    return (
        f"| {row.source.removeprefix('zoo:')} | {row.batch} | {row.machine} | {show_time(fast)} |"
        f" {show_time(slow)} | {even} | {show_time(m.step_s)} | {m.shares} | {busy or '-'} |"
        f" {100 * m.of_sum:.1f} % |"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 where a row misses the mark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose model has this in its name")
    args = parser.parse_args(argv)
    print(
        "| model | batch | machine | faster alone | slower alone | equal shares | step |"
        " microbatches | waits | of the sum |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    below, reached = [], dict[str, bool]()
    for row in ROWS:
        if args.only not in row.source:
            continue
        m = measure(row)
        print(line(row, m), flush=True)
        if m.step_s > min(m.alone_s) * 1.001:
            below.append(f"{row.source} on {row.machine} is slower than the faster kind alone")
        if m.together.techniques.get("islands"):
            reached[row.source] = reached.get(row.source, False) or m.of_sum >= MARK
    below += [f"{source} reaches the mark at no batch" for source, ok in reached.items() if not ok]
    for text in below:
        print(f"missed: {text}", file=sys.stderr)
    return bool(below)


if __name__ == "__main__":
    sys.exit(main())
