"""Pins that contradict each other, and how splits and layouts are spelled in errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.errors import PlanError
from planner.execution.techniques import contradiction
from planner.sharding.layout import ISLAND


def check(
    mesh: Mapping[str, tuple[int, ...]],
    techniques: Mapping[str, Any],
    forbidden: frozenset[str],
    nodes: Mapping[str, Mapping[str, Any]],
) -> None:
    """Raises PlanError P024 for pins that contradict each other; what each is,
    planner.pins.pins.Pins says."""
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
    if ISLAND in mesh:
        raise PlanError(
            "P024",
            f"pin {ISLAND} = {' or '.join(map(str, mesh[ISLAND]))} contradicts the name: that axis"
            " is of machines with several kinds of device, which follow from --hardware",
            help=["--hardware 8xh100-sxm+8xa100-80gb without a pinned mesh, or another name"],
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
    if wrong := contradiction(techniques, mesh):
        raise PlanError(
            "P024", f"{'pin' if wrong.single else 'pins'} {wrong.text}", help=[wrong.help]
        )


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
