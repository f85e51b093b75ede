"""Of meshes those that a launcher's programs run on."""

from __future__ import annotations

from math import gcd, prod

from planner.analysis.axis_roles import role_named
from planner.analysis.facts import GraphFacts
from planner.errors import PlanError
from planner.machine.mesh_choices import divisors, grouped
from planner.machine.topology import Mesh, domain_of
from planner.ops import operator_of
from planner.pins.launcher_space import ends
from planner.search.request import Request
from planner.workload.model import Model

SHORTEST = 1024
"""Positions of a row that a device of the sequence axis has at least."""


def replicas(mesh: Mesh) -> int:
    """Groups of devices with rows of their own."""
    return _data_ranks(mesh) * dict(mesh.shape).get("expert", 1)


def _data_ranks(mesh: Mesh) -> int:
    """Places along all axes of the batch: two where shards keep to groups."""
    return prod(a.size for a in mesh.inner if role_named(a.name) == "data")


def with_groups(meshes: tuple[Mesh, ...], request: Request) -> tuple[Mesh, ...]:
    """The meshes, and where a launcher shards parameters over replicas of one stage those with
    shards in groups, each with a copy of everything (HSDP): of one fast domain, and where nothing
    but the batch is cut of two, of four ..."""
    launcher, topology, asked = request.launcher, request.topology, request.pins.techniques
    domain = domain_of(topology)
    in_groups = (
        launcher is not None
        and launcher.groups
        and asked.get("zero_stage", 3) == 3
        and "zero_group" not in asked
        and domain > 1
    )
    if not in_groups:
        return meshes
    more = list[Mesh]()
    for mesh in meshes:
        size, plain = domain, _data_ranks(mesh) == topology.devices
        while mesh.stages == 1 and size < topology.devices and (plain or size == domain):
            in_domains = grouped(topology, mesh, size)
            if in_domains is not None and len(in_domains.group) < len(in_domains.inner):
                more.append(in_domains)
            size *= 2
    return (*meshes, *more)


