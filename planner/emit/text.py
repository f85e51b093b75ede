"""Pieces of program text: numbers, PartitionSpecs, dims in plain notation."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from planner.ops.base import axes_text
from planner.sharding.layout import Layout, group
from planner.sharding.rule import Rule, Split


def small_literal(value: np.ndarray) -> str:
    """A number as a literal (so that it adapts to its neighbour's dtype), or the flat list of an
    array's numbers."""
    if value.ndim:
        return "[" + ", ".join(_number(v) for v in value.reshape(-1).tolist()) + "]"
    text = _number(value.item())
    return f"({text})" if text.startswith("-") else text


def _number(item: bool | int | float) -> str:
    return f'float("{item}")' if isinstance(item, float) and not math.isfinite(item) else repr(item)


def counted(value: np.ndarray) -> str:
    """Arguments of the `arange` that makes an array of evenly spaced whole numbers along its one
    real dim; "" where there is none."""
    flat = value.reshape(-1)
    if (
        value.dtype.kind not in "iuf"
        or flat.size < 3
        or flat.size not in value.shape
        or not np.all(np.isfinite(flat))
    ):
        return ""
    first, step = flat[0].item(), flat[1].item() - flat[0].item()
    if (
        not step
        or first != int(first)
        or step != int(step)
        or abs(flat).max() >= 2**24
        or not np.array_equal(flat, first + step * np.arange(flat.size))
    ):
        return ""
    first, step = int(first), int(step)
    end = first + step * flat.size
    return (
        str(end)
        if (first, step) == (0, 1)
        else f"{first}, {end}"
        if step == 1
        else f"{first}, {end}, {step}"
    )


INLINE = 256
"""Arrays of at most so many numbers stand in the text; longer ones lie in a file beside the
program."""


def inlined(value: np.ndarray) -> bool:
    """Whether an array stands in the text."""
    return value.size <= INLINE and value.dtype.kind in "biuf"


def array_table(name: str, value: np.ndarray) -> str:
    """`NAME = np.array(...)`, a dozen numbers a line, floats as short as their type tells them
    apart."""
    flat = value.reshape(-1)
    numbers = [
        str(v) if value.dtype.kind == "f" and np.isfinite(v) else _number(v.item()) for v in flat
    ]
    rows = ["    " + ", ".join(numbers[i : i + 12]) + ",\n" for i in range(0, len(numbers), 12)]
    shape = f".reshape({value.shape})" if value.ndim != 1 else ""
    return f'{name} = np.array([\n{"".join(rows)}], "{value.dtype}"){shape}\n'


def short_floats(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes with floats as short as float32 tells them apart: 1e-05 instead of
    9.999999747378752e-06, which is the same float32."""
    return {k: _short(v) if isinstance(v, float) else v for k, v in attrs.items()}


def _short(value: float) -> float:
    narrow = np.float32(value) if abs(value) < 3e38 else value
    return float(str(narrow)) if narrow == value else value


def pattern(texts: Sequence[str]) -> str:
    """One text for several that differ in numbers alone, with * for those that differ
    (layers.*.norm.weight); else the first."""
    rows = [re.split(r"(\d+)", text) for text in texts]
    if len({len(row) for row in rows}) > 1 or any(
        len(set(column)) > 1 for column in list(zip(*rows, strict=True))[::2]
    ):
        return texts[0]
    return "".join(
        column[0] if len(set(column)) == 1 else "*" for column in zip(*rows, strict=True)
    )


def rule_cells(rule: Rule, slot: int, split: Split) -> str:
    """A result's dims in plain notation, such as [b/data, s, n/tensor]."""
    cells = []
    for dim in rule.results[slot]:
        axes = [a for f in dim for a in rule.axes(f, split)]
        cells.append((" ".join(dim) or "1") + ("/" + "+".join(axes) if axes else ""))
    return "[" + ", ".join(cells) + "]"


def spec_text(
    layout: Layout, shape: tuple[int, ...] | None = None, mesh: Mapping[str, int] | None = None
) -> str:
    """A PartitionSpec literal; with `shape`, axes that do not divide their dim are left out (jit
    only shards evenly)."""
    cells = []
    for d, axes in enumerate(layout.dims):
        if shape is not None and mesh is not None and axes and shape[d] % group(axes, mesh):
            axes = ()
        cells.append("None" if not axes else axes_text(axes))
    while cells and cells[-1] == "None":
        cells.pop()
    return f"P({', '.join(cells)})"


def wrapped(text: str) -> bool:
    """Whether one pair of brackets encloses the whole expression."""
    plain = re.sub(r'"[^"\\]*"|\'[^\'\\]*\'', lambda m: "_" * len(m[0]), text)
    if not (plain.startswith("(") and plain.endswith(")")) or "'" in plain or '"' in plain:
        return False
    depth = 0
    for i, c in enumerate(plain):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return i == len(plain) - 1 and "," not in plain[1:2]
    return False
