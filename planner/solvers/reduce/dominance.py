"""Dominated strategies (planner.solvers.reduce.reductions says why they may go).

Strategy a of a node falls to b when b uses no more and, with lead(a, b) = own[a] - own[b],

    lead(a, b) + sum over edges min_y (table[a, y] - table[b, y]) >= 0

A minimum is no more than the difference at any one y. At the y where row a is least it costs one
entry a pair instead of a row, and nearly all pairs fail it already; only those left are looked at
in full. Nodes of repeated parts of a model are alike to the last number, and so is the answer.
"""

from __future__ import annotations

import numpy as np

from planner.solvers.reduce.partial import State
from planner.solvers.reduce.pool import Pool


def dominate(state: State) -> bool:
    """One pass of dominance over the nodes that changed since the last. True when a strategy
    went."""
    changed = False
    listed = sorted(state.unpruned)
    state.unpruned = set()
    known: dict[tuple[bytes, bytes, tuple[int, ...]], np.ndarray | None] = {}
    for i in listed:
        if state.cost[i] is None:
            continue
        cost = state.own(i)
        if len(cost) < 2:
            continue
        usage, tables = state.usage[i], tuple(sorted(state.near[i].values()))
        use = None if usage is None else usage.use
        key = (cost.tobytes(), b"" if use is None else use.tobytes(), tables)
        if key not in known:
            known[key] = _undominated(state.pool, cost, use, tables)
        kept = known[key]
        if kept is not None:
            state.shrink(i, kept)
            changed = True
    return changed


def _undominated(
    pool: Pool, cost: np.ndarray, use: np.ndarray | None, tables: tuple[int, ...]
) -> np.ndarray | None:
    """The strategies that no other dominates, or None when that is all. cost: [strategies], use:
    [intervals, strategies]"""
    # the tables have a zero in every row, so each edge can only lower the lead of one strategy over
    # another
    lead = cost[:, None] - cost
    lead.ravel()[:: len(cost) + 1] = -np.inf
    if use is not None:
        total = use.sum(axis=0)
        lead[total[:, None] < total] = -np.inf  # necessary, and cheaper than every interval
    open_tables = []
    for t in tables:
        leads = pool.leads(t)
        if leads is None:
            open_tables.append(t)
        else:
            lead += leads
    most = lead
    for t in open_tables:
        most = most + pool.most_leads(t)
    a, b = np.nonzero(most >= 0)
    if use is not None and len(a):
        no_more = (use[:, a] >= use[:, b]).all(axis=0)
        a, b = a[no_more], b[no_more]
    margin = lead[a, b]
    for t in open_tables:
        if not len(a):
            break
        margin = margin + pool.lead(t, a, b)
        ahead = margin >= 0
        a, b, margin = a[ahead], b[ahead], margin[ahead]
    if not len(a):
        return None
    k = len(cost)
    beats = np.zeros((k, k), bool)
    beats[a, b] = True
    # of two that beat each other the first stays
    gone = (beats & ~(beats.T & np.tri(k, k, -1, dtype=bool).T)).any(axis=1)
    return np.flatnonzero(~gone) if gone.any() else None
