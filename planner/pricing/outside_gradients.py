"""Gradients of weights outside repeated blocks, while the blocks run backward.

A training step with a loop over its blocks makes gradients in three turns: of what follows the
blocks (the head), of the blocks, of what is before them (a table). While the blocks run backward
those of the last turn are not there. Those of the first are, but where the optimizer updates a
master copy and there is one microbatch: then nobody reads the weight any more, and its gradient
lies where the weight lay (costmodels.liveness). So does that of the last turn, once it is there.
What a ZeRO stage leaves of a reduced gradient waits for the end of the step beside it. A stack of
experts is an exception: the loop over experts carries its gradient, which has room of its own.

Counted of programs that are written so: one stage, a loop, weights that one operator reads. Stages
of pipelines carry all gradients from tick to tick, and in programs of the jit backend the compiler
chooses the order.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.liveness import gradient_takes_its_weights_place
from planner.analysis.facts import GraphFacts
from planner.ops import operator_of
from planner.pricing.pricer import Pricer


@dataclass(frozen=True)
class OutsideGradient:
    """The gradient of a weight outside the blocks. absent: its gradient has no room of its own
    while they run backward; waits: what the ZeRO stage leaves of it has; made_later: the gradient
    has afterwards."""

    absent: bool
    waits: bool
    made_later: bool


def one_run_on_one_stage(base: GraphFacts, stages: int) -> bool:
    """Whether a step runs one loop over blocks, and nothing between two of them."""
    return stages == 1 and len(base.runs) == 1


def outside_gradient(
    base: GraphFacts, pricer: Pricer, node: int, zero_stage: int, microbatches: int
) -> OutsideGradient:
    """The gradient of a weight that only `node` reads, which is in no repeated block."""
    runtime = pricer.runtime
    if (
        not base.training
        or base.written_out
        or pricer.mesh.stages > 1
        or runtime.kernels is not None
        or runtime.partitioned
    ):
        return OutsideGradient(False, False, False)
    carried = operator_of(base.graph.nodes[node].op).filling is not None
    in_place = not carried and gradient_takes_its_weights_place(
        pricer.recipe, zero_stage, microbatches
    )
    before = one_run_on_one_stage(base, 1) and node < base.runs[0][0]
    return OutsideGradient(in_place or before, in_place and not before, before and not in_place)
