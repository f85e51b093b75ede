"""Whether the decisions of a strategy file can be at all: files are edited by hand, and an
impossible split would be emitted as wrong numbers.

check_mesh      axes, device count and techniques
check_splits    every node's split, against its operator's rule
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Protocol

from costmodels.runtimes import as_framework
from planner.errors import PlanError
from planner.execution.plan import Plan, StepTechniques
from planner.execution.techniques import (
    INTERLEAVED,
    MAX_ZERO_STAGE,
    OF_PLANS,
    SCHEDULES,
    contradiction,
    read_table,
)
from planner.execution.uneven_pipeline import wrong_widths
from planner.graph.ir import Graph
from planner.ops.lookup import rule_of
from planner.sharding.layout import ISLAND, STAGE
from planner.sharding.notation import spell_rule, spell_split
from planner.sharding.rule import Limits, Rule, legal

PADDING = 0.5
"""Share of a dim that a recorded split may pad: what pins may ask for."""


class Decided(Protocol):
    """What is checked of a strategy before there is a graph."""

    @property
    def mesh_shape(self) -> tuple[tuple[str, int], ...]:
        """(axis, size) pairs, outermost first."""

    @property
    def techniques(self) -> Mapping[str, Any]:
        """The file's table of techniques."""

    @property
    def topology(self) -> Mapping[str, Any]:
        """The file's machine."""

    @property
    def workload(self) -> Mapping[str, Any]:
        """The file's workload."""

    @property
    def blocks(self) -> tuple[Mapping[str, Any], ...]:
        """The file's repeated blocks."""


def check_mesh(strategy: Decided, devices: int) -> None:
    """Axis names are distinct and multiply to the devices; techniques are known ones, on existing
    axes, and go together. Raises P060."""
    sizes = [n for _, n in strategy.mesh_shape]
    names = [a for a, _ in strategy.mesh_shape]
    chosen, mesh = read_table(strategy.techniques), dict(strategy.mesh_shape)
    if len(set(names)) < len(names):
        wrong = f"two mesh axes are called {next(n for n in names if names.count(n) > 1)!r}"
    elif min(sizes, default=1) < 1 or prod(sizes) != devices:
        wrong = f"mesh {mesh} has {prod(sizes)} devices, the topology {devices}"
    else:
        wrong = (
            _wrong_values(chosen, mesh)
            or _wrong_schedule(strategy, chosen, mesh)
            or _wrong_islands(strategy, chosen, mesh)
            or _wrong_cuts(strategy, chosen, mesh)
        )
    if not wrong and any(
        int(b["first"]) < 0 or int(b["period"]) < 1 or int(b["repeats"]) < 1
        for b in strategy.blocks
    ):
        wrong = "a repeated block begins before the first node, or has no nodes or no repeats"
    if wrong:
        raise PlanError(
            "P060", f"this strategy cannot be: {wrong}", help=["change it in the strategy file"]
        )


def _wrong_values(chosen: StepTechniques, mesh: Mapping[str, int]) -> str:
    """What is wrong with single techniques, or with some beside each other."""
    values = {t.name: getattr(chosen, t.field) for t in OF_PLANS if t.name != "zero_group"}
    for t in OF_PLANS:
        if wrong := t.wrong(getattr(chosen, t.field)):
            return wrong
    if missing := set(chosen.zero_axes) - set(mesh):
        return f"zero_group names axis {min(missing)!r}, which the mesh has not"
    if (STAGE in mesh) != bool(chosen.schedule):
        return (
            f"schedule {chosen.schedule or 'none'!r} with mesh {dict(mesh)}: one of"
            f" {', '.join(SCHEDULES)} goes with an axis called stage, none without"
        )
    conflict = contradiction(values, {a: (n,) for a, n in mesh.items()})
    return conflict.text if conflict else ""


