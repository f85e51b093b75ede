"""The price of a step whose islands run as many microbatches each as their devices' speed allows.

An island is a place along the mesh axis "island": devices of one kind, on the same mesh as every
other island's. Each has its own microbatches, priced with its own devices and links; then all sum
their gradients, and update. So a step is

    the loop over microbatches of the island that takes longest
    + the sum of gradients within islands and between them, over the slowest link
    + the update where it takes longest

FLOPs and useful work are the means over all devices; memory is the largest of any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from costmodels.capacity import Breakdown
from costmodels.hardware.mixed import DTYPE
from planner.analysis.facts import GraphFacts
from planner.execution.layout_flow import Flow
from planner.execution.loops import RepeatedBlock
from planner.machine.topology import Topology
from planner.pricing import step_time
from planner.pricing.cost import Cost, IslandShare
from planner.pricing.pricer import Pricer


def group_of_each(topology: Topology, islands: int) -> tuple[int, ...]:
    """The group of devices that each island is part of; of several (where a node of it is slower),
    the slowest."""
    per_island = topology.devices // islands
    of_device = [k for k, (_, n) in enumerate(topology.kinds) for _ in range(n)]
    return tuple(
        min(
            dict.fromkeys(of_device[i * per_island : (i + 1) * per_island]),
            key=lambda k: topology.kinds[k][0].peak(DTYPE),
        )
        for i in range(islands)
    )


def busiest(flow: Flow, pricer: Pricer, group: int, microbatches: int) -> tuple[Flow, Pricer]:
    """A flow, and prices, as an island of one group has them that runs so many microbatches."""
    plan = replace(flow.plan, microbatches=microbatches, islands=())
    return replace(flow, plan=plan), Pricer(
        pricer.topology.of_group(group), pricer.mesh, pricer.runtime, pricer.recipe
    )


def price(base: GraphFacts, flow: Flow, runs: tuple[RepeatedBlock, ...], pricer: Pricer) -> Cost:
    """Price of a derived flow with islands."""
    microbatches, topology = flow.plan.islands, pricer.topology
    shares = _shares(flow, topology)
    costs = _costs(base, flow, runs, pricer)
    longest = max(costs.values(), key=_until_update_s)
    update_s = max(c.optimizer_time_s for c in costs.values())
    flops = sum(
        costs[g].flops_per_device * sum(counts) / max(counts) for g, counts in shares.items()
    )
    per_device = flops / len(microbatches)
    useful = base.model_flops * flow.plan.microbatches / flow.plan.devices
    return replace(
        longest,
        step_time_s=longest.step_time_s + update_s - longest.optimizer_time_s,
        optimizer_time_s=update_s,
        flops_per_device=round(per_device),
        distinct_work=min(1.0, float(useful / per_device)) if per_device else 1.0,
        memory=_largest([c.memory for c in costs.values()]),
        islands=tuple(
            IslandShare(
                device=topology.kinds[group][0].name,
                devices=topology.kinds[group][1],
                microbatches=tuple(counts),
                busy_s=costs[group].step_time_s,
            )
            for group, counts in shares.items()
        ),
    )


def as_priced(
    base: GraphFacts, flow: Flow, runs: tuple[RepeatedBlock, ...], pricer: Pricer
) -> tuple[Flow, Pricer]:
    """The flow and the prices that a plan's seconds are of: with islands those of the one that the
    others wait for."""
    if not flow.plan.islands:
        return flow, pricer
    costs = _costs(base, flow, runs, pricer)
    group = max(costs, key=lambda g: _until_update_s(costs[g]))
    return busiest(flow, pricer, group, max(_shares(flow, pricer.topology)[group]))


def _until_update_s(cost: Cost) -> float:
    return cost.step_time_s - cost.optimizer_time_s


def _shares(flow: Flow, topology: Topology) -> dict[int, list[int]]:
    """Group -> microbatches of each of its islands."""
    shares: dict[int, list[int]] = {}
    microbatches = flow.plan.islands
    for group, n in zip(group_of_each(topology, len(microbatches)), microbatches, strict=True):
        shares.setdefault(group, []).append(n)
    return shares


def _costs(
    base: GraphFacts, flow: Flow, runs: tuple[RepeatedBlock, ...], pricer: Pricer
) -> dict[int, Cost]:
    """Group -> the price of its busiest island's step."""
    costs = {}
    for group, counts in _shares(flow, pricer.topology).items():
        ours, prices = busiest(flow, pricer, group, max(counts))
        costs[group] = step_time.price(base, ours, runs, prices)
    return costs


def _largest(parts: Sequence[Breakdown]) -> Breakdown:
    return max(parts, key=lambda b: b.total)
