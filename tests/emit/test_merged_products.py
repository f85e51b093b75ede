"""Forward passes whose products of one operand GPU compilers are told to leave apart."""

from __future__ import annotations

import pytest

import planner
from planner.emit.from_strategy import program


@pytest.mark.parametrize(
    ("source", "workload", "unroll", "apart"),
    [
        ("zoo:dit-s-2", "infer", True, True),
        ("zoo:dit-s-2", "infer", False, False),
        ("zoo:dit-s-2", "train", False, False),
        ("zoo:vit-b16", "infer", False, False),
    ],
)
def test_products_stay_apart_where_copies_of_their_weights_would_be_the_most(
    source: str, workload: str, unroll: bool, apart: bool
) -> None:
    """A DiT's modulations all read one vector: joined, their weights are there twice. Queries, keys
    and values of a block are smaller than its activations, and in loops."""
    strategy = planner.plan(source, devices=8, batch=16, workload=workload, baselines=False)
    text = program(strategy, source, unroll=unroll).text
    assert ('{"xla_gpu_dot_merger_threshold_mb": 0}' in text) == apart
