"""What fused attention kernels of frameworks reach of a device's peak
(costmodels/frameworks/fused_attention.toml, which says where each figure is from)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from math import log2
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".toml")


@cache
def shares_of_peak(kernel: str, device: str, keys: int, width: int) -> tuple[float, float]:
    """(forward, backward) fraction of peak that the products of a kernel reach on a device, by its
    name: of heads of `width` elements, with `keys` keys a query.

    Where a length or a width was not measured it takes the nearest of them: between two lengths in
    proportion to the logarithm, the next greater width, or the greatest.
    """
    table = _table()
    entry = table.get(kernel, {}).get(generation_of(device)) or table["any"]
    if "shares" in entry:
        forward, backward = entry["shares"]
        return float(forward), float(backward)
    forward, backward = (
        _between(entry["keys"], _of_width(entry[name], width), keys) / entry["peak_tflops"]
        for name in ("forward", "backward")
    )
    return forward, backward


def generation_of(device: str) -> str:
    """The generation of a device, by its name; "" for one that is not in the table."""
    return next((g for g, names in _table()["generations"].items() if device in names), "")


def kernel_names() -> tuple[str, ...]:
    """Kernels that the table has."""
    return tuple(name for name in _table() if name not in ("generations", "any"))


@cache
def _table() -> Mapping[str, Any]:
    with FILE.open("rb") as file:
        return tomllib.load(file)


def _of_width(columns: Mapping[str, Sequence[float]], width: int) -> Sequence[float]:
    widths = sorted(map(int, columns))
    return columns[str(next((w for w in widths if w >= width), widths[-1]))]


def _between(lengths: Sequence[int], rates: Sequence[float], keys: int) -> float:
    clamped = min(max(keys, lengths[0]), lengths[-1])
    above = max(1, next(k for k, length in enumerate(lengths) if length >= clamped))
    low, high = lengths[above - 1], lengths[above]
    part = log2(clamped / low) / log2(high / low)
    return rates[above - 1] + part * (rates[above] - rates[above - 1])
