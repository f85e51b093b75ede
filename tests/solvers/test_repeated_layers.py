"""Tables that layers of a model repeat are summed once: the same to the bit as each on its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.solvers.exact.elimination import Tree, compile_tree
from planner.solvers.exact.minibucket import split_tree
from planner.solvers.model import Model

LAYERS = 6
LAYER = (4, 3, 5, 3)
"""Options of the nodes of one layer."""
INSIDE = ((0, 1), (0, 2), (1, 2), (1, 3), (2, 3))


def layers(odd: int | None) -> tuple[Model, np.ndarray]:
    """A chain of equal layers (their first nodes hand on), one of which has costs of its own, and
    the unary costs."""
    drawn = np.random.default_rng(3)
    own = drawn.integers(0, 100, sum(LAYER)).astype(float)
    tables = {p: drawn.integers(0, 100, (LAYER[p[0]], LAYER[p[1]])).astype(float) for p in INSIDE}
    between = drawn.integers(0, 100, (LAYER[0], LAYER[0])).astype(float)
    n = len(LAYER)
    pairs = {}
    for layer in range(LAYERS):
        a = layer * n
        pairs |= {(a + u, a + v): table for (u, v), table in tables.items()}
        if layer + 1 < LAYERS:
            pairs[a, a + n] = between
    unary = np.tile(own, LAYERS)
    if odd is not None:
        unary[odd * len(own) : (odd + 1) * len(own)] += drawn.integers(0, 9, len(own))
    offset = np.concatenate(([0], np.cumsum(np.tile(LAYER, LAYERS))))
    return Model(offset, unary, pairs, None), unary


def told(tree: Tree, unary: np.ndarray) -> list[object]:
    value, choice, tables = tree.run(unary)
    of_tables = [table.tobytes() for table in tables]
    least = [a.tobytes() for a in tree.marginals(unary)[1:]]
    return [value, choice.tolist(), of_tables, least, tree.tighten(unary), tree.tighten(unary)]


@pytest.mark.parametrize("odd", [None, 2])
@pytest.mark.parametrize("split", [False, True])
def test_repeated_tables_are_those_summed_on_their_own(split: bool, odd: int | None) -> None:
    model, unary = layers(odd)
    tree = split_tree(model, 16) if split else compile_tree(model)
    assert tree is not None and tree.exact is not split
    assert sum(kind is not None for kind in tree.kinds) > len(tree.kinds) // 3
    alone = replace(tree, kinds=[None] * len(tree.kinds), tables=[])
    assert told(tree, unary) == told(alone, unary)


def test_another_pair_table_is_another_sum() -> None:
    """Kinds follow the tables: after `with_pairs` with one layer's table changed."""
    model, unary = layers(None)
    first = compile_tree(model)
    assert first is not None
    pairs = dict(model.pairs)
    pairs[0, 1] = pairs[0, 1] + 1000.0
    changed, anew = first.with_pairs(pairs), compile_tree(replace(model, pairs=pairs))
    assert anew is not None
    assert changed.run(unary)[0] == anew.run(unary)[0] > first.run(unary)[0]
