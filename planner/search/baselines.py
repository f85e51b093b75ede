"""The plans that people would type: data parallel, ZeRO-3, Megatron's and everything everywhere,
each tuned under the same limits as the search."""

from __future__ import annotations

from planner.machine.mesh_choices import meshes, pinned_mesh
from planner.machine.topology import Mesh
from planner.search.best_first import BestFirst, PlanFamily
from planner.search.domain import Family
from planner.search.request import Candidate
from planner.search.solving import Solving
from planner.space.families import batch_only, megatron_only, no_split


def tune_baselines(search: Solving, found: dict[str, Candidate]) -> None:
    """Adds data_parallel, zero3, megatron and replicated, each tuned over microbatches,
    recompute and ZeRO stage under the same limits: with room where it fits so."""
    topology, n = search.request.topology, search.request.topology.devices
    one = (search.offered.replicas(),)
    node = topology.levels[0].size
    inner = tuple(
        m
        for m in meshes(topology)
        if len(m.axes) <= 2 and m.axes[-1].name == "tensor" and m.axes[-1].size <= node
    )
    levels = (0, 1) if search.training else (0,)
    families: list[tuple[str, tuple[Mesh, ...], Family, tuple[int, ...]]] = [
        ("data_parallel", one, lambda b, m: batch_only(b, m.shape, ("data",)), levels),
        ("replicated", (pinned_mesh(topology, {"data": n}),), lambda b, m: no_split(b), (0,)),
    ]
    if search.training:
        families.append(("zero3", one, lambda b, m: batch_only(b, m.shape, ("data",)), (3,)))
    base = search.base(1)
    staged = (
        tuple(m for m in search.offered.staged() if dict(m.shape).get("tensor", 1) <= node)
        if base is not None and base.dealt
        else ()
    )
    if n > 1 and (inner or staged):
        families.append(("megatron", inner + staged, megatron_only, levels))
    for label, on, allowed, at in families:
        family = PlanFamily(label, allowed, at, pinned=False)
        explorer = BestFirst(search, family, on, search.request.roomy_bytes)
        try:
            best = explorer.run() or explorer.smallest()
            if (
                best is not None
                and search.request.roomy_bytes
                < best.cost.memory.total
                <= search.request.limit_bytes
            ):
                explorer = BestFirst(search, family, on)
                best = explorer.run() or best
        except KeyboardInterrupt:
            if explorer.best is not None:  # it may have been reported
                found[label] = explorer.best
            raise
        if best is not None:
            found[label] = best
