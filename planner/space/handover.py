"""What equal pipeline stages hand to each other, whatever the layouts: in a space's costs the least
that any plan hands on, in pieces as small as all devices of a stage make them."""

from __future__ import annotations

from math import prod

from planner.execution.collective import CollectiveUse, handover_collectives
from planner.execution.loops import carried_tensors
from planner.execution.pipeline import Schedule
from planner.sharding.layout import STAGE
from planner.space.variables import Space


def handover_s(space: Space, microbatches: int, schedule: str, virtual_stages: int) -> float:
    """Seconds of a step in which a device hands microbatches to the next stage and gradients back,
    at least; 0 where the stages are uneven, or a framework's program is priced. 0 microbatches
    stand for any number: as little as the batch would take in one piece."""
    base, price = space.base, space.pricer
    if price.mesh.stages < 2 or base.dealt is None or not base.training:
        return 0.0
    if price.runtime.kernels is not None:
        return 0.0
    key = "handover", microbatches, schedule, virtual_stages
    if key not in space.memo:
        passes = Schedule(price.mesh.stages, microbatches, schedule, virtual_stages)
        part = space.parts / max(microbatches, 1) / prod(price.sizes.values())
        seconds = 0.0
        for name in carried_tensors(base.graph, (base.dealt[0],)):
            tensor = base.graph.tensors[name]
            payload = int(tensor.elements * part * price.itemsize(tensor.dtype))
            if microbatches:
                uses = tuple(handover_collectives(name, payload, passes, passes.ticks))
            else:
                once = CollectiveUse("collective-permute", (STAGE,), payload, 1, "forward", name)
                uses = (once, once)
            seconds += sum(map(price.use_s, uses))
        space.memo[key] = seconds
    known: float = space.memo[key]
    return known
