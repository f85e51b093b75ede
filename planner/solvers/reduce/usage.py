"""Live usage of one node, in rows: what the reductions do with it."""

from __future__ import annotations

import numpy as np


class Usage:
    """Live intervals of one node, in rows. Parts that a node takes over from its neighbours are
    joined when they are asked for: hubs take over thousands."""

    def __init__(self, spans: np.ndarray, use: np.ndarray, flat: bool = False) -> None:
        self._parts = [(spans, use)]
        self.flat = flat  # whether `level` has seen it as it is

    @property
    def spans(self) -> np.ndarray:
        """[intervals, 2]"""
        return self.whole()[0]

    @property
    def use(self) -> np.ndarray:
        """[intervals, strategies]"""
        return self.whole()[1]

    def whole(self) -> tuple[np.ndarray, np.ndarray]:
        """`spans` and `use`."""
        if len(self._parts) > 1:
            spans, use = (
                np.concatenate([s for s, _ in self._parts]),
                np.concatenate([u for _, u in self._parts]),
            )
            code = spans[:, 0] * (1 << 31) + spans[:, 1]
            by = np.argsort(code, kind="stable")
            first = np.flatnonzero(np.append(True, np.diff(code[by]) != 0))
            self._parts = [(spans[by[first]], np.add.reduceat(use[by], first, axis=0))]
        return self._parts[0]

    def take(self, strategies: np.ndarray) -> Usage:
        """The usage of a node whose strategies are these of this one's."""
        spans, use = self.whole()
        return Usage(spans, use[:, strategies])

    def join(self, other: Usage) -> None:
        """Take over another node's intervals; equal spans add up."""
        self._parts += other._parts
        self.flat = False
