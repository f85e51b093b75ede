"""The search over large and tight problems, compiled: passes of messages for `prices`, and decoded
choices repaired and descended. `annealing` goes on from its best choice.

Needs numba (the optional extra "fast"); `plainsearch` is there without. Work unit: one table entry
read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from planner.solvers.bounds import messages_numba as kernels
from planner.solvers.bounds.messages import Incumbent
from planner.solvers.model import Model
from planner.solvers.neighbourhood import cuts, moves
from planner.solvers.neighbourhood.flat import Flat, flatten, high_of


@dataclass
class Search:
    """Arrays of one model, the choice under way and the incumbent: the compiled `prices.Passes`."""

    model: Model
    flat: Flat
    rows: int
    best: Incumbent
    top: np.ndarray
    lazy: np.ndarray
    unary: np.ndarray  # [positions] costs under the prices of the last pass
    message: np.ndarray
    share: np.ndarray  # [nodes] weight of a node in each chain through it
    x: np.ndarray
    regret: np.ndarray
    high: float  # what stands for a forbidden entry
    own: Incumbent = field(default_factory=Incumbent)
    """The best that was found here, not by another process: its choice and cost."""

    def sweep(self, price: np.ndarray) -> float:
        """See `prices.Passes`."""
        f = self.flat
        if self.rows:
            kernels.priced(f, price, self.unary)
        value = kernels.message_pass(f, self.unary, self.message, self.share, self.x, self.regret)
        return value - float(price.sum()) * f.limit if self.rows else value

    def cost(self, x: np.ndarray) -> float:
        """Of a choice, far above all others where it is forbidden."""
        return float(kernels.total_cost(self.flat, x))

    def mended(self, x: np.ndarray, sweeps: int = 6) -> tuple[np.ndarray | None, float]:
        """A copy of x repaired and descended, and its cost; None where it cannot be made to fit.
        The incumbent keeps it when it is the best."""
        f, y = self.flat, x.copy()
        kernels.load_all(f, y, self.top, self.lazy)
        if self.rows and self.top[1] > f.limit:
            journal = np.empty((8 * len(y) + 256, 2), np.int64)
            out = np.empty(int(np.diff(f.offset).max()))
            fits, _, _ = moves.repair(
                f, y, self.top, self.lazy, np.inf, len(journal), 256, journal, 0, out
            )
            if not fits:
                return None, np.inf
        moves.descend(f, y, self.top, self.lazy, sweeps)
        cost = self.cost(y)
        if cost >= self.high:
            return None, np.inf
        self.own.offer(y, cost)
        self.best.offer(y, cost)
        return y, cost

    def fit(self, x: np.ndarray) -> bool:
        """Repair and descend a copy of x; True when it fits. The incumbent keeps it when it is the
        best."""
        return self.mended(x)[0] is not None

    def cut(self, limit: float, room: float, random: np.random.Generator) -> cuts.Cut:
        """See `ground.Ground`."""
        return cuts.drawn(self.flat, limit, room, random)


def start(model: Model) -> Search:
    """A search over a model with exact costs."""
    f, n = flatten(model), model.nodes
    rows = 0 if model.memory is None else model.memory.rows
    own = np.repeat(np.arange(n), np.diff(f.first))
    earlier, later = np.bincount(own, f.other < own, n), np.bincount(own, f.other > own, n)
    share = 1.0 / np.maximum(1, np.maximum(earlier, later))
    top, lazy = np.zeros(2 * f.leaves), np.zeros(2 * f.leaves)
    best, message = Incumbent(price=np.zeros(rows)), np.zeros(int(f.message[-1]))
    return Search(
        model,
        f,
        rows,
        best,
        top,
        lazy,
        f.cost.copy(),
        message,
        share,
        np.zeros(n, np.int64),
        np.zeros(len(f.cost)),
        high_of(model),
    )
