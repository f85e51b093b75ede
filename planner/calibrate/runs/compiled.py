"""What XLA's programs reach of devices, learned from published runs of many devices at once: first
of a kind of device (GPUs, TPUs), from all its runs; from there of each device, from its own.

A device that nobody published a run of takes what its kind reaches. Many rows of one model by one
source tell little more than a few, and count as a few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from costmodels.runtimes import Rates
from planner.calibrate.runs import xla
from planner.calibrate.runs.fit import Prepared, fitted

START = Rates(stragglers=0.005)
"""Before any run is looked at: all of what device files say, and steps that grow by half a per cent
for each doubling of the devices."""
WIDTHS = {
    "matmul": 0.04,
    "memory": 0.08,
    "attention": 0.1,
    "inner": 0.15,
    "outer": 0.25,
    "stragglers": 0.5,
}
"""How far (in log) rates may be from device files at no great cost. Narrow, as wide ones told
sources that were left out worse."""
LEAST_PARAMETERS = 1e9
"""Rates are learned from models from here on: smaller ones wait for their hosts."""
RELEASE = "2024"
"""XLA's releases for GPUs before this year made the same programs up to 1.4 times slower (the same
rows of JAX-Toolbox and of T5X, by date), and tell little of today's."""
FEW = 3.0
"""So many rows of one model, sequence length and source count in full."""


def tells(row: Prepared) -> bool:
    """Whether rates are learned from a row: a large dense model's, of a program like the emitted
    ones."""
    facts = row.case.row
    old = str(facts.get("date") or "9") < RELEASE and row.case.topology.device.kind == "gpu"
    dense = row.parameters >= LEAST_PARAMETERS and not xla.mixture(facts)
    return dense and facts.get("runtime") != "torch_xla" and not old


def learned(rows: Sequence[Prepared]) -> dict[str, Rates]:
    """Kind of device, and device -> what programs reach of it."""
    rates: dict[str, Rates] = {}
    large = [row for row in rows if tells(row) and row.case.measured_s]
    alike = Counter(_model(row) for row in large)

    def counts(row: Prepared) -> float:
        return min(1.0, FEW / alike[_model(row)])

    for kind in dict.fromkeys(row.case.topology.device.kind for row in large):
        of_kind = [row for row in large if row.case.topology.device.kind == kind]
        rates[kind] = fitted(of_kind, START, counts, WIDTHS)
        for name in dict.fromkeys(row.case.topology.device.name for row in of_kind):
            of_device = [row for row in of_kind if row.case.topology.device.name == name]
            rates[name] = fitted(of_device, rates[kind], counts, WIDTHS)
    return rates


def rates_of(row: Prepared, learned_rates: dict[str, Rates]) -> Rates:
    """The rates of a row's device among those learned."""
    device = row.case.topology.device
    return learned_rates.get(device.name, learned_rates.get(device.kind, START))


def sources_left_out(rows: Sequence[Prepared]) -> list[float]:
    """Per row the seconds of a step by rates that have not seen its source."""
    seconds = [0.0] * len(rows)
    for source in dict.fromkeys(row.case.row["source"] for row in rows):
        rates = learned([row for row in rows if row.case.row["source"] != source])
        for k, row in enumerate(rows):
            if row.case.row["source"] == source:
                seconds[k] = row.step_s(rates_of(row, rates))
    return seconds


def _model(row: Prepared) -> tuple[Any, ...]:
    return tuple(row.case.row[key] for key in ("source", "model", "seq"))
