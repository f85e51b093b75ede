"""Neighbourhoods of nearly every choice: an elimination beside kept nodes finds what trying
everything finds, tables keep within their limit, and descents only ever gain."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.solvers.bounds import messages
from planner.solvers.bounds.messages_small import Plain
from planner.solvers.exact.elimination import compile_tree
from planner.solvers.model import Model, build
from planner.solvers.neighbourhood import cutset, search
from planner.solvers.problem import Problem, evaluate
from tests.solvers.problems import floors_hold, random_problem
from tests.solvers.test_auto import grid

needs_numba = pytest.mark.skipif(
    not search.numba_is_there(), reason="needs numba (pip install 'meshwright[fast]')"
)
ENGINES = ["plain", pytest.param("compiled", marks=needs_numba)]
engines = pytest.mark.parametrize("engine", ENGINES)


def started(model: Model, engine: str) -> search.Search:
    """A search whose cuts are compiled or in numpy."""
    return search.start(model, compiled=engine == "compiled")


def eliminated(
    model: Model, x: np.ndarray, limit: float, seed: int, engine: str
) -> tuple[np.ndarray, np.ndarray]:
    """What a drawn cut makes of a choice, and which nodes it kept."""
    state, y = started(model, engine), x.copy()
    cut: Any = state.cut(limit, 1e8, np.random.default_rng(seed))
    sizes = np.array(model.sizes)
    if engine == "plain":
        kept = np.setdiff1d(np.arange(model.nodes), cut.free)
        assert all(prod(shape) <= limit * (1 + 1e-6) for shape in cut.tree.shape)
    else:
        order, position, scope_first, scope = cut.order
        kept = np.flatnonzero(position < 0)
        for t, v in enumerate(order.tolist()):
            axes = scope[scope_first[t] : scope_first[t + 1]]
            assert (
                sizes[v] * sizes[axes].prod() <= limit * (1 + 1e-9)
                and (np.diff([t, *position[axes]]) > 0).all()
            )
    cut.eliminate(state.flat.cost, y)
    return y, kept


@pytest.mark.parametrize(
    "engine", ["plain", pytest.param("compiled", marks=[needs_numba, pytest.mark.slow])]
)
@given(st.integers(0, 10**6), st.sampled_from([3, 9, 30, 10**6]))
@settings(max_examples=150, deadline=None)
def test_nothing_beside_the_kept_nodes_is_less(engine: str, seed: int, limit: int) -> None:
    problem = replace(random_problem(seed, nodes=6), usage_limit=None)
    model, rng = build(problem), np.random.default_rng(seed)
    x = np.array([rng.integers(s) for s in model.sizes])
    y, kept = eliminated(model, x, limit, seed, engine)
    assert (y[kept] == x[kept]).all() and (limit < 10**6 or not len(kept))
    each = [[x[i]] if i in kept else range(s) for i, s in enumerate(model.sizes)]
    least = min(model.total(np.array(z)) for z in product(*each))
    assert model.total(y) == least or not np.isfinite(least)


def sparse(seed: int, nodes: int) -> Problem:
    """A random problem of two strategies a node whose elimination joins many that were no
    neighbours."""
    rng = np.random.default_rng(seed)
    edges = [sorted(rng.choice(nodes, 2, replace=False).tolist()) for _ in range(2 * nodes)]
    tables = tuple(rng.integers(0, 100, (2, 2)) for _ in edges)
    cost = tuple(rng.integers(0, 100, 2) for _ in range(nodes))
    return Problem(
        cost,
        np.array(edges),
        np.arange(len(edges)),
        tables,
        np.zeros(0, np.int64),
        np.zeros((0, 2), np.int64),
        (),
        None,
    )


@engines
def test_where_nothing_is_kept_the_optimum_is_found(engine: str) -> None:
    for seed in range(3):
        model = build(sparse(seed, 60))
        y, kept = eliminated(model, np.zeros(60, np.int64), 1e8, seed, engine)
        tree = compile_tree(model)
        assert tree is not None and not len(kept) and model.total(y) == tree.run(model.cost)[0]


@engines
def test_descents_fit_only_gain_and_are_the_same_for_a_seed(engine: str) -> None:
    problem = grid(2, 6, 5, 0.25)
    ends = []
    for _ in range(2):
        state = started(build(problem), engine)
        turns = iter(range(20))
        messages.raise_bound(state, lambda _, turns=turns: next(turns, None) is not None)  # type: ignore[misc]
        first = state.best.x
        assert first is not None
        descent = cutset.start(state, 5)
        other = descent.with_noise(first, 1e3)
        assert evaluate(problem, other).feasible and (other != first).any()
        found = [descent.run(x, lambda work: work > 0) for x in (first, other)]
        for before, after in zip((first, other), found, strict=True):
            assert evaluate(problem, after).feasible
            assert (
                state.best.cost <= evaluate(problem, after).cost <= evaluate(problem, before).cost
            )
        ends.append(np.concatenate(found).tolist())
    assert ends[0] == ends[1]


def test_costs_with_noise_are_those_of_as_many_nodes_as_asked() -> None:
    descent = cutset.start(search.start(build(grid(0, 5, 4, 0.3))), 0)
    assert [int(descent._region(k).sum()) for k in (1, 7, 25)] == [1, 7, 25]


@engines
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 100_000))
def test_no_choice_with_an_option_costs_less_than_its_floor(engine: str, seed: int) -> None:
    problem = random_problem(seed, nodes=5, most=3)
    floors_hold(problem, started(build(problem), engine))


@pytest.mark.skipif(not search.numba_is_there(), reason="needs numba")
def test_passes_node_by_node_are_the_same_compiled() -> None:
    models = [build(random_problem(seed, nodes=6)) for seed in range(12)]
    linked = [model for model in models if model.pairs]
    assert len(linked) > 6
    for model in linked:
        plain, compiled = Plain(model), search.start(model, compiled=True)
        price = np.full(0 if model.memory is None else model.memory.rows, 0.7)
        for _ in range(5):
            assert plain.sweep(price) == pytest.approx(compiled.sweep(price), rel=1e-12, abs=1e-6)
        np.testing.assert_allclose(plain.regret, compiled.regret, rtol=1e-9, atol=1e-6)


def test_passes_by_colours_find_the_optimum_of_a_tree() -> None:
    rng = np.random.default_rng(4)
    for _ in range(5):
        edges = [(int(rng.integers(v)), v) for v in range(1, 30)]
        tables = tuple(rng.integers(0, 100, (4, 4)) for _ in edges)
        cost = tuple(rng.integers(0, 100, 4) for _ in range(30))
        problem = Problem(
            cost,
            np.array(edges),
            np.arange(len(edges)),
            tables,
            np.zeros(0, np.int64),
            np.zeros((0, 2), np.int64),
            (),
            None,
        )
        state, tree = search.start(build(problem), compiled=False), compile_tree(build(problem))
        assert tree is not None
        bounds = [state.sweep(np.zeros(0)) for _ in range(60)]
        assert (np.diff(bounds) >= -1e-6).all() and bounds[-1] == pytest.approx(
            tree.run(np.concatenate(cost).astype(float))[0], rel=1e-9
        )
