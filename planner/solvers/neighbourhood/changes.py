"""Changes of a choice in numpy, for problems of thousands of nodes: what every option would cost is
kept up to date, so that each change is found in a few array operations.

The marginal of an option is its node's cost with it while every other node keeps its own; a change
of one node changes the marginals of its neighbours alone.
"""

from __future__ import annotations

import numpy as np

from planner.solvers.model import Memory, Model
from planner.solvers.neighbourhood.flat import Flat, flatten

STEPS = 256
"""Changes that a repair may take, beside half as many as there are nodes."""
HELD = 3_000_000
"""Options live at rows that are remembered (32 bytes each), all rows together."""


class Changes:
    """Index arrays of a model, and what they make of a choice: its cost, marginals, loads, repair
    and descent."""

    def __init__(self, flat: Flat, memory: Memory | None) -> None:
        n = len(flat.offset) - 1
        self.flat, self.memory, self.sizes = flat, memory, np.diff(flat.offset)
        self.owner = np.repeat(np.arange(n), np.diff(flat.first))  # [adjacency entries]
        wide = self.sizes[self.owner]
        self.entry = np.repeat(
            np.arange(len(wide)), wide
        )  # [values] the entry of each: one value per option of its node
        within = np.arange(len(self.entry)) - np.repeat(np.cumsum(wide) - wide, wide)
        self.added_to = flat.offset[self.owner][self.entry] + within  # the option, by position
        self.column = (
            flat.place[flat.back][self.entry] + within
        )  # place in the neighbour's table, first row
        self._later = np.flatnonzero(flat.other > self.owner)
        self._near = [
            list(zip(*rows, strict=True))
            for rows in self._rows((flat.other, flat.place), flat.first)
        ]
        self._lives = [
            list(zip(*rows, strict=True))
            for rows in self._rows((flat.start[:-1], flat.lo, flat.hi), flat.interval)
        ]
        self._offset, self._live, self._held = (
            flat.offset.tolist(),
            dict[int, tuple[np.ndarray, ...]](),
            0,
        )

    @staticmethod
    def _rows(columns: tuple[np.ndarray, ...], first: np.ndarray) -> list[list[list[int]]]:
        """Per node the entries of each column, as plain numbers."""
        listed, ends = [c.tolist() for c in columns], first.tolist()
        return [[c[a:b] for c in listed] for a, b in zip(ends, ends[1:], strict=False)]

    def cost(self, x: np.ndarray) -> float:
        """The cost of a choice."""
        f, a = self.flat, self._later
        tables = f.table[f.place[a] + x[self.owner[a]] * self.sizes[f.other[a]] + x[f.other[a]]]
        return float(f.cost[f.offset[:-1] + x].sum() + tables.sum())

    def beside(self, x: np.ndarray, values: np.ndarray | slice = slice(None)) -> np.ndarray:
        """What tables add to each option beside the neighbours' choice: of all of them, or of some
        of the values that entries hand to their neighbours. [positions]"""
        f, entry = self.flat, self.entry[values]
        return np.bincount(
            self.added_to[values],
            f.table[self.column[values] + x[f.other[entry]] * self.sizes[self.owner[entry]]],
            len(f.cost),
        )

    def repaired(self, x: np.ndarray, sweeps: int) -> np.ndarray | None:
        """A copy of x repaired and descended; None where it cannot be made to fit."""
        y = x.copy()
        marginal, load = (
            self.flat.cost + self.beside(y),
            (np.zeros(0) if self.memory is None else self.memory.load(y)),
        )
        if not self._repair(y, marginal, load):
            return None
        self._descend(y, marginal, load, sweeps)
        return y

    def _change(
        self, x: np.ndarray, marginal: np.ndarray, load: np.ndarray, i: int, k: int
    ) -> None:
        """Set x[i] = k in place, with all that follows from it."""
        f, offset, old = self.flat, self._offset, int(x[i])
        x[i] = k
        for j, place in self._near[i]:
            a, b = offset[j], offset[j + 1]
            new, before = place + k * (b - a), place + old * (b - a)
            marginal[a:b] += f.table[new : new + b - a] - f.table[before : before + b - a]
        for start, lo, hi in self._lives[i]:
            load[lo:hi] += f.use[start + k] - f.use[start + old]

    def _at(self, row: int) -> tuple[np.ndarray, ...]:
        """Intervals live at a row, and per option of one after the other: which interval, its
        usage, its position, its number."""
        if row not in self._live:
            f = self.flat
            live = np.flatnonzero((f.lo <= row) & (f.hi > row))
            wide = f.start[live + 1] - f.start[live]
            which, number = (
                np.repeat(np.arange(len(live)), wide),
                np.arange(wide.sum()) - np.repeat(np.cumsum(wide) - wide, wide),
            )
            self._held += len(which)
            if self._held > HELD:
                self._live, self._held = {}, len(which)
            self._live[row] = (
                live,
                which,
                f.use[f.start[live][which] + number],
                f.offset[f.owner[live]][which] + number,
                number,
            )
        return self._live[row]

    def _repair(self, x: np.ndarray, marginal: np.ndarray, load: np.ndarray) -> bool:
        """Lower the worst row by the change of least cost per usage saved until everything fits;
        options that were left are not taken again."""
        f, abandoned = self.flat, np.zeros(len(marginal), bool)
        for _ in range(STEPS + len(x) // 2):
            row = int(load.argmax()) if len(load) else -1
            if row < 0 or load[row] <= f.limit:
                return True
            live, which, use, positions, number = self._at(row)
            nodes = f.owner[live]
            saved = np.minimum((f.use[f.start[live] + x[nodes]])[which] - use, load[row] - f.limit)
            added = marginal[positions] - marginal[f.offset[nodes] + x[nodes]][which]
            rate = np.where(added > 0, added / np.maximum(saved, 1e-9), added * saved - 1e-9)
            rate[(saved <= 0) | abandoned[positions]] = np.inf
            best = int(rate.argmin()) if len(rate) else -1
            if best < 0 or rate[best] == np.inf:
                return False
            i = int(nodes[which[best]])
            abandoned[self._offset[i] + x[i]] = True
            self._change(x, marginal, load, i, int(number[best]))
        return False

    def _descend(self, x: np.ndarray, marginal: np.ndarray, load: np.ndarray, sweeps: int) -> None:
        """Best single changes within the limit, node by node."""
        first = self.flat.offset[:-1]
        for _ in range(sweeps):
            moved = False
            for i in np.flatnonzero(
                np.minimum.reduceat(marginal, first) < marginal[first + x]
            ).tolist():
                row, old = marginal[self._offset[i] : self._offset[i + 1]], int(x[i])
                better = np.flatnonzero(row < row[old])
                for k in better[np.argsort(row[better], kind="stable")].tolist():
                    if self._fits(load, i, old, k):
                        self._change(x, marginal, load, i, k)
                        moved = True
                        break
            if not moved:
                return

    def _fits(self, load: np.ndarray, i: int, old: int, k: int) -> bool:
        f = self.flat
        for start, lo, hi in self._lives[i]:
            growth = f.use[start + k] - f.use[start + old]
            if growth > 0 and load[lo:hi].max() + growth > f.limit:
                return False
        return True


def changes_of(model: Model) -> Changes:
    """Index arrays for changes of a choice; of a searchable model. Made once per model."""
    if "changes" not in model.memo:
        model.memo["changes"] = Changes(flatten(model), model.memory)
    changes: Changes = model.memo["changes"]
    return changes
