"""What two layouts of evenly cut tensors differ in, found for tens of thousands of pairs in a search.

Axes that keep their place have no part in a move, but that they divide what moves: those that lead a dim in both layouts, and those that are partial or a fan
in both. A dim that both leave as it is has none either. So a pair is known by the rows of axes that change, dim by dim, and by the axes that stay.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.layout import Axes, Layout

Rows = tuple[Axes, ...]
"""What two layouts differ in: per dim that is cut otherwise the old and the new axes, then partial and fan axes of the one, and of the other."""


class Differences:
    """Differences of layouts by number. layouts: may grow."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self.layouts = layouts
        self._codes: dict[int, tuple[int, ...]] = {}  # layout -> numbers of its rows of axes: of each dim, partial and fan
        self._number: dict[Axes, int] = {(): 0}
        self._rows: list[Axes] = [()]
        self._cuts: dict[tuple[int, int], tuple[int, int, int]] = {}  # rows of a dim -> what of them differs, and the row that stays
        self._pending: dict[tuple[int, int], tuple[int, int]] = {}  # rows of partial or fan axes -> what of them differs

    def between(self, a: int, b: int) -> tuple[int, ...]:
        """Numbers of the rows of two layouts' difference (see `rows`), then of the rows that stay: pairs with the same have the same moves."""
        old, new = self._codes.get(a) or self._code(a), self._codes.get(b) or self._code(b)
        found: list[int] = []
        stay: list[int] = []
        for x, y in zip(old[:-2], new[:-2], strict=True):
            if x == y:
                if x:
                    stay.append(x)
                continue
            cut = self._cuts.get((x, y)) or self._cut(x, y)
            found += cut[:2]
            if cut[2]:
                stay.append(cut[2])
        for x, y in zip(old[-2:], new[-2:], strict=True):
            found += (0, 0) if x == y else self._pending.get((x, y)) or self._left(x, y)
        return *found, -1, *stay

    def rows(self, difference: tuple[int, ...]) -> tuple[Rows, Axes]:
        """The rows of a difference by name, and the axes that stay."""
        end = difference.index(-1)
        *dims, partial, to_partial, fan, to_fan = (self._rows[k] for k in difference[:end])
        return (*dims, partial, fan, to_partial, to_fan), tuple(a for k in difference[end + 1 :] for a in self._rows[k])

    def _row(self, axes: Axes) -> int:
        n = self._number.setdefault(axes, len(self._rows))
        if n == len(self._rows):
            self._rows.append(axes)
        return n

    def _code(self, a: int) -> tuple[int, ...]:
        layout = self.layouts[a]
        found = self._codes[a] = tuple([self._row(axes) for axes in (*layout.dims, layout.partial, layout.fan)])
        return found

    def _cut(self, x: int, y: int) -> tuple[int, int, int]:
        old, new = self._rows[x], self._rows[y]
        same = next((k for k, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        found = self._cuts[x, y] = self._row(old[same:]), self._row(new[same:]), self._row(old[:same])
        return found

    def _left(self, x: int, y: int) -> tuple[int, int]:
        old, new = self._rows[x], self._rows[y]
        found = self._pending[x, y] = self._row(tuple(a for a in old if a not in new)), self._row(tuple(a for a in new if a not in old))
        return found
