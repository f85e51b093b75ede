"""What is proven of a plan, and of which plans that is said: a bound covers the meshes that were
tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

AXES = {1: "one axis", 2: "up to two axes", 3: "up to three axes"}


def covered(solver: Mapping[str, Any]) -> str:
    """`the 22 meshes tried`: what the bound of a strategy's `solver` holds for, as its file says;
    `the meshes tried` of files that do not."""
    meshes = {name for row in solver.get("covers", ()) for name in row["meshes"]}
    return (
        "the one mesh tried"
        if len(meshes) == 1
        else f"the {len(meshes)} meshes tried"
        if meshes
        else "the meshes tried"
    )


def extent(solver: Mapping[str, Any]) -> list[str]:
    """What the bound of a strategy's `solver` holds for, as `covered` but at length, a phrase each:
    for `plan explain`."""
    rows: Sequence[Mapping[str, Any]] = solver.get("covers", ())
    phrases = []
    with_all_splits = {name for row in rows if row["splits"] == "all" for name in row["meshes"]}
    some = {
        name for row in rows if row["splits"] == "some" for name in row["meshes"]
    } - with_all_splits
    for meshes, words in ((with_all_splits, "every split"), (some, "splits that good plans use")):
        names = sorted(meshes, key=_axes)
        if names:
            phrases.append(
                f"{len(names)} mesh{'es' if len(names) > 1 else ''} of"
                f" {AXES.get(_axes(names[-1]), 'several axes')}, {words}"
            )
    micro = sorted({n for row in rows for n in row["microbatches"]})
    return [*phrases, f"microbatches {', '.join(map(str, micro))}"] if micro else phrases


def _axes(mesh: str) -> int:
    """Axes of a mesh beside its stages."""
    return len(mesh.rpartition("|")[2].split("x"))
