"""The error of a search that found no plan: how close it came, and what would help."""

from __future__ import annotations

from typing import Any

from costmodels.hardware.units import show_bytes
from planner.errors import NO_PLAN, PlanError
from planner.execution.techniques import phrases
from planner.whatif.remedies import fewer_pins, remedies


def no_plan(request: Any, result: Any, model: Any = None) -> PlanError:
    """Nothing fits: how close it came, where the memory goes, and (given the model) remedies that
    were planned anew."""
    smallest = result.smallest
    limit = show_bytes(request.limit_bytes)
    if (
        smallest is None or smallest.cost.memory.total <= request.limit_bytes
    ):  # a baseline that fits does not keep the pins
        without = fewer_pins(request, model) if model is not None else ""
        return PlanError(
            "P021",
            f"no plan is possible under these pins on {request.topology.devices} devices",
            help=[without or "remove pins, or the mode that contradicts them"],
            exit_code=NO_PLAN,
        )
    parts = {
        k: getattr(smallest.cost.memory, k)
        for k in ("parameters", "gradients", "optimizer", "activations", "temporary")
    }
    offloaded = "".join(f", {words}" for words in phrases(smallest.plan, ("offload",)))
    heavy = ", ".join(f"{k} {show_bytes(v)}" for k, v in sorted(parts.items(), key=lambda p: -p[1]))
    help = remedies(request, result, model) if model is not None else []
    full, least = request.capacity.usable, show_bytes(smallest.cost.memory.total)
    hint = (
        f"a --memory-limit above {least}, which the smallest plan takes: the device has"
        f" {show_bytes(full)} usable"
        if smallest.cost.memory.total <= full
        else "hardware with more memory (--hardware)"
    )
    return PlanError(
        "P021",
        f"no plan fits: {least} a device in the smallest plan priced, {limit} usable",
        detail=[
            (
                f"smallest plan: mesh {' x '.join(f'{a} {n}' for a, n in smallest.plan.mesh)},"
                f" ZeRO-{smallest.plan.zero_stage}, recompute {smallest.plan.recompute},"
                f" {smallest.plan.microbatches}"
                f" microbatch{'es' if smallest.plan.microbatches > 1 else ''}{offloaded}"
            ),
            heavy,
        ],
        help=help if any(line.startswith("--hardware ") for line in help) else [*help, hint],
        exit_code=NO_PLAN,
    )
