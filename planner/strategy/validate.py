"""TODO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Protocol

from planner.errors import PlanError
from planner.execution.pipeline import INTERLEAVED, MAX_ZERO_STAGE, SCHEDULES
from planner.execution.plan import Plan
from planner.execution.technique_fields import (
    bucket_of,
    copies_of,
    offload_of,
    schedule_of,
    virtual_of,
    widths_of,
)
from planner.execution.techniques import IN_LOOPS, OFFLOAD, RECOMPUTE, WEIGHTS
from planner.execution.uneven_pipeline import wrong_widths
from planner.graph.ir import Graph
from planner.ops.lookup import rule_of
from planner.sharding.layout import STAGE
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
    def blocks(self) -> tuple[Mapping[str, Any], ...]:
        """The file's repeated blocks."""


def check_mesh(strategy: Decided, devices: int) -> None:
    """Axis names are distinct and multiply to the devices; techniques are known ones on existing
    axes. Raises P060."""
    names, sizes = [a for a, _ in strategy.mesh_shape], [n for _, n in strategy.mesh_shape]

    t = strategy.techniques
    wrong, schedule = "", schedule_of(t)
    if len(set(names)) < len(names):
        wrong = f"two mesh axes are called {next(n for n in names if names.count(n) > 1)!r}"
    elif min(sizes, default=1) < 1 or prod(sizes) != devices:
        wrong = (
            f"mesh {dict(strategy.mesh_shape)} has {prod(sizes)} devices, the topology {devices}"
        )
    elif t["recompute"] not in RECOMPUTE:
        wrong = f"recompute {t['recompute']!r} is none of {', '.join(RECOMPUTE)}"
    elif t["zero_stage"] not in (0, 1, 2, 3):
        wrong = f"zero_stage {t['zero_stage']} is none of 0, 1, 2, 3"
    elif set(offload_of(t)) - set(OFFLOAD) or len(set(offload_of(t))) < len(offload_of(t)):
        wrong = f"offload {list(offload_of(t))!r} is not made of {', '.join(OFFLOAD)}"
    elif (sent := [w for w in offload_of(t) if w in IN_LOOPS]) and (
        t["recompute"] == "none" or schedule
    ):
        wrong = (
            f"offload of {' and '.join(sent)} with recompute {t['recompute']} and schedule"
            f" {schedule or 'none'!r}: those of recomputed blocks are sent, without pipeline stages"
        )
    elif (sent := [w for w in offload_of(t) if w in WEIGHTS]) and (copies_of(t) > 1 or schedule):
        wrong = (
            f"offload of {' and '.join(sent)} with microbatch overlap or stages: weights are"
            " fetched for one microbatch at a time"
        )
    elif sent and "optimizer" not in offload_of(t):
        wrong = (
            f"offload of {' and '.join(sent)} without optimizer, which takes more room and is read"
            " once a step"
        )
    elif bucket_of(t) < 0:
        wrong = f"fused_collective_bytes {bucket_of(t)} is no size"
    elif t["microbatches"] < 1:
        wrong = f"{t['microbatches']} microbatches"
    elif (STAGE in names) != bool(schedule) or (schedule and schedule not in SCHEDULES):
        wrong = (
            f"schedule {schedule or 'none'!r} with mesh {dict(strategy.mesh_shape)}: one of"
            f" {', '.join(SCHEDULES)} goes with an axis called stage, none without"
        )
    elif schedule and t["zero_stage"] > MAX_ZERO_STAGE[schedule]:
        wrong = (
            f"zero_stage {t['zero_stage']} with pipeline stages: at most {MAX_ZERO_STAGE[schedule]}"
            f" under {schedule}"
        )
    elif schedule and t["microbatches"] < 2:
        wrong = "pipeline stages need at least two microbatches"
    elif (schedule == INTERLEAVED) != (virtual_of(t) > 1):
        wrong = (
            f"schedule {schedule or 'none'!r} with virtual {virtual_of(t)}: {INTERLEAVED}"
            " schedules have several virtual stages per stage, others one"
        )
    elif copies_of(t) < 1 or t["microbatches"] % copies_of(t):
        wrong = (
            f"{t['microbatches']} microbatches do not divide into {copies_of(t)} overlapped"
            " ones (copies)"
        )
    elif copies_of(t) > 1 and schedule:
        wrong = (
            f"{copies_of(t)} overlapped microbatches (copies) with schedule {schedule!r}:"
            " pipeline stages run one microbatch"
            " at a time"
        )
    elif schedule == INTERLEAVED and t["microbatches"] % dict(strategy.mesh_shape)[STAGE]:
        wrong = (
            f"{t['microbatches']} microbatches do not go in groups of"
            f" {dict(strategy.mesh_shape)[STAGE]}, as interleaved stages take them"
        )
    elif (
        schedule == INTERLEAVED
        and not t.get("cuts")
        and not any(
            int(b["repeats"]) % (dict(strategy.mesh_shape)[STAGE] * virtual_of(t)) == 0
            for b in strategy.blocks
        )
    ):
        wrong = (
            f"no repeated blocks divide into {dict(strategy.mesh_shape)[STAGE]} stages of"
            f" {virtual_of(t)} virtual stages each (virtual)"
        )
    elif (widths := widths_of(t)) and (
        wide := wrong_widths(
            widths, dict(strategy.mesh_shape).get(STAGE, 1), int(t["microbatches"]), virtual_of(t)
        )
    ):
        wrong = wide
    elif widths and len(widths) != len(t.get("cuts", ())) + 1:
        wrong = (
            f"widths {list(widths)} of stages cut before"
            f" {', '.join(map(str, t.get('cuts', ()))) or 'no node'}: one for each stage"
        )
    elif t.get("cuts") and (
        (
            len(t["cuts"]) + 1 != dict(strategy.mesh_shape).get(STAGE, 1) * virtual_of(t)
            and not widths
        )
        or t["recompute"] != "block"
    ):
        wrong = (
            f"stages cut before {', '.join(map(str, t['cuts']))} need one virtual stage more"
            " (stages times"
            " virtual), and recompute block"
        )
    elif set(t["zero_group"]) - set(names):
        wrong = (
            f"zero_group names axis {min(set(t['zero_group']) - set(names))!r}, which the mesh"
            " has not"
        )
    elif any(
        int(b["first"]) < 0 or int(b["period"]) < 1 or int(b["repeats"]) < 1
        for b in strategy.blocks
    ):
        wrong = "a repeated block begins before the first node, or has no nodes or no repeats"
    if wrong:
        raise PlanError(
            "P060", f"this strategy cannot be: {wrong}", help=["change it in the strategy file"]
        )


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
        if STAGE in used and plan.schedule:
            wrong = "stages cut no operator"
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
