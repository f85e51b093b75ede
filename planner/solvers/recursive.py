"""`recursive`: the double recursion, one mesh axis at a time, one node at a time.

The outer recursion walks the mesh axes, the slowest link first. At one level every node holds a set
of strategies that agree on the axes decided before. The inner recursion visits the nodes (heaviest
first, then along the graph and against it), each choosing what this axis cuts:

    score_i(k) = cost_i(k) + price . usage_i(k) + sum over neighbours j of  min over l open at j of
        [ table_ij(k, l) + lead_j(l) ]
    lead_j(l)  = cost_j(l) - min over j's open strategies

node i keeps the strategies that cut this axis as its best one does. Two or three sweeps revisit
nodes whose neighbours changed, until a fixed point. Work: visits x axes, each of one vector-matrix
minimum per edge: linear in nodes.

Each run leaves one whole choice. Two passes of sequential message passing over all strategies
(`_reputation`, the tree-reweighted form) estimate what each strategy costs the whole problem. The
strategies met, those of best reputation and the best single changes are each node's alphabet; `dp`
on the alphabet mixes them exactly. When memory binds, all this is done under memory prices, up from
none to one that fits; the alphabet then has strategies of best reputation on both sides of the
limit, as the optimum has.

A problem of thousands of nodes without axes (the contest's) is reduced exactly first. Where an
alphabet is too wide to mix exactly, the choices met are polished by one descent of neighbourhoods
(`cutset`, in numpy) under memory prices of some passes of messages.

Based on the idea of the double recursive algorithm (Wang et al., Euro-Par 2021); costs, prices and
the polish are ours.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count, pairwise

import numpy as np

from planner.solvers.bounds import messages as prices
from planner.solvers.bounds.lagrangian import Clock
from planner.solvers.dp import Outcome, claim, clock_of, solve_model
from planner.solvers.exact.elimination import compile_tree
from planner.solvers.model import Model, build, restrict
from planner.solvers.neighbourhood import cutset, search
from planner.solvers.neighbourhood.local import MANY, polish
from planner.solvers.problem import Budget, Problem, Solution
from planner.solvers.reduce.reductions import reduce

SWEEPS = 3
SMALL = 400
"""Nodes of a problem whose alphabet is mixed anew around what came of it."""
DEFAULT_WORK = 5e8
LARGE = 5000
"""Nodes of a problem that is reduced first."""
PASSES = 150
"""Passes of messages for the prices of a descent."""
HIGH = 1e17
"""Stands for +inf where messages are subtracted."""


def solve(problem: Problem, budget: Budget, start: tuple[int, ...] | None = None) -> Solution:
    """A good choice in near-linear time. No bound is claimed unless the exact polish had every
    strategy in its alphabet, or prices of memory gave one."""
    if not len(problem.cost):
        return Solution((), "optimal", 0.0, "recursive")
    clock = clock_of(budget, DEFAULT_WORK)
    if len(problem.cost) <= LARGE or problem.axis_choice:
        return _solved(problem, budget, clock, start)
    reduction = reduce(problem)
    if reduction.problem is None:
        return Solution((), "infeasible", None, "recursive")
    known = None if start is None else reduction.restrict(start)
    solution = _solved(
        reduction.problem, budget, clock, None if known is None else tuple(known.tolist())
    )
    return (
        replace(solution, choice=tuple(reduction.expand(solution.choice).tolist()))
        if solution.choice
        else solution
    )


def _solved(
    problem: Problem, budget: Budget, clock: Clock, start: tuple[int, ...] | None
) -> Solution:
    model = build(problem)
    levels = _levels(problem)
    heavy = _heaviest_first(problem, model)
    met = [_descend(model, model.cost, levels, heavy, clock)]
    if start is not None:
        met.append(np.asarray(start, np.int64))
    memory, flats = model.memory, [model.cost]
    if memory is not None and min(float(memory.load(x).max()) for x in met) > memory.limit:
        priced, flats = _under_prices(model, levels, heavy, met[0], clock)
        met += priced
    mixed = _mix(model, met, [_reputation(model, flat, clock) for flat in flats], clock)
    return claim(problem, mixed or _polished(model, met, budget, clock), clock, "recursive")


def _levels(problem: Problem) -> list[list[np.ndarray]]:
    """Per level and node the label of each strategy: what it cuts on that axis; last the strategies
    themselves."""
    all_options = [np.arange(len(c)) for c in problem.cost]
    axes = problem.axis_choice[0].shape[1] if problem.axis_choice else 0
    return [[choice[:, a] for choice in problem.axis_choice] for a in range(axes)] + [all_options]


def _heaviest_first(problem: Problem, model: Model) -> list[int]:
    weight = problem.weight
    if weight is None:
        finite = np.where(np.isfinite(model.cost), model.cost, 0.0)
        weight = np.maximum.reduceat(finite, model.offset[:-1])
    return [int(i) for i in np.argsort(-np.asarray(weight, np.float64), kind="stable")]


def _descend(
    model: Model, flat: np.ndarray, levels: list[list[np.ndarray]], order: list[int], clock: Clock
) -> np.ndarray:
    """One run of the outer recursion under flat strategy costs. [nodes]"""
    offset = model.offset.tolist()
    cost = [flat[a:b] for a, b in pairwise(offset)]
    neighbours = [list(d.items()) for d in model.adjacent]
    lead = [_lead(c) for c in cost]  # own cost over the open minimum, +inf where closed
    messages_to: list[dict[int, np.ndarray]] = [
        {} for _ in range(model.nodes)
    ]  # messages_to[i][j]: j's message to i, until j changes
    for labels in levels:
        start = lead.copy()
        stale = [True] * model.nodes
        for _ in range(SWEEPS):
            changed = False
            for i in order:
                if not stale[i]:
                    continue
                stale[i] = False
                total = start[i]
                messages = messages_to[i]
                for j, table in neighbours[i]:
                    message = messages.get(j)
                    if message is None:
                        message = messages[j] = (table + lead[j]).min(axis=1)
                        clock.work += table.size
                    total = total + message
                label = labels[i]
                new = np.where(label == label[total.argmin()], start[i], np.inf)
                if (new == lead[i]).all():
                    continue
                lead[i] = _lead(new)
                changed = True
                for j, _ in neighbours[i]:
                    messages_to[j].pop(i, None)
                    stale[j] = True
            if not changed:
                break
    return np.array([int(row.argmin()) for row in lead])


def _lead(row: np.ndarray) -> np.ndarray:
    least = row.min()
    return row - least if np.isfinite(least) else np.zeros(len(row))


def _reputation(model: Model, flat: np.ndarray, clock: Clock, passes: int = 2) -> np.ndarray:
    """Estimated cost of the whole problem given each strategy, up to a constant per node. Flat
    [positions]."""
    offset, n = model.offset.tolist(), model.nodes
    neighbours = [list(d.items()) for d in model.adjacent]
    messages: list[dict[int, np.ndarray | float]] = [dict.fromkeys(d, 0.0) for d in model.adjacent]
    share = [
        1.0 / max(1, sum(j < i for j in d), sum(j > i for j in d))
        for i, d in enumerate(model.adjacent)
    ]
    flat = np.minimum(flat, HIGH)
    score = flat.copy()
    for turn in range(2 * passes):
        for i in range(n) if turn % 2 == 0 else range(n - 1, -1, -1):
            reputation = flat[offset[i] : offset[i + 1]] + sum(messages[i].values())
            score[offset[i] : offset[i + 1]] = reputation
            reputation = reputation * share[i]
            for j, table in neighbours[i]:
                if (j > i) == (turn % 2 == 0):
                    message = (table + (reputation - messages[i][j])[:, None]).min(axis=0)
                    messages[j][i] = np.minimum(message - min(message.min(), HIGH), HIGH)
                    clock.work += table.size
    return score


def _under_prices(
    model: Model, levels: list[list[np.ndarray]], order: list[int], free: np.ndarray, clock: Clock
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Choices under rising memory prices on the worst row, then between the last that overloads and
    the first that fits.

    Also the flat costs under the last price that overloads (if only none) and the first that fits,
    where one does.
    """
    memory = model.memory
    assert memory is not None
    row = int(memory.load(free).argmax())
    price = np.zeros(memory.rows)
    over = float(memory.load(free)[row]) - memory.limit
    low, high = 0.0, None
    rate = (
        0.1
        * max(model.total(free) if np.isfinite(model.total(free)) else 1.0, 1.0)
        / max(over, 1.0)
    )
    choices: list[np.ndarray] = []
    below, above = model.cost, None
    for _ in range(5):
        if not clock.spend(0):
            break
        price[row] = rate
        flat = model.cost + memory.priced(price, len(model.cost))
        x = _descend(model, flat, levels, order, clock)
        choices.append(x)
        if memory.load(x).max() <= memory.limit:
            high, above = rate, flat
        else:
            low, below = rate, flat
        if high is None:
            rate *= 8
        elif low == 0.0:
            rate = high / 8
        elif high / low < 4:
            break
        else:
            rate = float(np.sqrt(low * high))
    return choices, [below] if above is None else [below, above]


