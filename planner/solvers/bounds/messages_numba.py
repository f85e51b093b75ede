"""Message passing node by node in compiled loops (numba), for problems of thousands of nodes: the
passes of `messages_small`, for which numpy would take fifty times as long.

Chains are long in the order of the nodes, so that a bound takes fewer passes than colour by colour
(`messages_coloured`, where numba is not there), and each takes a third of the time.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from planner.solvers.neighbourhood.flat import Flat


@njit(cache=True)
def _known(f, unary, message, i, total):
    """Write what node i knows of its options into total: their own cost, and all messages."""
    o = f.offset[i]
    k = f.offset[i + 1] - o
    for s in range(k):
        total[s] = unary[o + s]
    for a in range(f.first[i], f.first[i + 1]):
        m = f.message[a]
        for s in range(k):
            total[s] += message[m + s]
    least = total[0]
    for s in range(1, k):
        least = min(least, total[s])
    return least


@njit(cache=True)
def _decoded(f, unary, message, x, i, cost):
    """The best option of node i beside what earlier neighbours have, and what later ones say. cost:
    room for its options."""
    o = f.offset[i]
    k = f.offset[i + 1] - o
    for s in range(k):
        cost[s] = unary[o + s]
    for a in range(f.first[i], f.first[i + 1]):
        j = f.other[a]
        if j < i:
            row = f.place[f.back[a]] + x[j] * k
            for s in range(k):
                cost[s] += f.table[row + s]
        else:
            m = f.message[a]
            for s in range(k):
                cost[s] += message[m + s]
    best = 0
    for s in range(1, k):
        if cost[s] < cost[best]:
            best = s
    return best


@njit(cache=True)
def _send(f, message, i, part, later, best):
    """Send node i's part of what it knows to its later, or earlier, neighbours; what was taken off
    the messages. best: room for a neighbour's options."""
    k, taken = f.offset[i + 1] - f.offset[i], 0.0
    for a in range(f.first[i], f.first[i + 1]):
        j = f.other[a]
        if (j > i) != later:
            continue
        kj = f.offset[j + 1] - f.offset[j]
        m = f.message[a]
        for q in range(kj):
            best[q] = np.inf
        for s in range(k):
            lead = part[s] - message[m + s]
            row = f.place[a] + s * kj
            for q in range(kj):
                best[q] = min(best[q], lead + f.table[row + q])
        least = best[0]
        for q in range(1, kj):
            least = min(least, best[q])
        taken += least
        m = f.message[f.back[a]]
        for q in range(kj):
            message[m + q] = best[q] - least
    return taken


@njit(cache=True)
def _sweep(f, unary, message, share, x, regret):
    """One pass there and back; see `Passes.sweep`."""
    n, widest = len(x), 0
    for i in range(n):
        widest = max(widest, f.offset[i + 1] - f.offset[i])
    total, best = np.empty(widest), np.empty(widest)
    for i in range(n):
        o = f.offset[i]
        least = _known(f, unary, message, i, total)
        x[i] = _decoded(f, unary, message, x, i, best)
        for s in range(f.offset[i + 1] - o):
            regret[o + s] = total[s] - least
            total[s] *= share[i]
        _send(f, message, i, total, True, best)
    bound = 0.0
    for i in range(n - 1, -1, -1):
        least = _known(f, unary, message, i, total)
        for s in range(f.offset[i + 1] - f.offset[i]):
            total[s] = (total[s] - least) * share[i]
        bound += least + _send(f, message, i, total, False, best)
    return bound


class Passes:
    """Messages of a model, all zero at first."""

    def __init__(self, flat: Flat) -> None:
        n = len(flat.offset) - 1
        self.flat, self._message = flat, np.zeros(int(flat.message[-1]))
        owner = np.repeat(np.arange(n), np.diff(flat.first))
        ends = [np.bincount(owner, way, n) for way in (flat.other < owner, flat.other > owner)]
        self._share = 1.0 / np.maximum(1, np.maximum(*ends))

    def sweep(self, unary: np.ndarray, x: np.ndarray, regret: np.ndarray) -> float:
        """See `messages_coloured.Passes.sweep`."""
        bound: float = _sweep(self.flat, unary, self._message, self._share, x, regret)
        return bound
