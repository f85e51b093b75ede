"""The scaling study: its page says what its saved figures say, and thinned problems are the same
problem with fewer strategies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.scaling import Row, lines, thinned
from planner.solvers.problem import evaluate
from tests.solvers.problems import random_problem

ROOT = Path(__file__).parents[2]


def test_the_page_shows_the_saved_figures() -> None:
    rows = [Row(**r) for r in json.loads((ROOT / "benchmarks/results/scaling.json").read_text())]
    page = (ROOT / "docs/scaling.md").read_text()
    assert "\n".join(lines(rows)) in page
    for study in dict.fromkeys(r.study for r in rows):
        assert (
            f"images/scaling-{study}.svg" in page
            and (ROOT / f"docs/images/scaling-{study}.svg").exists()
        )


def test_a_thinned_problem_prices_its_choices_as_the_whole_one_does() -> None:
    problem = replace(random_problem(3), axis_choice=())
    few = thinned(problem, 2)
    kept = [
        np.unique(np.linspace(0, len(c) - 1, min(2, len(c))).round().astype(int))
        for c in problem.cost
    ]
    assert max(map(len, few.cost)) == 2
    for pick in (0, 1):
        small = tuple(min(pick, len(k) - 1) for k in kept)
        whole = tuple(int(k[x]) for k, x in zip(kept, small, strict=True))
        assert evaluate(few, small).cost == evaluate(problem, whole).cost
        assert evaluate(few, small).peak_usage == evaluate(problem, whole).peak_usage
