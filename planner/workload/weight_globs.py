"""Weights by globs over their labels or names, as users name them."""

from __future__ import annotations

import fnmatch

from planner.errors import PlanError, did_you_mean
from planner.graph.ir import Graph


def matching(graph: Graph, glob: str, option: str) -> set[str]:
    """Weights whose label or name matches. Raises PlanError when none does."""
    names = {n: graph.labels.get(n, n) for n in graph.weights}
    found = {
        n
        for n, label in names.items()
        if fnmatch.fnmatchcase(label, glob) or fnmatch.fnmatchcase(n, glob)
    }
    if not found:
        parts = dict.fromkeys(part for label in names.values() for part in label.split("."))
        near = did_you_mean(glob, [*names.values(), *names]) or did_you_mean(
            glob.strip("*."),
            list(parts),
            0.5,  # people shorten names of layers
        )
        raise PlanError(
            "P036",
            f"{option} {glob!r} matches no parameter",
            help=[near or "`plan ops FILE --parameters` lists them"],
        )
    return found
