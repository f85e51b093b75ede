"""The portfolio: the same answers as brute force, sound bounds, determinism, and the second
process."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.solvers import auto, dp, ilp, recursive, solve
from planner.solvers.bounds import messages
from planner.solvers.model import build
from planner.solvers.neighbourhood import local, search
from planner.solvers.neighbourhood.changes import changes_of
from planner.solvers.problem import Budget, Problem, evaluate
from planner.solvers.reduce.reductions import Reduction, reduce
from tests.solvers.problems import brute_force, random_problem, wide

ROOT = Path(__file__).parents[2]
needs_numba = pytest.mark.skipif(
    not search.numba_is_there(), reason="the optional extra 'fast' is not installed"
)


def grid(seed: int, side: int, strategies: int, tight: float) -> Problem:
    """A grid too wide for elimination, with a binding memory limit."""
    rng = np.random.default_rng(seed)
    n = side * side
    ends = [(i, i + 1) for i in range(n) if (i + 1) % side] + [
        (i, i + side) for i in range(n - side)
    ]
    tables = tuple(rng.integers(0, 100, (strategies, strategies)) for _ in range(12))
    usage = tuple(rng.integers(0, 100, strategies) for _ in range(n))
    span = np.array([(i, i + side) for i in range(n)])
    problem = Problem(
        tuple(rng.integers(0, 100, strategies) for _ in range(n)),
        np.array(ends),
        rng.integers(0, 12, len(ends)),
        tables,
        np.arange(n),
        span,
        usage,
        None,
    )
    least = evaluate(problem, [int(u.argmin()) for u in usage]).peak_usage
    return replace(problem, usage_limit=int(least + tight * 50 * side))


def test_small_problems_are_solved_exactly() -> None:
    for seed in range(80):
        problem = random_problem(seed)
        best = brute_force(problem)
        found = solve(problem, "auto")
        assert found.status == ("infeasible" if best is None else "optimal")
        assert best is None or evaluate(problem, found.choice).cost == best


@pytest.mark.slow
@needs_numba
def test_the_search_is_deterministic_for_a_seed_and_work_and_its_bound_is_sound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto, "PROVABLE", 0)
    monkeypatch.setattr(auto, "NARROW", 1)
    problem = grid(0, 5, 4, 0.3)
    exact = solve(problem, "ilp")
    assert exact.status == "optimal"
    best = evaluate(problem, exact.choice).cost
    first, again = (solve(problem, "auto", Budget(work=20_000_000, seed=3)) for _ in range(2))
    assert first == again
    verdict = evaluate(problem, first.choice)
    assert verdict.feasible and best <= verdict.cost <= 1.02 * best
    assert first.bound is not None and 0.8 * best <= first.bound <= best + 1e-6 * best


@pytest.mark.slow
@needs_numba
def test_two_processes_within_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "NARROW", 1)
    problem = grid(1, 6, 4, 0.3)
    began = time.monotonic()
    found = solve(problem, "auto", Budget(time_limit_s=20))
    assert found.status == "optimal"  # HiGHS proves it in the other process
    assert time.monotonic() - began < 22
    monkeypatch.setattr(auto, "PROVABLE", 0)
    began = time.monotonic()
    quick = solve(problem, "auto", Budget(time_limit_s=3))
    assert time.monotonic() - began < 5
    verdict = evaluate(problem, quick.choice)
    assert verdict.feasible and verdict.cost <= 1.02 * evaluate(problem, found.choice).cost


@pytest.mark.slow
def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "numba_is_there", lambda: False)
    monkeypatch.setattr(auto, "NARROW", 1)
    problem = grid(1, 5, 4, 0.3)
    found = solve(problem, "auto", Budget(time_limit_s=20))
    assert found.status == "optimal" and evaluate(problem, found.choice).feasible


def test_a_numba_that_cannot_be_imported_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    search.numba_is_there.cache_clear()
    try:
        assert not search.numba_is_there()
    finally:
        search.numba_is_there.cache_clear()


@pytest.mark.slow
def test_without_numba_the_search_is_in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a time limit, where HiGHS is not asked: of the cost that it proves within a percent,
    and never over the limit by more than a neighbourhood."""
    problem = grid(1, 7, 4, 0.3)
    best = evaluate(problem, solve(problem, "ilp").choice).cost
    for module, name, value in (
        (auto, "NARROW", 1),
        (auto, "PROVABLE", 0),
        (search, "MANY", 0),
        (search, "numba_is_there", lambda: False),
    ):
        monkeypatch.setattr(module, name, value)
    began = time.monotonic()
    found = solve(problem, "auto", Budget(time_limit_s=4))
    assert time.monotonic() - began < 6
    verdict = evaluate(problem, found.choice)
    assert (
        verdict.feasible
        and best <= verdict.cost <= 1.01 * best
        and found.bound is not None
        and found.bound <= best
    )


