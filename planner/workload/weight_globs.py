"""Weights by globs over their labels or names, as users name them."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

from planner.errors import PlanError, closest
from planner.graph.ir import Graph


def matching(graph: Graph, glob: str, option: str) -> set[str]:
    """Weights whose label or name matches. Raises PlanError when none does."""
    names = {n: graph.labels.get(n, n) for n in graph.weights}
    matches = {n for n, label in names.items() if _matches((label, n), glob)}
    if not matches:
        near = _meant([*names.values(), *names], glob)
        raise PlanError(
            "P036",
            f"{option} {glob!r} matches no parameter",
            help=[f"did you mean {near!r}?" if near else "`plan ops FILE --parameters` lists them"],
        )
    return matches


def _matches(names: Iterable[str], glob: str) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for name in names)


def _meant(names: Sequence[str], glob: str) -> str:
    """The glob with what it lacks to match some name, as where a layer is named without the scopes
    around it or the parameter in it; else the closest name, or the parameters of the closest layer,
    as people shorten names of layers; "" without any."""

    def completed(part: str) -> str:
        longer = (f"*.{part}", f"{part}.weight", f"*.{part}.weight", f"*{part}*")
        return next((one for one in longer if _matches(names, one)), "")

    parts = list(dict.fromkeys(part for name in names for part in name.split(".")))
    layer = closest(glob.strip("*."), parts, 0.5)
    return completed(glob) or closest(glob, names) or (completed(layer) if layer else "")
