"""What of a plan calls for a word before it is believed or run: a count of devices that leaves
nodes ragged, a speed above all that was published."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import costmodels
from costmodels.capacity import capacity
from costmodels.hardware.units import show_time
from planner.analysis.facts import GraphFacts
from planner.errors import PlanError
from planner.graph.findings import Finding
from planner.machine.topology import for_devices
from planner.ops import operator_of
from planner.ops.attention_pairs import Positions
from planner.pricing.cost import Cost

if TYPE_CHECKING:
    from planner.search.request import Request, SearchResult
    from planner.workload.model import Model

COUNTED = ("bfloat16", "float16")
"""Types whose peak the published figures are shares of."""


@cache
def published() -> dict[str, dict[str, Any]]:
    """Device -> the best published MFU of a training run, which run, and where."""

    return tomllib.loads((Path(costmodels.__file__).parent / "published.toml").read_text())


def hidden_work(base: GraphFacts) -> float:
    """The part of a step's FLOPs, as MFU counts them, that is of pairs which a causal mask
    hides."""
    graph, hidden = base.graph, Fraction(0)
    for i, node in enumerate(graph.nodes):
        if operator_of(node.op).kind == "attention" and node.attrs.get("causal"):
            queries, keys = graph.shapes(node.inputs[:2])
            share = Positions.of(node).share(queries[2], keys[2])
            hidden += base.flops_of(i) * Fraction(1 - share)
    return float(hidden / base.model_flops) if hidden else 0.0


def too_fast(request: Request, cost: Cost, base: GraphFacts) -> tuple[Finding, ...]:
    """A mark on a plan that is priced faster for its work than any run that was published on its
    kind of device: counted as that was, and without pairs that a causal mask hides, of which long
    sequences have more than the published run. Where only the first holds it says so."""
    best = published().get(request.topology.device.name)
    peak = request.topology.peak(request.recipe.compute)
    mfu = (
        cost.flops_per_device * cost.distinct_work / peak / cost.step_time_s
        if cost.step_time_s
        else 0.0
    )
    if (
        best is None
        or request.topology.groups
        or request.recipe.compute not in COUNTED
        or mfu <= best["mfu"]
    ):
        return ()
    causal_mfu, best_mfu = mfu * (1 - hidden_work(base)), best["mfu"] * (1 - best["hidden"])
    run = f"{best['run']}; {best['source']}"
    text = (
        f"MFU {100 * mfu:.1f} % is above the best that was published of training on"
        f" {request.topology.device.name}, {100 * best['mfu']:.1f} % ({run}): expect a longer step"
        if causal_mfu > best_mfu
        else f"MFU {100 * mfu:.1f} % counts pairs of positions that the causal mask hides:"
        f" {100 * causal_mfu:.1f} % without them, where the best that was published of training on"
        f" {request.topology.device.name} is {100 * best_mfu:.1f} % ({run})"
    )
    return (Finding("published", text),)


def ragged(request: Request, result: SearchResult, model: Model) -> tuple[Finding, ...]:
    """A count of devices that fills no node whole: the nearest that do, and what fewer of them take
    for the same batch, planned anew."""
    now, chip, best = request.topology.devices, request.topology.device, result.best
    node = chip.node_size
    try:
        usual = for_devices(chip.source, now).levels == request.topology.levels
    except PlanError:
        usual = False
    if (
        best is None
        or not usual
        or chip.inner.torus_dims
        or len(request.topology.levels) < 2
        or now % node == 0
    ):
        return ()
    fewer, more = now // node * node, -(-now // node) * node
    share = request.topology.levels[0].size
    text = (
        f"{now} devices are {now // share} nodes with {share} of their {node} devices, which no"
        f" cluster has: {fewer} or {more} fill whole nodes"
    )
    other = _at(request, model, fewer)
    if other is not None:
        quicker = other < best.cost.step_time_s
        text += f"; {fewer} take {show_time(other)} a step for the same batch, " + (
            "less time on fewer devices"
            if quicker
            else f"these {now} {show_time(best.cost.step_time_s)}"
        )
    return (Finding("devices", text),)


def _at(request: Request, model: Model, devices: int) -> float | None:
    """Seconds of a step of the best plan on so many devices; None where there is none."""
    from planner.search.search import Search

    topology = for_devices(request.topology.device.source, devices)
    room = capacity(topology.device, devices, request.capacity.reserve)
    try:
        best = (
            Search(model, replace(request, topology=topology, capacity=room, baselines=False))
            .run(how_close=False)
            .best
        )
    except PlanError:  # pins that so many devices have no place for
        return None
    return best.cost.step_time_s if best is not None else None
