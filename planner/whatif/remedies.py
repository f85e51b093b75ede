"""What would help when nothing fits: more devices, devices with more memory, a smaller batch or
fewer pins, each planned anew before it is quoted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from costmodels import device_names, load_device
from costmodels.capacity import capacity
from costmodels.hardware.units import show_time
from planner.errors import PlanError
from planner.machine.topology import for_devices
from planner.workload.host_tables import PLACES, worth

if TYPE_CHECKING:
    from planner.search.request import Candidate, Request, SearchResult
    from planner.workload.model import Model

GROWTH = (2, 4, 8, 16, 32)
LARGER = 2
"""Devices with more memory that are tried."""
TRIES = 3
"""Searches per kind of remedy; the first that fits is quoted."""


def remedies(request: Request, result: SearchResult, model: Model) -> list[str]:
    """Help lines such as "128 devices fit (re-priced: 41 ms with --batch 64)"; empty when nothing
    tried fits."""
    without = _unpinned(request, model)
    # More devices that are no faster than these without a pin help nobody.
    devices = _devices(request, result, model, without[1].cost.step_time_s if without else inf)
    lines = (
        devices,
        _hardware(request, result, model),
        _batch(request, model),
        _tables(request, model),
        without[0] if without else "",
    )
    return [line for line in lines if line]


def fewer_pins(request: Request, model: Model) -> str:
    """The help line of the pin without which the fastest plan fits."""
    fewer = _unpinned(request, model)
    return fewer[0] if fewer else ""


def _unpinned(request: Request, model: Model) -> tuple[str, Candidate] | None:
    """The line and the plan without the pin without which the fastest plan fits, of the first few;
    without all where no single one stands in the way. A bucket's size takes no room and stays."""
    from planner.pins.pins import Pins
    from planner.space.propagation import MODES

    if request.mode in MODES:
        return None  # there the pins are the plan
    bucket = {k: v for k, v in request.pins.techniques.items() if k == "bucket"}
    single = [
        (f"pin {words}", fewer)
        for words, fewer in request.pins.each()
        if fewer.techniques.items() >= bucket.items()
    ]
    for several in (single[:TRIES], [("pins", Pins(techniques=bucket))] if len(single) > 1 else []):
        plans = [
            (
                words,
                _plan(
                    replace(request, pins=fewer, offload=fewer.techniques.get("offload", ())), model
                ),
            )
            for words, fewer in several
        ]
        best = min(
            ((words, c) for words, c in plans if c is not None),
            key=lambda plan: plan[1].cost.step_time_s,
            default=None,
        )
        if best is not None:
            return (
                f"without {best[0]} it fits (re-priced: {show_time(best[1].cost.step_time_s)})",
                best[1],
            )
    return None


def _devices(request: Request, result: SearchResult, model: Model, most_s: float = inf) -> str:
    """The fewest more devices that fit, of those tried; nothing where they are no faster than so
    many seconds a step."""
    close, now = result.smallest, request.topology.devices
    need = close.cost.memory.total / max(request.limit_bytes, 1) if close else 1.0
    factors = [g for g in GROWTH if g >= need / 2][:TRIES] or [GROWTH[-1]]
    for n in (now * g for g in factors):
        try:
            topology = for_devices(request.topology.device.source, n)
        except PlanError:
            continue
        if len(topology.levels) < len(request.topology.levels):
            continue  # a machine of another build
        room = capacity(topology.device, n, request.capacity.reserve)
        best = _plan(replace(request, topology=topology, capacity=room), model)
        if best is not None and best.cost.step_time_s >= most_s:
            return ""
        if best is not None:
            # A batch that follows the devices would grow with them: the price holds for this one.
            defaulted = model.workload.batch is None and model.workload.tokens_per_step is None
            return (
                f"{n} devices fit (re-priced:"
                f" {show_time(best.cost.step_time_s)}{f' with --batch {model.batch}' if defaulted else ''})"  # noqa: E501
            )
    return ""


def _hardware(request: Request, result: SearchResult, model: Model) -> str:
    """As many devices of the same kind with more memory, the smallest first; nothing where the
    user's own limit or topology is what binds."""
    chip, n, close = request.topology.device, request.topology.devices, result.smallest
    try:
        usual = for_devices(chip.name, n).levels == request.topology.levels
    except PlanError:
        usual = False
    if close is None or not usual or request.limit_bytes < request.capacity.usable:
        return ""
    shipped = [load_device(name) for name in device_names()]
    larger = sorted(
        (
            d
            for d in shipped
            if d.kind == chip.kind
            and d.memory_bytes > max(chip.memory_bytes, close.cost.memory.total)
        ),
        key=lambda d: (d.memory_bytes, d.name),
    )
    for other in larger[:LARGER]:
        try:
            topology = for_devices(other.name, n)
        except PlanError:
            continue
        best = _plan(
            replace(
                request, topology=topology, capacity=capacity(other, n, request.capacity.reserve)
            ),
            model,
        )
        if best is not None:
            return f"--hardware {other.name} fits (re-priced: {show_time(best.cost.step_time_s)})"
    return ""


def _batch(request: Request, model: Model) -> str:
    for batch in _smaller(model.batch):
        try:
            best = _plan(request, model.under(batch=batch, tokens_per_step=None))
        except PlanError:
            continue
        if best is not None:
            return f"--batch {batch} fits (re-priced: {show_time(best.cost.step_time_s)})"
    return ""


def elsewhere(request: Request, model: Model) -> dict[str, Candidate]:
    """ "tables_host", "tables_server" -> the best plan with the tables there; nothing where they
    are no large part of the model, or are there already."""

    if (
        model.workload.kind != "train"
        or model.workload.tables != PLACES[0]
        or not worth(model.plain)
    ):
        return {}
    plans = {f"tables_{place}": _plan(request, model.under(tables=place)) for place in PLACES[1:]}
    return {key: best for key, best in plans.items() if best is not None}


def _tables(request: Request, model: Model) -> str:
    best = min(
        elsewhere(request, model).items(), key=lambda kv: kv[1].cost.step_time_s, default=None
    )
    return (
        f"--tables {best[0].removeprefix('tables_')} fits (re-priced:"
        f" {show_time(best[1].cost.step_time_s)})"
        if best
        else ""
    )


def _smaller(batch: int) -> Iterator[int]:
    """A few smaller batches, the largest first."""
    tried = 0
    while batch > 1 and tried < TRIES:
        batch = batch // (4 if batch >= 64 else 2)
        tried += 1
        yield batch


def _plan(request: Request, model: Model) -> Candidate | None:
    from planner.search.search import Search

    try:
        return Search(model, replace(request, baselines=False, time_limit_s=None)).quoted()
    except PlanError:
        # a pinned mesh that does not multiply to that many devices, or a batch the model cannot be
        # read at
        return None
