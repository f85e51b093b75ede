"""`plan MODEL --confirm TARGET`: plans compiled ahead of time, best first, until the compiler says
of one that it fits.

At most `MOST` are compiled, in the worker of `plan verify`. After one that takes more than a device
has, the next is the best that the memory model puts below it by at least what was too much: others
would be refused alike. What the compiler said is kept in the strategy, and what it took in seconds
in its provenance.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from costmodels.hardware.units import show_bytes
from planner.errors import PlanError
from planner.strategy.strategy import Strategy
from planner.verify.chips import chip
from planner.verify.report import FLOPS, PEAK
from planner.verify.targets import Target, parse_target, require

MOST = 3
TPUS = {"tpu7x": "v7x"}
"""Generations that the compiler calls otherwise than `plan hardware`."""
Smaller = Callable[[int], "Strategy | None"]
"""The best plan that the memory model puts at so many bytes or fewer; None where there is none."""


def target_of(text: str, devices: int, kind: str, device: str = "") -> Target:
    """The target of `--confirm` for a plan on devices of a kind, whose compiler is here. device:
    its name, which may be one that no compiler knows.

    Raises PlanError P163 to P165."""

    target = parse_target(text, devices, option="--confirm")
    if target.kind == "cpu":
        raise PlanError(
            "P164",
            "--confirm 'cpu': what the CPU's compiler takes for temporaries says nothing of a"
            " device's memory",
            help=["gpu:NAME or tpu:SLICE; plan verify compiles and runs on virtual CPU devices"],
        )
    if target.kind != kind:
        raise PlanError(
            "P165",
            f"--confirm {text} compiles for {target.machine.partition(',')[0]}, the plan is for"
            f" devices of kind {kind}",
            help=["a target of the planned devices' kind, or another --hardware"],
        )
    named_chip = chip(device) if kind == "gpu" else device if device.startswith("tpu-") else None
    if named_chip is not None and named_chip != (
        chip(target.name) if kind == "gpu" else f"tpu-{TPUS.get(target.name, target.name)}"
    ):
        raise PlanError(
            "P165",
            f"--confirm {text} compiles for another device than the plan's, {device}",
            help=[f"the target of {device}, or another --hardware"],
        )
    require(target, "--confirm")
    return target


def confirmed(
    best: Strategy,
    smaller: Smaller,
    source: Any,
    target: Target,
    *,
    backend: str = "shard_map",
    tell: Callable[[str], None] = lambda line: None,
) -> Strategy:
    """The first plan that fits as compiled, else `best`; either with what the compiler said.
    Interrupted, `best` with what was said so far.

    Raises PlanError P161, P162 or P166 where no plan could be compiled at all.
    """
    rejected: list[dict[str, Any]] = []
    failed: PlanError | None = None
    plan, begun = best, time.monotonic()
    try:
        while True:
            tell(f"compiling plan {len(rejected) + 1} of at most {MOST} for {target.text}")
            try:
                outcome = compiled(plan, source, target, backend)
            except PlanError as e:
                failed, outcome = (
                    failed or e,
                    {"peak_bytes": 0, "why": f"{e.what}{f': {e.detail[0]}' if e.detail else ''}"},
                )
            if "why" not in outcome:
                return _with(plan, target, rejected, begun, fits=True, **outcome)
            rejected.append({**_decisions(plan), **outcome})
            too_much = max(0, outcome["peak_bytes"] - int(plan.costs["memory_limit_bytes"]))
            again = (
                smaller(int(plan.costs["memory_per_device_bytes"]) - max(1, too_much))
                if len(rejected) < MOST
                else None
            )
            if again is None:
                break
            plan = again
    except KeyboardInterrupt:
        return _with(best, target, rejected, begun, fits=False, stopped="interrupt")
    if failed is not None and not any(row["peak_bytes"] for row in rejected):
        raise failed
    return _with(best, target, rejected, begun, fits=False)


def compiled(plan: Strategy, source: Any, target: Target, backend: str) -> dict[str, Any]:
    """What the compiler says of a plan; `why` where it does not fit."""
    from planner.verify.worker import verify

    report = verify(plan, source, backend=backend, target=target.text, run=False, named=False)
    peak = next(f for f in report.figures if f.what == PEAK)
    dots = next((f for f in report.figures if f.of == FLOPS and f.predicted), None)
    limit = int(plan.costs["memory_limit_bytes"])
    outcome: dict[str, Any] = {"peak_bytes": peak.compiled}
    if dots is not None and dots.predicted and dots.compiled != dots.predicted:
        outcome["flops_ratio"] = round(dots.compiled / dots.predicted, 6)
    return (
        outcome
        if peak.compiled <= limit
        else {**outcome, "why": f"{show_bytes(peak.compiled)} of {show_bytes(limit)}"}
    )


def _decisions(plan: Strategy) -> dict[str, Any]:
    """What tells a rejected plan from others."""
    t = plan.techniques
    return {
        "mesh": dict(plan.mesh_shape),
        "zero_stage": t["zero_stage"],
        "recompute": t["recompute"],
        "microbatches": t["microbatches"],
        "step_time_s": plan.costs["step_time_s"],
        "planned_bytes": plan.costs["memory_per_device_bytes"],
    }


def _with(
    plan: Strategy, target: Target, rejected: list[dict[str, Any]], begun: float, **outcome: Any
) -> Strategy:
    table = {
        "target": target.text,
        "limit_bytes": int(plan.costs["memory_limit_bytes"]),
        "rejected": rejected,
        **outcome,
    }
    return replace(
        plan,
        confirmed=table,
        provenance={**plan.provenance, "confirm_s": round(time.monotonic() - begun, 1)},
    )
