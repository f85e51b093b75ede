"""Random small problems for the solvers' tests, and the brute force that judges them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from planner.solvers.bounds.messages import Passes, floors, raise_bound, rounding
from planner.solvers.problem import FORBIDDEN, Problem, evaluate


def random_problem(seed: int, nodes: int | None = None, most: int = 4, span: int = 1000) -> Problem:
    """A small problem; over many seeds a tenth is infeasible, half has a binding limit, and all
    features occur."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 8)) if nodes is None else nodes
    sizes = rng.integers(1, most + 1, n)
    cost = [rng.integers(0, span, s) for s in sizes]
    for c in cost:
        if rng.random() < 0.1:
            c[rng.integers(len(c))] = FORBIDDEN
    edges, picked, tables = [], [], []
    for _ in range(int(rng.integers(0, 2 * n + 1))):
        u, v = (int(i) for i in rng.choice(n, 2, replace=False))
        for _ in range(2 if rng.random() < 0.2 else 1):
            table = rng.integers(0, span, (sizes[u], sizes[v]))
            table[rng.random(table.shape) < rng.choice([0.0, 0.15])] = FORBIDDEN
            edges.append((u, v))
            picked.append(len(tables))
            tables.append(table)
    live_node, span_of, usage = [], [], []
    for i in range(n):
        for _ in range(int(rng.integers(0, 4))):
            lo = int(rng.integers(0, 6))
            live_node.append(i)
            span_of.append((lo, lo + int(rng.integers(0, 5))))
            usage.append(rng.integers(0, 50, sizes[i]))
    problem = Problem(
        tuple(cost),
        np.array(edges, np.int64).reshape(-1, 2),
        np.array(picked, np.int64),
        tuple(tables),
        np.array(live_node, np.int64),
        np.array(span_of, np.int64).reshape(-1, 2),
        tuple(usage),
        None,
    )
    kind = rng.random()
    if kind < 0.2:
        return problem
    peaks = every_choice(problem, 20_000).peak_usage
    if kind < 0.3:
        return replace(problem, usage_limit=max(0, int(peaks.min()) - 1))
    return replace(problem, usage_limit=int(np.quantile(peaks, rng.uniform(0, 0.5))))


@dataclass(frozen=True)
class Judged:
    """Choices, a row each: what `evaluate` says of one at a time. cost: of those that choose nothing
    forbidden."""

    choice: np.ndarray
    cost: np.ndarray
    peak_usage: np.ndarray
    feasible: np.ndarray


def every_choice(problem: Problem, most: int | None = None) -> Judged:
    """All choices of a problem, or the first so many, the last node's options next to each other.

    Array by array over the choices: one by one takes most of the solvers' tests. That it says what
    `evaluate` says is tested (tests/solvers/test_solvers.py).
    """
    sizes = [len(c) for c in problem.cost]
    count = prod(sizes) if most is None else min(most, prod(sizes))
    rows = np.arange(count)
    x = np.array(np.unravel_index(rows, sizes) if sizes else [], np.int64).reshape(-1, count)
    picked = [c[k] for c, k in zip(problem.cost, x, strict=True)]
    for (u, v), t in zip(problem.edges, problem.edge_table, strict=True):
        picked.append(problem.tables[t][x[u], x[v]])
    forbidden = np.zeros(count, bool)
    cost = np.zeros(count, np.int64)
    for value in picked:
        forbidden |= value >= FORBIDDEN
        cost += np.where(value >= FORBIDDEN, 0, value)
    peak = np.zeros(count, np.int64)
    for at in np.unique(problem.live_span[:, 0]) if len(problem.live_span) else ():
        live = (problem.live_span[:, 0] <= at) & (at < problem.live_span[:, 1])
        held = np.zeros(count, np.int64)
        for j in np.flatnonzero(live):
            held += problem.live_usage[j][x[problem.live_node[j]]]
        peak = np.maximum(peak, held)
    limit = problem.usage_limit
    fits = np.ones(count, bool) if limit is None else peak <= limit
    return Judged(x.T, cost, peak, fits & ~forbidden)


def brute_force(problem: Problem) -> int | None:
    """The optimum by trying everything; None when nothing is feasible."""
    every = every_choice(problem)
    return int(every.cost[every.feasible].min()) if every.feasible.any() else None


def least_with(problem: Problem) -> list[np.ndarray]:
    """Per node the least cost of a choice that fits with each option, by trying everything; inf
    where there is none."""
    every, found = every_choice(problem), [np.full(len(c), np.inf) for c in problem.cost]
    for least, k in zip(found, every.choice.T, strict=True):
        np.minimum.at(least, k[every.feasible], every.cost[every.feasible])
    return found


def wide(seed: int, side: int = 5, strategies: int = 12) -> Problem:
    """A grid too wide for elimination, in little memory; few options of each node are good."""
    rng = np.random.default_rng(seed)
    n = side * side
    ends = [(i, i + 1) for i in range(n) if (i + 1) % side] + [
        (i, i + side) for i in range(n - side)
    ]
    cost = tuple(np.sort(rng.integers(0, 4000, strategies)) for _ in range(n))
    tables = tuple(rng.integers(0, 300, (strategies, strategies)) for _ in ends)
    usage = tuple(np.sort(rng.integers(0, 1000, strategies))[::-1].copy() for _ in range(n))
    return Problem(
        cost,
        np.array(ends),
        np.arange(len(ends)),
        tables,
        np.arange(n),
        np.tile([0, 1], (n, 1)),
        usage,
        int(0.8 * sum(int(u.max()) for u in usage)),
    )


def floors_hold(problem: Problem, passes: Passes) -> None:
    """No choice with an option costs less than the floor of the messages, and the bound is one."""
    if not passes.model.pairs:
        return
    turns = itertools.count()
    raise_bound(passes, lambda _: next(turns) < 40)
    found = floors(passes, 20)
    least = np.concatenate(least_with(problem))
    assert (found <= least + 1e-9 * np.maximum(1, least)).all()
    assert passes.best.bound <= least.min() + rounding(least.min())
    assert passes.best.x is None or (
        evaluate(problem, passes.best.x).feasible
        and evaluate(problem, passes.best.x).cost == passes.best.cost
    )
