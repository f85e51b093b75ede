"""Pins that contradict each other, and how pins are spelled in what is said of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.errors import PlanError
from planner.execution.pipeline import INTERLEAVED
from planner.execution.techniques import IN_LOOPS, WEIGHTS
from planner.execution.uneven_pipeline import WIDEST
from planner.sharding.layout import STAGE


def check(
    mesh: Mapping[str, tuple[int, ...]],
    techniques: Mapping[str, Any],
    forbidden: frozenset[str],
    nodes: Mapping[str, Mapping[str, Any]],
) -> None:
    """Raises PlanError P024 for pins that contradict each other; what each is,
    planner.pins.pins.Pins says."""
    schedule, chunks = techniques.get("schedule"), techniques.get("virtual")
    if schedule is not None and chunks is not None and (schedule == INTERLEAVED) != (chunks > 1):
        raise PlanError(
            "P024",
            f"pins schedule = {schedule!r} and virtual = {chunks} contradict each other:"
            f" {INTERLEAVED} schedules have several virtual stages per stage, others one",
            help=["remove one of them"],
        )
    if techniques.get("zero_stage") == 0 and "zero_group" in techniques:
        raise PlanError(
            "P024",
            f"pins zero_stage = 0 and zero_group = {techniques['zero_group']} contradict each"
            " other: without ZeRO nothing is shared in groups",
            help=["zero=1 (to 3), or leave zero_group out"],
        )
    if techniques.get("zero_stage", 3) != 3 and "fsdp" in mesh:
        sizes = " or ".join(map(str, mesh["fsdp"]))
        raise PlanError(
            "P024",
            f"pins fsdp = {sizes} and zero_stage = {techniques['zero_stage']} contradict each"
            " other: fsdp is ZeRO-3 over so many devices",
            help=[f"dp={sizes},zero={techniques['zero_stage']}, or leave zero out"],
        )
    for glob, table in nodes.items():
        both = next(
            (f for f, axes in table.get("split", {}).items() if axes and f in forbidden), ""
        )
        if both:
            raise PlanError(
                "P024",
                f"pins [forbid] {both} and {glob!r} contradict each other",
                detail=[f"{glob!r}: {placement(table)}"],
                help=["remove one of them"],
            )
    if widths := techniques.get("widths", ()):
        stages, micro = mesh.get(STAGE, ()), techniques.get("microbatches", WIDEST)
        other = (
            f"stage = {' or '.join(map(str, stages))}"
            if stages and sum(widths) not in stages
            else (
                f"virtual = {chunks}"
                if chunks is not None and chunks > 1
                else (
                    f"schedule = {schedule!r}"
                    if schedule == INTERLEAVED
                    else f"microbatches = {micro}"
                    if micro % max(widths)
                    else ""
                )
            )
        )
        if other or not stages:
            raise PlanError(
                "P024",
                f"pins widths = {spelled('widths', widths)} and {other or 'no stages'} contradict"
                f" each other: the stages take {sum(widths)} positions of the stage axis, one"
                f" virtual stage each, and {max(widths)} microbatches go together",
                help=[f"pp={sum(widths)}, or leave widths out"],
            )
    if (copies := techniques.get("copies", 1)) > 1:
        micro, staged = (
            techniques.get("microbatches", copies),
            bool(set(mesh.get("stage", ())) - {1}),
        )
        other = "stages" if staged else f"microbatches = {micro}" if micro % copies else ""
        if other:
            raise PlanError(
                "P024",
                f"pins copies = {copies} and {other} contradict each other: {copies}"
                " microbatches overlap, without pipeline stages",
                help=["remove one of them" if staged else f"a multiple of {copies} microbatches"],
            )
    if sent := [w for w in techniques.get("offload", ()) if w in IN_LOOPS]:
        other = next(
            (f"recompute = {r!r}" for r in [techniques.get("recompute")] if r == "none"), ""
        ) or ("stages" if set(mesh.get("stage", ())) - {1} else "")
        if other:
            raise PlanError(
                "P024",
                f"pins offload = {'+'.join(sent)!r} and {other} contradict each other: those of"
                " recomputed blocks are sent, without pipeline stages",
                help=["remove one of them"],
            )
    if sent := [w for w in techniques.get("offload", ()) if w in WEIGHTS]:
        other = (
            "copies"
            if techniques.get("copies", 1) > 1
            else "stages"
            if set(mesh.get("stage", ())) - {1}
            else ""
        )
        if other:
            raise PlanError(
                "P024",
                f"pins offload = {'+'.join(sent)!r} and {other} contradict each other: weights are"
                " brought for one microbatch at a time",
                help=["remove one of them"],
            )
        if "optimizer" not in techniques["offload"]:
            raise PlanError(
                "P024",
                f"pin offload = {'+'.join(sent)!r} leaves the optimizer's state on the devices,"
                " which takes more room and is read once a step",
                help=[f"offload=optimizer+{'+'.join(sent)}"],
            )


def spelled(key: str, value: Any) -> str:
    """A technique's value as one would write it."""
    if key in ("offload", "widths"):
        return "+".join(map(str, value)) or "none"
    return "none" if key == "bucket" and not value else str(value)


def placement(table: Mapping[str, Any]) -> str:
    """`n over tensor` of a split, `[data, -]` of a layout."""
    if "split" in table:
        return (
            ", ".join(
                f"{f} over {' + '.join(axes)}" if axes else f"{f} whole"
                for f, axes in table["split"].items()
            )
            or "whole"
        )
    if "layout" in table:
        return f"[{', '.join('+'.join(axes) or '-' for axes in table['layout'])}]"
    return "as it is"
