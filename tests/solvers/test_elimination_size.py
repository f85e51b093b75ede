"""Elimination's tables are bounded before they are made, and pair tables are not kept at the size
of what they are added to."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np

from planner.solvers.exact.elimination import MOST_DIMS, Scratch, compile_tree
from planner.solvers.exact.minibucket import split_tree
from planner.solvers.model import Model
from planner.solvers.neighbourhood.changes import changes_of
from planner.solvers.neighbourhood.cuts_numpy import drawn


def clique(nodes: int, options: int) -> Model:
    """Every two nodes share a table: one elimination table holds all their combinations."""
    random = np.random.default_rng(nodes * options)
    pairs = {
        p: random.integers(0, 9, (options, options)).astype(float)
        for p in itertools.combinations(range(nodes), 2)
    }
    return Model(
        np.arange(nodes + 1) * options,
        random.integers(0, 9, nodes * options).astype(float),
        pairs,
        None,
    )


def test_pair_tables_stay_small() -> None:
    model = clique(5, 20)
    tree = compile_tree(model)
    assert tree is not None and max(np.prod(s) for s in tree.shape) == 20**5
    assert sum(part.nbytes for parts in tree.base for part in parts) < 20**5 * 8 / 10
    value, choice, _ = tree.run(model.cost)
    cost = sum(model.cost[v * 20 + x] for v, x in enumerate(choice)) + sum(
        t[choice[u], choice[v]] for (u, v), t in model.pairs.items()
    )
    assert value == cost


def test_wide_models_are_refused_before_their_tables_are_made() -> None:
    model = clique(7, 14)  # 14**7 entries: 800 MB
    tracemalloc.start()
    try:
        assert compile_tree(model) is None
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_tables_have_no_more_dims_than_an_array() -> None:
    """Operators with one split each add nothing to the entries of a table, but a dim: a clique of a
    hundred has one entry and a hundred dims."""
    model = clique(100, 1)
    cost = float(sum(model.cost)) + sum(float(t[0, 0]) for t in model.pairs.values())
    assert compile_tree(model) is None
    tree = split_tree(model)
    assert max(map(len, tree.shape)) <= MOST_DIMS
    value, choice, _ = tree.run(model.cost)
    assert (value, tuple(choice)) == (cost, (0,) * 100)
    cut = drawn(model, changes_of(model), 1e6, 1e6, np.random.default_rng(0), Scratch())
    assert 0 < len(cut.free) < 100 and max(map(len, cut.tree.shape)) <= MOST_DIMS
