"""Plans the points of a sweep (planner.whatif.sweep_rows), by whatever search each takes: for the
largest batch, the fewest devices, the front of time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from costmodels.hardware.describe import topology_table
from planner.errors import PlanError
from planner.machine.group_names import named_groups
from planner.machine.topology import device
from planner.machine.topology_file import described, is_machine
from planner.machine.tpu_slices import named_slice, part_of_host, slice_shapes
from planner.strategy.strategy import Strategy
from planner.whatif.sweep_rows import Point, Row, bytes_of, front

MOST_DEVICES = 65_536
MOST_DOUBLINGS = 14
FRONT = 4
"""Memory limits tried between the smallest plan and the fastest."""
Watch = Callable[[str], AbstractContextManager[Any]]


@dataclass
class Sweeper:
    """Plans a model at points. common: keyword arguments of `planner.plan` that all share; watch:
    wraps every plan with a line for people; plan: `planner.plan`."""

    source: str
    common: Mapping[str, Any]
    watch: Watch
    plan: Callable[..., Strategy]
    scaling: str = ""
    _helped: set[str] = field(default_factory=set)
    _started: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float | None:
        """Seconds that are left of the time for all points together; None without a limit."""
        limit = self.common.get("time_limit_s")
        return None if limit is None else max(0.0, limit - (time.monotonic() - self._started))

    def row(self, point: Point) -> Row:
        """The row of a point, by whatever search it takes. KeyboardInterrupt when the user stops
        it."""
        try:
            if point.devices is None and not _slice_named(point.hardware):
                return self._fewest(point)
            return self._largest(point) if point.batch == "max" else self._plan(point)
        except PlanError as e:  # hardware that is not known, or not in that number
            return Row(point, point.devices, error=e)

    def front(self, point: Point) -> list[Row]:
        """Plans of a point on the front of step time and memory."""
        fast = self._plan(point, objective="step")
        if fast.strategy is None:
            return [fast]
        small = self._plan(point, objective="memory")
        assert small.strategy is not None
        low, high = bytes_of(small), bytes_of(fast)
        limits = (
            [round(low * (high / low) ** (k / (FRONT + 1))) for k in range(1, FRONT + 1)]
            if high > low
            else []
        )
        return front(
            [
                fast,
                small,
                *(
                    self._plan(point, objective="step", memory_limit_bytes=limit, remedies=False)
                    for limit in limits
                ),
            ]
        )

    def _plan(self, point: Point, *, remedies: bool | None = None, **more_options: Any) -> Row:
        """One plan. remedies: whether to look for what would help where nothing fits; by default
        once for each hardware."""
        devices: int | None = point.devices
        chip = None
        try:
            topology = described(point.hardware, devices)
            devices, chip = topology.devices, topology.device
            where = (
                {"topology": point.hardware}
                if is_machine(point.hardware)
                else {"hardware": point.hardware}
            )
            source, dims = sized(self.source, {**self.common["dims"], **dict(point.dims)})
            sizes = {"batch": point.batch, "tokens_per_step": point.tokens_per_step, "dims": dims}
            helping = point.hardware not in self._helped if remedies is None else remedies
            with self.watch(_said(point, devices)) as line:
                options = {
                    **self.common,
                    "time_limit_s": self.left_s,
                    "hardware": None,
                    "topology": None,
                    **where,
                    "devices": devices,
                    **sizes,
                    **more_options,
                }
                strategy = self.plan(source, progress=line.report, remedies=helping, **options)
        except PlanError as e:
            if e.code == "P026" and line.interrupted:
                raise KeyboardInterrupt from e
            if e.code == "P021" and remedies is None:
                self._helped.add(point.hardware)
            return Row(point, devices, error=e, device=chip)
        if strategy.solver.get("stopped") == "interrupt":
            raise KeyboardInterrupt
        return Row(point, devices, replace(strategy, graph=None), device=chip)

    def _largest(self, point: Point) -> Row:
        """The largest batch that fits in one go: doubled from one row a device until it does not,
        then halved towards that in steps of a row a device."""
        assert point.devices is not None or _slice_named(point.hardware)
        n = described(point.hardware, point.devices).devices
        once = self._once()

        def attempt(batch: int) -> Row:
            return self._plan(replace(point, batch=batch), remedies=False, **once)

        good, batch = attempt(n), n
        while not self._fits(good) and batch > 1 and (good.strategy is not None or good.too_large):
            batch //= 2
            good = attempt(batch)
        if not self._fits(good):
            return self._plan(replace(point, batch=batch), **once)
        low, high = batch, 0
        while batch >= n and not high and batch < n << MOST_DOUBLINGS:
            batch *= 2
            row = attempt(batch)
            good, low, high = (row, batch, 0) if self._fits(row) else (good, low, batch)
        for _ in range(2):
            middle = (low + high) // 2 // n * n
            if high and low < middle < high:
                row = attempt(middle)
                good, low, high = (row, middle, high) if self._fits(row) else (good, low, middle)
        return good

    def _fits(self, row: Row) -> bool:
        """Whether a point has a plan that fits with room: on its devices alone, unless the user
        says what waits in the host's memory. With enough sent there nearly all does."""
        from planner.pins.pins import Pins, parse_pins

        common_pins = self.common["pins"]
        pins = (
            Pins()
            if common_pins == "annotated"
            else common_pins
            if isinstance(common_pins, Pins)
            else parse_pins(common_pins)
        )
        pinned = "offload" in pins.techniques
        roomy = row.strategy is not None and (
            not row.tight or "with_room" in row.strategy.baselines
        )
        if row.strategy is None or not roomy:
            return False
        kept = row.strategy.baselines.get("on_devices", {}).get("fit") == "yes"
        return pinned or kept or not row.strategy.techniques["offload"]

    def _once(self) -> dict[str, Any]:
        """Pins under which a training step takes its batch in one go."""
        from planner.pins.pins import Pins, parse_pins

        if self.common["workload"] != "train":
            return {}
        common_pins = self.common["pins"]
        pins = common_pins if isinstance(common_pins, Pins) else parse_pins(common_pins)
        pinned = pins.techniques.get("microbatches", 1)
        if pinned != 1:
            raise PlanError(
                "P003",
                f"--batch max takes a step's batch in one go, and {pinned} microbatches are pinned",
                help=["leave micro out, or give the batch"],
            )
        return {"pins": replace(pins, techniques={**pins.techniques, "microbatches": 1})}

    def _fewest(self, point: Point) -> Row:
        """The fewest devices that fit: doubled until they do, then fewer whole nodes (or slices)
        below that."""
        counts = device_counts(point.hardware)
        row = Row(
            point, None, error=PlanError("P012", f"{point.hardware} comes in no number of devices")
        )
        below = 0
        for n in (c for c in counts if c & (c - 1) == 0 or c == counts[0]):
            row = self._plan(replace(point, devices=n), remedies=False)
            if self._fits(row) or (row.strategy is None and not row.too_large):
                break
            below = n
        if not self._fits(row) or row.devices is None:
            return row
        between = [c for c in counts if below < c < row.devices]
        while between:
            middle = between[len(between) // 2]
            trial = self._plan(replace(point, devices=middle), remedies=False)
            row, between = (
                (trial, [c for c in between if c < middle])
                if self._fits(trial)
                else (row, [c for c in between if c > middle])
            )
        return row


def own_devices(hardware: str) -> int | None:
    """As many devices as a topology file or a name such as 8xh100 says there are; None where that
    is left open."""
    if named_groups(hardware):
        return described(hardware, None).devices
    if (
        not is_machine(hardware)
        or not {"size", "shape"} & topology_table(hardware)["level"][-1].keys()
    ):
        return None
    return described(hardware, None).devices


def device_counts(hardware: str) -> list[int]:
    """Numbers that hardware is used in, rising: powers of two up to a node, then whole nodes by
    powers of two and quarters of these; real slices of a torus."""

    if is_machine(hardware):
        levels = topology_table(hardware)["level"]
        node = prod(prod(x["shape"]) if "shape" in x else x.get("size", 1) for x in levels)
        inside: list[int] = []
        if {"size", "shape"} & levels[-1].keys():
            return [node]
    else:
        chip = device(hardware)
        if chip.inner.torus_dims:
            shapes = slice_shapes(chip.inner.torus_pod)
            return sorted(
                n * chip.package_size for n, s in shapes.items() if not part_of_host(s) or n == 1
            )
        node, inside = (
            chip.node_size,
            [1 << k for k in range(chip.node_size.bit_length()) if 1 << k < chip.node_size],
        )
    beyond = {
        node * m * q // 4
        for m in (1 << k for k in range(17))
        for q in (4, 5, 6, 7)
        if m * q % 4 == 0
    }
    return sorted({*inside, *(n for n in beyond if n <= MOST_DEVICES)})


def sized(source: str, dims: Mapping[str, int]) -> tuple[str, dict[str, int]]:
    """A source and the dims left to give: those of a zoo model are options of its spec."""
    if not source.startswith("zoo:") or not dims:
        return source, dict(dims)
    name, *options = source.split(",")
    others = [o for o in options if o.partition("=")[0] not in dims]
    return ",".join([name, *others, *(f"{k}={v}" for k, v in dims.items())]), {}


def _slice_named(hardware: str) -> bool:

    return bool(named_slice(hardware)[1])


def _said(point: Point, devices: int) -> str:
    sizes = [f"{k}={v}" for k, v in point.dims] + ([f"batch {point.batch}"] if point.batch else [])
    return f"planning {devices} x {point.hardware}{''.join(f', {s}' for s in sizes)}:"
