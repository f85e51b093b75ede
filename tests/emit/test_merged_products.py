"""Forward passes whose products of one operand GPU compilers are told to leave apart."""

from __future__ import annotations

import pytest

import planner
from planner.emit.from_strategy import program


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("source", "workload", "blocks", "apart"),
    [
        ("zoo:dit-s-2", "infer", "written-out", True),
        ("zoo:dit-s-2", "infer", "looped", False),
        pytest.param("zoo:dit-s-2", "train", "written-out", False, marks=pytest.mark.slow),
        ("zoo:vit-b16", "infer", "looped", False),
    ],
)
def test_products_stay_apart_where_copies_of_their_weights_would_be_the_most(
    source: str, workload: str, blocks: str, apart: bool
) -> None:
    """A DiT's modulations all read one vector: joined, their weights are there twice. Queries, keys
    and values of a block are smaller than its activations, and in loops."""
    strategy = planner.plan(
        source, devices=8, batch=16, workload=workload, pins=f"blocks={blocks}", baselines=False
    )
    text = program(strategy, source).text
    assert ('{"xla_gpu_dot_merger_threshold_mb": 0}' in text) == apart
