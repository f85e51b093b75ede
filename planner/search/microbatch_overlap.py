"""Good plans of a search once more, with two microbatches at the same time
(planner.pricing.microbatch_overlap).

The search itself knows one microbatch at a time: what its bounds and solvers count as shown, copies
would hide. So copies are tried on what it priced, with the same splits and with as many or twice as
many microbatches (whose rows are half as many, so that activations take the room they took). A
split that is good only in copies is not found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from planner.execution.save_policies import is_named
from planner.execution.techniques import WEIGHTS
from planner.space.assemble import assemble
from planner.space.families import Allowed

if TYPE_CHECKING:
    from planner.search.request import Candidate
    from planner.search.solving import Solving

WORTH = 0.05
"""Copies are taken where they make a step shorter by this share at least: what hides is a guess."""
FINALISTS = 3
"""Plans that are priced in copies, those first that would gain the most if all hid that can; as
many of those that save values by name, of which there are many much alike."""
COPIES = 2


def with_microbatch_overlap(
    search: Solving, best: Candidate, priced: Sequence[Candidate], limit_bytes: int
) -> Candidate:
    """The best plan, or one of those priced in copies where that is worth it and takes so many
    bytes at most."""
    request = search.request
    if (
        request.copies
        or request.partitioned
        or set(WEIGHTS) & set(request.offload)
        or not search.training
    ):
        return best
    if request.objective != "step" or request.mode not in ("auto", "semi-auto"):
        return best
    worth, fastest = best.cost.step_time_s * (1 - WORTH), best
    least_s = {
        id(c): (
            c.cost.step_time_s
            - search.pricer(c.mesh).copies_hidden * c.cost.exposed_communication_time_s
        )
        for c in (best, *priced)
    }
    # A plan that does not fit has none in copies that does; and one mesh may be another with an
    # axis in two parts: equal plans are looked at once.
    fitting = [
        c
        for c in (best, *priced)
        if c.mesh.stages == 1 and least_s[id(c)] <= worth and c.cost.memory.total <= limit_bytes
    ]
    distinct = {
        (c.techniques, f"{c.cost.step_time_s:.9g}", f"{least_s[id(c)]:.9g}"): c
        for c in reversed(fitting)
    }
    ranked = sorted(distinct.values(), key=lambda c: least_s[id(c)])
    by_name = [c for c in ranked if is_named(c.plan.recompute)]
    others = [c for c in ranked if not is_named(c.plan.recompute)]
    for c in (*others[:FINALISTS], *by_name[:FINALISTS]):
        for micro in (c.plan.microbatches, 2 * c.plan.microbatches):
            overlapped = (
                _overlapped(search, c, micro)
                if micro % COPIES == 0 and micro in search.offered.microbatches(c.mesh)
                else None
            )
            if (
                overlapped is not None
                and overlapped.cost.memory.total <= limit_bytes
                and overlapped.cost.step_time_s < min(fastest.cost.step_time_s, worth)
            ):
                fastest = overlapped
    return fastest


def _overlapped(search: Solving, c: Candidate, micro: int) -> Candidate | None:
    """A plan's splits with so many microbatches, COPIES at the same time; None where the batch does
    not divide that far."""
    base = search.base(micro)
    if base is None or not all(node.id in c.plan.splits for node in base.graph.nodes):
        return None
    among: Allowed = {i: (c.plan.splits[base.graph.nodes[i].id],) for i in base.times}
    space, techniques = (
        search.space(c.mesh, micro, None, among=among),
        replace(c.techniques, microbatches=micro),
    )
    solved = search.solve(assemble(space, techniques, None)) if space is not None else None
    if space is None or solved is None or not solved.choice:
        return None
    return search.price(space, c.mesh, techniques, solved, c.label, copies=COPIES)
