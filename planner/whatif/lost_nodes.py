"""What a node costs that is missing, or slower than the others.

missing   the plan is made anew for the devices that are left, for the same batch
slow      one program on one mesh goes in step: every collective waits for the slow node, so that a
          step takes what it takes where all devices are as slow. From some share on it is better
          left out
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from planner.errors import PlanError
from planner.machine.nodes import check_nodes, machines_without, nodes_of, with_slow_node
from planner.machine.topology import Topology, from_json
from planner.pins.pins import Pins
from planner.strategy.pins import pins_of
from planner.strategy.strategy import Strategy
from planner.whatif.reprice import best_plan, own_model, recorded_request, reprice
from planner.workload.model import Model

TRIES = 7
"""Shares of speed at which the plan is priced to find where leaving a node out begins to pay: to
one hundredth."""


@dataclass(frozen=True)
class Without:
    """The best plan on the devices that are left, None where none was found: refused then says
    why. pinned: whether it keeps the pins of the plan before; unpinned: whether that has some,
    which have no place on these devices."""

    devices: int
    plan: Strategy | None
    refused: str = ""
    pinned: bool = False
    unpinned: bool = False

    @property
    def step_s(self) -> float | None:
        """Seconds of its step."""
        return float(self.plan.costs["step_time_s"]) if self.plan is not None else None


@dataclass(frozen=True)
class LostNodes:
    """nodes: those asked about, of `of`; today_s, today_bytes: a step with all of them, and
    what it takes of a device's memory. slow: (share of its
    speed, seconds of a step that waits for it), None where the node is missing. pays_below: the
    share below which a step without it is shorter; 0: never, 1: at every share."""

    nodes: tuple[int, ...]
    of: int
    devices: int
    today_s: float
    today_bytes: int
    without: tuple[Without, ...]
    slow: tuple[float, float] | None = None
    pays_below: float = 0.0

    @property
    def best(self) -> Without | None:
        """The plan without, of the shortest step."""
        return min(
            (w for w in self.without if w.step_s is not None),
            key=lambda w: w.step_s or 0.0,
            default=None,
        )


def without_nodes(strategy: Strategy, source: str | Path, nodes: Sequence[int]) -> LostNodes:
    """The cost of missing nodes: a search for each way to use what is left. Raises PlanError P003
    for nodes that are not there, P051 for another model."""
    topology = from_json(strategy.topology)
    check_nodes(topology, nodes, "--without")
    return _without(strategy, own_model(strategy, source), topology, nodes)


def slow_node(strategy: Strategy, source: str | Path, node: int, share: float) -> LostNodes:
    """The cost of a node at a share of its speed, beside that of leaving it out. Raises PlanError
    P003, P051."""
    topology = from_json(strategy.topology)
    check_nodes(topology, [node], "--slow")
    model = own_model(strategy, source)
    if nodes_of(topology) > 1:
        lost = _without(strategy, model, topology, [node])
    else:
        lost = LostNodes((node,), 1, topology.devices, *_today(strategy, model, topology), ())

    def step_s(speed: float) -> float:
        return _today(strategy, model, with_slow_node(topology, node, speed))[0]

    pays = 0.0
    if lost.best is not None and (limit := lost.best.step_s) is not None:
        low, high = 0.0, 1.0
        for _ in range(TRIES):
            middle = (low + high) / 2
            low, high = (middle, high) if step_s(middle) > limit else (low, middle)
        pays = high if limit >= lost.today_s else 1.0
    return replace(lost, slow=(share, step_s(share)), pays_below=pays)


def _without(
    strategy: Strategy, model: Model, topology: Topology, nodes: Sequence[int]
) -> LostNodes:
    machines = machines_without(topology, nodes, model.batch)
    return LostNodes(
        tuple(nodes),
        nodes_of(topology),
        topology.devices,
        *_today(strategy, model, topology),
        tuple(_planned(strategy, model, machine) for machine in machines),
    )


def _today(strategy: Strategy, model: Model, topology: Topology) -> tuple[float, int]:
    """Seconds of the plan's step on a machine, bytes of a device."""
    cost = reprice(strategy, model, topology).cost
    return cost.step_time_s, cost.memory.total


def _planned(strategy: Strategy, model: Model, machine: Topology) -> Without:
    """The best plan on a machine, under the recorded pins where they have a place on it."""
    refused, had_pins = "", not pins_of(strategy).empty
    for pins in (None, Pins()):
        try:
            request = recorded_request(strategy, machine, pins)
            plan = best_plan(model, replace(request, baselines=False))
        except PlanError as e:
            refused = refused or e.what
            continue
        kept = pins is None and not request.pins.empty
        return Without(machine.devices, plan, pinned=kept, unpinned=pins is not None and had_pins)
    return Without(machine.devices, None, refused)
