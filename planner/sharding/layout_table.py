"""Layouts by number, one table for all meshes of a search: prices are then array operations over
numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.sharding.layout import Axes, Layout


@dataclass(frozen=True, eq=False)
class LayoutColumn:
    """Layouts in a row, one per option: the distinct ones, by number, and which of those each
    option has."""

    layouts: tuple[int, ...]
    of: np.ndarray


class LayoutTable:
    """Layouts by number, and what does not depend on the sizes of axes: readings of rules and
    reshards between layouts."""

    def __init__(self) -> None:
        self.layouts: list[Layout] = []
        self.axes: dict[str, int] = {}
        """Bit of each axis in `cuts`."""
        self._cuts = np.zeros((64, 4), np.int64)
        self._rows: dict[tuple[int, ...], LayoutColumn] = {}
        self.memo: dict[tuple, dict] = {}
        """Readings of rules, kept by planner.space.build: what is read -> split -> layout
        number."""
        self._number: dict[Layout, int] = {}
        self._plain: dict[int, int] = {}
        self._written: dict[tuple[int, ...], bytes] = {}
        self._derived: dict[tuple, list[tuple] | None] = {}
        """Collectives of pairs that are alike: kind, numbers of axes and of cutting axes, and the
        rest."""
        self.reshard: dict[Axes, Any] = {}
        """Tables of pairs of layouts by axes of meshes, kept by planner.sharding.reshard_table."""

    def number(self, layout: Layout) -> int:
        """The layout's number."""
        n = self._number.get(layout)
        if n is None:
            n = self._number[layout] = len(self.layouts)
            self.layouts.append(layout)
            room, rank = self._cuts.shape
            if n == room or len(layout.dims) > rank:
                self._cuts = np.pad(self._cuts, ((0, room), (0, max(0, len(layout.dims) - rank))))
            self._cuts[n, : len(layout.dims)] = [
                sum([self.axes.setdefault(a, 1 << len(self.axes)) for a in axes])
                for axes in layout.dims
            ]
        return n

    def column(self, numbers: tuple[int, ...]) -> LayoutColumn:
        """The column of layouts of these numbers: the same object for the same numbers."""
        row = self._rows.get(numbers)
        if row is None:
            index: dict[int, int] = {}
            of = np.array([index.setdefault(n, len(index)) for n in numbers], np.intp)
            row = self._rows[numbers] = LayoutColumn(tuple(index), of)
        return row

    def partial(self, row: LayoutColumn) -> np.ndarray:
        """Whether each option's layout is partial. [options]"""
        return np.array([bool(self.layouts[n].partial) for n in row.layouts])[row.of]

    def cuts(self, layouts: Sequence[int], rank: int) -> np.ndarray:
        """Bits of the axes that cut each dim of layouts of one rank. [layouts, rank]"""
        return self._cuts[list(layouts), :rank]

    def without_grad_partial(self, number: int) -> int:
        """The number of the layout without its partial gradients."""
        if number not in self._plain:
            layout = self.layouts[number]
            self._plain[number] = self.number(Layout(layout.dims, layout.partial))
        return self._plain[number]

    def written(self, numbers: tuple[int, ...]) -> bytes:
        """Layouts, written out: the same in any table."""
        if numbers not in self._written:
            self._written[numbers] = repr(
                [
                    (x.dims, x.partial, x.grad_partial)
                    for x in map(self.layouts.__getitem__, numbers)
                ]
            ).encode()
        return self._written[numbers]

    def derived(
        self, key: tuple, axes: Axes, derive: Callable[[], list[tuple] | None]
    ) -> list[Any] | None:
        """What `derive` finds, in the names of `axes`; it is asked once for all pairs of a form
        (the key)."""
        if key not in self._derived:
            derivation, number = derive(), {axis: k for k, axis in enumerate(axes)}
            self._derived[key] = (
                None
                if derivation is None
                else [
                    (kind, [number[x] for x in over], [number[x] for x in cut], rest)
                    for kind, over, cut, *rest in derivation
                ]
            )
        known = self._derived[key]
        return (
            None
            if known is None
            else [
                (kind, tuple([axes[k] for k in over]), tuple([axes[k] for k in cut]), *rest)
                for kind, over, cut, rest in known
            ]
        )
