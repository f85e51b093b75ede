"""Memory prices: the Lagrangian bound over the rows, with exact elimination as its oracle.

    L(p) = min over x of  cost(x) + sum_r p_r (load_r(x) - limit)      p >= 0

is a lower bound on the optimum for every p. Along one direction L is concave and piecewise linear,
so its maximum is found exactly by intersecting the lines of two choices (one that overloads, one
that does not); with several binding rows, projected subgradient steps of Polyak length follow. With
all costs set to zero, L(p) > 0 proves that no choice fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from planner.solvers.exact.elimination import Tree
from planner.solvers.model import Model
from planner.solvers.neighbourhood.local import polish


@dataclass
class Clock:
    """Deterministic work (table entries visited) and, when asked, wall time."""

    work_limit: float
    deadline: float | None
    work: float = 0.0
    stopped: Literal["", "time", "work", "interrupt"] = ""

    def spend(self, amount: float) -> bool:
        """Count work; False once a limit has been passed (`stopped` says which)."""
        self.work += amount
        if self.work > self.work_limit:
            self.stopped = "work"
        elif self.deadline is not None and time.monotonic() > self.deadline:
            self.stopped = "time"
        return not self.stopped


@dataclass
class Dual:
    """State of the search for prices: best bound and prices, best feasible choice."""

    model: Model
    tree: Tree
    clock: Clock
    bound: float = -np.inf
    price: np.ndarray = field(default_factory=lambda: np.zeros(0))
    best_cost: float = np.inf
    best: np.ndarray | None = None
    above: np.ndarray | None = None
    """The last minimiser that overloaded a row; `below`: the last that fitted. Around the best
    price of one row they are its two sides."""
    below: np.ndarray | None = None

    def oracle(self, price: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """L(price), a minimiser and its overload per row. Keeps the best bound, and a feasible
        choice when it meets one."""
        memory = self.model.memory
        assert memory is not None
        value, x, _ = self.tree.run(self.model.cost + memory.priced(price, len(self.model.cost)))
        value -= float(price.sum()) * memory.limit
        over = memory.load(x) - memory.limit
        if value > self.bound:
            self.bound, self.price = value, price
        self.clock.spend(self.tree.entries)
        if over.max() > 0:
            self.above = x
        elif np.isfinite(value):
            self.below = x
            self.offer(x)
        return value, x, over

    def offer(self, x: np.ndarray) -> None:
        """Keep a feasible choice when it is the cheapest so far."""
        cost = self.model.total(x)
        if cost < self.best_cost:
            self.best_cost, self.best = cost, x

    @property
    def closed(self) -> bool:
        """True when no integer cost fits between bound and best."""
        return self.bound > self.best_cost - 1 + slack(self.best_cost)


def slack(cost: float) -> float:
    """Rounding allowance of a float bound near this cost."""
    return min(0.5, 1e-12 * abs(cost)) if np.isfinite(cost) else 0.0


def along(
    dual: Dual,
    origin: np.ndarray,
    direction: np.ndarray,
    first: tuple[float, np.ndarray, np.ndarray],
) -> np.ndarray:
    """Maximise L(origin + t direction) over t >= 0 exactly; returns the best prices met. `first` is
    the oracle at t = 0."""
    value0, _, over0 = first
    slope_low = float(direction @ over0)
    if slope_low <= 0:
        return origin
    low = (0.0, value0, slope_low)
    step = max(abs(value0), 1.0) / max(slope_low, 1.0) * 0.05
    t, high = step, None
    for _ in range(48):
        value, _, over = dual.oracle(origin + t * direction)
        slope = float(direction @ over)
        if slope <= 0:
            high = (t, value, slope)
            break
        low = (t, value, slope)
        t *= 6
        if dual.clock.stopped:
            return origin + low[0] * direction
    if high is None:
        return origin + low[0] * direction
    for _ in range(40):
        if high[2] == 0 or dual.closed or dual.clock.stopped:
            break
        # the two supporting lines meet at t; if L reaches that height, t is the maximum
        t = (low[1] - high[1] + high[2] * high[0] - low[2] * low[0]) / (high[2] - low[2])
        height = low[1] + low[2] * (t - low[0])
        if not low[0] < t < high[0]:
            break
        value, _, over = dual.oracle(origin + t * direction)
        if value >= height - 1e-12 * max(abs(height), 1.0):
            return origin + t * direction
        slope = float(direction @ over)
        if slope > 0:
            low = (t, value, slope)
        else:
            high = (t, value, slope)
    return origin + (high[0] if high[1] >= low[1] else low[0]) * direction


def subgradient(dual: Dual, rounds: int, heal: Callable[[np.ndarray], None]) -> None:
    """Polyak steps from the best prices over all rows, stopping when the bound no longer moves."""
    price, direction, gain, idle = dual.price.copy(), None, 1.0, 0
    for k in range(rounds):
        before = dual.bound
        value, x, over = dual.oracle(price)
        if dual.clock.stopped or dual.closed or not np.isfinite(value):
            return
        if k % 8 == 0:
            heal(x)
        idle = 0 if dual.bound > before + 1e-7 * abs(before) else idle + 1
        if idle >= 6:
            gain, idle, price, direction = gain * 0.5, 0, dual.price.copy(), None
            if gain < 0.02:
                return
            continue
        over = np.where((price <= 0) & (over < 0), 0.0, over)
        direction = over if direction is None else over + 0.5 * direction
        norm = float(direction @ direction)
        if norm == 0:
            return
        target = (
            dual.best_cost
            if np.isfinite(dual.best_cost)
            else dual.bound + 0.05 * abs(dual.bound) + 1
        )
        price = np.maximum(0.0, price + gain * max(target - value, 1.0) / norm * direction)


def maximise(dual: Dual, rounds: int = 80) -> None:
    """Raise the bound from no prices at all: the worst row alone first, then all rows together."""
    memory = dual.model.memory
    assert memory is not None
    origin = np.zeros(memory.rows)
    value, x, over = dual.oracle(origin)
    if not np.isfinite(value) or over.max() <= 0:
        return

    def heal(x: np.ndarray) -> None:
        polished = polish(dual.model, x)
        if polished is not None:
            dual.offer(polished)

    for _ in range(4):
        direction = np.zeros(memory.rows)
        direction[int(over.argmax())] = 1.0
        origin = along(dual, origin, direction, (value, x, over))
        if dual.closed or dual.clock.stopped:
            return
        value, x, over = dual.oracle(origin + 0.0)
        if dual.best is None:
            heal(x)
        worst = int(over.argmax())
        if over[worst] <= 0 or direction[worst] > 0:
            break
    if dual.best is not None:
        heal(dual.best)
    others = (
        (dual.model.memory.load(x) - memory.limit > 0) if dual.model.memory else np.zeros(0, bool)
    )
    if memory.rows > 1 and (
        int(others.sum()) > 1 or (others & (dual.price == 0)).any() or (dual.price > 0).sum() > 1
    ):
        subgradient(dual, rounds, heal)


def cannot_fit(model: Model, tree: Tree, clock: Clock, rounds: int = 60) -> bool:
    """Try to prove that no choice fits: prices p on the unit simplex with min_x p . load(x) >
    limit."""
    memory = model.memory
    assert memory is not None
    if (memory.extreme(False) > memory.limit).any():
        return True
    zero = np.where(np.isfinite(model.cost), 0.0, np.inf)
    load = memory.extreme(True)
    price = np.zeros(memory.rows)
    price[int(load.argmax())] = 1.0
    flat = _without_costs(model, tree)
    for k in range(rounds):
        value, x, _ = flat.run(zero + memory.priced(price, len(model.cost)))
        if value > memory.limit * (1 + 1e-12) + 1e-6:
            return True
        over = memory.load(x) - memory.limit
        if over.max() <= 0 or not clock.spend(tree.entries):
            return False
        step = np.where(over > 0, over, 0.0) / over.max()
        price = price + step / (1 + k)
        price /= price.sum()
    return False


def _without_costs(model: Model, tree: Tree) -> Tree:
    from dataclasses import replace

    return replace(
        tree,
        tables=[],
        base=[[np.where(np.isinf(b), np.inf, 0.0) for b in parts] for parts in tree.base],
    )
