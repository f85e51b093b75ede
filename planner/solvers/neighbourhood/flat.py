"""A model as flat arrays, for array operations and compiled loops.

Adjacency is in compressed rows: entry a of node i names a neighbour, the place of the table with
i's strategies as rows, the place of the message that the neighbour sends to i, and the entry of the
opposite direction. Equal tables share their place. Memory intervals are kept per node.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.solvers.model import Model


class Flat(NamedTuple):
    """All arrays; none is written to."""

    offset: np.ndarray  # [nodes + 1] first position of each node
    cost: np.ndarray  # [positions] float64
    first: np.ndarray  # [nodes + 1] first adjacency entry
    other: np.ndarray  # [entries] neighbour
    place: np.ndarray  # [entries] start of the table, row-major, rows are the node's own strategies
    message: np.ndarray  # [entries] start of the message from the neighbour to the node
    back: np.ndarray  # [entries] the entry of the opposite direction
    table: np.ndarray  # [values] float64
    interval: np.ndarray  # [nodes + 1] first interval of each node
    lo: np.ndarray  # [intervals]
    hi: np.ndarray  # [intervals]
    owner: np.ndarray  # [intervals]
    start: np.ndarray  # [intervals + 1] first usage entry
    use: np.ndarray  # [usage entries] float64
    limit: float


HIGH, ABOVE = 1e15, 1e4
"""What stands for a forbidden entry (`high_of`): so many times what any choice costs, at most so
much."""


def high_of(model: Model) -> float:
    """Stands for a forbidden entry of a model: no real cost comes near, nor a price of memory that
    pays; and not so much more that what is added to it and taken off again (messages are) would
    lose what costs differ by."""
    highest_own = float(
        np.maximum.reduceat(
            np.where(np.isfinite(model.cost), np.abs(model.cost), 0.0), model.offset[:-1]
        ).sum()
    )
    highest_of = {
        id(t): float(np.where(np.isfinite(t), np.abs(t), 0.0).max(initial=0.0))
        for t in model.pairs.values()
    }
    return min(
        HIGH, ABOVE * (1.0 + highest_own + sum(highest_of[id(t)] for t in model.pairs.values()))
    )


def flatten(model: Model) -> Flat:
    """Flat arrays of a model with exact costs."""
    n, high = model.nodes, high_of(model)
    pool: list[np.ndarray] = []
    place_of: dict[tuple[int, bool], tuple[int, np.ndarray]] = {}
    used = 0
    rows: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    for (u, v), table in sorted(model.pairs.items(), key=lambda item: item[0]):
        for i, j, turned in ((u, v, False), (v, u, True)):
            base = (
                table.base
                if table.base is not None and table.base.shape == table.T.shape
                else table
            )
            key = (id(base), turned != (base is not table))
            if key not in place_of:
                oriented = np.minimum(table.T if turned else table, high)
                place_of[key] = (used, base)
                pool.append(np.ascontiguousarray(oriented).ravel())
                used += oriented.size
            rows[i].append((j, place_of[key][0]))
    rows = [sorted(r) for r in rows]
    first = np.concatenate(([0], np.cumsum([len(r) for r in rows]))).astype(np.int64)
    other = np.array([j for r in rows for j, _ in r], np.int64)
    place = np.array([p for r in rows for _, p in r], np.int64)
    owner_of = np.repeat(np.arange(n), np.diff(first))
    back = np.empty(len(other), np.int64)
    back[np.lexsort((owner_of, other))] = np.arange(len(other))
    sizes = np.diff(model.offset)
    message = np.concatenate(([0], np.cumsum(sizes[owner_of]))).astype(np.int64)
    cost = np.minimum(model.cost, high)
    table = np.concatenate(pool) if pool else np.zeros(1)
    memory = model.memory
    none = np.zeros(0, np.int64)
    return Flat(
        offset=model.offset.astype(np.int64),
        cost=cost,
        first=first,
        other=other,
        place=place,
        message=message,
        back=back,
        table=table,
        interval=(
            np.zeros(n + 1, np.int64)
            if memory is None
            else np.searchsorted(memory.node, np.arange(n + 1)).astype(np.int64)
        ),
        lo=none if memory is None else memory.row_lo.astype(np.int64),
        hi=none if memory is None else memory.row_hi.astype(np.int64),
        owner=none if memory is None else memory.node.astype(np.int64),
        start=np.zeros(1, np.int64) if memory is None else memory.start.astype(np.int64),
        use=np.zeros(0) if memory is None else memory.use_value,
        limit=np.inf if memory is None else memory.limit,
    )
