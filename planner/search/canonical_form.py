"""Of plans that cost the same, the one to show: on few axes, without what changes nothing, and with
axes called by what they do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.analysis.axis_roles import role_named
from planner.pricing.step_time import derived
from planner.search.axis_names import axis_names, renamed_candidate, renamed_mesh, renamed_space
from planner.search.axis_symmetry import axis_swap, swapped_choice
from planner.search.request import TIE_MEMORY, Candidate
from planner.search.solving import Solving
from planner.solvers.problem import Solution
from planner.space.variables import Space

WITH_ROOM = "with_room"
"""Key of the best plan that fits with the upper end of its memory range, among the baselines of one
that fits tightly."""
PLAINER = 3e-3
"""What a plan on fewer axes may take longer and is taken all the same, as a part of the step (a
guess: far below what prices are off by)."""
ON_DEVICES = "on_devices"
"""Key of the best plan with nothing in the host's memory, among the baselines of one that was taken
because it has something there."""


def on_fewer_axes(search: Solving, best: Candidate, others: Sequence[Candidate]) -> Candidate:
    """The plan, or where two of its axes do the same (data, data2) one on fewer axes that is as
    small and hardly slower: what one odd operator gains by a second axis of the batch is not worth
    a mesh that nobody would have written."""
    base = search.base(best.plan.microbatches)
    assert base is not None
    roles = [
        role
        for name in axis_names(base, best.plan, search.request.pins.named).values()
        if (role := role_named(name))
    ]
    if len(set(roles)) == len(roles):
        return best
    close = (
        c
        for c in others
        if len(c.mesh.axes) < len(best.mesh.axes)
        and search.value(c) <= (1 + PLAINER) * search.value(best)
        and c.cost.step_time_s <= (1 + PLAINER) * best.cost.step_time_s
        and c.cost.memory.total <= (1 + TIE_MEMORY) * best.cost.memory.total
    )
    return min(close, key=lambda c: c.key(search.request), default=best)


def canonical(search: Solving, best: Candidate) -> Candidate:
    """The plan, or one that is told apart from it by nothing that costs, where it is no dearer:
    without an ZeRO stage that finds nothing to cut, and of the mirror images in which axes
    that cost the same change places (planner.search.axis_symmetry) the usual one.
    """
    _, space, choice, _ = search.details[id(best)]
    pins, techniques = search.request.pins, best.techniques
    swap = axis_swap(best.mesh, axis_names(space.base, best.plan, pins.axes), pins.axes)
    image = (swapped_choice(space, choice, best.mesh, swap) if swap else None) or choice
    if (
        best.plan.zero_stage
        and "zero_stage" not in pins.techniques
        and not any(w.zero_stage for w in derived(space.base.untied, best.plan)[0].weights.values())
    ):
        techniques = replace(techniques, zero_stage=0)
    if (image, techniques) == (choice, best.techniques):
        return best
    other = search.price(
        space,
        best.mesh,
        techniques,
        Solution(image, "feasible"),
        best.label,
        copies=best.plan.overlapped_microbatches,
        exchanges=best.plan.exchanges,
    )
    if other is None or other.key(search.request) > best.key(search.request):
        return best
    proven = replace(
        other, bound_s=best.bound_s, status=best.status
    )  # of the problem that offers both
    search.details[id(proven)] = proven, *search.details[id(other)][1:]
    return proven


def named(search: Solving, best: Candidate, space: Space) -> tuple[Candidate, Space]:
    """A plan and its space with axes called by what they do; names the user gave stay."""
    names = axis_names(space.base, best.plan, search.request.pins.named)
    if all(a == b for a, b in names.items()):
        return best, space
    mesh = renamed_mesh(best.mesh, names)
    return renamed_candidate(best, mesh, names), renamed_space(space, mesh, names)


def called(search: Solving, baselines: Mapping[str, Candidate]) -> dict[str, Candidate]:
    """Baselines, and the plans with room and on devices alone, with axes called by what they do."""
    renamed: dict[str, Candidate] = {}
    for label, c in baselines.items():
        base = search.base(c.plan.microbatches)
        assert base is not None
        own = label in (WITH_ROOM, ON_DEVICES)
        names = axis_names(base, c.plan, search.request.pins.named if own else ())
        renamed[label] = renamed_candidate(c, renamed_mesh(c.mesh, names), names)
    return renamed
