"""Pieces of program text: numbers, PartitionSpecs, dims in plain notation."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from planner.layout import Layout, group
from planner.ops.base import axes_text
from planner.rule import Split


def small_literal(value: np.ndarray) -> str:
    """A number as a literal (so that it adapts to its neighbour's dtype), or the flat list of an array's numbers."""
    if value.ndim:
        return "[" + ", ".join(_number(v) for v in value.reshape(-1).tolist()) + "]"
    text = _number(value.item())
    return f"({text})" if text.startswith("-") else text


def _number(item: bool | int | float) -> str:
    return f'float("{item}")' if isinstance(item, float) and not math.isfinite(item) else repr(item)


def rule_cells(dims: tuple[tuple[str, ...], ...], split: Split) -> str:
    """A result's dims in plain notation, such as [b/data, s, n/model]."""
    cells = []
    for dim in dims:
        axes = [a for f in dim for a in split.axes(f)]
        cells.append((" ".join(dim) or "1") + ("/" + "+".join(axes) if axes else ""))
    return "[" + ", ".join(cells) + "]"


def spec_text(layout: Layout, shape: tuple[int, ...] | None = None, mesh: Mapping[str, int] | None = None) -> str:
    """A PartitionSpec literal; with `shape`, axes that do not divide their dim are left out (jit only shards evenly)."""
    cells = []
    for d, axes in enumerate(layout.dims):
        if shape is not None and mesh is not None and axes and shape[d] % group(axes, mesh):
            axes = ()
        cells.append("None" if not axes else axes_text(axes))
    while cells and cells[-1] == "None":
        cells.pop()
    return f"P({', '.join(cells)})"
