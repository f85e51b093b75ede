"""Equal tables are stored once and every question about a table is answered once.

Large problems have a hundred thousand edges and a thousand distinct tables. `Pool` gives each
distinct table (and each index map) a number; results of operations are remembered by those numbers,
so a pass over all edges costs dictionary look-ups.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

SMALL = 1 << 13
"""Steps between rows of a table (rows x rows x columns) up to which they are all answered at once:
tens of microseconds."""


@dataclass
class Pool:
    """Interned tables (float64, +inf = forbidden) and index maps (int64), with remembered
    operations."""

    tables: list[np.ndarray] = field(default_factory=list)
    maps: list[np.ndarray] = field(default_factory=list)
    functions: dict[int, np.ndarray | None] = field(
        default_factory=dict
    )  # what `function` has answered
    _table_of: dict[tuple[tuple[int, ...], bytes], int] = field(default_factory=dict)
    _map_of: dict[bytes, int] = field(default_factory=dict)
    _taken: dict[tuple[int, int], int] = field(default_factory=dict)
    _turned: dict[int, int] = field(default_factory=dict)
    _sums: dict[tuple[int, int], int] = field(default_factory=dict)
    _alive: dict[int, np.ndarray | None] = field(default_factory=dict)
    _parts: dict[int, tuple[np.ndarray, np.ndarray, int] | None] = field(default_factory=dict)
    _leads: dict[int, np.ndarray | None] = field(default_factory=dict)
    _finite: dict[int, bool] = field(default_factory=dict)

    def table(self, array: np.ndarray) -> int:
        """Number of this table."""
        array = np.ascontiguousarray(array, np.float64)
        key = (array.shape, array.tobytes())
        number = self._table_of.get(key)
        if number is None:
            number = self._table_of[key] = len(self.tables)
            self.tables.append(array)
        return number

    def map(self, index: np.ndarray) -> int:
        """Number of this index map."""
        index = np.ascontiguousarray(index, np.int64)
        key = index.tobytes()
        number = self._map_of.get(key)
        if number is None:
            number = self._map_of[key] = len(self.maps)
            self.maps.append(index)
        return number

    def take(self, t: int, m: int) -> int:
        """The table's rows in the order of a map."""
        number = self._taken.get((t, m))
        if number is None:
            number = self._taken[t, m] = self.table(self.tables[t][self.maps[m]])
        return number

    def turn(self, t: int) -> int:
        """The transposed table."""
        number = self._turned.get(t)
        if number is None:
            number = self._turned[t] = self.table(self.tables[t].T)
            self._turned[number] = t
        return number

    def add(self, a: int, b: int) -> int:
        """The sum of two tables."""
        key = (a, b) if a < b else (b, a)
        number = self._sums.get(key)
        if number is None:
            number = self._sums[key] = self.table(self.tables[a] + self.tables[b])
        return number

    def alive(self, t: int) -> np.ndarray | None:
        """Rows with a finite entry, or None when all have one."""
        if t not in self._alive:
            finite = np.isfinite(self.tables[t]).any(axis=1)
            self._alive[t] = None if finite.all() else finite
        return self._alive[t]

    def function(self, t: int) -> np.ndarray | None:
        """The column of each row's one finite entry, or None when some row has another number of
        them."""
        if t not in self.functions:
            finite = np.isfinite(self.tables[t])
            self.functions[t] = finite.argmax(axis=1) if (finite.sum(axis=1) == 1).all() else None
        return self.functions[t]

    def parts(self, t: int) -> tuple[np.ndarray, np.ndarray, int] | None:
        """(row part, column part, rest's number or -1 when nothing is left); None when the table is
        its own rest.

        table = row[:, None] + column[None] + rest, rest >= 0 with a zero in every row and column
        that has a finite entry.
        """
        if t not in self._parts:
            table = self.tables[t]
            row = _finite_min(table, 1)
            rest = table - row[:, None]
            column = _finite_min(rest, 0)
            if (
                not np.count_nonzero(row)
                and not np.count_nonzero(column)
                and np.count_nonzero(table)
            ):
                self._parts[t] = None
            else:
                rest = rest - column
                if np.count_nonzero(rest) and np.isfinite(rest).all():
                    # a base row other than the cheapest may show that the table separates after all
                    flat = rest - rest[:1]
                    if (flat == flat[:, :1]).all():
                        row, column, rest = row + flat[:, 0], column + rest[0], np.zeros(rest.shape)
                self._parts[t] = (row, column, self.table(rest) if np.count_nonzero(rest) else -1)
        return self._parts[t]

    def leads(self, t: int) -> np.ndarray | None:
        """`lead` of all pairs of rows, or None for a table too large to answer for pairs that
        nobody asks for. [rows, rows]"""
        if t not in self._leads:
            table = self.tables[t]
            small = len(table) * table.size <= SMALL
            self._leads[t] = self._steps(t, table[:, None], table).min(axis=2) if small else None
        return self._leads[t]

    def most_leads(self, t: int) -> np.ndarray:
        """An upper bound on `lead` of all pairs of rows: the step at the column where the first row
        is least. [rows, rows]"""
        table = self.tables[t]
        least = table.argmin(axis=1)
        return self._steps(t, table[np.arange(len(least)), least][:, None], table[:, least].T)

    def lead(self, t: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Least of table[a, y] - table[b, y] over y for each pair of rows; y forbidden to a counts
        for nothing. [pairs]"""
        table = self.tables[t]
        lead = np.empty(len(a))
        chunk = max(1, 4_000_000 // table.shape[1])
        for p in range(0, len(a), chunk):
            lead[p : p + chunk] = self._steps(
                t, table[a[p : p + chunk]], table[b[p : p + chunk]]
            ).min(axis=1)
        return lead

    def _steps(self, t: int, high: np.ndarray, low: np.ndarray) -> np.ndarray:
        """high - low of two selections of table t's entries; +inf where high is forbidden."""
        if t not in self._finite:
            self._finite[t] = bool(np.isfinite(self.tables[t]).all())
        if self._finite[t]:
            return high - low
        with np.errstate(invalid="ignore"):
            return np.where(np.isinf(high), np.inf, high - low)


def _finite_min(table: np.ndarray, axis: int) -> np.ndarray:
    least = np.minimum.reduce(table, axis=axis)
    return least if np.maximum.reduce(least) < np.inf else np.where(np.isfinite(least), least, 0.0)
