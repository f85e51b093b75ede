"""Compiled loops for large problems (numba): row loads, costs, and message passing. Moves on a
choice are in `moves`.

All take a `flat.Flat`. Row loads live in a segment tree with range-add and range-max: `top[1]` is
the largest load of any row, so `top[1] <= limit` is the feasibility test after any change. A
`State` is (x, top, lazy): the choice and that tree.

Costs are integers held in float64, so that running sums stay exact.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def range_add(top, lazy, leaves, lo, hi, value):
    """Add to rows lo .. hi - 1."""
    a, b = lo + leaves, hi + leaves
    left, right = a, b - 1
    while a < b:
        if a & 1:
            top[a] += value
            lazy[a] += value
            a += 1
        if b & 1:
            b -= 1
            top[b] += value
            lazy[b] += value
        a >>= 1
        b >>= 1
    left >>= 1
    right >>= 1
    while left >= 1:
        top[left] = max(top[2 * left], top[2 * left + 1]) + lazy[left]
        if right != left:
            top[right] = max(top[2 * right], top[2 * right + 1]) + lazy[right]
        left >>= 1
        right >>= 1


@njit(cache=True)
def change(f, x, top, lazy, i, k):
    """Set x[i] = k and account for its memory."""
    old = x[i]
    x[i] = k
    for j in range(f.interval[i], f.interval[i + 1]):
        step = f.use[f.start[j] + k] - f.use[f.start[j] + old]
        if step != 0.0:
            range_add(top, lazy, f.leaves, f.lo[j], f.hi[j], step)


@njit(cache=True)
def load_all(f, x, top, lazy):
    """Fill the segment tree from the choice x. Leaves past the last row stay below everything."""
    top[:] = 0.0
    lazy[:] = 0.0
    for j in range(len(f.lo)):
        range_add(top, lazy, f.leaves, f.lo[j], f.hi[j], f.use[f.start[j] + x[f.owner[j]]])


@njit(cache=True)
def total_cost(f, x):
    """Cost of the choice."""
    value = 0.0
    for i in range(len(x)):
        value += f.cost[f.offset[i] + x[i]]
        for a in range(f.first[i], f.first[i + 1]):
            j = f.other[a]
            if j > i:
                value += f.table[f.place[a] + x[i] * (f.offset[j + 1] - f.offset[j]) + x[j]]
    return value


@njit(cache=True)
def marginal(f, x, i, out):
    """Cost of each strategy of node i given its neighbours, into out."""
    k = f.offset[i + 1] - f.offset[i]
    for s in range(k):
        out[s] = f.cost[f.offset[i] + s]
    for a in range(f.first[i], f.first[i + 1]):
        row = f.place[f.back[a]] + x[f.other[a]] * k
        for s in range(k):
            out[s] += f.table[row + s]


@njit(cache=True)
def message_pass(f, unary, message, share, x, regret):
    """One forward and one backward sweep of sequential tree-reweighted message passing under unary
    costs; returns the lower bound.

    The forward sweep also decodes a choice into x, and writes per position how much the bound of
    the pass before (same unary costs) rises at least when that strategy is forced: the messages are
    then exact min-marginals of all chains through the node.
    """
    n = len(x)
    widest = 0
    for i in range(n):
        widest = max(widest, f.offset[i + 1] - f.offset[i])
    total, best, fixed = np.empty(widest), np.empty(widest), np.empty(widest)
    bound = 0.0
    for sweep in range(2):
        for step in range(n):
            i = step if sweep == 0 else n - 1 - step
            o = f.offset[i]
            k = f.offset[i + 1] - o
            for s in range(k):
                total[s] = unary[o + s]
                fixed[s] = unary[o + s]
            for a in range(f.first[i], f.first[i + 1]):
                j = f.other[a]
                m = f.message[a]
                for s in range(k):
                    total[s] += message[m + s]
                if sweep == 0:
                    if j < i:
                        row = f.place[f.back[a]] + x[j] * k
                        for s in range(k):
                            fixed[s] += f.table[row + s]
                    else:
                        for s in range(k):
                            fixed[s] += message[m + s]
            if sweep == 0:
                least = total[0]
                for s in range(1, k):
                    least = min(least, total[s])
                for s in range(k):
                    regret[o + s] = total[s] - least
                least = fixed[0]
                x[i] = 0
                for s in range(1, k):
                    if fixed[s] < least:
                        least = fixed[s]
                        x[i] = s
            else:
                least = total[0]
                for s in range(1, k):
                    least = min(least, total[s])
                bound += least
                for s in range(k):
                    total[s] -= least
            for s in range(k):
                total[s] *= share[i]
            for a in range(f.first[i], f.first[i + 1]):
                j = f.other[a]
                if (j > i) != (sweep == 0):
                    continue
                kj = f.offset[j + 1] - f.offset[j]
                m = f.message[a]
                for q in range(kj):
                    best[q] = np.inf
                for s in range(k):
                    lead = total[s] - message[m + s]
                    row = f.place[a] + s * kj
                    for q in range(kj):
                        best[q] = min(best[q], lead + f.table[row + q])
                least = best[0]
                for q in range(1, kj):
                    least = min(least, best[q])
                if sweep == 1:
                    bound += least
                m = f.message[f.back[a]]
                for q in range(kj):
                    message[m + q] = best[q] - least
    return bound


@njit(cache=True)
def priced(f, price, unary):
    """Unary costs under row prices, into unary."""
    running = np.zeros(len(price) + 1)
    for r in range(len(price)):
        running[r + 1] = running[r] + price[r]
    unary[:] = f.cost
    for j in range(len(f.lo)):
        each = running[f.hi[j]] - running[f.lo[j]]
        if each != 0.0:
            o = f.offset[f.owner[j]]
            for s in range(f.start[j + 1] - f.start[j]):
                unary[o + s] += each * f.use[f.start[j] + s]
