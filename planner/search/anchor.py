"""`--calibrate-with PLAN=STEP`: prices scaled to one step that was measured.

PLAN is a strategy file on the same kind of device, of one node for instance, STEP what a step of
it took: `1.43 s`, or a file that says so (planner.support.measured_steps: an emitted program's log,
a history of W&B, an overview of xprof). Every rate of the device is then as much higher or lower as
the step was; how steps grow with the devices stays.

Of published runs that differ in their number of devices alone four in five lie as near to each
other as `[anchor]` of costmodels/runtimes/ranges.toml says, which is the range that is then
printed. Of two models on one machine they do not lie nearer than without: the range stays as it
was.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from costmodels.hardware.units import UnitError, time_s
from planner.errors import PlanError
from planner.machine.mesh_choices import pinned_mesh
from planner.pricing.pricer import Pricer
from planner.search.request import Request
from planner.strategy.read import load
from planner.support.measured_steps import SUFFIXES, step_seconds

MOST = 100.0
"""A step that took so many times longer or shorter than its price is of something else."""


@dataclass(frozen=True)
class Anchor:
    """A plan's price of a step beside what was measured. model: its name; device: its kind of
    device, whose prices the runtime profile made."""

    path: str
    model: str
    device: str
    devices: int
    runtime: str
    priced_s: float
    measured_s: float

    @property
    def slower(self) -> float:
        """How many times longer the step took than its price."""
        return self.measured_s / self.priced_s


def read_anchor(text: str) -> Anchor:
    """The anchor of an option's value. Raises PlanError P225 where it is none."""
    path, equals, step = text.partition("=")
    if not path or not equals or not step:
        raise _fault(f"{text!r} is not PLAN=STEP")
    strategy = load(path)
    measured = _measured_s(step)
    priced = float(strategy.costs["step_time_s"])
    if strategy.topology.get("anchor"):
        raise _fault(f"{path} was priced with an anchor itself")
    if not priced or not 1 / MOST < measured / priced < MOST:
        raise _fault(
            f"{path} was priced {priced:.3g} s a step, and {measured:.3g} s is no step of it"
        )
    return Anchor(
        path,
        str(strategy.model["name"]),
        str(strategy.topology["device"]),
        int(strategy.topology["devices"]),
        str(strategy.workload["runtime"]),
        priced,
        measured,
    )


def anchored(request: Request, anchor: Anchor) -> Request:
    """The request with prices scaled to an anchor. Raises PlanError P225 for one of another device
    or profile."""
    device = request.topology.device
    if anchor.device != device.name or anchor.runtime != request.runtime.name:
        raise _fault(
            f"{anchor.path} is on {anchor.device} under {anchor.runtime}, this plan on"
            f" {device.name} under {request.runtime.name}"
        )
    topology = request.topology
    mesh = pinned_mesh(topology, {"data": topology.devices})
    shipped = Pricer(topology, mesh, request.runtime, request.recipe).rates
    scaled = replace(
        shipped,
        **{
            name: getattr(shipped, name) / anchor.slower
            for name in ("matmul", "memory", "attention", "inner", "outer")
        },
    )
    rates = {**device.rates, request.runtime.name: asdict(scaled)}
    return replace(
        request,
        topology=replace(topology, device=replace(device, rates=rates, anchor=anchor.model)),
    )


def assumed(anchor: Anchor, model: str) -> str:
    """What a summary says of it."""
    text = (
        f"prices x {anchor.slower:.3g}: {anchor.path} was priced {anchor.priced_s:.3g} s a step on"
        f" {anchor.devices} devices and took {anchor.measured_s:.3g} s"
    )
    if anchor.model == model:
        return text
    return (
        f"{text}; it is of {anchor.model}, and of published runs one model's tell no more of"
        " another's: the range is as wide as without"
    )


def _measured_s(step: str) -> float:
    """Seconds of a step, or the middle one of a log. Raises PlanError P225."""
    path = Path(step)
    if path.suffix not in SUFFIXES:
        try:
            return time_s(step if " " in step else _spaced(step))
        except (UnitError, ValueError) as e:
            raise _fault(f"{step!r} is no time, such as 1.43s, and no log (.jsonl)") from e
    try:
        return step_seconds(path)
    except OSError as e:
        raise _fault(f"{step} cannot be read: {e.strerror or e}") from e
    except ValueError as e:
        raise _fault(f"{step} cannot be read: {e}") from e


def _spaced(text: str) -> str:
    """`1.43s` with a space before its unit."""
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    return f"{digits} {text[len(digits) :]}"


def _fault(what: str) -> PlanError:
    return PlanError(
        "P225",
        f"--calibrate-with: {what}",
        help=[
            "PLAN=STEP, a strategy file on the same device and what its step took:"
            " node.plan.json=1.43s, or node.plan.json=log.jsonl of its program (--log log.jsonl),"
            " a history of W&B (.csv, .json) or an overview of xprof (.json)"
        ],
    )