def sayable(
    meshes: tuple[Mesh, ...], model: Model, request: Request, base: GraphFacts
) -> tuple[Mesh, ...]:
    """Of meshes of a launcher's degrees those with whole rows on every replica, in every microbatch
    where their number is pinned, stages that it can say, experts where there are some, and pieces
    of a row of equal length. Raises PlanError P035 where no batch is whole on them, P068 where no
    stages are."""
    launcher, training = request.launcher, model.workload.kind == "train"
    assert launcher is not None
    blocks = base.dealt[0][2] if training and base.dealt else 0
    experts = any("expert" in roles.values() for roles in base.roles.values())
    layers = sum(operator_of(n.op).kind == "attention" for n in base.graph.nodes)
    uneven = launcher.uneven and layers == blocks  # what stages are counted in there
    length = max(
        (
            base.rules[i].sizes[factor]
            for i, roles in base.roles.items()
            for factor, role in roles.items()
            if role == "sequence" and factor in base.rules[i].sizes
        ),
        default=1,
    )

    def rows_are_whole(mesh: Mesh) -> bool:
        sizes = dict(mesh.shape)
        pieces = sizes.get("sequence", 1)
        return (
            model.batch % replicas(mesh) == 0
            and (sizes.get("expert", 1) == 1 or experts)
            and (pieces == 1 or (length % pieces == 0 and length // pieces >= SHORTEST))
        )

    def stages_are_said(mesh: Mesh) -> bool:
        return (
            mesh.stages == 1
            or bool(blocks and blocks % mesh.stages == 0)
            or bool(uneven and ends(blocks, mesh.stages))
            or bool(launcher.layouts and blocks >= mesh.stages)
        )

    with_whole_rows = tuple(m for m in meshes if rows_are_whole(m))
    with_known_stages = tuple(m for m in with_whole_rows if stages_are_said(m))
    if with_whole_rows and not with_known_stages:
        fewer = [str(n) for n in range(2, blocks + 1) if blocks % n == 0][:4]
        raise PlanError(
            "P068",
            f"{min(m.stages for m in with_whole_rows)} pipeline stages are not possible under"
            f" --for {launcher.name}: they share the {blocks} repeated blocks evenly"
            + ("" if uneven else f", and {layers - blocks} more layers are unlike these"),
            help=[f"pp={' or '.join(fewer)}", "leave --for out: stages are then cut anywhere"],
        )
    if meshes and not with_known_stages:
        n = request.topology.devices
        raise PlanError(
            "P035",
            f"batch {model.batch} does not divide over the replicas of any mesh that"
            f" {launcher.name} has for {n} devices",
            help=[f"--batch {n}, or another multiple of the replicas"],
        )
    return _with_pinned_microbatches(_with_pinned_zero(with_known_stages, request), model, request)


def with_whole_heads(
    meshes: tuple[Mesh, ...], request: Request, base: GraphFacts
) -> tuple[Mesh, ...]:
    """Of meshes those whose tensor ranks have as many heads of every attention: launchers start no
    other (Megatron Core's TransformerConfig refuses them). Raises PlanError P024 where there are
    none."""
    launcher = request.launcher
    assert launcher is not None
    sizes = [
        base.rules[i].sizes
        for i, n in enumerate(base.graph.nodes)
        if operator_of(n.op).kind == "attention"
    ]
    counts = {s.get("g", 1) * s.get("r", 1) for s in sizes} - {1}
    heads = gcd(*counts) if counts else 0
    with_whole = tuple(m for m in meshes if heads % dict(m.shape).get("tensor", 1) == 0)
    if meshes and not with_whole:
        ranks = min(dict(m.shape).get("tensor", 1) for m in meshes)
        fewer = max(n for n in divisors(heads) if n <= ranks and request.topology.devices % n == 0)
        raise PlanError(
            "P024",
            f"tensor = {ranks} and --for {launcher.name} contradict each other: attention has"
            f" {heads} heads, and every tensor rank has as many of them",
            help=[f"tp={fewer}", "leave --for out: heads may then be cut with padding"],
        )
    return with_whole


def zero_stages(mesh: Mesh, request: Request) -> tuple[int, ...]:
    """ZeRO stages that the launcher has on a mesh."""
    sizes, launcher = dict(mesh.shape), request.launcher
    assert launcher is not None
    stages = launcher.zero_with(
        sizes.get("sequence", 1), _data_ranks(mesh), replicas(mesh), mesh.stages
    )
    # What is reduced over all replicas once is so in parts, near and far, without groups, too.
    only_shards = mesh.group and "zero_group" not in request.pins.techniques
    return tuple(z for z in stages if z == 3) if only_shards else stages


def _with_pinned_zero(meshes: tuple[Mesh, ...], request: Request) -> tuple[Mesh, ...]:
    """Of meshes those on which the launcher has the pinned ZeRO stage; all where none has replicas.
    Raises PlanError P024 where there are none."""
    launcher, pinned = request.launcher, request.pins.techniques.get("zero_stage")
    assert launcher is not None
    if not pinned:
        return meshes
    stages_on = {mesh: zero_stages(mesh, request) for mesh in meshes}
    with_stage = tuple(mesh for mesh in meshes if int(pinned) in stages_on[mesh])
    others = sorted({z for levels in stages_on.values() for z in levels if z})
    if others and not with_stage:
        raise PlanError(
            "P024",
            f"pin zero_stage = {pinned} and --for {launcher.name} contradict each other:"
            f" {launcher.version} has {', '.join(map(str, others))} on the meshes that are left",
            help=[f"zero={others[0]}", "remove the pin, or --for"],
        )
    return with_stage or meshes


def _with_pinned_microbatches(
    meshes: tuple[Mesh, ...], model: Model, request: Request
) -> tuple[Mesh, ...]:
    """Of meshes those with whole rows on every replica in each of the pinned microbatches. Raises
    PlanError P035 where there are none."""
    launcher, pinned = request.launcher, request.pins.techniques.get("microbatches")
    assert launcher is not None
    if not pinned or model.workload.kind != "train" or model.batch % int(pinned):
        return meshes

    def possible(mesh: Mesh, offered: tuple[int, ...]) -> tuple[int, ...]:
        return launcher.microbatches(offered, model.batch // replicas(mesh), mesh.stages)

    with_whole_rows = tuple(m for m in meshes if possible(m, (int(pinned),)))
    if meshes and not with_whole_rows:
        fewer = {n for m in meshes for n in possible(m, tuple(divisors(model.batch)))}
        nearest = max((n for n in fewer if n < int(pinned)), default=min(fewer, default=0))
        rounds = " that go through its stages in whole rounds" if launcher.whole_rounds else ""
        raise PlanError(
            "P035",
            f"batch {model.batch} has no {pinned} microbatches of whole rows on every"
            f" replica{rounds}, on any mesh that {launcher.name} has for"
            f" {request.topology.devices} devices under these pins",
            help=[f"micro={nearest}"] if nearest else ["pin other degrees"],
        )
    return with_whole_rows
