"""Time by part of emitted programs, compiled for chips that are not there: the plan's price beside
the roofline of the compiled kernels (docs/verify.md).

    python -m benchmarks.clock                      every case whose compiler is installed
    python -m benchmarks.clock --target gpu:h100    those of one target
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import planner
from costmodels.hardware.units import show_bytes, show_time
from planner.errors import PlanError
from planner.pins.pins import Pins
from planner.verify.clock import ATTENTION, COPIES, Clock
from planner.verify.worker import verify


@dataclass(frozen=True)
class Case:
    """A model with its sequence, and a plan of it for eight devices of a target."""

    model: str
    batch: int
    mesh: str
    hardware: str
    target: str

    @property
    def name(self) -> str:
        """As the tables call it."""
        short = self.model.removeprefix("zoo:")
        return f"{short}, batch {self.batch}, {self.mesh}=8, {self.target}"


def llama(layers: int, seq: int) -> str:
    """Llama-3 8B of so many layers."""
    return f"zoo:llama3-8b,layers={layers},seq={seq}"


H100, V5E, V5P = (
    ("h100-sxm", "gpu:h100"),
    ("v5e:2x4", "tpu:v5e:2x4"),
    ("v5p:2x2x2", "tpu:v5p:2x2x2"),
)
CASES = (
    Case(llama(2, 2048), 32, "data", *H100),
    Case(llama(2, 8192), 8, "data", *H100),
    Case(llama(2, 32768), 8, "data", *H100),
    Case(llama(4, 8192), 8, "tensor", *H100),
    Case("zoo:mixtral-8x7b,layers=2,seq=4096", 16, "expert", *H100),
    Case(llama(2, 8192), 8, "data", *V5E),
    Case(llama(2, 8192), 8, "data", *V5P),
)


def timed(case: Case) -> Clock:
    """The clock of a case. PlanError where its compiler is not installed."""
    strategy = planner.plan(
        case.model,
        devices=8,
        batch=case.batch,
        hardware=case.hardware,
        pins=Pins(mesh={case.mesh: (8,)}),
        baselines=False,
    )
    report = verify(strategy, case.model, target=case.target, named=False)
    assert report.clock is not None
    return report.clock


def rows(found: Sequence[tuple[Case, Clock]]) -> list[str]:
    """Two tables: time, and what it is made of."""
    lines = [
        "| program | kernels priced | compiled | apart | attention priced | compiled"
        " | loops and copies | moved |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, clock in found:
        part = {p.part: p for p in clock.parts}
        attention, copies = part[ATTENTION], part.get(COPIES)
        moved = sum(p.moved_bytes for p in clock.parts)
        cells = [
            case.name,
            _shown(clock.priced_s),
            show_time(clock.compiled_s),
            f"{clock.distance:+.1%}" if clock.distance is not None else "-",
            _shown(attention.priced_s),
            show_time(attention.compiled_s),
            show_time(copies.compiled_s) if copies else "-",
            f"{moved / 1e9:.1f} GB",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| program | collectives | on the links | exposed | whole | exposed as priced | peak"
        " | below the limit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, clock in found:
        sent = clock.collectives
        cells = [
            case.name,
            f"{sent.count}",
            show_time(sent.links_s),
            show_time(sent.exposed_s),
            f"{sent.whole}",
            show_time(sent.priced_exposed_s),
            show_bytes(clock.peak_bytes),
            show_bytes(clock.limit_bytes - clock.peak_bytes),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _shown(seconds: float | None) -> str:
    return "-" if seconds is None else show_time(seconds)


def main() -> None:
    """Print the tables, and every part of the case with the longest sequence."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="")
    wanted = parser.parse_args().target
    found = []
    for case in CASES:
        if case.target.startswith(wanted):
            try:
                found.append((case, timed(case)))
            except PlanError as e:
                print(f"{case.name}: {e.what}")
    print("\n".join(rows(found)))
    for case, clock in found:
        print(f"\n{case.name}\n" + "\n".join(clock.lines(100)))


if __name__ == "__main__":
    main()
