"""What a plan loses because repeats of a block decide alike: the same mesh and techniques with
every node deciding for itself.

Programs run repeated blocks in one loop, which needs them alike, so searches look for nothing else
(planner.graph.repeats). Here each repeat has decisions of its own, at the same prices: its weights
still count as their part of the one array that a loop reduces. The least of that problem bounds
what any choice could save, and a solver looks for one. Both figures are of the problem
(planner.space.assemble) that the search decides by, not of a whole step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from planner.errors import PlanError
from planner.machine.topology import Mesh
from planner.search.domain import SearchDomain
from planner.search.relaxation import Relaxation
from planner.sharding.rule import Limits
from planner.solvers import solve
from planner.solvers.problem import Budget, evaluate
from planner.space.assemble import PICO, Techniques, assemble, least_working
from planner.space.build import build_space
from planner.space.families import Allowed
from planner.space.variables import Space

if TYPE_CHECKING:
    from planner.analysis.facts import GraphFacts
    from planner.whatif.reprice import Priced

WORK = 20_000_000
"""Work units of the search for a better choice (planner.search.solving.WORK): less than a second."""  # noqa: E501


@dataclass(frozen=True)
class Untied:
    """decisions: with repeats alike, untied: with each node on its own. tied_s: the fastest that
    was found with repeats alike, found_s: with each on its own, least_s: no choice is below
    (seconds of a step, as far as decisions settle them)."""

    decisions: int
    untied: int
    tied_s: float
    found_s: float
    least_s: float

    @property
    def most(self) -> float:
        """Part of the time that deciding apart could save at most."""
        return max(0.0, 1 - self.least_s / self.tied_s)

    @property
    def found(self) -> float:
        """Part of it that a choice was found to save."""
        return max(0.0, 1 - self.found_s / self.tied_s)


def apart(base: GraphFacts) -> GraphFacts:
    """The base with every node in a class of its own; repeated blocks are as they were."""
    nodes = range(len(base.graph.nodes))
    return replace(base, shared=tuple(nodes), times=dict.fromkeys(nodes, 1))


def untied(priced: Priced) -> Untied:
    """The figures of a plan's mesh and techniques under its memory limit. Raises PlanError P059
    where no blocks are repeated: nothing is tied there."""
    base, plan, inner = priced.base, priced.plan, Mesh(priced.mesh.inner)
    if not base.runs:
        raise PlanError(
            "P059",
            "no blocks of this model are repeated, so every node decides for itself already",
            help=["plan explain FILE says what else was there"],
        )
    offered = SearchDomain(priced.model, priced.request, lambda _: base, lambda: False)
    few = offered.alphabet(base, inner, (plan,)) if len(inner.axes) > 2 else None
    limits = Limits(spatial=priced.model.batch < priced.request.topology.devices)
    pricer = replace(priced.pricer, offload=plan.offload, memo={})

    def space(of: GraphFacts, allowed: Allowed | None) -> Space:
        splits = {i: allowed[base.shared[i]] for i in of.times} if allowed else None
        return build_space(
            of,
            pricer,
            limits=limits,
            allowed=splits,
            zero_axes=priced.mesh.zero_axes,
            parts=plan.microbatches,
        )

    techniques, each = Techniques.of(plan), apart(base)
    own = assemble(
        space(base, {i: (plan.splits[base.graph.nodes[i].id],) for i in base.times}),
        techniques,
        None,
    )
    judged = evaluate(own, solve(own, "dp").choice)
    # Memory of a whole plan may be below what its problem counts: what the plan itself takes there
    # is room enough.
    tied, _ = _solved(space(base, few), techniques, priced.request.limit_bytes, judged.peak_usage)
    found, least = _solved(
        space(each, few), techniques, priced.request.limit_bytes, judged.peak_usage
    )
    # What is alike may be chosen apart, too: where a solver's work ended before it came so far,
    # that is known all the same. Costs are whole picoseconds, the bound is not.
    tied = min(tied, judged.cost / PICO)
    found = min(found, tied)
    return Untied(len(base.times), len(each.times), tied, found, min(least, found))


def _solved(
    space: Space, techniques: Techniques, limit_bytes: float, room: int = 0
) -> tuple[float, float]:
    """Seconds of the best choice that was found, inf for none, and that no choice is below. room:
    bytes of what is kept that are there at least."""
    limit_bytes = max(limit_bytes, room + least_working(space, techniques))
    problem = assemble(space, techniques, limit_bytes - least_working(space, techniques))
    solved, relaxed = solve(problem, "dp", Budget(work=WORK)), Relaxation(space)
    least = (solved.bound or 0.0) / PICO
    if (free := relaxed.free(techniques, techniques.microbatches)) is not None:
        usage = relaxed.usage(techniques, free[0])
        fits = usage + least_working(space, techniques) <= limit_bytes
        least = max(
            least, free[1] if fits else relaxed.limited(techniques, limit_bytes, (free[1], usage))
        )
    return (evaluate(problem, solved.choice).cost / PICO if solved.choice else math.inf), least
