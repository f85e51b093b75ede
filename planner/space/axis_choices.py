"""What each option of a space's variables cuts over each mesh axis: what the solver `recursive`
decides level by level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from planner.sharding.layout import Layout
from planner.sharding.rule import Split
from planner.space.variables import Space


def axis_choices(space: Space) -> tuple[np.ndarray, ...]:
    """`_axis_choices`, kept with the space."""
    if "axes" not in space.memo:
        space.memo["axes"] = _axis_choices(space)
    result: tuple[np.ndarray, ...] = space.memo["axes"]
    return result


def _axis_choices(space: Space) -> tuple[np.ndarray, ...]:
    """Per variable [options, axes] which factor (a small integer) each mesh axis cuts, -1 for none:
    what `recursive` decides level by level."""
    axes = tuple(space.pricer.sizes)
    alike: dict[tuple, np.ndarray] = {}  # nodes of one kind share their splits
    choices = []
    for v in space.variables:
        if v.kind == "op":
            factors = (*space.base.rules[v.node].choices, "+")
            key = id(v.splits), factors
            if key not in alike:
                alike[key] = _cuts(v.splits, {f: k for k, f in enumerate(factors)}, axes)
            choices.append(alike[key])
        else:
            choices.append(
                np.array(
                    [_states(shared, derived, axes) for shared, derived in v.layouts], np.int64
                ).reshape(len(v.layouts), len(axes))
            )
    return tuple(choices)


def _cuts(splits: Sequence[Split], number: Mapping[str, int], axes: tuple[str, ...]) -> np.ndarray:
    """Which factor each mesh axis cuts. [splits, axes]"""
    result, column = (
        np.full((len(splits), len(axes)), -1, np.int64),
        {a: k for k, a in enumerate(axes)},
    )
    for row, split in enumerate(splits):
        for f, used in split.pairs:
            for a in used:
                result[row, column[a]] = number[f]
    return result


def _states(shared: Layout, derived: Layout | None, axes: tuple[str, ...]) -> list[int]:
    """What each mesh axis does to a shared tensor: the dim it cuts, or a number beyond."""
    row = []
    for a in axes:
        kind, d = shared.state(a)
        code = (
            d
            if kind == "sharded"
            else {"partial": 100, "grad_partial": 101, "replicated": -1}[kind]
        )
        row.append(code + (200 if derived is not None and a in derived.grad_partial else 0))
    return row
