"""A plan from one before: of a model that changed a little, what was decided for the operators that
did not change stays, and the others are solved.

    before    of requests that differ in the model alone, the searches kept last
              (planner.cache.folder), each with the content of its operators in order
    kept      the operators of both models that stand in one order, as many as can be; but not those
              beside a change, by a tensor or in the order
    solved    all others, on the mesh of the plan before and with any techniques, by the same search
              as ever (planner.search.best_first)

Content says nothing of names, nor of how often a block is repeated: a model with a layer more keeps
everything. An answer says what was kept, and proves nothing: other meshes and other splits of what
was kept were not looked at. Where nothing like the model is known, most of it changed, nothing fits
with room, or what does is slower for its work than the plan before (memory may bind now), there is
none, and all is searched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from difflib import SequenceMatcher
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from planner.errors import PlanError
from planner.machine.topology import Mesh
from planner.search.best_first import BestFirst, PlanFamily
from planner.search.cache_entry import Decided, decided
from planner.search.exchanges_beside import with_exchanges_beside
from planner.search.keys import history_key
from planner.search.microbatch_overlap import with_microbatch_overlap
from planner.search.request import ReusedPlan
from planner.sharding.rule import Limits, Split
from planner.space.families import Allowed

if TYPE_CHECKING:
    from planner.analysis.facts import GraphFacts
    from planner.search.request import Candidate, SearchResult
    from planner.search.solving import Solving

MOST_SEARCHES = 8
"""Searches of one history."""
LEAST_KEPT = 0.5
"""Share of the operators that must be kept: of a model that has less in common with one before, all
is searched."""
MUCH = 0.8
"""Share of the operators that another model has too, from which on people are told that there is
one to plan from."""
SLOWER = 1.02
"""Times what the plan before leads one to expect, by the FLOPs of both models, that an answer may
take."""
S = TypeVar("S", bound="Solving")
MODES = ("auto", "semi-auto")
"""In the others little is left to search."""


def contents(base: GraphFacts) -> tuple[str, ...]:
    """A digest of what each class of nodes is, in their order."""
    return tuple(
        [
            hashlib.blake2b(repr(base.content(i)).encode(), digest_size=8).hexdigest()
            for i in base.times
        ]
    )


def remember(search: Solving, key: str, result: SearchResult) -> None:
    """Add a search, kept under a key, to those that models like its own may be planned from; and
    tell the cache of the latest whose model is much like this one."""
    cache, tied, best = search.request.cache, search.base(1), result.best
    if (
        cache is None or tied is None or best is None or tied.untied.shared != result.base.shared
    ):  # an entry has what was decided for the classes of its own base
        return
    base = tied.untied
    history, own_contents = history_key(search.model, search.request), contents(base)
    row = {
        "key": key,
        "model": search.model.name,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "contents": own_contents,
        "flops": float(base.model_flops),
        "copied_s": float(best.cost.loop_copy_time_s),
        "looped": len(base.looped),
        "other_s": best.cost.step_time_s - best.cost.compute_time_s - best.cost.loop_copy_time_s,
    }
    others = [r for r in _rows(cache.get(history)) if r["key"] != key]
    cache.put(history, {"searches": [row, *others][:MOST_SEARCHES]})
    cache.alike = next(
        (
            f"{r['model']} on {r['date']}"
            for r in others
            if sum(map({*r["contents"]}.__contains__, own_contents)) >= MUCH * len(own_contents)
        ),
        "",
    )


def _rows(entry: Any) -> list[dict[str, Any]]:
    """The searches of a history, the latest first; what is no such row is left out."""
    rows = entry.get("searches", []) if isinstance(entry, dict) else []
    parts = {
        "key": str,
        "model": str,
        "date": str,
        "contents": list,
        "flops": float,
        "copied_s": float,
        "looped": int,
        "other_s": float,
    }
    good = (
        [
            r
            for r in rows
            if isinstance(r, dict) and all(isinstance(r.get(k), kind) for k, kind in parts.items())
        ]
        if isinstance(rows, list)
        else []
    )
    return [r for r in good if all(isinstance(c, str) for c in r["contents"])]


def kept_places(
    old: Sequence[str], new: Sequence[str], linked: Mapping[int, frozenset[int]]
) -> dict[int, int]:
    """Place in a new order -> place in an old one, of operators that are in both and not beside a
    change. linked: places that share a tensor with each."""
    pairs: dict[int, int] = {}
    beside: set[int] = set()
    for tag, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            pairs.update(zip(range(c, d), range(a, b), strict=True))
        else:
            beside.update((c - 1, d))
    changed = set(range(len(new))) - pairs.keys()
    beside.update(k for place in changed for k in linked.get(place, ()))
    return {k: at for k, at in pairs.items() if k not in beside}


def _linked(base: GraphFacts) -> dict[int, frozenset[int]]:
    """Place of each class among the classes -> those of the classes that it hands a tensor to, or
    is handed one by."""
    place = {c: k for k, c in enumerate(base.times)}
    neighbours: dict[int, set[int]] = {}
    for edge in base.tensor_edges:
        ends = {
            place[c]
            for c in (*(i for i, _, _ in edge.uses), *((edge.maker[0],) if edge.maker else ()))
        }
        for k in ends:
            neighbours.setdefault(k, set()).update(ends - {k})
    return {k: frozenset(others) for k, others in neighbours.items()}


def from_before(search: S) -> tuple[S, Candidate, ReusedPlan] | None:
    """The best plan that keeps what a search before decided for most of the model, the search that
    has its details, and what was kept; None where there is no such."""
    request, cache, tied = search.request, search.request.cache, search.base(1)
    if cache is None or tied is None or request.mode not in MODES or request.objective != "step":
        return None
    base = tied.untied
    new, linked = contents(base), _linked(base)
    rows = [
        (row, kept_places(row["contents"], new, linked))
        for row in _rows(cache.get(history_key(search.model, request)))
    ]
    for row, places in sorted(rows, key=lambda x: -len(x[1])):
        if len(places) < LEAST_KEPT * len(new):
            return None
        decisions = decided(cache.get(row["key"]), request.topology, len(row["contents"]))
        if decisions is not None:  # else it left the cache, or does not hold
            classes = tuple(base.times)
            reused = {classes[k]: decisions.splits[place] for k, place in places.items()}
            reused_nodes = sum(base.times[c] for c in reused)
            work = (
                float(base.model_flops) / row["flops"]
                if row["flops"] > 0 and base.model_flops
                else 1.0
            )
            # Products take their share of the work, copies of loops that of the blocks; what else
            # there is (communication, the optimizer) need not become less with it.
            copied_s = row["copied_s"] * len(base.looped) / max(1, row["looped"])
            expected = (decisions.step_time_s - row["copied_s"]) * work + copied_s
            expected += row["other_s"] * max(0.0, 1 - work)
            answer = _answer(search, decisions, reused, SLOWER * expected)
            return (
                (
                    *answer,
                    ReusedPlan(
                        row["model"],
                        row["date"],
                        reused_nodes,
                        len(base.graph.nodes) - reused_nodes,
                    ),
                )
                if answer
                else None
            )
    return None


def _answer(
    search: S, before: Decided, reused: Mapping[int, Split], most_s: float
) -> tuple[S, Candidate] | None:
    """The best plan of at most so many seconds on the mesh of one before, with the splits that are
    reused (by class of nodes), and its search; where none fits, with as much in the host's memory
    as that one had."""
    numbered = search.base(1)
    assert numbered is not None
    for offload in dict.fromkeys((search.request.offload, before.offload)):
        within = search if offload == search.request.offload else search.offloading(offload)
        limit = within.request.roomy_bytes
        family = BestFirst(
            within,
            PlanFamily(
                "plan",
                partial(_allowed, within, numbered.untied, reused),
                within.offered.levels(),
                alone=True,
            ),
            (before.mesh,),
            limit,
        )
        try:
            best = family.run(
                most_s if before.copies == 1 else inf
            )  # without copies it may be slower
        except PlanError:  # the mesh is none for this model, or pins cannot be followed on it
            return None
        best = (
            with_exchanges_beside(
                within,
                with_microbatch_overlap(within, best, tuple(family.priced), limit),
                tuple(family.priced),
                limit,
            )
            if best is not None
            else None
        )
        if best is not None and best.cost.step_time_s <= most_s:
            return within, best
    return None


def _allowed(
    search: Solving, numbered: GraphFacts, reused: Mapping[int, Split], base: GraphFacts, mesh: Mesh
) -> Allowed:
    """What pins leave, and of classes whose split is reused that one alone."""
    pins = search.request.pins
    by_pins = (
        {}
        if pins.empty
        else search.offered.restricted(base, mesh, Limits(forbidden=pins.forbidden_factors))
    )
    return {
        **by_pins,
        **(
            {i: (s,) for i, s in reused.items() if i in base.times}
            if base.untied.shared == numbered.shared
            else {}
        ),
    }