def test_large_programs_are_solved_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ilp, "LARGE", 0)
    for seed in (0, 3, 7):
        problem = random_problem(seed, nodes=6)
        best, found = brute_force(problem), solve(problem, "ilp", Budget(time_limit_s=30))
        assert found.status == ("infeasible" if best is None else "optimal")
        assert best is None or evaluate(problem, found.choice).cost == best
    problem = wide(1, side=8)
    began = time.monotonic()
    found = solve(problem, "ilp", Budget(time_limit_s=2))
    assert time.monotonic() - began < 4
    assert (
        evaluate(problem, found.choice).feasible
        and found.bound is not None
        and found.bound <= evaluate(problem, found.choice).cost
    )


@pytest.mark.slow
def test_recursive_polishes_what_is_too_wide_to_mix_exactly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = grid(1, 7, 4, 0.3)
    best = evaluate(problem, solve(problem, "ilp").choice).cost
    for name, value in (("MANY", 0), ("LARGE", 0), ("compile_tree", lambda model: None)):
        monkeypatch.setattr(recursive, name, value)
    for budget in (Budget(work=100_000_000), Budget(time_limit_s=20)):
        found, again = (solve(problem, "recursive", budget) for _ in range(2))
        verdict = evaluate(problem, found.choice)
        assert (
            found.choice == again.choice
            and verdict.feasible
            and best <= verdict.cost <= 1.03 * best
        )
        assert found.bound is not None and found.bound <= best


@pytest.mark.parametrize("name", ["recursive", "dp"])
def test_an_interrupted_search_of_wide_problems_gives_its_best(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, passes = grid(1, 7, 4, 0.3), itertools.count()
    whole = search.Search.sweep

    def sweep(self: search.Search, price: np.ndarray) -> float:
        if next(passes) == 20:
            raise KeyboardInterrupt
        return whole(self, price)

    monkeypatch.setattr(search.Search, "sweep", sweep)
    for module, what, value in (
        (recursive, "MANY", 0),
        (recursive, "compile_tree", lambda model: None),
        (dp, "compile_tree", lambda *_, **__: None),
        (search, "MANY", 0),
    ):
        monkeypatch.setattr(module, what, value)
    found = solve(problem, name, Budget(time_limit_s=20))
    assert found.stopped == "interrupt" and evaluate(problem, found.choice).feasible


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 100_000))
def test_choices_made_to_fit_node_by_node_and_by_array_operations(seed: int) -> None:
    """Both fit and cost no more than before where that fitted. Array operations leave no change of
    one node that fits and costs less; steps node by node do not look again at what others have made
    room for."""
    problem = random_problem(seed)
    model = build(problem)
    x = np.array([np.random.default_rng(seed).integers(s) for s in model.sizes])
    before = evaluate(problem, x)
    for found, every in (
        (local.polish(model, x, 50), False),
        (changes_of(model).repaired(x, 50), True),
    ):
        verdict = None if found is None else evaluate(problem, found)
        assert verdict is not None or not before.feasible
        if found is None or verdict is None or not verdict.feasible:
            assert not before.feasible
            continue
        assert changes_of(model).cost(found) == verdict.cost and (
            not before.feasible or verdict.cost <= before.cost
        )
        for i, size in enumerate(model.sizes if every else ()):
            for k in range(size):
                other = evaluate(problem, np.where(np.arange(len(x)) == i, k, found))
                assert not other.feasible or other.cost >= verdict.cost


