"""Kernels that exchange with their neighbours equal the unsharded ones under every split that has them exchange."""

from __future__ import annotations

import random

import pytest

from tests.oracle import Case, all_splits, mismatch
from tests.oracle_neighbours import neighbour_cases

CASES = neighbour_cases()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_exchange_equals_unsharded(case: Case) -> None:
    """Over both axes, and a seeded sample of the exchange over one beside whatever else is cut."""
    splits = [s for s in all_splits(case) if s.axes("ring")]
    both = [s for s in splits if len(s.axes("ring")) == 2]
    assert both
    assert mismatch(case, [both[0], *random.Random(case.name).sample([s for s in splits if s not in both], 2)]) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_split_equals_unsharded(case: Case) -> None:
    assert mismatch(case, all_splits(case)) == []
