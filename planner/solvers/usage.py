"""Live usage of one node, in rows: what the reductions do with it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Usage:
    """Live intervals of one node, in rows."""

    spans: np.ndarray  # [intervals, 2]
    use: np.ndarray  # [intervals, strategies]

    def joined(self, other: Usage) -> Usage:
        """Both nodes' intervals; equal spans add up."""
        spans, use = np.concatenate([self.spans, other.spans]), np.concatenate([self.use, other.use])
        code = spans[:, 0] * (1 << 31) + spans[:, 1]
        by = np.argsort(code, kind="stable")
        first = np.flatnonzero(np.append(True, np.diff(code[by]) != 0))
        return Usage(spans[by[first]], np.add.reduceat(use[by], first, axis=0))

    def moved(self, place: np.ndarray) -> Usage | None:
        """The same usage after rows were renumbered; None when nothing is left."""
        spans = place[self.spans]
        some = spans[:, 1] > spans[:, 0]
        if some.all():
            return Usage(spans, self.use)
        return Usage(spans[some], self.use[some]) if some.any() else None

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