def test_many_nodes_are_repaired_by_array_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = grid(3, 8, 5, 0.2)
    model, x = build(problem), np.zeros(64, np.int64)
    assert not evaluate(problem, x).feasible
    few = local.polish(model, x)
    monkeypatch.setattr(local, "MANY", 0)
    many = local.polish(model, x)
    assert few is not None and many is not None
    costs = [evaluate(problem, y).cost for y in (few, many)]
    assert all(evaluate(problem, y).feasible for y in (few, many)) and max(costs) <= 1.2 * min(
        costs
    )


@pytest.mark.slow
def test_what_is_too_wide_for_elimination_is_proven_with_compiled_loops_and_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = wide(1, side=6)
    found, exact = solve(problem, "auto"), solve(problem, "dp")
    assert found.status == exact.status == "optimal" and solve(problem, "auto") == found
    assert evaluate(problem, found.choice).cost == evaluate(problem, exact.choice).cost
    monkeypatch.setattr(search, "numba_is_there", lambda: False)
    assert (
        evaluate(problem, solve(problem, "auto").choice).cost
        == evaluate(problem, exact.choice).cost
    )


@pytest.mark.slow
@needs_numba
def test_what_has_no_room_is_given_on_with_fewer_options(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, handed = wide(1, side=6), []

    def reduced(of: Problem, only: list[np.ndarray] | None = None) -> Reduction:
        handed.append(only)
        return reduce(of, only=only)

    best = evaluate(problem, solve(problem, "dp").choice).cost
    monkeypatch.setattr(auto, "NARROW", 1)
    monkeypatch.setattr(auto, "PROVABLE", 0)
    monkeypatch.setattr(auto, "reduce", reduced)
    found = solve(problem, "auto", Budget(work=100_000_000))
    verdict = evaluate(problem, found.choice)
    assert verdict.feasible and best <= verdict.cost <= 1.01 * best
    assert found.bound is not None and 0.97 * best <= found.bound <= best + messages.rounding(best)
    assert (
        handed[0] is None
        and handed[-1] is not None
        and sum(map(len, handed[-1])) < auto.FEWER * sum(map(len, problem.cost))
    )


def test_the_benchmark_prints_a_table(tmp_path: Path) -> None:
    problem = random_problem(1)
    body = {
        "problem": {
            "usage_limit": 10**6,
            "nodes": {
                "costs": [c.tolist() for c in problem.cost],
                "usages": [[0] * len(c) for c in problem.cost],
                "intervals": [[0, 0] for _ in problem.cost],
            },
            "edges": {"nodes": [], "costs": []},
        }
    }
    (tmp_path / "X.json").write_text(json.dumps(body))
    cost = sum(int(c.min()) for c in problem.cost)
    (tmp_path / "ref.csv").write_text(
        f"instance,contest_seconds,best_known_cost\nX,20,{cost}\nY,20,1\n"
    )
    command = [
        sys.executable,
        "-m",
        "benchmarks.iopddl",
        "--instances",
        str(tmp_path),
        "--reference",
        str(tmp_path / "ref.csv"),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"{cost}" in done.stdout and "1.00000" in done.stdout and "optimal" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(
    not (ROOT.parent / "shared" / "data" / "iopddl").exists(),
    reason="contest instances are not here",
)
@pytest.mark.parametrize(("name", "limit"), [("A", 60), ("C", 60), ("G", 120)])
def test_contest_instances_are_proven_optimal(name: str, limit: int) -> None:
    from planner.solvers.iopddl import read_problem

    folder = ROOT.parent / "shared" / "data" / "iopddl"
    reference = dict(
        line.split(",")[0::6][:2]
        for line in (folder / "reference.csv").read_text().splitlines()[1:]
    )
    problem = read_problem(folder / f"{name}.json.gz")
    found = solve(problem, "auto", Budget(time_limit_s=limit))
    assert found.status == "optimal" and evaluate(problem, found.choice).cost == int(
        reference[name]
    )
