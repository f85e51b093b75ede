"""How sure a price is: the range around a step's price that holds four runs in five, from published
runs that were priced by constants which had not seen their source.

    measured / priced  lies between  1 - below  and  1 + above

Of emitted programs costmodels/runtimes/ranges.toml has the ends by kind of device and size of
model, how many runs and sources they are of, and how far those reach: more devices or parameters
than were ever measured, a device or a technique that no run had, make the range wider by a factor
that is a guess, and it says why. Profiles of frameworks have ends of their own
(Runtime.time_spread).

Two plans of one model on one machine share most of their error: what one rate is off, it is off for
both. How far apart two of them must be to be told apart is therefore another figure, `tie`, from
runs of one model on one machine that differ in nothing but their configuration.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from costmodels.runtimes import Runtime

FILE = Path(__file__).with_name("runtimes") / "ranges.toml"
SMALL = 1e9
"""Parameters below which a model is small: its steps wait for the host and for memory."""


@dataclass(frozen=True)
class Asked:
    """What a price was asked for. device, kind: of the machine; calibrated: its figures were
    measured by the user; parameters: of the model; sequence: tokens of one; stages: of a pipeline;
    experts: whether the model has a mixture of them."""

    device: str
    kind: str
    calibrated: bool
    devices: int
    parameters: int
    sequence: int
    stages: int
    experts: bool
    training: bool
    anchored: bool = False
    """Whether prices are scaled to a measured step of this model."""


@dataclass(frozen=True)
class TimeRange:
    """below, above: how far below and above its price a step may lie, as fractions of it, so that
    one run in ten is beyond either end. tie: by what fraction the step of another plan of the same
    model on the same machine must differ to be told apart. why: what makes the range wide.
    runs, sources: of how many published runs the ends are, by how many sources; 0 where they are a
    profile's own."""

    below: float
    above: float
    tie: float
    why: tuple[str, ...] = ()
    runs: int = 0
    sources: int = 0

    def ends(self, step_s: float) -> tuple[float, float]:
        """Seconds that the range of a step goes from and to."""
        return step_s * (1 - self.below), step_s * (1 + self.above)

    def tied(self, step_s: float) -> tuple[float, float]:
        """Seconds between which steps of other plans cannot be told from this one's."""
        return step_s / (1 + self.tie), step_s * (1 + self.tie)


def time_range(runtime: Runtime, asked: Asked) -> TimeRange:
    """The range of a step under a profile."""
    table = _table()
    tie = float(table["tie"]["fraction"])
    if asked.anchored:
        return TimeRange(table["anchor"]["below"], table["anchor"]["above"], tie)
    rows = table.get(asked.kind)
    if runtime.kernels is not None or rows is None:
        return TimeRange(*runtime.time_spread, tie)
    size = "small" if asked.parameters < SMALL else "large"
    row, why = rows.get("experts" if asked.experts and "experts" in rows else size), []
    if row is None:
        row = rows["large"]
        why.append(f"no published run on a {asked.kind.upper()} is of a model below a billion")
    why += [reason for reason, holds in _beyond(asked, rows) if holds]
    wider = float(table["beyond"]["factor"]) ** len(why)
    return TimeRange(
        1 - (1 - row["below"]) ** wider,
        (1 + row["above"]) ** wider - 1,
        tie,
        tuple(why),
        row["runs"],
        row["sources"],
    )


def _beyond(asked: Asked, rows: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Reasons why a price goes beyond the published runs of a kind of device."""
    reach = rows["reach"]
    return [
        (
            f"no run on {asked.device} is among the published runs of XLA programs compared",
            asked.device not in reach["devices_named"] and not asked.calibrated,
        ),
        (f"published runs go up to {reach['devices']:,} devices", asked.devices > reach["devices"]),
        (
            f"published runs go up to {reach['parameters'] / 1e9:,.0f} billion parameters",
            asked.parameters > reach["parameters"],
        ),
        (
            f"published runs go up to {reach['sequence']:,} tokens a sequence",
            asked.sequence > reach["sequence"],
        ),
        ("no published run of a large model has pipeline stages compiled by XLA", asked.stages > 1),
        (
            f"no published run of a mixture of experts on a {asked.kind.upper()} was compared",
            asked.experts and "experts" not in rows,
        ),
        ("published runs train: no step of inference was compared", not asked.training),
    ]


@cache
def _table() -> Mapping[str, Any]:
    with FILE.open("rb") as file:
        return tomllib.load(file)
