"""What descents stand on (`cutset`, `rounds`): a search over one wide problem, compiled (`search`,
with numba) or in numpy (`plainsearch`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np

from planner.solvers.bounds.messages import Incumbent, Passes
from planner.solvers.bounds.messages_small import Plain
from planner.solvers.model import Model
from planner.solvers.neighbourhood import search_numpy
from planner.solvers.neighbourhood.flat import Flat
from planner.solvers.neighbourhood.local import MANY


class Cut(Protocol):
    """Nodes that are eliminated beside some that are kept."""

    def eliminate(self, unary: np.ndarray, x: np.ndarray) -> None:
        """Set all nodes of x that are not kept to what is least under unary costs [positions]."""

    @property
    def work(self) -> float:
        """Of one elimination."""


class Ground(Passes, Protocol):
    """One wide problem: passes of messages, choices made to fit, and cuts."""

    model: Model
    flat: Flat
    best: Incumbent
    own: Incumbent
    """The best that was found here, not by another process: its choice and cost."""

    def cost(self, x: np.ndarray) -> float:
        """Of a choice, far above all others where it is forbidden."""

    def mended(self, x: np.ndarray, sweeps: int = 6) -> tuple[np.ndarray | None, float]:
        """A copy of x repaired and descended, and its cost; None where it cannot be made to fit.
        The incumbent keeps it when it is the best."""

    def cut(self, limit: float, room: float, random: np.random.Generator) -> Cut:
        """A random cut under which no table has more than `limit` entries, nor all of them more
        than `room`."""


@cache
def compiled() -> bool:
    """Whether numba is there; one that cannot be imported (beside a numpy newer than it knows, say)
    is none."""
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


def plain(model: Model) -> Plain | search_numpy.PlainSearch:
    """Passes in numpy: of few nodes one by one."""
    return search_numpy.start(model) if model.nodes > MANY else Plain(model)


def start(model: Model, seed: int) -> Ground:
    """A search over a model with exact costs."""
    if not compiled():
        return search_numpy.start(model)
    from planner.solvers.neighbourhood import moves, search

    moves.seed(seed)
    return search.start(model)


@dataclass(frozen=True)
class Others:
    """What is done with the rest of the portfolio: take over what it found, tell it what a run
    ended with, and try mixtures."""

    sync: Callable[[], None]
    share: Callable[[np.ndarray], None]
    mix: Callable[[], None]


def unit_of(state: Ground) -> float:
    """What a node costs at least, about."""
    return max(abs(state.best.bound), 1e-3 * abs(state.best.cost), 1.0) / state.model.nodes