def _wrong_islands(strategy: Decided, chosen: StepTechniques, mesh: Mapping[str, int]) -> str:
    """What is wrong with islands beside mesh, microbatches, other techniques and the machine."""
    counts, places = chosen.islands, mesh.get(ISLAND, 0)
    if not counts and ISLAND not in mesh:
        return ""
    if len(counts) != places or next(iter(mesh)) != ISLAND:
        return (
            f"islands {list(counts)} with mesh {dict(mesh)}: one for each place of the first axis"
        )
    if min(counts) < 1 or sum(counts) != chosen.microbatches or max(counts) < 2:
        return (
            f"islands {list(counts)} of {chosen.microbatches} microbatches: at least one each, two"
            " of one, and all together"
        )
    groups = [int(g["devices"]) for g in strategy.topology.get("groups", ())]
    per_island = prod(mesh.values()) // places
    if not groups or sum(groups) != prod(mesh.values()) or any(n % per_island for n in groups):
        return (
            f"islands of {per_island} devices on groups of {groups}: whole islands of one kind each"
        )
    if chosen.schedule or chosen.overlapped_microbatches > 1 or chosen.offload:
        return "islands with pipeline stages, overlapped microbatches or offload"
    return ""


def _wrong_schedule(strategy: Decided, chosen: StepTechniques, mesh: Mapping[str, int]) -> str:
    """What is wrong with pipeline stages beside the ZeRO stage, microbatches and blocks."""
    schedule, micro = chosen.schedule, chosen.microbatches
    if not schedule:
        return ""
    if chosen.zero_stage > MAX_ZERO_STAGE[schedule]:
        most = MAX_ZERO_STAGE[schedule]
        return (
            f"zero_stage {chosen.zero_stage} with pipeline stages: at most {most} under {schedule}"
        )
    if micro < 2:
        return "pipeline stages need at least two microbatches"
    if schedule != INTERLEAVED:
        return ""
    if micro % mesh[STAGE]:
        return (
            f"{micro} microbatches do not go in groups of {mesh[STAGE]}, as interleaved stages"
            " take them"
        )
    chunks = mesh[STAGE] * chosen.virtual_stages
    if (
        not as_framework(str(strategy.workload.get("runtime")))
        and not strategy.techniques.get("cuts")
        and all(int(b["repeats"]) % chunks for b in strategy.blocks)
    ):
        return (
            f"no repeated blocks divide into {mesh[STAGE]} stages of {chosen.virtual_stages}"
            " virtual stages each (virtual)"
        )
    return ""


def _wrong_cuts(strategy: Decided, chosen: StepTechniques, mesh: Mapping[str, int]) -> str:
    """What is wrong with where uneven pipeline stages begin, and with their devices."""
    cuts, widths = strategy.techniques.get("cuts", ()), chosen.stage_widths
    places = mesh.get(STAGE, 1)
    cut = ", ".join(map(str, cuts))
    if widths and (
        wrong := wrong_widths(widths, places, chosen.microbatches, chosen.virtual_stages)
    ):
        return wrong
    if widths and len(widths) != len(cuts) + 1:
        return f"widths {list(widths)} of stages cut before {cut or 'no node'}: one for each stage"
    uncounted = len(cuts) + 1 != places * chosen.virtual_stages and not widths
    if cuts and (uncounted or chosen.recompute != "block"):
        return (
            f"stages cut before {cut} need one virtual stage more (stages times virtual), and"
            " recompute block"
        )
    return ""


def check_splits(graph: Graph, plan: Plan, rules: Sequence[Rule] = ()) -> None:
    """Every split names axes of the mesh once, and factors of its operator that may be cut that
    far. Raises P061 with the node.

    rules: of the graph's nodes, where they are at hand.
    """
    sizes = dict(plan.mesh)
    for i, node in enumerate(graph.nodes):
        split = plan.splits[node.id]
        if not split.pairs:
            continue
        rule = rules[i] if rules else rule_of(node, graph)[0]
        used = [a for _, axes in split.pairs for a in axes]
        wrong = ""
        if (STAGE in used and plan.schedule) or ISLAND in used:
            wrong = f"{'islands' if ISLAND in used else 'stages'} cut no operator"
        elif set(used) - set(sizes):
            wrong = f"axis {min(set(used) - set(sizes))!r} is not in the mesh {sizes}"
        elif len(set(used)) < len(used):
            wrong = "an axis cuts two factors"
        elif not legal(rule, split, sizes, Limits(waste=PADDING)):
            wrong = "the rule does not allow it"
        if wrong:
            detail = [f"rule {spell_rule(rule)}", f"sizes {dict(rule.sizes)}, mesh {sizes}"]
            raise PlanError(
                "P061",
                f"node {node.id!r} ({node.op}) cannot be split {spell_split(split.as_dict())}:"
                f" {wrong}",
                detail=detail,
                help=["change its split in the strategy file"],
            )
