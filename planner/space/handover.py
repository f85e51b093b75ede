"""What pipeline stages hand to each other, whatever the layouts: in a space's costs the least that
any plan hands on, in pieces as small as all devices of a stage make them.

Equal stages hand on what their blocks carry. Of uneven ones every buffer has room for what the
fullest cut hands on, and no cuts have less there than the places in the graph where least is.
"""

from __future__ import annotations

from math import prod

from planner.analysis.facts import GraphFacts
from planner.execution.collective import CollectiveUse, handover_collectives
from planner.execution.loops import carried_tensors
from planner.execution.pipeline import Schedule
from planner.execution.techniques import WIDEST
from planner.pricing.pricer import Pricer
from planner.sharding.layout import STAGE
from planner.space.variables import Space


def handover_s(space: Space, microbatches: int, schedule: str, virtual_stages: int) -> float:
    """Seconds of a step in which a device hands microbatches to the next stage and gradients back,
    at least (`least_handover_s`)."""
    if space.pricer.mesh.stages < 2:
        return 0.0
    key = "handover", microbatches, schedule, virtual_stages
    if key not in space.memo:
        chunks = virtual_stages if microbatches else 1
        passes = Schedule(space.pricer.mesh.stages, microbatches, schedule, chunks)
        space.memo[key] = least_handover_s(space.base, space.pricer, space.parts, passes)
    known: float = space.memo[key]
    return known


def least_handover_s(base: GraphFacts, pricer: Pricer, parts: int, passes: Schedule) -> float:
    """Seconds of a step that passes of microbatches are handed on, and gradients back; 0 where a
    framework's program is priced. 0 microbatches stand for any number: as little as the batch
    would take in one piece. parts: microbatches of the step, one of which the base's graph is."""
    if not base.training or pricer.runtime.kernels is not None:
        return 0.0
    ticks = passes.ticks
    if base.dealt is not None:
        tensors = (base.graph.tensors[n] for n in carried_tensors(base.graph, (base.dealt[0],)))
        sizes = [t.elements * pricer.itemsize(t.dtype) for t in tensors]
    else:
        # Stages of several places are fewer, and fill in fewer ticks.
        chunks = passes.stages * passes.virtual_stages
        if passes.virtual_stages == 1:
            chunks, ticks = passes.stages // WIDEST + 1, passes.microbatches
        elements = sorted(base.places.values())
        sizes = (
            [elements[chunks - 2] * pricer.itemsize("float32")]
            if len(elements) > chunks - 2
            else []
        )
    part = parts / max(passes.microbatches, 1) / prod(pricer.sizes.values())
    seconds = 0.0
    for size in sizes:
        payload = int(size * part)
        if passes.microbatches and ticks == passes.ticks:
            uses = tuple(handover_collectives("", payload, passes, passes.read_ticks))
        else:
            times = max(passes.microbatches, 1)
            use = CollectiveUse("collective-permute", (STAGE,), payload, times, "forward", "")
            uses = (use, use)
        seconds += sum(map(pricer.use_s, uses))
    # Of what equal stages hand on, kernels hide a share (planner.pricing.loop_overlap).
    hidden = pricer.hidden.spared * pricer.hidden.handed_on if base.dealt is not None else 0.0
    return (1 - hidden) * seconds
