"""Seconds that a framework's host takes to start the kernels of a step, below which no plan is.

A pass of a place of the program takes what its kernels take, or what the host takes to start them
where that is longer (costmodels.frameworks.step_time): of small models on many devices it is, and
nothing that a plan cuts changes it, but for the number of microbatches.
"""

from __future__ import annotations

from planner.analysis.facts import GraphFacts
from planner.execution.save_policies import BLOCK
from planner.execution.techniques import DUALPIPE
from planner.ops import operator_of
from planner.pricing.pricer import Pricer
from planner.space.techniques import Techniques

PASSES = 3
"""Kernels of a pass forward are started once, those of one backward are twice as many."""


def least_launch_s(base: GraphFacts, pricer: Pricer, stages: int, techniques: Techniques) -> float:
    """Seconds; 0 where programs are emitted (each kernel's launch is in its own price) or nothing
    is trained."""
    if pricer.runtime.kernels is None or not base.training:
        return 0.0
    inside, outside, repeats = _launches(base, stages)
    block = (PASSES + (techniques.recompute == BLOCK)) * inside * pricer.rates.launch_s
    of_all = repeats * block + PASSES * outside * pricer.rates.launch_s
    longest = max(-(-repeats // stages) * block, of_all / stages)
    ticks = techniques.microbatches * longest
    if techniques.schedule == DUALPIPE:
        return ticks
    chunks = max(techniques.virtual_stages, pricer.runtime.interleave)
    return ticks + (of_all - longest) / chunks


def _launches(base: GraphFacts, stages: int) -> tuple[int, int, int]:
    """Kernels of one block's forward pass, those outside of the blocks, and how many blocks there
    are, as planner.pricing.frameworks.stages.assign_stages has them."""
    first, period, repeats = 0, 0, 1
    if stages == 1:
        first, period, repeats = max(base.runs, key=lambda r: r[1] * r[2], default=(0, 0, 1))
    elif base.dealt is not None:
        first, period, repeats = base.dealt[0]
    key = "launches", first, period, repeats
    memo = base.graph.memo
    if key not in memo:
        started = [not operator_of(node.op).free for node in base.graph.nodes]
        inside = sum(started[first : first + period])
        memo[key] = inside, sum(started) - repeats * inside, repeats
    launches: tuple[int, int, int] = memo[key]
    return launches
