"""Parameters of a strategy in groups that are alike, and the line of text for each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from planner.sharding.layout import STAGE
from planner.sharding.notation import cells
from planner.strategy.strategy import Strategy


@dataclass(frozen=True)
class WeightGroup:
    """Parameters that are alike: the same label but for layer numbers, the same shape and layout.
    `elements` counts all of them.

    stages: pipeline stages that they are divided over, 1 where every device has a part of each.
    """

    label: str
    shape: tuple[int, ...]
    dims: tuple[tuple[str, ...], ...]
    count: int
    elements: int
    stages: int = 1


def weight_groups(strategy: Strategy) -> list[WeightGroup]:
    """All parameters in groups, the heaviest first (ties in file order)."""
    names_by_group: dict[tuple, list[str]] = {}
    stages = dict(strategy.mesh_shape).get(STAGE, 1)
    for name, row in strategy.tensors.items():
        if "label" in row:
            label = _NUMBER.sub("*", str(row["label"]) or name)
            key = (
                label,
                tuple(row["shape"]),
                tuple(tuple(a) for a in stored_axes(row)),
                stages if "stage" in row else 1,
            )
            names_by_group.setdefault(key, []).append(str(row["label"]) or name)
    groups = []
    for (label, shape, dims, stage_count), names in names_by_group.items():
        groups.append(
            WeightGroup(
                label if len(names) > 1 else names[0],
                shape,
                dims,
                len(names),
                len(names) * prod(shape),
                stage_count,
            )
        )
    return sorted(groups, key=lambda g: -g.elements)


def spell_weight(group: WeightGroup, names: Mapping[int, str]) -> str:
    """`W[d, f/tensor]` of a group of parameters."""
    return "W" + cells([names.get(n, str(n)) for n in group.shape], group.dims)


_NUMBER = re.compile(r"(?<=[./])\d+(?=[./])")


def stored_axes(row: Mapping[str, Any]) -> list[list[str]]:
    """Axes per dim of a tensor row as it is kept between steps: ZeRO stage 3 cuts the weight
    itself."""
    dims = [list(a) for a in row["layout"]]
    zero = row.get("zero")
    if zero and zero["level"] == 3:
        dims[zero["dim"]] += zero["axes"]
    return dims
