"""One model planned at many points: devices, hardware, dims and batch; and what a whole training
run costs at each.

    days          work / (work per second and device * devices)
    device-hours  hours * devices;   cost = device-hours * price;   energy = device-hours * power of
                  the devices alone, at their limit

Rows and the answers that are read off them; planner.whatif.sweep plans them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from costmodels import Device
from planner.errors import PlanError
from planner.strategy.strategy import Strategy

DAY_S = 86_400


@dataclass(frozen=True)
class Point:
    """Where to plan. hardware: a device, slice, machine or file; devices None: the fewest that fit;
    batch None: the model's own default, "max": the largest that fits at once, without gradient
    accumulation."""

    hardware: str
    devices: int | None
    dims: tuple[tuple[str, int], ...] = ()
    batch: int | str | None = None
    tokens_per_step: int | None = None


@dataclass(frozen=True)
class Row:
    """A plan at a point (its graph dropped), or why there is none. device: None where the hardware
    is not known or does not come in that number."""

    point: Point
    devices: int | None
    strategy: Strategy | None = None
    error: PlanError | None = None
    device: Device | None = None

    @property
    def per_s(self) -> float:
        """Tokens (or samples) a second of the whole machine."""
        assert self.strategy is not None and self.devices is not None
        return float(self.strategy.costs["tokens_per_s_per_device"]) * self.devices

    @property
    def tight(self) -> bool:
        """Whether the plan fits by its price alone."""
        return self.strategy is not None and self.strategy.costs["fit"] == "tight"

    @property
    def too_large(self) -> bool:
        """Whether it was memory that stood in the way."""
        return self.error is not None and self.error.code == "P021"


@dataclass(frozen=True)
class TrainingRun:
    """A training run at a point; None where the price or the power is not known."""

    days: float
    device_hours: float
    usd: float | None
    kwh: float | None
    usd_per_h: float | None


def run_of(row: Row, work: float, prices: Mapping[str, float]) -> TrainingRun:
    """What it takes to get through `work` tokens (or samples). prices: USD per device-hour by the
    point's hardware, "" for all; else the device's own."""
    assert row.device is not None and row.devices is not None
    hours = work / row.per_s / 3600
    price = prices.get(row.point.hardware, prices.get("", row.device.usd_per_h))
    watts = row.device.watts
    return TrainingRun(
        hours * 3600 / DAY_S,
        hours * row.devices,
        None if price is None else hours * row.devices * price,
        None if watts is None else hours * row.devices * watts / 1000,
        price,
    )


def best_run(
    runs: Sequence[TrainingRun | None],
    days: float | None,
    usd: float | None,
    tight: Sequence[bool] = (),
) -> int | None:
    """The row that keeps the deadline most cheaply; without a deadline the one that is done first
    within the budget. None when none keeps both.

    tight: of each row whether memory is; such rows come after those that fit with room. Rows
    without a price keep no budget and come last among those that keep the deadline.
    """
    fits = [
        (i, r)
        for i, r in enumerate(runs)
        if r is not None
        and (days is None or r.days <= days)
        and (usd is None or (r.usd is not None and r.usd <= usd))
    ]
    unpriced = float("inf")

    def key(item: tuple[int, TrainingRun]) -> tuple[float, ...]:
        i, r = item
        cost, risk = unpriced if r.usd is None else r.usd, i < len(tight) and tight[i]
        return (
            (risk, cost, r.device_hours, r.days, i) if days is not None else (risk, r.days, cost, i)
        )

    return min(fits, key=key)[0] if fits else None


def fewest(rows: Iterable[Row]) -> dict[tuple[str, tuple[tuple[str, int], ...]], int]:
    """Per hardware and dims the fewest devices of a row that fits."""
    counts: dict[tuple[str, tuple[tuple[str, int], ...]], int] = {}
    for row in rows:
        if row.strategy is not None and row.devices is not None:
            key = row.point.hardware, row.point.dims
            counts[key] = min(row.devices, counts.get(key, row.devices))
    return counts


def first_too_large(rows: Sequence[Row]) -> Row | None:
    """The first row that memory stops after one of the same hardware fitted, on at most as many
    devices or with all else the same: fewer devices and a larger batch than what fitted do not tell
    which of the two is too much."""
    fitted: dict[str, list[Row]] = {}
    for row in rows:
        if row.strategy is not None:
            fitted.setdefault(row.point.hardware, []).append(row)
        elif row.too_large and any(_tells(was, row) for was in fitted.get(row.point.hardware, ())):
            return row
    return None


def _tells(was: Row, row: Row) -> bool:
    return (was.devices or 0) <= (row.devices or 0) or (was.point.dims, was.point.batch) == (
        row.point.dims,
        row.point.batch,
    )


def front(rows: Sequence[Row]) -> list[Row]:
    """The rows that no other betters in both step time and memory, the fastest first."""
    front: list[Row] = []
    for row in sorted(
        (r for r in rows if r.strategy is not None), key=lambda r: (step_s(r), bytes_of(r))
    ):
        if not front or bytes_of(row) < bytes_of(front[-1]):
            front.append(row)
    return front


def step_s(row: Row) -> float:
    """Seconds of a step of a row with a plan."""
    assert row.strategy is not None
    return float(row.strategy.costs["step_time_s"])


def bytes_of(row: Row) -> int:
    """Bytes of a device's memory that a row's plan takes."""
    assert row.strategy is not None
    return int(row.strategy.costs["memory_per_device_bytes"])
