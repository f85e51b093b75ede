"""What two layouts of evenly cut tensors differ in, found for tens of thousands of pairs in a
search: a table at a time.

Axes that keep their place have no part in a reshard, but that they divide what it moves: those that
lead a dim in both layouts, and those that are `partial` or `grad_partial` in both. A dim that both
leave as it is has none either. So a pair is known by the rows of axes that change, dim by dim, and
by the axes that stay.

A layout is a row of numbers, one per dim and two for its partial and `grad_partial` axes, each the
number of some axes. What two such numbers differ in is looked up in a square table, filled as pairs
of numbers are met: a mesh has few, however many layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from planner.sharding.layout import Axes, Layout

Rows = tuple[Axes, ...]
"""What two layouts differ in: per dim that is cut otherwise the old and the new axes, then partial
and `grad_partial` axes of the one, and of the other."""
UNKNOWN = -1


class LayoutDifferences:
    """Differences of layouts by number. layouts: may grow; axes: how many a layout may use."""

    def __init__(self, layouts: Sequence[Layout], axes: int) -> None:
        self.layouts = layouts
        self._most = 2 * axes  # dims that change: each loses an axis or gets one
        self._codes: dict[
            int, tuple[int, ...]
        ] = {}  # layout -> numbers of its rows of axes: of each dim, partial and grad_partial
        self._number: dict[Axes, int] = {}
        self._rows: list[Axes] = []
        self._axes: dict[str, int] = {}  # axis -> its bit among those that stay
        self._changed: list[tuple[Axes, Axes]] = [
            ((), ())
        ]  # what two rows differ in: old and new axes, without those that stay
        self._changes: dict[tuple[Axes, Axes], int] = {((), ()): 0}
        self._change = np.zeros(
            (2, 0, 0), np.int32
        )  # [dim or pending, row, row] number of what changes, UNKNOWN until asked
        self._stay = np.zeros(
            (2, 0, 0), np.int32
        )  # [likewise] bits of the axes that stay and divide what moves

    def between(
        self, rows: Sequence[int], columns: Sequence[int], a: np.ndarray, b: np.ndarray
    ) -> list[bytes]:
        """A key for each of some pairs of a row's and a column's layout (of one rank): the same for
        the same difference (`rows`), whatever the rank.

        a, b: which of the rows, and which of the columns. [pairs] each
        """
        old, new = (
            np.array([self._codes.get(n) or self._code(n) for n in numbers], np.intp)
            for numbers in (rows, columns)
        )
        rank, n = old.shape[1] - 2, len(self._rows)
        if n > self._change.shape[1]:
            added = 2 * n - self._change.shape[1]
            self._change, self._stay = (
                np.pad(part, ((0, 0), (0, added), (0, added)), constant_values=UNKNOWN)
                for part in (self._change, self._stay)
            )
        wide = self._change.shape[1]
        plane = np.array([0] * rank + [wide * wide] * 2)[:, None]
        places = plane + (old * wide)[a].T + new[b].T  # [dims and two, pairs] places in the tables
        change = self._change.take(places)
        if change.min() == UNKNOWN:
            for cell in sorted(set(places[change == UNKNOWN].tolist())):
                self._differ(*divmod(cell, wide))
            change = self._change.take(places)
        key = np.zeros((places.shape[1], self._most + 4), np.int32)
        key[:, 0] = np.bitwise_or.reduce(self._stay.take(places), axis=0)
        key[:, 1:3] = change[rank:].T
        # Which of the dims change makes no difference, only in what order: the next that does goes
        # where one that does not would be.
        cells, place = key.ravel(), np.arange(3, key.size, key.shape[1])
        for part in change[:rank]:
            cells[place] = part
            place += part != 0
        keys: list[bytes] = key.view(f"V{key.shape[1] * key.itemsize}").ravel().tolist()
        return keys

    def read(self, keys: Sequence[bytes]) -> Iterator[tuple[Rows, int]]:
        """What the pairs of each key differ in, and the axes that stay (`staying`)."""
        known = self._changed
        for stay, partial, grad_partial, *dims in (
            np.frombuffer(b"".join(keys), np.int32).reshape(len(keys), -1).tolist()
        ):
            (old_partial, new_partial), (old_grad_partial, new_grad_partial) = (
                known[partial],
                known[grad_partial],
            )
            yield (
                (
                    *[axes for k in dims if k for axes in known[k]],
                    old_partial,
                    old_grad_partial,
                    new_partial,
                    new_grad_partial,
                ),
                stay,
            )

    def staying(self, bits: int) -> Axes:
        """The axes of a number that `read` found."""
        return tuple(a for a, bit in self._axes.items() if bits & bit)

    def _code(self, a: int) -> tuple[int, ...]:
        layout = self.layouts[a]
        code = self._codes[a] = tuple(
            [self._row(axes) for axes in (*layout.dims, layout.partial, layout.grad_partial)]
        )
        return code

    def _row(self, axes: Axes) -> int:
        n = self._number.setdefault(axes, len(self._rows))
        if n == len(self._rows):
            self._rows.append(axes)
        return n

    def _differ(self, row: int, y: int) -> None:
        """Fill in what two rows of axes differ in: those that cut a dim or, in the second half of
        the tables, have something pending."""
        pending, x = divmod(row, self._change.shape[1])
        old, new, stay = self._rows[x], self._rows[y], Axes()
        if pending:
            changed = tuple(a for a in old if a not in new), tuple(a for a in new if a not in old)
        else:
            same = next(
                (k for k, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
                min(len(old), len(new)),
            )
            changed, stay = (old[same:], new[same:]), old[:same]
        n = self._change[pending, x, y] = self._changes.setdefault(changed, len(self._changed))
        if n == len(self._changed):
            self._changed.append(changed)
        self._stay[pending, x, y] = sum(
            self._axes.setdefault(a, 1 << len(self._axes)) for a in stay
        )
