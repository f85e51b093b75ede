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
from planner.space.assemble import PICO, assemble, least_working
from planner.space.build import build_space
from planner.space.families import Allowed
from planner.space.techniques import Techniques
from planner.space.variables import Space

if TYPE_CHECKING:
    from planner.analysis.facts import GraphFacts
    from planner.whatif.reprice import Priced

WORK = 20_000_000
"""Work units of the search for a better choice (planner.search.solving.WORK): less than a second."""  # noqa: E501


@dataclass(frozen=True)
class PerLayer:
    """Decisions shared by all repeats of a block, beside decisions per layer: how many there are of
    each, the seconds of the fastest step found under each, and the lower bound of a step with
    decisions per layer (seconds as far as decisions settle them)."""

    shared_decisions: int
    layer_decisions: int
    shared_s: float
    per_layer_s: float
    lower_bound_s: float

    @property
    def most_saved(self) -> float:
        """Share of the time that decisions per layer could save at most."""
        return max(0.0, 1 - self.lower_bound_s / self.shared_s)

    @property
    def saved(self) -> float:
        """Share of the time that the best decisions found per layer save."""
        return max(0.0, 1 - self.per_layer_s / self.shared_s)


def without_sharing(base: GraphFacts) -> GraphFacts:
    """The base with every node in a class of its own; repeated blocks are as they were."""
    nodes = range(len(base.graph.nodes))
    return replace(base, shared=tuple(nodes), times=dict.fromkeys(nodes, 1))


def per_layer(priced: Priced) -> PerLayer:
    """The figures of a plan's mesh and techniques under its memory limit. Raises PlanError P059
    where no blocks are repeated: nothing is shared there."""
    base, plan, inner = priced.base, priced.plan, Mesh(priced.mesh.inner)
    if not base.runs:
        raise PlanError(
            "P059",
            "no blocks of this model are repeated, so every node decides for itself already",
            help=["plan explain FILE says what else was there"],
        )
    domain = SearchDomain(priced.model, priced.request, lambda _: base, lambda: False)
    cuts = {name: {f for f, _ in split.pairs} for name, split in plan.splits.items()}
    alphabet = domain.alphabet(base, inner, cuts) if len(inner.axes) > 2 else None
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

    techniques, layered = Techniques.of(plan), without_sharing(base)
    planned = assemble(
        space(base, {i: (plan.splits[base.graph.nodes[i].id],) for i in base.times}),
        techniques,
        None,
    )
    judged = evaluate(planned, solve(planned, "dp").choice)
    # Memory of a whole plan may be below what its problem counts: what the plan itself takes there
    # is room enough.
    limit, room = priced.request.limit_bytes, judged.peak_usage
    shared_s, _ = _solved(space(base, alphabet), techniques, limit, room)
    per_layer_s, lower_bound_s = _solved(space(layered, alphabet), techniques, limit, room)
    # Shared decisions are also decisions per layer: that holds even where the solver's work ended
    # before it found them. Costs are whole picoseconds, the bound is not.
    shared_s = min(shared_s, judged.cost / PICO)
    per_layer_s = min(per_layer_s, shared_s)
    return PerLayer(
        shared_decisions=len(base.times),
        layer_decisions=len(layered.times),
        shared_s=shared_s,
        per_layer_s=per_layer_s,
        lower_bound_s=min(lower_bound_s, per_layer_s),
    )


def _solved(
    space: Space, techniques: Techniques, limit_bytes: float, room: int = 0
) -> tuple[float, float]:
    """Seconds of the best choice found, inf for none, and a lower bound of all choices. room: bytes
    that choices may take at least, whatever the limit."""
    limit_bytes = max(limit_bytes, room + least_working(space, techniques))
    problem = assemble(space, techniques, limit_bytes - least_working(space, techniques))
    solved, relaxed = solve(problem, "dp", Budget(work=WORK)), Relaxation(space)
    bound = (solved.bound or 0.0) / PICO
    if (free := relaxed.free(techniques, techniques.microbatches)) is not None:
        usage = relaxed.usage(techniques, free[0])
        fits = usage + least_working(space, techniques) <= limit_bytes
        bound = max(
            bound, free[1] if fits else relaxed.limited(techniques, limit_bytes, (free[1], usage))
        )
    return (evaluate(problem, solved.choice).cost / PICO if solved.choice else math.inf), bound
