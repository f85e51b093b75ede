"""The plans that people would type: data parallel, ZeRO-3, Megatron's and everything everywhere,
each tuned under the same limits as the search."""

from __future__ import annotations

from dataclasses import replace

from planner.execution.techniques import TECHNIQUES
from planner.machine.mesh_choices import meshes, pinned_mesh
from planner.machine.topology import Mesh
from planner.pins.pins import Pins
from planner.search.best_first import BestFirst, PlanFamily
from planner.search.domain import Family
from planner.search.request import Candidate
from planner.search.solving import Solving
from planner.space.families import batch_only, megatron_only, no_split

NOT_KEPT = ("zero_stage", "zero_group", "copies")
"""Pinned techniques that baselines leave aside, as they do pinned meshes."""
Meshes = tuple[Mesh, ...]


def tune_baselines(search: Solving, baselines: dict[str, Candidate]) -> None:
    """Adds data_parallel, zero3, megatron and replicated, each tuned over microbatches,
    recompute and ZeRO stage under the same limits: with room where it fits so."""
    topology, n = search.request.topology, search.request.topology.devices
    data_parallel = (search.offered.replicas(),)
    node = topology.levels[0].size
    inner = tuple(
        m
        for m in meshes(topology)
        if len(m.axes) <= 2 and m.axes[-1].name == "tensor" and m.axes[-1].size <= node
    )
    levels = (0, 1) if search.training else (0,)
    families: list[tuple[str, Meshes, Family, tuple[int, ...]]] = [
        ("data_parallel", data_parallel, lambda b, m: batch_only(b, m.shape, ("data",)), levels),
        ("replicated", (pinned_mesh(topology, {"data": n}),), lambda b, m: no_split(b), (0,)),
    ]
    if search.training:
        families.append(
            ("zero3", data_parallel, lambda b, m: batch_only(b, m.shape, ("data",)), (3,))
        )
    base = search.base(1)
    staged = (
        tuple(m for m in search.offered.staged() if dict(m.shape).get("tensor", 1) <= node)
        if base is not None and base.dealt
        else ()
    )
    if n > 1 and (inner or staged):
        families.append(("megatron", inner + staged, megatron_only, levels))
    freed = _freed(search)
    for label, searched_meshes, allowed, zero_stages in families:
        family = PlanFamily(label, allowed, zero_stages, pinned=False)
        # Stages and what is gathered by blocks run in loops, and may keep the pins.
        loops = (
            searched_meshes
            if freed is search or zero_stages == (3,)
            else tuple(m for m in searched_meshes if m.stages > 1)
        )
        for searched, part in (
            (freed, tuple(m for m in searched_meshes if m not in loops)),
            (search, loops),
        ):
            if part:
                _tune(searched, family, part, baselines)
    search.stopped = search.stopped or freed.stopped


def _tune(search: Solving, family: PlanFamily, on: Meshes, baselines: dict[str, Candidate]) -> None:
    """Puts the best plan of a family on some meshes with what was found, unless that is better."""
    request = search.request
    explorer = BestFirst(search, family, on, request.roomy_bytes)
    try:
        best = explorer.run() or explorer.smallest()
        if best is not None and request.roomy_bytes < best.cost.memory.total <= request.limit_bytes:
            explorer = BestFirst(search, family, on)
            best = explorer.run() or best
    except KeyboardInterrupt:
        if explorer.best is not None:  # it may have been reported
            baselines.setdefault(family.label, explorer.best)
        raise
    known = baselines.get(family.label)
    if best is not None and (known is None or _rank(search, best) < _rank(search, known)):
        baselines[family.label] = best


def _rank(search: Solving, c: Candidate) -> tuple[bool, bool, float]:
    """Order among the best plans of a family on several meshes: room, fit, the objective."""
    size, request = c.cost.memory.total, search.request
    return size > request.roomy_bytes, size > request.limit_bytes, search.value(c)


def _freed(search: Solving) -> Solving:
    """The search that baselines are tuned by which keep no pin of a mesh or of a ZeRO stage: where
    such a pin leaves loops over blocks alone, one whose programs may have blocks written out."""
    request = search.request
    staged = {t.name for t in TECHNIQUES if t.staged}  # they ask for the mesh that is left aside
    kept = {
        k: v for k, v in request.pins.techniques.items() if k not in NOT_KEPT and k not in staged
    }
    freed = Pins(techniques=kept)
    if request.written_out_up_to or not replace(request, pins=freed).written_out_up_to:
        return search
    return search.under(freed)
