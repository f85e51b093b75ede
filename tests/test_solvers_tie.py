"""Tying loses nothing: the tied problem prices every tied choice like the untied one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from planner.solvers.problem import evaluate
from planner.tie import tie

from .problems import random_problem


@pytest.mark.parametrize("seed", range(60))
def test_tied_and_untied_agree(seed: int) -> None:
    problem = random_problem(seed)
    rng = np.random.default_rng(seed)
    sizes = [len(c) for c in problem.cost]
    # classes of nodes with equally many strategies
    classes = np.array([s * 10 + int(rng.integers(2)) for s in sizes])
    problem = replace(problem, weight=rng.random(len(sizes)))
    tied, expand = tie(problem, classes)
    assert len(tied.cost) == len(set(classes.tolist()))
    assert tied.weight is not None and problem.weight is not None
    assert np.isclose(tied.weight.sum(), problem.weight.sum())
    for x in itertools.islice(itertools.product(*[range(len(c)) for c in tied.cost]), 300):
        ours, judged = evaluate(tied, x), evaluate(problem, expand(x))
        assert ours.feasible == judged.feasible
        assert ours.peak_usage == judged.peak_usage
        assert bool(ours.forbidden) == bool(judged.forbidden)
        if not judged.forbidden:
            assert ours.cost == judged.cost


def test_members_must_match() -> None:
    problem = random_problem(0)
    sizes = [len(c) for c in problem.cost]
    assert len(set(sizes)) > 1
    with pytest.raises(ValueError, match="strategies"):
        tie(problem, np.zeros(len(sizes), np.int64))
