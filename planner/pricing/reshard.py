"""Prices of reshards between layouts on one mesh, evaluated for many pairs at a time.

What moves between two layouts is derived elsewhere (`planner.sharding.reshard_table`), once for all
meshes. `ReshardPrices` holds for one mesh all pairs met so far as flat arrays,

    seconds of a move = min over lines of  latency + size * (slope / product of the cutting axes)

and prices a table of pairs for a tensor of a given size with a few array operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Protocol

import numpy as np

from planner.pricing.table_key import TableStore, key_of
from planner.sharding.layout import Axes, group
from planner.sharding.layout_table import LayoutColumn, LayoutTable
from planner.sharding.reshard_table import reshard_table

SUMS = ("all-reduce", "reduce-scatter")
"""Collectives that add up."""


class LinePrices(Protocol):
    """What reshards need of the prices of one mesh (planner.pricing.pricer.Pricer)."""

    kept: TableStore | None

    @property
    def sizes(self) -> Mapping[str, int]:
        """axis -> size, of axes that operators may be cut over."""

    @property
    def place(self) -> bytes:
        """What prices on the mesh follow from, as bytes."""

    @property
    def sums_shown(self) -> float:
        """Share of the backward pass's sums that a plan shows at least."""

    def lines(
        self, kind: str, axes: Axes, strided: bool = False
    ) -> tuple[tuple[float, float], ...]:
        """(latency_s, s_per_byte) lines whose minimum is the time of a collective."""


