"""The one problem every solver sees, and the one judge.

    minimise   sum_i cost[i][x_i] + sum_{(u,v)} table_uv[x_u, x_v]
    such that  at every integer time t:  sum over nodes live at t of usage[i][x_i]  <=  usage_limit

Node i may carry several half-open live intervals [lo, hi) with a usage each (the contest has one
per node); [0, 0) is never live. Costs and usages are exact integers (ours: picoseconds and bytes).
FORBIDDEN is a plain number that makes a choice a failure to report. The form is that of the IOPDDL
contest (ASPLOS/EuroSys 2025); `planner.solvers.iopddl` reads and writes its JSON.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

FORBIDDEN = 10**18


@dataclass(frozen=True)
class Problem:
    """Costs are int64; shapes in comments. Edges may be parallel (they add up); u == v never
    occurs.

    Equal tables are stored once: `edge_table[e]` indexes `tables`.
    """

    cost: tuple[np.ndarray, ...]  # per node: [strategies]
    edges: np.ndarray  # [edges, 2] node indices (first endpoint is the table's row)
    edge_table: np.ndarray  # [edges] index into tables
    tables: tuple[np.ndarray, ...]  # each [strategies of u, strategies of v]
    live_node: np.ndarray = field(
        default_factory=lambda: np.zeros(0, np.int64)
    )  # [intervals] node index
    live_span: np.ndarray = field(
        default_factory=lambda: np.zeros((0, 2), np.int64)
    )  # [intervals, 2] lo, hi
    live_usage: tuple[np.ndarray, ...] = ()  # per interval: [strategies of its node]
    usage_limit: int | None = None
    names: tuple[str, ...] = ()  # per node, for messages; may be empty
    axis_choice: tuple[np.ndarray, ...] = ()
    """Optional, for `recursive`: per node [strategies, mesh axes] the factor each axis cuts (-1:
    none), axes outermost link first."""
    axis_size: tuple[int, ...] = ()  # [mesh axes]
    weight: np.ndarray | None = (
        None  # [nodes] heaviness for visiting order (e.g. FLOPs); None: max cost
    )


@dataclass(frozen=True)
class Verdict:
    """What `evaluate` found: exact total cost, peak usage over time, and what is violated."""

    cost: int
    peak_usage: int
    forbidden: int  # number of forbidden entries chosen
    feasible: bool  # peak within the limit and nothing forbidden


@dataclass(frozen=True)
class Solution:
    """One strategy index per node, with what the solver claims. Only `evaluate` is believed for the
    cost.

    bound: proven lower bound on the optimum (same unit as cost), or None. status "optimal" only
    with gap <= 1e-6; "infeasible" is a proof, "none" means nothing feasible was found in the
    budget.
    """

    choice: tuple[int, ...]
    status: Literal["optimal", "feasible", "infeasible", "none"]
    bound: float | None = None
    solver: str = ""
    work: int = 0  # deterministic work units spent
    stopped: Literal["", "time", "work", "interrupt"] = ""


@dataclass(frozen=True)
class Budget:
    """Limits of one solve. `work` (solver-specific units) keeps results deterministic;
    `time_limit_s` may cut earlier.

    below: choices that cost as much are not wanted. A solver may end without a choice where it
    proves that none is below: "none", with a bound of no less.
    """

    time_limit_s: float | None = None
    work: int | None = None
    seed: int = 0
    below: float = math.inf


class Solver(Protocol):
    """Every solver module has `solve(problem, budget, start=None) -> Solution`; `start` is an
    optional warm start."""

    def __call__(
        self, problem: Problem, budget: Budget, start: tuple[int, ...] | None = None
    ) -> Solution: ...


def evaluate(problem: Problem, choice: tuple[int, ...] | np.ndarray) -> Verdict:
    """Cost, peak usage and feasibility of a choice, from the arrays alone. Vectorised; exact
    integers."""
    x = np.asarray(choice, dtype=np.int64)
    if x.shape != (len(problem.cost),):
        raise ValueError(
            f"a choice has one strategy per node: {len(problem.cost)} expected, {x.shape} given"
        )
    picked = [int(c[k]) for c, k in zip(problem.cost, x, strict=True)]
    for (u, v), t in zip(problem.edges, problem.edge_table, strict=True):
        picked.append(int(problem.tables[t][x[u], x[v]]))
    forbidden = sum(value >= FORBIDDEN for value in picked)
    usage = np.fromiter(
        (int(u[x[n]]) for u, n in zip(problem.live_usage, problem.live_node, strict=True)),
        np.int64,
        len(problem.live_usage),
    )
    peak = 0
    if len(usage):
        lo, hi = problem.live_span[:, 0], problem.live_span[:, 1]
        real = hi > lo
        times, where = np.unique(np.concatenate([lo[real], hi[real]]), return_inverse=True)
        steps = np.zeros(len(times) + 1, np.int64)
        np.add.at(steps, where, np.concatenate([usage[real], -usage[real]]))
        peak = int(max(0, steps.cumsum().max(initial=0)))
    fits = problem.usage_limit is None or peak <= problem.usage_limit
    return Verdict(sum(picked), peak, forbidden, fits and not forbidden)
