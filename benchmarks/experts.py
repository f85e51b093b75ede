"""Published configurations of experts beside the plans chosen for the same launcher.

    python -m benchmarks.experts [--only WORD] [--save FILE]

Each row of benchmarks.expert_rows is priced under its launcher (`--for`): what was published is
pinned, and what it leaves open (microbatches, recompute, the ZeRO stage) is searched, the expert's
configuration at its best. The chosen plan has nothing pinned and may be anything that the same
launcher can say. Where the launcher's space here lacks what was published (layers that do not
divide into the stages, say), the configuration is priced by the same runtime outside of that space,
then without virtual stages, and the row says which. CPU seconds are those of the free search.

Exit status 1 where a chosen plan does not fit or is more than half a percent slower than a
published one that fits (both within the machine's memory).
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import planner
from benchmarks.expert_rows import EXPERTS, Expert
from costmodels.hardware.units import show_bytes, show_time
from planner.errors import PlanError
from planner.pins.launcher_space import SPACES
from planner.strategy.strategy import Strategy

TIE = 5e-3
"""Plans this near each other are ties for the search."""
PATIENCE_S = 10.0
LONGER_S = {"DeepSeek-V3": 20.0}
"""CPU seconds that a free search may take; by name where it may take more."""
TOO_LARGE = 3
"""Exit code of a search in which nothing fits."""


@dataclass(frozen=True)
class Row:
    """What came of a published configuration. published: None where it does not fit, or cannot be
    said here; note: how it was priced, or why not; took_s: CPU seconds of the free search."""

    expert: Expert
    published: Strategy | None
    note: str
    chosen: Strategy
    took_s: float

    @property
    def ratio(self) -> float:
        """Step of the chosen plan over that of the published one; 0 where there is none."""
        if self.published is None:
            return 0.0
        return self.chosen.cost.step_time_s / self.published.cost.step_time_s

    @property
    def slower(self) -> bool:
        """Whether the chosen plan is dearer than a tie."""
        return self.ratio > 1 + TIE

    @property
    def slow_search(self) -> bool:
        """Whether the free search took longer than it may."""
        return self.took_s > LONGER_S.get(self.expert.name, PATIENCE_S)


def _plan(expert: Expert, **options: Any) -> Strategy:
    """A plan of an expert's model, machine, batch and precision."""
    return planner.plan(
        expert.spec,
        devices=expert.devices,
        hardware=expert.hardware,
        batch=expert.batch,
        precision=expert.precision,
        remedies=False,
        **options,
    )


def _ways(expert: Expert) -> Iterator[tuple[str, dict[str, str]]]:
    """How a published configuration may be said, the nearest to its launcher first: a note and
    options of planner.plan."""
    yield "", {"launcher": expert.launcher, "pins": expert.pins}
    columns = ",sp=on" if "tp=" in expert.pins else ""
    outside = {"runtime": SPACES[expert.launcher].runtime, "pins": expert.pins + columns}
    yield "outside --for", outside
    if "vpp=" in expert.pins:
        pins = re.sub(r"vpp=\d+", "vpp=1", outside["pins"])
        yield "outside --for, not interleaved", outside | {"pins": pins}


def published(expert: Expert) -> tuple[Strategy | None, str]:
    """The expert's configuration at its best, and a note; None where it does not fit, or cannot be
    said."""
    note, refused = "", ""
    for note, options in _ways(expert):
        try:
            return _plan(expert, baselines=False, **options), note
        except PlanError as e:
            if e.exit_code == TOO_LARGE:
                return None, f"{note}{', ' if note else ''}too large"
            refused = f"not said: {e.code}"
    return None, refused


def row_of(expert: Expert) -> Row:
    """One row."""
    pinned, note = published(expert)
    began = time.process_time()
    chosen = _plan(expert, launcher=expert.launcher)
    return Row(expert, pinned, note, chosen, time.process_time() - began)


HEAD = (
    f"{'model':17s} {'source':11s} {'hardware':12s} {'devices':>7s} {'batch':>6s}"
    f"  {'published':42s} {'step':>8s} {'memory':>9s}   {'chosen':>8s} {'memory':>9s}"
    f" {'ratio':>6s}  {'CPU s':>6s}"
)


def _figures(found: Strategy | None) -> str:
    if found is None:
        return f"{'':8s} {'':9s}"
    memory = show_bytes(found.cost.memory_per_device_bytes)
    return f"{show_time(found.cost.step_time_s):>8s} {memory:>9s}"


def show(row: Row) -> str:
    """A line of the table."""
    e = row.expert
    mesh = " x ".join(f"{a['name']} {a['size']}" for a in row.chosen.mesh)
    marks = [row.note, "SLOWER" * row.slower, "long search" * row.slow_search]
    words = "; ".join(m for m in marks if m)
    return (
        f"{e.name:17s} {e.source:11s} {e.hardware:12s} {e.devices:7,d} {e.batch:6,d}"
        f"  {e.pins:42s} {_figures(row.published)}   {_figures(row.chosen)}"
        f" {f'{row.ratio:.3f}' if row.ratio else '':>6s}  {row.took_s:6.1f}  {mesh}"
        f"{f'   [{words}]' if words else ''}"
    )


def summary(rows: list[Row]) -> str:
    """What the rows say together."""
    worse = sum(r.slower for r in rows)
    fit, inside = (sum(r.published is not None for r in rows), sum(not r.note for r in rows))
    return (
        f"{'MISSED' if worse else 'kept'}: {worse} of {len(rows)} chosen plans slower than the"
        f" published configuration; {fit} of those fit, {inside} within the launcher's space;"
        f" {sum(r.slow_search for r in rows)} searches too long"
    )


def main() -> int:
    """Price every row and print the table."""
    parser = argparse.ArgumentParser(
        description="Published configurations beside the plans chosen here."
    )
    parser.add_argument("--only", default="", help="rows whose name, source or launcher has this")
    parser.add_argument("--save", type=Path, help="also write the table here")
    args = parser.parse_args()
    lines, rows = [HEAD], list[Row]()
    print(HEAD, flush=True)
    for e in EXPERTS:
        if args.only.lower() not in f"{e.name} {e.source} {e.launcher}".lower():
            continue
        rows.append(row_of(e))
        lines.append(show(rows[-1]))
        print(lines[-1], flush=True)
    lines.append(summary(rows))
    print(lines[-1])
    if args.save:
        args.save.write_text("\n".join(lines) + "\n")
    return int(any(r.slower for r in rows))


if __name__ == "__main__":
    sys.exit(main())