def _mix(
    model: Model, met: list[np.ndarray], scores: list[np.ndarray], clock: Clock
) -> Outcome | None:
    """Exact solve on the alphabet of the choices met and of the best single changes around the best
    of them; None where that of many nodes is too wide. scores: reputations, under each price."""
    best: np.ndarray | None = None
    many = model.nodes > MANY and model.searchable
    rounds, extra, caps = (4, 4, (500, 10_000)) if model.nodes <= SMALL else (1, 2, (500,))
    outcome = Outcome(None, -np.inf)
    for _ in range(rounds):
        keep = _alphabet(model, met, met[-1] if best is None else best, scores, extra)
        complete = sum(len(k) for k in keep) == len(model.cost)
        small = restrict(model, keep)
        tree = compile_tree(small) if many else None
        if many and tree is None:
            return None
        mixed = solve_model(
            small, clock, None if best is None else _index(keep, best), caps, prove=False, tree=tree
        )
        if mixed.choice is None:
            if complete:
                return mixed
            healed = next(
                (h for h in (polish(model, x) for x in reversed(met)) if h is not None), None
            )
            if healed is None:
                return _least_memory(model, clock)
            met.append(healed)
            best = healed
            continue
        x = np.array([int(k[c]) for k, c in zip(keep, mixed.choice, strict=True)])
        before = np.inf if best is None else model.total(best)
        best = x
        outcome = Outcome(x, mixed.bound if complete else -np.inf)
        if complete or not clock.spend(0) or model.total(x) >= before:
            break
        met = [x]
        extra += 1
    if best is not None and outcome.choice is None:
        outcome = Outcome(best, -np.inf)
    return outcome