class ReshardPrices:
    """Tables of reshard seconds on one mesh."""

    def __init__(self, layout_table: LayoutTable, pricer: LinePrices) -> None:
        self.layout_table, self.pricer = layout_table, pricer
        self.sizes = dict(pricer.sizes)
        self.order = tuple(self.sizes)
        self.mesh = tuple(self.sizes.items())
        self.pairs = reshard_table(layout_table, self.order)
        self._priced: dict[float, tuple[int, np.ndarray, np.ndarray]] = {}
        self._tables: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}
        self._lines: tuple[int, np.ndarray, np.ndarray] = 0, np.zeros((0, 1)), np.zeros((0, 1))
        self._devices = np.ones(1, np.int64)  # bits of axes -> devices along them
        self._local: dict[tuple[tuple[int, ...], tuple[int, ...]], np.ndarray] = {}
        self._extents: dict[
            tuple[tuple[int, ...], tuple[int, ...]], tuple[np.ndarray, np.ndarray]
        ] = {}

    def table(
        self,
        shape: tuple[int, ...],
        itemsize: float,
        rows: Sequence[int],
        columns: Sequence[int],
        grad: bool,
    ) -> tuple[np.ndarray, np.ndarray]:
        """(forward, backward) seconds [rows, columns] of converting a tensor from each row's layout
        to each column's; infinite where there is no way.

        The backward part is 0 where the tensor carries no gradient. The arrays are of all who ask
        for them.
        """
        asked = shape, itemsize, tuple(rows), tuple(columns), grad
        result = self._tables.get(asked)
        if result is None:
            result = self._tables[asked] = self._kept(*asked)
        return result

    def _kept(
        self,
        shape: tuple[int, ...],
        itemsize: float,
        rows: tuple[int, ...],
        columns: tuple[int, ...],
        grad: bool,
    ) -> tuple[np.ndarray, np.ndarray]:
        """`table`, as a search before made it where that is known."""
        kept = self.pricer.kept
        if kept is None:
            return self._made(shape, itemsize, rows, columns, grad)
        key = key_of(
            self.pricer.place,
            repr((shape, itemsize, grad)).encode(),
            self.layout_table.written(rows),
            self.layout_table.written(columns),
        )
        result = kept.array(
            key,
            2 * len(rows),
            len(columns),
            lambda: np.concatenate(self._made(shape, itemsize, rows, columns, grad)),
        )
        return result[: len(rows)], result[len(rows) :]

    def _made(
        self,
        shape: tuple[int, ...],
        itemsize: float,
        rows: tuple[int, ...],
        columns: tuple[int, ...],
        grad: bool,
    ) -> tuple[np.ndarray, np.ndarray]:
        """`table`, worked out."""
        grid = self.pairs.grid(rows, columns)
        forward, backward = self._prices(prod(shape) * itemsize)
        result = forward[grid], backward[grid] if grad else np.zeros(grid.shape)
        (source, over), (target, beyond) = (
            self._padded(shape, tuple(rows)),
            self._padded(shape, tuple(columns)),
        )
        if over.any() or beyond.any():
            padded = np.nonzero(over[:, None] | beyond[None, :])
            extents = source[padded[0]], target[padded[1]]
            cells = [
                (rows[r], columns[c]) for r, c in zip(*(k.tolist() for k in padded), strict=True)
            ]
            path = self._padded_paths(shape, cells, *extents)
            self._pad(result, padded, self.pairs.arrays[0][grid[padded]], path, extents, itemsize)
            if not grad:
                result[1][padded] = 0.0
        return result

    def local(self, shape: tuple[int, ...], row: LayoutColumn) -> np.ndarray:
        """Elements of one device's piece, padding included, in each distinct layout of a row."""
        key = shape, row.layouts
        result = self._local.get(key)
        if result is None:
            result = self._local[key] = (
                -(-np.array(shape, np.int64) // self.pieces(row.layouts, len(shape)))
            ).prod(axis=1)
        return result

    def pieces(self, layouts: Sequence[int], rank: int) -> np.ndarray:
        """Into how many pieces each dim is cut. [layouts, rank]"""
        cuts = self.layout_table.cuts(layouts, rank)
        if len(self._devices) != 1 << len(self.layout_table.axes):
            self._devices = np.ones(1, np.int64)
            for axis in self.layout_table.axes:
                self._devices = np.concatenate(
                    [self._devices, self._devices * self.sizes.get(axis, 1)]
                )
        return self._devices[cuts]

    def _padded(
        self, shape: tuple[int, ...], layouts: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The tensor's extents as each layout pads them, and whether it pads any. [layouts, dims],
        [layouts]"""
        key = shape, layouts
        result = self._extents.get(key)
        if result is None:
            pieces, whole = self.pieces(layouts, len(shape)), np.array(shape, np.int64)
            extents = -(-whole // pieces) * pieces
            result = self._extents[key] = extents, (extents != whole).any(axis=1)
        return result

    def _padded_paths(
        self,
        shape: tuple[int, ...],
        pairs: Iterable[tuple[int, int]],
        source: np.ndarray,
        target: np.ndarray,
    ) -> np.ndarray:
        """Number of the path between each pair of layouts, one of which pads the tensor, in the
        table of padded ones. source, target: extents as padded. [pairs, dims]"""
        facts = (
            (source == target) + 2 * (source == shape) + 4 * (target == shape)
        ) @ 8 ** np.arange(len(shape))
        find = self.pairs.padded.find
        return np.array(
            [
                find(a, b, code, shape, self.mesh)
                for (a, b), code in zip(pairs, facts.tolist(), strict=True)
            ]
        )

    def _pad(
        self,
        tables: tuple[np.ndarray, np.ndarray],
        padded: tuple[np.ndarray, ...],
        impossible: np.ndarray,
        path: np.ndarray,
        extents: tuple[np.ndarray, np.ndarray],
        itemsize: float,
    ) -> None:
        """Fill in the cells `padded` of tables, pairs of which a layout pads. impossible: of each
        cell whether there is no way; path: number of its path; extents: as padded by the first and
        the second layout. [cells], [cells, dims]"""
        source, target = extents
        first, terms, backs, targets = self.pairs.padded.arrays
        times = (first[1:] - first[:-1])[path]
        cell = np.repeat(np.arange(len(path)), times)
        move = (
            np.arange(len(cell))
            - np.repeat(np.cumsum(times) - times, times)
            + np.repeat(first[path], times)
        )
        late = (targets[move, None] >> np.arange(source.shape[1])) & 1
        size = np.where(late, target[cell], source[cell]).prod(axis=1) * itemsize
        latency, slope = self._of_terms()
        term, back = terms[move], backs[move]
        seconds = np.where(size, (latency[term] + size[:, None] * slope[term]).min(axis=1), 0.0)
        forward = np.bincount(cell, np.where(back, 0.0, seconds), len(path))
        tables[0][padded] = np.where(impossible, np.inf, forward)
        tables[1][padded] = np.bincount(cell, np.where(back, seconds, 0.0), len(path))

    def _prices(self, size: float) -> tuple[np.ndarray, np.ndarray]:
        """(forward, backward) seconds of every pair for a tensor of `size` bytes. [pairs]"""
        pairs = self.pairs
        n = len(pairs.impossible)
        known = self._priced.get(size)
        if known is None or known[0] != n:
            latency, slope = self._of_terms()
            term_s = (
                (latency + size * slope).min(axis=1)
                if size and len(latency)
                else np.zeros(len(latency))
            )
            impossible, whose, back, term = pairs.arrays
            seconds = term_s[term] if len(term) else np.zeros(0)
            # Without any moves bincount forgets the type of its weights.
            forward = np.bincount(whose, np.where(back, 0.0, seconds), n).astype(np.float64)
            shown = seconds * self._shown()[term] if len(term) else seconds
            backward = np.bincount(whose, np.where(back, shown, 0.0), n).astype(np.float64)
            forward[impossible] = np.inf
            known = self._priced[size] = n, forward, backward
        return known[1], known[2]

    def _shown(self) -> np.ndarray:
        """Share of each term that a backward pass may show: what a framework hides of sums of
        gradients under the products for weights (costmodels.frameworks.step_time, which knows when
        those are shorter) is counted by the whole plan's price alone. [terms]"""
        shown = self.pricer.sums_shown
        return np.array([shown if kind in SUMS else 1.0 for kind, _, _ in self.pairs.terms])

    def _of_terms(self) -> tuple[np.ndarray, np.ndarray]:
        """Latency and seconds per byte of the whole tensor of each term: [terms, lines], whose
        minimum is its time."""
        if self._lines[0] != self.pairs.terms_met:
            terms = self.pairs.terms
            lines = [self.pricer.lines(kind, axes, True) for kind, axes, _ in terms]
            width = max(map(len, lines))
            table = np.array([[*row, *[row[-1]] * (width - len(row))] for row in lines])
            share = np.array([1 / group(cut, self.sizes) for _, _, cut in terms])
            self._lines = len(terms), table[:, :, 0], table[:, :, 1] * share[:, None]
        return self._lines[1], self._lines[2]
