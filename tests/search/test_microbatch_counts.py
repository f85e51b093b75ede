"""Microbatches of batches and device counts that are no powers of two."""

from __future__ import annotations

import planner
from planner.search.microbatch_counts import with_whole_rows


def test_numbers_divide_the_rows_and_lie_apart() -> None:
    assert with_whole_rows(10, 256) == (1, 2, 5, 10)
    assert with_whole_rows(60, 256) == (1, 2, 4, 6, 12, 20, 30, 60)
    assert with_whole_rows(1000, 256)[-1] == 250
    assert with_whole_rows(64, 256) == (1, 2, 4, 8, 16, 32, 64)
    assert with_whole_rows(1, 256) == (1,)


def test_an_odd_batch_is_accumulated() -> None:
    """75 samples on five devices have no power of two: nothing that saves all of 15 rows fits."""
    p = planner.plan(
        "zoo:llama3-8b,layers=4", devices=5, batch=75, pins="dp=5,recompute=none", cache=None
    )
    assert p.plan.microbatches in (3, 5, 15)
    assert p.costs["fit"] != "no"
