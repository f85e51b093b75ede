"""Live usage of one node, in rows: what the reductions do with it."""

from __future__ import annotations

import numpy as np


class Usage:
    """Live intervals of one node, in rows. Parts that a node takes over from its neighbours are joined when they are asked for: hubs take over thousands."""

    def __init__(self, spans: np.ndarray, use: np.ndarray, flat: bool = False) -> None:
        self._parts = [(spans, use)]
        self.flat = flat  # whether `level` has seen it as it is

    @property
    def spans(self) -> np.ndarray:
        """[intervals, 2]"""
        return self._whole()[0]

    @property
    def use(self) -> np.ndarray:
        """[intervals, strategies]"""
        return self._whole()[1]

    def _whole(self) -> tuple[np.ndarray, np.ndarray]:
        if len(self._parts) > 1:
            spans, use = np.concatenate([s for s, _ in self._parts]), np.concatenate([u for _, u in self._parts])
            code = spans[:, 0] * (1 << 31) + spans[:, 1]
            by = np.argsort(code, kind="stable")
            first = np.flatnonzero(np.append(True, np.diff(code[by]) != 0))
            self._parts = [(spans[by[first]], np.add.reduceat(use[by], first, axis=0))]
        return self._parts[0]

    def take(self, strategies: np.ndarray) -> Usage:
        """The usage of a node whose strategies are these of this one's."""
        spans, use = self._whole()
        return Usage(spans, use[:, strategies])

    def join(self, other: Usage) -> None:
        """Take over another node's intervals; equal spans add up."""
        self._parts += other._parts
        self.flat = False

    def moved(self, place: np.ndarray) -> Usage | None:
        """The same usage after rows were renumbered; None when nothing is left."""
        spans = place[self.spans]
        some = spans[:, 1] > spans[:, 0]
        if some.all():
            return Usage(spans, self.use, self.flat)
        return Usage(spans[some], self.use[some], self.flat) if some.any() else None

    def count(self, top: np.ndarray, low: np.ndarray, grow: np.ndarray, fall: np.ndarray) -> None:
        """Add to the steps of the largest and least load, and to the largest rise and fall at each boundary. [rows + 1] each"""
        if len(self.spans) == 1:
            (a, b), high = self.spans[0].tolist(), int(self.use[0].max())
            top[a] += high
            top[b] -= high
            grow[a] += high
            fall[b] += high
            return
        at, back = np.unique(self.spans, return_inverse=True)
        back = back.reshape(-1, 2)
        step = np.zeros((len(at), self.use.shape[1]), np.int64)
        np.add.at(step, back[:, 0], self.use)
        np.subtract.at(step, back[:, 1], self.use)
        load = step.cumsum(axis=0)
        top[at] += np.diff(load.max(axis=1), prepend=0)
        low[at] += np.diff(load.min(axis=1), prepend=0)
        grow[at] += step.max(axis=1)
        fall[at] += (-step).max(axis=1)
