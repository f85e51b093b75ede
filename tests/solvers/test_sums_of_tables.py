"""Parts of large tables are added up before they are as large: the same to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from planner.solvers.exact import elimination, passes
from planner.solvers.model import INF_INT, Model

SIZES = (5, 7, 3, 6, 4, 2)
PAIRS = ((0, 1), (0, 2), (1, 2), (1, 3), (2, 3), (2, 4), (3, 4), (4, 5), (0, 5))


@pytest.mark.parametrize("integer", [False, True])
def test_large_tables_are_summed_as_small_ones(
    integer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = np.random.default_rng(5)
    offset = np.concatenate(([0], np.cumsum(SIZES)))

    def costs(*shape: int) -> np.ndarray:
        if integer:
            each = drawn.integers(0, 1000, shape)
            return np.where(drawn.random(shape) < 0.1, INF_INT, each)
        return np.where(drawn.random(shape) < 0.1, np.inf, drawn.random(shape))

    unary = costs(offset[-1])
    pairs = {(u, v): costs(SIZES[u], SIZES[v]) for u, v in PAIRS}
    model = Model(offset, unary, pairs, None, pairs_int=pairs)
    found = []
    for large in (1 << 60, 0):
        monkeypatch.setattr(passes, "LARGE", large)
        tree = elimination.compile_tree(model, integer=integer)
        assert tree is not None
        value, choice, tables = tree.run(unary)
        found.append((value, choice.tolist(), [table.tobytes() for table in tables]))
    assert found[0] == found[1]
    assert found[0][0] < (INF_INT if integer else np.inf)
