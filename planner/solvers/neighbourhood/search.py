"""The search over one large and tight problem: passes of messages, choices made to fit, and cuts
whose other nodes are eliminated at once (`cutset`).

Passes and eliminations are compiled where numba is there (the extra `fast`), since a search is
mostly these: a pass then takes a third of the time, an elimination a tenth or less. The rest is
array operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import numpy as np

from planner.solvers.bounds import messages_coloured
from planner.solvers.bounds.messages import Incumbent
from planner.solvers.bounds.messages_small import Plain
from planner.solvers.exact.elimination import Scratch
from planner.solvers.model import Model
from planner.solvers.neighbourhood import cuts_numpy
from planner.solvers.neighbourhood.changes import Changes, changes_of
from planner.solvers.neighbourhood.flat import Flat, high_of
from planner.solvers.neighbourhood.local import MANY


class Cut(Protocol):
    """Nodes that are eliminated beside some that are kept."""

    def eliminate(self, unary: np.ndarray, x: np.ndarray) -> None:
        """Set all nodes of x that are not kept to what is least under unary costs [positions]."""

    @property
    def work(self) -> float:
        """The work of one elimination."""


class Sweeps(Protocol):
    """Messages of one model."""

    def sweep(self, unary: np.ndarray, x: np.ndarray, regret: np.ndarray) -> float:
        """See `messages_coloured.Passes.sweep`."""


@dataclass
class Search:
    """Arrays of one model, the choice under way and the incumbent: a `messages.Passes`."""

    model: Model
    flat: Flat
    passes: Sweeps
    changes: Changes
    best: Incumbent
    x: np.ndarray  # [nodes] choice decoded from the last pass
    regret: np.ndarray  # [positions] see `messages.Passes`
    high: float
    """What stands for a forbidden entry."""
    compiled: bool
    """Whether passes and eliminations are."""
    own: Incumbent = field(default_factory=Incumbent)
    """The best that was found here, not by another process: its choice and cost."""
    scratch: Scratch = field(default_factory=Scratch)

    def sweep(self, price: np.ndarray) -> float:
        """See `messages.Passes`."""
        memory, unary, constant = self.model.memory, self.flat.cost, 0.0
        if memory is not None:
            unary = unary + memory.priced(price, len(unary))
            constant = float(price.sum()) * memory.limit
        return self.passes.sweep(unary, self.x, self.regret) - constant

    def cost(self, x: np.ndarray) -> float:
        """The cost of a choice, far above all others where it is forbidden."""
        return self.changes.cost(x)

    def repaired(self, x: np.ndarray, sweeps: int = 6) -> tuple[np.ndarray | None, float]:
        """A copy of x that fits in memory, improved by single changes, and its cost; None where it
        cannot be made to fit. The incumbent keeps it when it is the best."""
        y = self.changes.repaired(x, sweeps)
        cost = np.inf if y is None else self.cost(y)
        if y is None or cost >= self.high:
            return None, np.inf
        self.own.offer(y, cost)
        self.best.offer(y, cost)
        return y, cost

    def fit(self, x: np.ndarray) -> bool:
        """See `messages.Passes`."""
        return self.repaired(x)[0] is not None

    def cut(self, limit: float, room: float, random: np.random.Generator) -> Cut:
        """A random cut under which no table has more than `limit` entries, nor all of them more
        than `room`."""
        if self.compiled:
            from planner.solvers.neighbourhood import cuts

            return cuts.drawn(self.flat, limit, room, random)
        return cuts_numpy.drawn(self.model, self.changes, limit, room, random, self.scratch)


@cache
def numba_is_there() -> bool:
    """Whether numba can be imported: one that is too old for this numpy, say, cannot."""
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


def start(model: Model, compiled: bool | None = None) -> Search:
    """A search over a model with exact costs, compiled or not (None: where numba is there)."""
    changes, memory = changes_of(model), model.memory
    compiled = numba_is_there() if compiled is None else compiled
    if compiled:
        from planner.solvers.bounds import messages_numba as passes
    else:
        passes = messages_coloured  # type: ignore[misc]
    return Search(
        model=model,
        flat=changes.flat,
        passes=passes.Passes(changes.flat),
        changes=changes,
        best=Incumbent(price=np.zeros(0 if memory is None else memory.rows)),
        x=np.zeros(model.nodes, np.int64),
        regret=np.zeros(len(model.cost)),
        high=high_of(model),
        compiled=compiled,
    )


def in_numpy(model: Model) -> Plain | Search:
    """Passes of messages without compiled loops, which take a second to load: of few nodes one node
    at a time, else colour by colour."""
    return start(model, compiled=False) if model.nodes > MANY else Plain(model)


@dataclass(frozen=True)
class Others:
    """What is done with the rest of the portfolio: take over what it found, tell it what a descent
    ended with, and try mixtures."""

    sync: Callable[[], None]
    share: Callable[[np.ndarray], None]
    mix: Callable[[], None]


def unit_of(search: Search) -> float:
    """What a node costs at least, about."""
    best = search.best
    return max(abs(best.bound), 1e-3 * abs(best.cost), 1.0) / search.model.nodes
