"""TODO."""

from __future__ import annotations

from typing import Any

from costmodels.hardware.units import show_bytes
from planner.errors import NO_PLAN, PlanError
from planner.strategy.words import offload_words
from planner.whatif.remedies import fewer_pins, remedies


def no_plan(request: Any, found: Any, model: Any = None) -> PlanError:
    """Nothing fits: how close it came, where the memory goes, and (given the model) remedies that
    were planned anew."""

    close = found.smallest
    limit = show_bytes(request.limit_bytes)
    if (
        close is None or close.cost.memory.total <= request.limit_bytes
    ):  # a baseline that fits does not keep the pins
        without = fewer_pins(request, model) if model is not None else ""
        return PlanError(
            "P021",
            f"no plan is possible under these pins on {request.topology.devices} devices",
            help=[without or "remove pins, or the mode that contradicts them"],
            exit_code=NO_PLAN,
        )
    parts = {
        k: getattr(close.cost.memory, k)
        for k in ("parameters", "gradients", "optimizer", "activations", "temporary")
    }
    sent = "".join(f", {words}" for words in offload_words(close.plan.offload))
    heavy = ", ".join(f"{k} {show_bytes(v)}" for k, v in sorted(parts.items(), key=lambda p: -p[1]))
    help = remedies(request, found, model) if model is not None else []
    full, least = request.capacity.usable, show_bytes(close.cost.memory.total)
    more = (
        f"a --memory-limit above {least}, which the smallest plan takes: the device has"
        f" {show_bytes(full)} usable"
        if close.cost.memory.total <= full
        else "hardware with more memory (--hardware)"
    )
    return PlanError(
        "P021",
        f"no plan fits: {least} a device in the smallest plan priced, {limit} usable",
        detail=[
            (
                f"smallest plan: mesh {' x '.join(f'{a} {n}' for a, n in close.plan.mesh)},"
                f" ZeRO-{close.plan.zero}, recompute {close.plan.recompute},"
                f" {close.plan.microbatches}"
                f" microbatch{'es' if close.plan.microbatches > 1 else ''}{sent}"
            ),
            heavy,
        ],
        help=help if any(line.startswith("--hardware ") for line in help) else [*help, more],
        exit_code=NO_PLAN,
    )
