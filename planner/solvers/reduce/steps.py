"""The single steps of planner.solvers.reduce.reductions, which says why each keeps an optimal
choice. Each takes a node of the state."""

from __future__ import annotations

import numpy as np

from planner.solvers.reduce.partial import State


def single(state: State, i: int) -> None:
    """A node with one strategy left becomes a constant and rows of its neighbours' costs."""
    state.trail.append(("value", i, 0))
    state.constant += float(state.own(i)[0])
    for j, t in state.cut(i).items():
        state.cost[j] = state.own(j) + state.pool.tables[t][0]
    state.drop(i)


def fold(state: State, u: int) -> bool:
    """Fold one neighbour that is a function of u into u (of a bijection, the one with fewer edges).
    True when something changed."""
    pool = state.pool
    answered = pool.functions  # hubs ask of each of their edges again and again
    for v, t in state.near[u].items():
        f = answered[t] if t in answered else pool.function(t)
        if f is None:
            continue
        back = pool.function(pool.turn(t))
        if back is not None and len(state.near[v]) > len(state.near[u]):
            _absorb(state, v, u, back)
        else:
            _absorb(state, u, v, f)
        return True
    return False


def _absorb(state: State, u: int, v: int, f: np.ndarray) -> None:
    """v = f(u): move v's cost, usage and edges to u."""
    pool = state.pool
    table = pool.tables[state.near[u][v]]
    state.trail.append(("map", v, u, f))
    edges = state.cut(v)
    del edges[u]
    state.cost[u] = state.own(u) + table[np.arange(len(f)), f] + state.own(v)[f]
    m = pool.map(f)
    for w, t in edges.items():
        t = pool.take(t, m)
        state.set_edge(u, w, pool.add(state.near[u][w], t) if w in state.near[u] else t)
        state.touch(w)
    moved, present = state.usage[v], state.usage[u]
    if moved is not None:
        moved = moved.take(f)
        if present is None:
            state.usage[u] = moved
        else:
            present.join(moved)
    state.drop(v)
    state.touch(u)


def eliminate(state: State, i: int) -> None:
    """Minimise out a memory-neutral node of degree <= 2."""
    pool, cost = state.pool, state.own(i)
    around = list(state.near[i].items())
    if not around:
        state.trail.append(("value", i, int(cost.argmin())))
        state.constant += float(cost.min())
    elif len(around) == 1:
        ((u, t),) = around
        total = cost[:, None] + pool.tables[t]
        state.cut(i)
        state.trail.append(("map", i, u, total.argmin(axis=0)))
        state.cost[u] = state.own(u) + total.min(axis=0)
    else:
        (u, t), (w, s) = around
        if u > w:
            (u, t), (w, s) = (w, s), (u, t)
        total = cost[:, None, None] + pool.tables[t][:, :, None] + pool.tables[s][:, None, :]
        state.cut(i)
        state.trail.append(("pair", i, u, w, total.argmin(axis=0)))
        joined = pool.table(total.min(axis=0))
        state.set_edge(u, w, pool.add(state.near[u][w], joined) if w in state.near[u] else joined)
        state.touch(u)
        state.touch(w)
    state.drop(i)
