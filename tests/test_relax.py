"""Bounds of a space: those of the assembled problem, whatever the techniques and the limit."""

from __future__ import annotations

import pytest

from planner.api import make_request
from planner.assemble import PICO, Techniques, assemble, least_working, usage_of
from planner.model import Model, Workload
from planner.problem import Budget, evaluate
from planner.relax import WORK, Relaxed
from planner.search import Search
from planner.solvers.dp import solve


@pytest.mark.parametrize(("source", "devices", "batch"), [("zoo:llama3-8b,layers=2", 16, 64), ("zoo:resnet18", 8, 64), ("zoo:bert-tiny", 6, 24)])
def test_bounds_are_those_of_the_assembled_problem(source: str, devices: int, batch: int) -> None:
    request = make_request(devices=devices, hardware=None, topology=None)
    search = Search(Model.open(source, Workload("train", batch=batch), devices), request)
    checked = 0
    for mesh in search.offered.meshes()[1:3]:
        space = search.space(mesh, 1, None)
        assert space is not None
        relaxed = Relaxed(space)
        least = relaxed.least((0, 1, 2, 3))
        for at in (Techniques(0, "none", 1), Techniques(2, "block", 2), Techniques(3, "block-keep", 4), Techniques(1, "none", batch)):
            problem = assemble(space, at, None, uncut=True)
            exact = solve(problem, Budget())
            found = relaxed.free(at, at.microbatches)
            if exact.status == "infeasible":
                assert found is None
                continue
            cost = evaluate(problem, exact.choice).cost / PICO
            rounding = (len(problem.cost) + len(problem.edges)) / PICO
            assert found is not None and exact.status == "optimal"
            assert cost * (1 - 1e-9) - rounding <= found[1] <= cost + rounding
            assert relaxed.usage(at, found[0]) == pytest.approx(usage_of(space, at, tuple(found[0].tolist()), uncut=True)[0])
            assert least <= found[1] + rounding
            low, high = evaluate(problem, exact.choice).peak_usage, evaluate(problem, tuple(int(u.argmin()) for u in problem.live_usage)).peak_usage
            for limit in (low, (low + high) // 2):
                bounded = assemble(space, at, limit, uncut=True)
                best = solve(bounded, Budget())
                if best.status != "optimal":
                    continue
                value, bound = evaluate(bounded, best.choice).cost / PICO, relaxed.limited(at, limit + least_working(space, at, uncut=True))
                assert found[1] - rounding <= bound <= value + rounding
                same = solve(bounded, Budget(work=WORK)).bound  # with as much work
                assert same is not None and bound >= 0.99 * same / PICO
                checked += 1
            assert relaxed.limited(at, 0) == float("inf")
    assert checked >= 6


def test_a_bound_without_a_choice_is_no_plan_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tables would be too large, greedy decoding may meet a dead end: the bound stands, and nothing is known of memory."""
    request = make_request(devices=4, hardware=None, topology=None)
    search = Search(Model.open("zoo:mlp-tiny", Workload("train", batch=8), 4), request)
    space = search.space(search.offered.meshes()[0], 1, None)
    assert space is not None
    monkeypatch.setattr("planner.relax.compile_tree", lambda model: None)
    monkeypatch.setattr("planner.relax.bounded", lambda model, clock, start, order: (None, 1e6))
    relaxed = Relaxed(space)
    found = relaxed.free(Techniques(), 1)
    assert found is not None and found[1] > 0 and relaxed.usage(Techniques(), found[0]) == float("inf")