def _polished(model: Model, met: list[np.ndarray], budget: Budget, clock: Clock) -> Outcome:
    """One descent from the best of the choices met and of those that prices of memory bring."""
    state, passes = search.start(model, compiled=False), count(1)

    def go_on(work: float) -> bool:
        # With a time limit alone a descent has all of it: it ends by itself.
        clock.work += work
        in_time = clock.deadline is None or time.monotonic() < clock.deadline
        enough = clock.work > clock.work_limit and (
            budget.work is not None or clock.deadline is None
        )
        clock.stopped = "time" if not in_time else "work" if enough else ""
        return in_time and not enough

    best = state.best
    try:
        for x in met:
            state.fit(x)
        prices.raise_bound(state, lambda work: go_on(work) and next(passes) < PASSES)
        if best.x is not None and not best.closed and go_on(0.0):
            cutset.start(state, budget.seed).run(best.x, go_on)
    except KeyboardInterrupt:
        clock.stopped = "interrupt"
    return Outcome(best.x, best.bound)


def _least_memory(model: Model, clock: Clock) -> Outcome:
    """Nothing on the alphabet fits: the exact solver on all strategies decides, within the
    clock."""
    return solve_model(model, clock, None, (500,), prove=False)


def _index(keep: list[np.ndarray], x: np.ndarray) -> np.ndarray:
    return np.array([int(np.flatnonzero(k == c)[0]) for k, c in zip(keep, x, strict=True)])


def _alphabet(
    model: Model, met: list[np.ndarray], around: np.ndarray, rated: list[np.ndarray], extra: int
) -> list[np.ndarray]:
    """Per node, ascending: the strategies met, and the `extra` best by each reputation and as
    single changes around one choice."""
    keep: list[np.ndarray] = []
    score = model.cost.copy()
    offset = model.offset
    for (u, v), table in model.pairs.items():
        score[offset[u] : offset[u + 1]] += table[:, around[v]]
        score[offset[v] : offset[v + 1]] += table[around[u]]
    stack = np.stack(met)
    for i in range(model.nodes):
        scores = score[offset[i] : offset[i + 1]]
        chosen = set(stack[:, i].tolist())
        chosen.add(int(around[i]))
        if len(scores) <= 2 * extra + len(chosen):
            keep.append(np.arange(len(scores)))
            continue
        chosen.update(np.argpartition(scores, extra)[:extra].tolist())
        for scores_of in rated:
            chosen.update(
                np.argpartition(scores_of[offset[i] : offset[i + 1]], 2 * extra)[
                    : 2 * extra
                ].tolist()
            )
        keep.append(np.array(sorted(chosen)))
    return keep
