"""Neighbourhoods of nearly every choice: all nodes but a few are decided at once.

Where a tenth or a twentieth of the nodes keep their options (a cutset, drawn at random, those with
many neighbours rather than others), the tables that eliminate all the others are small. So the best
of all choices that agree with the one at hand there comes from one elimination. Memory is priced,
prices rise where it overflows and fall where there is room (`messages`), and what overflows all the
same is repaired. Tables start small and grow where neighbourhoods bring nothing any more: fewer
nodes are then kept.

A `search` draws the cuts and makes choices fit. Work unit: one column of a table read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from planner.solvers.bounds.messages import rounding
from planner.solvers.neighbourhood.search import Cut, Search

LIMITS = (3e3, 1e4, 3e4, 1e5)
"""Largest tables of a neighbourhood (in entries), one after the other."""
ROOM = 3e7
"""Most entries of all messages of a neighbourhood (8 bytes each)."""
TURNS, PACE = 8, 0.3
"""Eliminations of a neighbourhood, each under other prices, and the part of a Polyak step that
prices go."""
NEAR = 0.01
"""Choices dearer than the one at hand by more than this are not made to fit."""
PART, NOISE = (0.05, 1.0), (0.1, 1.0)
"""Bounds of the part of all nodes whose costs have noise where a descent starts, and of the noise
in units of what a node costs."""
PATIENCE, LITTLE = 4, 1e-5
"""How many neighbourhoods in a row may gain less than so much of the cost before tables grow."""


@dataclass
class Descent:
    """Neighbourhoods of a choice that fits, one after the other. price: of memory, where the bound
    of the last neighbourhood was best. [rows]"""

    search: Search
    random: np.random.Generator
    price: np.ndarray
    x: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    cost: float = np.inf

    def run(self, x: np.ndarray, go_on: Callable[[float], bool]) -> np.ndarray:
        """What a choice that fits descends to, until neighbourhoods of the largest tables bring
        nothing any more or `go_on(work)` says no."""
        self.x, self.cost = x.copy(), self.search.cost(x)
        for limit in LIMITS:
            idle = 0
            while idle < PATIENCE:
                before = self.cost
                improved = self._improve(self._cut(limit), go_on)
                idle = 0 if before - self.cost > LITTLE * abs(before) else idle + 1
                if not improved or self.search.best.closed:
                    return self.x
        return self.x

    def with_noise(self, x: np.ndarray, unit: float) -> np.ndarray:
        """Another choice that fits, the best of a neighbourhood where costs of some connected nodes
        have noise; the same one where that cannot be made to fit. unit: of costs."""
        flat, y = self.search.flat, x.copy()
        part, noise = (
            float(np.exp(self.random.uniform(*np.log(bounds)))) for bounds in (PART, NOISE)
        )
        noisy = self._region(max(1, int(part * len(x))))
        costs = self.random.exponential(noise * unit, len(flat.cost)) * np.repeat(
            noisy, np.diff(flat.offset)
        )
        self._cut(LIMITS[0]).eliminate(self._priced(self.price) + costs, y)
        fitting, _ = self.search.repaired(y)
        return x if fitting is None else fitting

    def _region(self, many: int) -> np.ndarray:
        """So many nodes, each beside an earlier one while there is one. [nodes] bool"""
        flat, reached = self.search.flat, np.zeros(len(self.search.flat.offset) - 1, bool)
        beside: list[int] = []
        for _ in range(many):
            while beside and reached[beside[-1]]:
                beside.pop()
            v = beside.pop() if beside else int(self.random.choice(np.flatnonzero(~reached)))
            reached[v] = True
            beside += flat.other[flat.first[v] : flat.first[v + 1]].tolist()
            if beside:
                k = int(self.random.integers(len(beside)))
                beside[k], beside[-1] = beside[-1], beside[k]
        return reached

    def _cut(self, limit: float) -> Cut:
        return self.search.cut(limit, ROOM, self.random)

    def _priced(self, price: np.ndarray) -> np.ndarray:
        """Costs under a price of memory. [positions]"""
        cost, memory = self.search.flat.cost, self.search.model.memory
        return cost if memory is None else cost + memory.priced(price, len(cost))

    def _improve(self, cut: Cut, go_on: Callable[[float], bool]) -> bool:
        """Try what eliminations under some prices find beside what is kept; False once
        `go_on(work)` has said no."""
        s, memory, beside = self.search, self.search.model.memory, self.x
        price, step, floor = self.price, np.zeros(len(self.price)), -np.inf
        for _ in range(TURNS):
            y = beside.copy()
            cut.eliminate(self._priced(price), y)
            least = s.cost(y)
            if least < (1 + NEAR) * self.cost:
                fitting, cost = s.repaired(y)
                if fitting is not None and cost < self.cost:
                    self.x, self.cost = fitting, cost
            if not go_on(cut.work):
                return False
            if memory is None:
                break
            over = memory.load(y) - memory.limit
            value = least + float(price @ over)
            if value > floor:
                floor, self.price = value, price
            step = over + 0.5 * step
            up = np.where((price <= 0) & (step < 0), 0.0, step)
            norm = float(up @ up)
            if floor >= self.cost - rounding(self.cost) or norm == 0:
                break  # nothing better is in the neighbourhood
            price = np.maximum(
                0.0, price + PACE * max(self.cost - value, 1e-6 * abs(value)) / norm * up
            )
        return True


def start(search: Search, seed: int) -> Descent:
    """Descents of a search from the prices that it found."""
    price = search.best.price
    memory = search.model.memory
    return Descent(
        search,
        np.random.default_rng(seed),
        price if len(price) or memory is None else np.zeros(memory.rows),
    )
