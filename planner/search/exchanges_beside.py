"""Good plans of a search once more, with experts' rows sent beside kernels of another microbatch
(planner.pricing.frameworks.dispatch.beside).

The search itself lets kernels wait for them: what its bounds and solvers count would be hidden in
part, and more so the fewer other things there are to wait for. So the plans that it priced are
tried with it, those with pipeline stages also with more virtual ones, which it needs. A split that
is good only so is not found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from planner.execution.techniques import BESIDE, INTERLEAVED
from planner.graph.ir import Graph
from planner.ops.expert_load import expert_nodes
from planner.pricing.frameworks.dispatch import EXCHANGE, beside
from planner.solvers.problem import Solution
from planner.space.techniques import Techniques

if TYPE_CHECKING:
    from planner.search.request import Candidate
    from planner.search.solving import Solving

FINALISTS = 8
"""Plans that are tried, those first that would gain the most if all hid."""


def with_exchanges_beside(
    search: Solving, best: Candidate, priced: Sequence[Candidate], limit_bytes: int
) -> Candidate:
    """The best plan, or one of those priced with exchanges beside kernels where that is shorter and
    takes so many bytes at most."""
    graph = search.details[id(best)][1].base.graph
    if not may_be_beside(search, graph) or search.request.objective != "step":
        return best
    least = {id(c): c.cost.step_time_s - _sent_s(c) for c in (best, *priced)}
    could = {
        (c.mesh.shape, c.techniques): c
        for c in reversed((best, *priced))
        if least[id(c)] < best.cost.step_time_s and c.cost.memory.total <= limit_bytes
    }
    fastest = best
    for c in sorted(could.values(), key=lambda c: least[id(c)])[:FINALISTS]:
        for techniques in _ways(search, c):
            again = _beside(search, c, techniques)
            if again is not None and again.cost.memory.total <= limit_bytes:
                fastest = min(fastest, again, key=lambda c: c.cost.step_time_s)
    return fastest


def may_be_beside(search: Solving, graph: Graph) -> bool:
    """Whether plans of a model may send experts' rows beside kernels, nothing being pinned of it.
    Bounds hold for those alone that wait: of what is proven nothing is left."""
    request = search.request
    free = request.runtime.exchange_slows and "exchanges" not in request.pins.techniques
    return bool(search.training and free and next(expert_nodes(graph), None) is not None)


def _sent_s(c: Candidate) -> float:
    """Seconds of a plan's exchanges at most: those of a stage, and those of the others in its
    bubble."""
    sent = sum(s for (kind, _), s in c.cost.exposed_by_axes.items() if kind == EXCHANGE)
    return sent * (1 + (c.mesh.stages - 1) / c.plan.microbatches)


def _ways(search: Solving, c: Candidate) -> Iterator[Techniques]:
    """A plan's techniques, and with more virtual stages."""
    yield c.techniques
    if c.mesh.stages == 1 or c.techniques.microbatches % c.mesh.stages:
        return
    for schedule, virtual in search.offered.schedules(c.mesh):
        if schedule == INTERLEAVED and virtual != c.techniques.virtual_stages:
            yield replace(c.techniques, schedule=schedule, virtual_stages=virtual)


def _beside(search: Solving, c: Candidate, techniques: Techniques) -> Candidate | None:
    """A plan's splits with exchanges beside kernels; None where they cannot be."""
    _, space, choice, _ = search.details[id(c)]
    plan = replace(c.plan, virtual_stages=techniques.virtual_stages)
    if not beside(space.base, plan, search.request.runtime):
        return None
    return search.price(
        space, c.mesh, techniques, Solution(choice, "feasible"), c.label, exchanges=BESIDE
    )
