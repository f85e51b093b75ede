"""Closing a gap by leaving options out: exact elimination of what may still be in a better choice.

`messages.floors` tells of every option what a choice with it costs at least. For any level T, a
choice either has only options with floors up to T, or costs more than T:

    optimum  >=  min( optimum over the options with floors up to T,  T )

With T the best known cost, and an exact solve of what is left, that is a proof. Where what is left
is too wide for elimination, the highest level that is not gives a better choice and a better bound,
and with the better choice the next proof has less to look at.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from planner.solvers.bounds.lagrangian import Clock
from planner.solvers.bounds.messages import Passes, entries, floors, raise_bound, rounding
from planner.solvers.exact.elimination import order_of
from planner.solvers.model import Model, restrict

Exact = Callable[[Model, np.ndarray | None], tuple[np.ndarray | None, float]]
"""An exact solver where tables allow: choice (None: none found) and bound (inf: none fits) of a
model; the second argument is a choice to start from."""
ROUNDS, HALVINGS, TURNS, SHARE, PASSES = 4, 7, 150, 0.3, 40
"""Of narrowing at most; of the way between bound and best known cost, to find the highest level
that is narrow enough; passes for a bound, but for no more than a share of the clock's work; passes
for the floors."""


def worthwhile(model: Model, clock: Clock) -> bool:
    """True when the clock has work left for enough passes."""
    return bool(model.pairs) and PASSES * entries(model) <= clock.work_limit - clock.work


def close(passes: Passes, exact: Exact, room: float, clock: Clock) -> list[np.ndarray] | None:
    """Raise the bound of a model and solve what may be better exactly, where its elimination has at
    most `room` entries. Updates the incumbent.

    Returns per node the options that may be in a choice as cheap as the best known, None where all
    may.
    """
    model, best, work = passes.model, passes.best, entries(passes.model)
    least = np.full(len(model.cost), -np.inf)
    if not worthwhile(model, clock):
        return None
    for turn in range(ROUNDS):
        share = clock.work + min(TURNS * work, SHARE * (clock.work_limit - clock.work) / (1 + turn))
        raise_bound(passes, lambda work: clock.spend(work) and clock.work < share)  # noqa: B023
        if best.closed or clock.stopped:
            break
        least = np.maximum(least, floors(passes, PASSES))
        clock.spend(PASSES * work)
        before = best.cost, best.bound
        while True:
            tried = best.cost
            if _solved(passes, least, exact, room) or clock.stopped or not best.cost < tried:
                break
        if best.closed or clock.stopped or (best.cost, best.bound) == before:
            break
    open_options = options(model, least, best.cost + rounding(best.cost))
    return open_options if sum(map(len, open_options)) < len(model.cost) else None


def _solved(passes: Passes, least: np.ndarray, exact: Exact, room: float) -> bool:
    """Solve what is at or below the highest level whose elimination has room; True when nothing is
    left to prove."""
    best, model = passes.best, passes.model
    top = best.cost + rounding(best.cost) if np.isfinite(best.cost) else float(least.max())
    level = _level(model, least, best.bound, top, room)
    if level is None:
        return False
    open_options = options(model, least, level)
    choice, bound = exact(
        restrict(model, open_options), None if best.x is None else places(open_options, best.x)
    )
    if choice is not None:
        x = chosen(open_options, choice)
        best.offer(x, model.total(x))
    best.bound = max(best.bound, min(bound, level if level < top or best.x is None else best.cost))
    return best.closed


def _level(model: Model, least: np.ndarray, low: float, top: float, room: float) -> float | None:
    """The highest level up to `top` where the elimination of what is left has room, nearly; None
    where there is none above `low` with an option for each node."""
    if _narrow(model, options(model, least, top), room):
        return top
    possible, high = None, top
    for _ in range(HALVINGS):
        level = (low + high) / 2
        open_options = options(model, least, level)
        if _narrow(model, open_options, room):
            low = level
            possible = level if all(map(len, open_options)) else possible
        else:
            high = level
    return possible


def options(model: Model, least: np.ndarray, level: float) -> list[np.ndarray]:
    """Per node the options with floors up to a level."""
    return [
        np.flatnonzero(least[a:b] <= level)
        for a, b in zip(model.offset[:-1], model.offset[1:], strict=True)
    ]


def places(open_options: list[np.ndarray], x: np.ndarray) -> np.ndarray | None:
    """A choice as places among the options that are open; None where it has another one. [nodes]"""
    positions = [np.flatnonzero(k == c) for k, c in zip(open_options, x.tolist(), strict=True)]
    return np.concatenate(positions) if all(map(len, positions)) else None


def chosen(open_options: list[np.ndarray], choice: np.ndarray) -> np.ndarray:
    """The choice of the whole model for one of the open options. [nodes]"""
    return np.array([int(k[c]) for k, c in zip(open_options, choice.tolist(), strict=True)])


def _narrow(model: Model, options_of: list[np.ndarray], room: float) -> bool:
    """True when the elimination of these options has room."""
    adjacent: list[set[int]] = [set() for _ in options_of]
    for u, v in model.pairs:
        adjacent[u].add(v)
        adjacent[v].add(u)
    order = order_of([len(k) for k in options_of], adjacent, room)
    return order is not None and order[2] <= room
