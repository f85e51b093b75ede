"""Message passing node by node: the passes of `messages` for problems of some hundred nodes.

A node's tables are read whole, one neighbour at a time; with tables of a hundred strategies a side
that is as fast as compiled loops.
"""

from __future__ import annotations

import numpy as np

from planner.solvers.bounds.messages import Incumbent
from planner.solvers.model import Model
from planner.solvers.neighbourhood.flat import high_of
from planner.solvers.neighbourhood.local import polish


class Plain:
    """Sequential tree-reweighted messages of a model in the order of its nodes."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.best = Incumbent(price=np.zeros(0 if model.memory is None else model.memory.rows))
        self.x, self.regret = np.zeros(model.nodes, np.int64), np.zeros(len(model.cost))
        forbidden = high_of(model)
        high = {pair: np.minimum(t, forbidden) for pair, t in model.pairs.items()}
        self._high = Model(
            model.offset, np.minimum(model.cost, forbidden), high, model.memory
        )  # to be repaired, a choice may be forbidden at first
        before: list[list[tuple[int, np.ndarray]]] = [[] for _ in range(model.nodes)]
        after: list[list[tuple[int, np.ndarray]]] = [[] for _ in range(model.nodes)]
        for u, v in sorted(high):
            after[u].append((v, high[u, v]))
            before[v].append((u, high[u, v].T))
        self._before, self._after = (
            before,
            after,
        )  # per node: neighbour, table with this node's strategies as rows
        self._share = [1.0 / max(1, len(a), len(b)) for a, b in zip(before, after, strict=True)]
        self._message = {
            (u, v): np.zeros(model.sizes[u]) for pair in high for u, v in (pair, pair[::-1])
        }  # to the first of the two

    def sweep(self, price: np.ndarray) -> float:
        """See `messages.Passes`."""
        memory, offset = self.model.memory, self.model.offset
        unary = (
            self._high.cost
            if memory is None
            else self._high.cost + memory.priced(price, len(self._high.cost))
        )
        bound, message = (
            (0.0 if memory is None else -float(price.sum()) * memory.limit),
            self._message,
        )
        for i in range(self.model.nodes):
            a, b = offset[i], offset[i + 1]
            coming = np.sum([message[i, j] for j, _ in self._after[i]], axis=0) + unary[a:b]
            total = coming + sum(message[i, j] for j, _ in self._before[i])
            self.regret[a:b] = total - total.min()
            self.x[i] = (coming + sum(t[:, self.x[j]] for j, t in self._before[i])).argmin()
            self._send(i, total * self._share[i], self._after[i])
        for i in range(self.model.nodes - 1, -1, -1):
            total = sum(
                (message[i, j] for j, _ in (*self._before[i], *self._after[i])),
                unary[offset[i] : offset[i + 1]],
            )
            least = total.min()
            bound += float(least) + self._send(i, (total - least) * self._share[i], self._before[i])
        return bound

    def _send(self, i: int, part: np.ndarray, to: list[tuple[int, np.ndarray]]) -> float:
        """Messages of node i with its part of what it knows; what was taken off them."""
        taken = 0.0
        for j, table in to:
            best = ((part - self._message[i, j])[:, None] + table).min(axis=0)
            least = float(best.min())
            self._message[j, i] = best - least
            taken += least
        return taken

    def fit(self, x: np.ndarray) -> bool:
        """See `messages.Passes`."""
        polished = polish(self._high, x)
        cost = np.inf if polished is None else self.model.total(polished)
        if polished is not None:
            self.best.offer(polished, cost)
        return cost < np.inf
