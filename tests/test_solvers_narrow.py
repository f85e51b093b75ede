"""Leaving options out and halving on memory: sound floors and bounds, and the optimum of brute force at the end."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.problem import FORBIDDEN, Budget, Problem, evaluate
from planner.solvers import auto, dp, narrow, prices, solve
from planner.solvers.branch import branch
from planner.solvers.elimination import compile_tree
from planner.solvers.lagrange import Clock, Dual, maximise
from planner.solvers.model import build
from planner.solvers.plain import Plain
from planner.solvers.reduce import Reduction, reduce

from .problems import brute_force, least_with, random_problem

needs_numba = pytest.mark.skipif(auto.importlib.util.find_spec("numba") is None, reason="the optional extra 'fast' is not installed")


def knapsack(seed: int, nodes: int = 14, bulk: int = 60) -> Problem:
    """A ring whose usage comes in few large steps of one row: prices leave a large gap."""
    rng = np.random.default_rng(seed)
    cost = tuple(rng.integers(0, 100, 3) for _ in range(nodes))
    tables = tuple(rng.integers(0, 40, (3, 3)) for _ in range(nodes))
    usage = tuple((bulk * rng.integers(0, 3, 3) + rng.integers(0, 3, 3)) * (8 if i < 2 else 1) for i in range(nodes))
    ends = np.array([(i, (i + 1) % nodes) for i in range(nodes)])
    span = np.tile([0, 1], (nodes, 1))
    least = sum(int(u.min()) for u in usage)
    problem = Problem(cost, ends, np.arange(nodes), tables, np.arange(nodes), span, usage, None)
    peak = evaluate(problem, solve(problem, "dp").choice).peak_usage
    return replace(problem, usage_limit=(least + peak) // 2)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 100_000), st.booleans())
def test_no_choice_with_an_option_costs_less_than_its_floor(seed: int, compiled: bool) -> None:
    problem = random_problem(seed, nodes=5, most=3)
    model = build(problem)
    if not model.pairs:
        return
    passes: prices.Passes = Plain(model)
    if compiled and auto.importlib.util.find_spec("numba") is not None:
        from planner.solvers import search

        passes = search.start(model)
    turns = itertools.count()
    prices.raise_bound(passes, lambda _: next(turns) < 40)
    floors = prices.floors(passes, 20)
    least = np.concatenate(least_with(problem))
    assert (floors <= least + 1e-9 * np.maximum(1, least)).all()
    assert passes.best.bound <= least.min() + prices.rounding(least.min())
    assert passes.best.x is None or (evaluate(problem, passes.best.x).feasible and evaluate(problem, passes.best.x).cost == passes.best.cost)


@needs_numba
def test_plain_and_compiled_passes_are_the_same() -> None:
    from planner.solvers import search

    for seed in range(12):
        model = build(random_problem(seed, nodes=6))
        if model.pairs:
            plain, compiled = Plain(model), search.start(model)
            price = np.full(0 if model.memory is None else model.memory.rows, 0.7)
            for _ in range(5):
                assert plain.sweep(price) == pytest.approx(compiled.sweep(price), rel=1e-12, abs=1e-6)
            np.testing.assert_allclose(plain.regret, compiled.regret, rtol=1e-9, atol=1e-6)


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


def wide(seed: int, side: int = 5, strategies: int = 12) -> Problem:
    """A grid too wide for elimination, in little memory; few options of each node are good."""
    rng = np.random.default_rng(seed)
    n = side * side
    ends = [(i, i + 1) for i in range(n) if (i + 1) % side] + [(i, i + side) for i in range(n - side)]
    cost = tuple(np.sort(rng.integers(0, 4000, strategies)) for _ in range(n))
    tables = tuple(rng.integers(0, 300, (strategies, strategies)) for _ in ends)
    usage = tuple(np.sort(rng.integers(0, 1000, strategies))[::-1].copy() for _ in range(n))
    return Problem(cost, np.array(ends), np.arange(len(ends)), tables, np.arange(n), np.tile([0, 1], (n, 1)), usage, int(0.8 * sum(int(u.max()) for u in usage)))


@pytest.mark.parametrize("name", ["dp", "auto"])
def test_what_is_too_wide_for_elimination_is_proven_after_narrowing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `dp`, and by `auto` with and without compiled loops; twice the same."""
    problem = wide(1, side=6)
    assert compile_tree(build(problem)) is None
    found = solve(problem, name)
    assert found.status == "optimal" and solve(problem, name) == found
    assert evaluate(problem, found.choice).peak_usage > 0.9 * (problem.usage_limit or 0)
    if name == "auto":
        exact = solve(problem, "dp")
        assert evaluate(problem, found.choice).cost == evaluate(problem, exact.choice).cost
        monkeypatch.setattr(auto.importlib.util, "find_spec", lambda name: None)
        assert evaluate(problem, solve(problem, "auto").choice).cost == evaluate(problem, exact.choice).cost


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 100_000), st.data())
def test_reducing_to_some_options_finds_the_best_of_them(seed: int, data: st.DataObject) -> None:
    problem = random_problem(seed, nodes=5)
    only = [np.array(sorted(data.draw(st.sets(st.integers(0, len(c) - 1), min_size=1)))) for c in problem.cost]
    best = brute_force(replace(problem, cost=tuple(np.where(np.isin(np.arange(len(c)), k), c, FORBIDDEN) for c, k in zip(problem.cost, only, strict=True))))
    reduction = reduce(problem, only=only)
    found = None if reduction.problem is None else solve(reduction.problem, "dp")
    assert (best is None) == (found is None or found.status == "infeasible")
    if best is not None and found is not None:
        x = reduction.expand(found.choice)
        assert evaluate(problem, x).cost == best and all(k in kept for k, kept in zip(x.tolist(), only, strict=True))


@needs_numba
def test_what_has_no_room_is_given_on_with_fewer_options(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, given = wide(1, side=6), []

    def reduced(of: Problem, only: list[np.ndarray] | None = None) -> Reduction:
        given.append(only)
        return reduce(of, only=only)

    best = evaluate(problem, solve(problem, "dp").choice).cost
    monkeypatch.setattr(auto, "NARROW", 1)
    monkeypatch.setattr(auto, "PROVABLE", 0)
    monkeypatch.setattr(auto, "reduce", reduced)
    found = solve(problem, "auto", Budget(work=100_000_000))
    verdict = evaluate(problem, found.choice)
    assert verdict.feasible and best <= verdict.cost <= 1.01 * best
    assert found.bound is not None and 0.97 * best <= found.bound <= best + prices.rounding(best)
    assert given[0] is None and given[-1] is not None and sum(map(len, given[-1])) < auto.FEWER * sum(map(len, problem.cost))


def test_little_work_leaves_a_bound_and_the_same_answer() -> None:
    problem = wide(2, side=6)
    first, again = (solve(problem, "dp", Budget(work=3_000_000)) for _ in range(2))
    best = evaluate(problem, solve(problem, "dp").choice).cost
    assert first == again and first.bound is not None and first.bound <= best
    assert not first.choice or evaluate(problem, first.choice).cost >= best
