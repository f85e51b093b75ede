"""Problems that a search meets again are not solved again."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from planner.search.build_request import make_request
from planner.search.search import Search
from planner.search.solving import digest
from planner.solvers.problem import Budget, Problem, Solution
from planner.space.assemble import assemble
from planner.space.techniques import Techniques
from planner.workload.model import Model, Workload


def search() -> Search:
    request = make_request(devices=8, hardware="h100-sxm", topology=None)
    return Search(Model.open("zoo:gpt-tiny", Workload("train", batch=64), 8), request)


def problem_of(found: Search, zero: int, micro: int, limit: int | None = 2**30) -> Problem:
    space = found.space(found.offered.meshes()[1], micro, None)
    assert space is not None
    return assemble(space, Techniques(zero, "none", micro), limit)


def test_stages_1_and_2_are_solved_once_in_one_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Budget]()
    ask = Search._ask

    def counted(problem: Problem, name: str, budget: Budget) -> Solution:
        asked.append(budget)
        return ask(problem, name, budget)

    monkeypatch.setattr(Search, "_ask", staticmethod(counted))
    found = search()
    answers = [found.solve(problem_of(found, zero, 1)) for zero in (1, 2)]
    assert len(asked) == 1 and answers[0] is answers[1]
    found.solve(problem_of(found, 1, 1), below=1.0)
    found.solve(problem_of(found, 1, 1), work_factor=200)
    assert len(asked) == 3  # other budgets may have other answers
    found.solve(problem_of(found, 1, 2))
    found.with_blocks("looped").solve(problem_of(found, 1, 2))
    assert len(asked) == 4


def test_whatever_answers_follow_from_is_told_apart() -> None:
    problem = problem_of(search(), 1, 2)
    known = {digest(problem)}
    assert digest(replace(problem)) in known
    for field in fields(problem):
        value = getattr(problem, field.name)
        if field.name == "names":  # said in messages alone
            continue
        if isinstance(value, np.ndarray):
            other = value + 1
        elif isinstance(value, tuple) and isinstance(value[0], np.ndarray):
            other = (*value[:-1], value[-1] + 1)
        else:
            other = (*value, 2) if isinstance(value, tuple) else value + 1
        known.add(digest(replace(problem, **{field.name: other})))
    assert len(known) == len(fields(problem))
