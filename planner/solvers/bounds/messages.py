"""Memory prices by message passing: a lower bound, choices met on the way, and what every single
option costs at least.

    L(p, m) = (tree-reweighted bound under unary costs cost + p . usage) - limit * sum p       p >=
        0 a price per row, m the messages

bounds the cost of every choice that fits. `raise_bound` takes one sweep pair of messages and one
Polyak step on p (deflected subgradient) at a time; `floors` holds p where the bound was best and
asks the messages, which are then min-marginals of chains, how far the bound rises when one option
is forced.

Passes go node by node (`messages_small`, for problems of few nodes) or colour by colour
(`messages_coloured`). Work unit: one table entry read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import numpy as np

from planner.solvers.model import Model

PACE, LITTLE, SETTLED = 0.2, 0.02, 600
"""The part of its time that a bound's pace is taken over, the part of the gap that is little, and
the passes before which no pace tells anything: prices start far off."""


@dataclass
class Incumbent:
    """Best feasible choice, best bound, the prices of that bound."""

    cost: float = np.inf
    x: np.ndarray | None = None
    bound: float = -np.inf
    price: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def offer(self, x: np.ndarray, cost: float) -> None:
        """Keep a choice that fits when it is the cheapest so far."""
        if cost < self.cost:
            self.cost, self.x = cost, x

    @property
    def closed(self) -> bool:
        """Nothing is left to prove: the gap is below the rounding of a bound."""
        return bool(np.isfinite(self.cost)) and self.cost - self.bound <= rounding(self.cost)


@dataclass
class Rising:
    """Whether it is worth the time to raise a bound further: not when at its pace of late little of
    the gap would be closed in what is left of `seconds`."""

    best: Incumbent
    seconds: float
    _began: float = field(default_factory=lambda: time.monotonic())
    _seen: list[tuple[float, float]] = field(default_factory=list)
    _passes: int = 0

    def worthwhile(self) -> bool:
        """Asked after each pass."""
        now, self._passes = time.monotonic() - self._began, self._passes + 1
        if not self._seen or now - self._seen[-1][0] > PACE * self.seconds / 4:
            self._seen = [*self._seen[-4:], (now, self.best.bound)]
        (then, before), gap = self._seen[0], self.best.cost - self.best.bound
        if (
            now > self.seconds
            or len(self._seen) < 5
            or self._passes < SETTLED
            or not np.isfinite(gap)
        ):
            return now <= self.seconds
        return bool((self.best.bound - before) / (now - then) * (self.seconds - now) > LITTLE * gap)


class Passes(Protocol):
    """Messages of one model, and the incumbent."""

    model: Model
    best: Incumbent
    x: np.ndarray  # [nodes] choice decoded from the last pass
    regret: (
        np.ndarray
        # [positions] rise of the bound of the pass before (under the same prices) when an option is
        # forced
    )

    def sweep(self, price: np.ndarray) -> float:
        """One pass there and back under prices [rows] from the messages of the last; L."""

    def fit(self, x: np.ndarray) -> bool:
        """Repair and descend a copy of x; True when it fits. The incumbent keeps it when it is the
        best."""


def rounding(cost: float) -> float:
    """Allowance for the rounding of sums near this cost."""
    return 1e-9 * max(1.0, abs(cost))


def entries(model: Model) -> float:
    """Work of one pass."""
    return 2.0 * (len(model.cost) + 2.0 * sum(t.size for t in model.pairs.values()))


def raise_bound(passes: Passes, go_on: Callable[[float], bool], patience: int = 12) -> None:
    """Raise the bound until `go_on(work)` says no; without memory until it stands still."""
    model, best = passes.model, passes.best
    rows, limit = (0, 0.0) if model.memory is None else (model.memory.rows, model.memory.limit)
    price, direction = np.zeros(rows), np.zeros(rows)
    gain, idle, mark, cycle = 1.0, 0, -1e300, 0
    work = entries(model)
    for turn in count():
        value = passes.sweep(price)
        if value > best.bound:
            best.bound, best.price = value, price.copy()
        if turn in (3, 10) or turn % 25 == 24:
            passes.fit(passes.x)
        if not go_on(work) or best.closed:
            break
        idle = 0 if best.bound > mark + 1e-7 * abs(mark) else idle + 1
        mark = best.bound
        if idle > patience:
            gain, idle = gain * 0.8, 0
            if gain < 1e-4:
                # once more from the best prices, now far, now near: the messages have settled since
                gain, price, cycle = (0.3, 0.02)[cycle % 2], best.price.copy(), cycle + 1
                direction[:] = 0.0
        if model.memory is None:
            if cycle:
                break
            continue
        over = model.memory.load(passes.x) - limit
        direction = over + 0.9 * direction
        step = np.where((price <= 0) & (direction < 0), 0.0, direction)
        norm = float(step @ step)
        if norm > 0:
            target = (
                best.cost if np.isfinite(best.cost) else best.bound + 0.1 * abs(best.bound) + 1.0
            )
            price = np.maximum(
                0.0, price + gain * max(target - value, 1e-6 * abs(value)) / norm * step
            )
    passes.fit(passes.x)


def floors(passes: Passes, sweeps: int = 60) -> np.ndarray:
    """What a choice that fits costs at least with each option, at the incumbent's prices (from no
    prices where it has none). [positions]"""
    best, model = passes.best, passes.model
    price = (
        best.price
        if len(best.price)
        else np.zeros(0 if model.memory is None else model.memory.rows)
    )
    least, value = np.full(len(model.cost), -np.inf), -np.inf
    for _ in range(sweeps):
        fresh = passes.sweep(price)
        if np.isfinite(value):
            least = np.maximum(least, value + passes.regret)
        value = fresh
        if value > best.bound:
            best.bound, best.price = value, price
    return np.maximum(least, best.bound)
