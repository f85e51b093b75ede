"""What is proven of a plan, and of which plans that is said: a bound covers the meshes that were tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

AXES = {1: "one axis", 2: "up to two axes", 3: "up to three axes"}


def covered(solver: Mapping[str, Any]) -> str:
    """`the 22 meshes tried`: what the bound of a strategy's `solver` holds for, as its file says; `the meshes tried` of files that do not."""
    rows: Sequence[Mapping[str, Any]] = solver.get("covers", ())
    whole, some = (sum(len(row["meshes"]) for row in rows if row["splits"] == splits) for splits in ("all", "some"))
    if whole + some == 0:
        return "the meshes tried"
    if whole + some == 1:
        return "the one mesh tried"
    return f"the {whole + some} meshes tried"


def extent(solver: Mapping[str, Any]) -> list[str]:
    """The same at length, a phrase each: for `plan explain`."""
    rows: Sequence[Mapping[str, Any]] = solver.get("covers", ())
    said = []
    for splits, words in (("all", "every split"), ("some", "splits that good plans use")):
        names = sorted({name for row in rows if row["splits"] == splits for name in row["meshes"]}, key=_axes)
        if names:
            said.append(f"{len(names)} mesh{'es' if len(names) > 1 else ''} of {AXES.get(_axes(names[-1]), 'several axes')}, {words}")
    micro = sorted({n for row in rows for n in row["microbatches"]})
    return [*said, f"microbatches {', '.join(map(str, micro))}"] if micro else said


def _axes(mesh: str) -> int:
    """Axes of a mesh beside its stages."""
    return len(mesh.rpartition("|")[2].split("x"))
