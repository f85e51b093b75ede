"""The search over large and tight problems in numpy: the twin of `search.Search`, without its
annealing.

Passes of messages go colour by colour (`colours`) and take three to four times as long as compiled
ones; a neighbourhood takes some ten times as long (`plaincuts`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from planner.solvers.bounds import messages_coloured as colours
from planner.solvers.bounds.messages import Incumbent
from planner.solvers.exact.elimination import Scratch
from planner.solvers.model import Model
from planner.solvers.neighbourhood import cuts_numpy as plaincuts
from planner.solvers.neighbourhood.changes import Changes, changes_of
from planner.solvers.neighbourhood.flat import Flat, high_of


@dataclass
class PlainSearch:
    """Arrays of one model, the choice under way and the incumbent: a `ground.Ground`."""

    model: Model
    flat: Flat
    passes: colours.Passes
    changes: Changes
    best: Incumbent
    x: np.ndarray
    regret: np.ndarray
    high: float  # what stands for a forbidden entry
    own: Incumbent = field(default_factory=Incumbent)
    scratch: Scratch = field(default_factory=Scratch)

    def sweep(self, price: np.ndarray) -> float:
        """See `prices.Passes`."""
        memory, cost = self.model.memory, self.flat.cost
        if memory is None:
            return self.passes.sweep(cost, self.x, self.regret)
        return (
            self.passes.sweep(cost + memory.priced(price, len(cost)), self.x, self.regret)
            - float(price.sum()) * memory.limit
        )

    def cost(self, x: np.ndarray) -> float:
        """See `ground.Ground`."""
        return self.changes.cost(x)

    def mended(self, x: np.ndarray, sweeps: int = 6) -> tuple[np.ndarray | None, float]:
        """See `ground.Ground`."""
        y = self.changes.mended(x, sweeps)
        cost = np.inf if y is None else self.cost(y)
        if y is None or cost >= self.high:
            return None, np.inf
        self.own.offer(y, cost)
        self.best.offer(y, cost)
        return y, cost

    def fit(self, x: np.ndarray) -> bool:
        """See `prices.Passes`."""
        return self.mended(x)[0] is not None

    def cut(self, limit: float, room: float, random: np.random.Generator) -> plaincuts.Cut:
        """See `ground.Ground`."""
        return plaincuts.drawn(self.model, self.changes, limit, room, random, self.scratch)


def start(model: Model) -> PlainSearch:
    """A search over a model with exact costs."""
    flat, rows = changes_of(model).flat, 0 if model.memory is None else model.memory.rows
    best, positions = Incumbent(price=np.zeros(rows)), len(model.cost)
    return PlainSearch(
        model,
        flat,
        colours.Passes(flat),
        changes_of(model),
        best,
        np.zeros(model.nodes, np.int64),
        np.zeros(positions),
        high_of(model),
    )
