"""Leaving options out and halving on memory: sound floors and bounds, and the optimum of brute
force at the end.

What needs compiled loops is tested in test_solvers_auto: compiling them takes twenty seconds, once
for a file's process.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner.solvers import dp, solve
from planner.solvers.bounds import messages as prices
from planner.solvers.bounds.lagrangian import Clock, Dual, maximise
from planner.solvers.bounds.messages_small import Plain
from planner.solvers.exact import narrow
from planner.solvers.exact.branch import branch
from planner.solvers.exact.elimination import compile_tree
from planner.solvers.model import build
from planner.solvers.problem import FORBIDDEN, Budget, Problem, evaluate
from planner.solvers.reduce.reductions import reduce
from tests.solvers.problems import brute_force, floors_hold, random_problem, wide


def knapsack(seed: int, nodes: int = 14, bulk: int = 60) -> Problem:
    """A ring whose usage comes in few large steps of one row: prices leave a large gap."""
    rng = np.random.default_rng(seed)
    cost = tuple(rng.integers(0, 100, 3) for _ in range(nodes))
    tables = tuple(rng.integers(0, 40, (3, 3)) for _ in range(nodes))
    usage = tuple(
        (bulk * rng.integers(0, 3, 3) + rng.integers(0, 3, 3)) * (8 if i < 2 else 1)
        for i in range(nodes)
    )
    ends = np.array([(i, (i + 1) % nodes) for i in range(nodes)])
    span = np.tile([0, 1], (nodes, 1))
    least = sum(int(u.min()) for u in usage)
    problem = Problem(cost, ends, np.arange(nodes), tables, np.arange(nodes), span, usage, None)
    peak = evaluate(problem, solve(problem, "dp").choice).peak_usage
    return replace(problem, usage_limit=(least + peak) // 2)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 100_000))
@example(
    25929
)  # what stood for forbidden entries was so large that messages lost what costs differ by
@example(2004)
def test_no_choice_with_an_option_costs_less_than_its_floor(seed: int) -> None:
    problem = random_problem(seed, nodes=5, most=3)
    floors_hold(problem, Plain(build(problem)))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 100_000), st.integers(2, 40))
def test_narrowing_never_loses_the_optimum(seed: int, room: int) -> None:
    """Whatever the room: the bound is one, and what is called closed is the optimum."""
    problem = random_problem(seed, nodes=5)
    best, model = brute_force(problem), build(problem)
    passes, clock = Plain(model), Clock(2e7, None)
    narrow.close(passes, dp.exact(clock), room, clock)
    found = passes.best
    if best is None:
        assert found.x is None
        return
    assert found.bound <= best + prices.rounding(best)
    if found.x is not None:
        verdict = evaluate(problem, found.x)
        assert verdict.feasible and verdict.cost == found.cost >= best
    if found.closed:
        assert found.cost == best


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 100_000))
def test_halving_ends_at_the_optimum(seed: int) -> None:
    problem = random_problem(seed, nodes=5)
    best, model = brute_force(problem), build(problem)
    tree = compile_tree(model)
    assert tree is not None
    if model.memory is None or not np.isfinite(tree.run(model.cost)[0]):
        return
    root = Dual(model, tree, Clock(1e9, None))
    branch(root)
    assert (root.best is None) == (best is None)
    assert root.bound == np.inf if best is None else root.best_cost == best == root.bound


def test_halving_closes_what_prices_and_few_labels_leave() -> None:
    left = 0
    for seed in range(6):
        problem = knapsack(seed)
        model = build(problem)
        tree = compile_tree(model)
        exact = solve(problem, "ilp")
        assert tree is not None and exact.status == "optimal"
        best = evaluate(problem, exact.choice).cost
        root = Dual(model, tree, Clock(1e9, None))
        maximise(root)
        left += root.bound < 0.995 * best
        branch(root)
        assert root.best is not None and root.best_cost == best == root.bound
        stopped = Dual(model, compile_tree(model) or tree, Clock(20 * tree.entries, None))
        branch(stopped)
        assert stopped.bound <= best <= stopped.best_cost
    assert left >= 3


def test_what_is_too_wide_for_elimination_is_proven_after_narrowing() -> None:
    """Twice the same."""
    problem = wide(1, side=6)
    assert compile_tree(build(problem)) is None
    found = solve(problem, "dp")
    assert found.status == "optimal" and solve(problem, "dp") == found
    assert evaluate(problem, found.choice).peak_usage > 0.9 * (problem.usage_limit or 0)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 100_000), st.data())
def test_reducing_to_some_options_finds_the_best_of_them(seed: int, data: st.DataObject) -> None:
    problem = random_problem(seed, nodes=5)
    only = [
        np.array(sorted(data.draw(st.sets(st.integers(0, len(c) - 1), min_size=1))))
        for c in problem.cost
    ]
    best = brute_force(
        replace(
            problem,
            cost=tuple(
                np.where(np.isin(np.arange(len(c)), k), c, FORBIDDEN)
                for c, k in zip(problem.cost, only, strict=True)
            ),
        )
    )
    reduction = reduce(problem, only=only)
    found = None if reduction.problem is None else solve(reduction.problem, "dp")
    assert (best is None) == (found is None or found.status == "infeasible")
    if best is not None and found is not None:
        x = reduction.expand(found.choice)
        assert evaluate(problem, x).cost == best and all(
            k in kept for k, kept in zip(x.tolist(), only, strict=True)
        )


def test_little_work_leaves_a_bound_and_the_same_answer() -> None:
    problem = wide(2, side=6)
    first, again = (solve(problem, "dp", Budget(work=3_000_000)) for _ in range(2))
    best = evaluate(problem, solve(problem, "dp").choice).cost
    assert first == again and first.bound is not None and first.bound <= best
    assert not first.choice or evaluate(problem, first.choice).cost >= best
