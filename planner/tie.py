"""Tying: nodes of one class take one decision, and nothing of the objective is lost.

    tied cost of class a       sum of its nodes' costs + the diagonals of edges inside the class
    tied table of (a, b)       parallel edges between the classes, which add up
    tied usage                 the members' live intervals, all of them, now on node a (equal spans are added up)

so that for every tied choice x: evaluate(tied, x) = evaluate(problem, expand(x)). A repeated block of a transformer is one class
per position in the block. Entries that are FORBIDDEN stay so: a sum with one is FORBIDDEN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from planner.solvers.problem import FORBIDDEN, Problem

Expand = Callable[[Sequence[int] | np.ndarray], tuple[int, ...]]


def tie(problem: Problem, classes: np.ndarray) -> tuple[Problem, Expand]:
    """One node per class, classes in order of their first member.

    Args:
        problem: the untied problem.
        classes: [nodes] any integers; members of a class must have equally many strategies, in the same meaning.

    Returns:
        The tied problem and `expand`, from a tied to an untied choice.

    Raises:
        ValueError: members of a class differ in their number of strategies.
    """
    classes = np.asarray(classes)
    if classes.shape != (len(problem.cost),):
        raise ValueError(f"one class per node: {len(problem.cost)} expected, {classes.shape} given")
    _, first, raw = np.unique(classes, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    of = rank[raw]  # [nodes] class in order of first member
    first = np.sort(first)
    cost = [np.zeros(len(problem.cost[i]), np.int64) for i in first.tolist()]
    for i, a in enumerate(of.tolist()):
        if len(problem.cost[i]) != len(cost[a]):
            raise ValueError(f"node {i} has {len(problem.cost[i])} strategies, its class {len(cost[a])}")
        cost[a] = _add(cost[a], problem.cost[i], 1)
    counted: dict[tuple[int, int, int], int] = {}
    ends = of[problem.edges] if len(problem.edges) else np.zeros((0, 2), np.int64)
    for (a, b), t in zip(ends.tolist(), problem.edge_table.tolist(), strict=True):
        counted[a, b, t] = counted.get((a, b, t), 0) + 1
    pairs: dict[tuple[int, int], np.ndarray] = {}
    for (a, b, t), times in counted.items():
        table = np.asarray(problem.tables[t])
        if a == b:
            cost[a] = _add(cost[a], np.diagonal(table), times)
            continue
        key, table = ((a, b), table) if a < b else ((b, a), table.T)
        pairs[key] = _add(pairs[key] if key in pairs else np.zeros(table.shape, np.int64), table, times)
    edges = np.array(list(pairs), np.int64).reshape(-1, 2)
    live_node, live_span, live_usage = _intervals(problem, of)
    weight = None if problem.weight is None else np.bincount(of, problem.weight, len(first))
    tied = Problem(
        tuple(cost), edges, np.arange(len(edges)), tuple(pairs.values()), live_node, live_span, live_usage, problem.usage_limit,
        tuple(problem.names[i] for i in first.tolist()) if problem.names else (),
        tuple(problem.axis_choice[i] for i in first.tolist()) if problem.axis_choice else (), problem.axis_size, weight,
    )  # fmt: skip
    return tied, lambda choice: tuple(np.asarray(choice, np.int64)[of].tolist())


def _add(total: np.ndarray, part: np.ndarray, times: int) -> np.ndarray:
    """total + times * part; forbidden once, forbidden for good."""
    bad = (total >= FORBIDDEN) | (part >= FORBIDDEN)
    if not bad.any():
        return total + times * part.astype(np.int64)
    return np.where(bad, FORBIDDEN, total + times * np.where(bad, 0, part).astype(np.int64))


def _intervals(problem: Problem, of: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
    """The members' intervals by (class, span), usages added."""
    total: dict[tuple[int, int, int], np.ndarray] = {}
    for i, (lo, hi), usage in zip(problem.live_node.tolist(), problem.live_span.tolist(), problem.live_usage, strict=True):
        if hi > lo:
            key = (int(of[i]), lo, hi)
            total[key] = total[key] + usage if key in total else usage.astype(np.int64)
    spans = np.array(list(total), np.int64).reshape(-1, 3)
    return spans[:, 0], spans[:, 1:], tuple(total.values())
