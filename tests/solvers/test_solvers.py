"""Every exact solver against brute force on random small problems."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod

import numpy as np
import pytest

from planner.solvers import dp, solve
from planner.solvers.problem import Budget, Problem, evaluate
from tests.solvers.problems import brute_force, every_choice, least_with, random_problem


@cache
def cases() -> list[tuple[Problem, int | None]]:
    """Problems and their optima, None where none fits; made where a test first asks, not by every
    process that collects tests."""
    problems = [random_problem(seed) for seed in range(200)]
    return [(problem, brute_force(problem)) for problem in problems]


def test_choices_judged_together_are_judged_as_each_alone() -> None:
    feasible = 0
    for problem, _ in cases()[:40]:
        every = every_choice(problem)
        assert len(every.choice) == prod(len(c) for c in problem.cost)
        assert len({tuple(x) for x in every.choice.tolist()}) == len(every.choice)
        for row in range(0, len(every.choice), max(1, len(every.choice) // 20)):
            alone = evaluate(problem, every.choice[row])
            assert (every.peak_usage[row], every.feasible[row]) == (
                alone.peak_usage,
                alone.feasible,
            )
            assert alone.forbidden or every.cost[row] == alone.cost
            feasible += alone.feasible
    assert feasible > 100


def test_the_cases_are_what_they_should_be() -> None:
    free = [solve(Problem(p.cost, p.edges, p.edge_table, p.tables), "dp") for p, _ in cases()]
    binding = sum(
        b is not None and s.choice != () and evaluate(p, s.choice).peak_usage > p.usage_limit
        for (p, b), s in zip(cases(), free, strict=True)
        if p.usage_limit is not None
    )
    infeasible = sum(b is None for _, b in cases())
    assert infeasible >= 20
    assert binding + infeasible >= 100


@pytest.mark.parametrize("name", ["dp", "ilp"])
def test_exact_solvers_find_the_optimum(name: str) -> None:
    for seed, (problem, best) in enumerate(cases()):
        found = solve(problem, name, Budget())
        if best is None:
            assert found.status == "infeasible", (name, seed, found)
            continue
        assert found.status == "optimal", (name, seed, found, best)
        verdict = evaluate(problem, found.choice)
        assert verdict.feasible and verdict.cost == best, (name, seed, verdict, best)
        assert found.bound is not None and found.bound <= best * (1 + 1e-9)
        assert best - found.bound <= 1e-6 * max(1, best)


@pytest.mark.parametrize(
    "entries, large, often",
    [(6e7, 1e5, 50), (6e7, 0, 50), pytest.param(20, 1e5, 10, marks=pytest.mark.slow)],
)
def test_what_costs_as_much_is_not_looked_for(
    entries: float, large: float, often: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below a level is the optimum, or nothing: then that is proven. Where tables have no room,
    too; and where options that no better choice has are left out first."""
    monkeypatch.setattr(dp, "TOTAL_LIMIT", entries)
    monkeypatch.setattr(dp, "LARGE", large)
    ended = 0
    for seed, (problem, best) in enumerate(cases()):
        if best is None or problem.usage_limit is None:
            continue
        for below in (best // 2, best, best + 1, 2 * best + 1):
            found = solve(problem, "dp", Budget(below=below))
            assert found.bound is not None and found.bound <= best * (1 + 1e-9), (
                seed,
                below,
                found,
            )
            if found.choice:
                cost = evaluate(problem, found.choice).cost
                assert cost == best if entries > 20 else cost >= best, (seed, below, found)
            elif entries > 20 or not found.stopped:
                ended += 1
                assert below <= best and (found.bound >= below - 1 or entries == 20), (
                    seed,
                    below,
                    found,
                )
    assert ended >= often


def chain_problem(seed: int, blocks: int, strategies: int, limited: float | None) -> Problem:
    """A layered net with residual edges, weights live all the time, activations in nested
    intervals, and two mesh axes."""
    rng = np.random.default_rng(seed)
    n = 6 * blocks
    axes = np.stack(np.unravel_index(np.arange(strategies) % 9, (3, 3)), axis=1) - 1
    choice = [axes[rng.permutation(strategies)] for _ in range(n)]
    cost = [rng.integers(10, 1000, strategies) * 1000 for _ in range(n)]
    convert = rng.integers(10, 600, (9, 9)) * 1000
    np.fill_diagonal(convert, 0)
    ends = [(i, i + 1) for i in range(n - 1)] + [(i, i + 3) for i in range(0, n - 3, 3)]
    code = [(c[:, 0] + 1) * 3 + c[:, 1] + 1 for c in choice]
    tables = tuple(convert[code[u]][:, code[v]] for u, v in ends)
    usage = [
        rng.choice([1, 2, 4, 8], strategies) * int(rng.integers(10**6, 10**8)) for _ in range(2 * n)
    ]
    span = [(0, 2 * n)] * n + [(i, 2 * n - i) for i in range(n)]
    problem = Problem(
        tuple(cost),
        np.array(ends),
        np.arange(len(ends)),
        tables,
        np.array([*range(n), *range(n)]),
        np.array(span),
        tuple(usage),
        None,
        axis_choice=tuple(choice),
        axis_size=(4, 2),
        weight=rng.random(n),
    )
    if limited is None:
        return problem
    free = evaluate(problem, solve(problem, "dp").choice).peak_usage
    least = sum(int(u.min()) for u in usage)
    return replace(problem, usage_limit=int(least + limited * (free - least)))


@pytest.mark.parametrize("limited", [None, 0.6, 0.1])
def test_recursive_is_near_the_optimum(limited: float | None) -> None:
    ratios = []
    for seed in range(6):
        problem = chain_problem(seed, 5, 18, limited)
        exact, quick = solve(problem, "dp"), solve(problem, "recursive")
        assert exact.status == "optimal"
        verdict = evaluate(problem, quick.choice)
        assert verdict.feasible
        ratios.append(verdict.cost / evaluate(problem, exact.choice).cost)
    assert min(ratios) >= 1
    assert max(ratios) <= 1.05 and np.mean(ratios) <= 1.02


def test_recursive_on_small_problems_never_misses_a_fit() -> None:
    for problem, best in cases():
        found = solve(problem, "recursive")
        assert (found.status == "infeasible") == (best is None)
        if best is not None:
            verdict = evaluate(problem, found.choice)
            assert verdict.feasible and verdict.cost >= best
            assert found.status != "optimal" or verdict.cost == best
            assert found.bound is None or found.bound <= best * (1 + 1e-9)


def test_too_wide_for_elimination_still_gives_a_bound() -> None:
    from planner.solvers import dp
    from planner.solvers.exact import minibucket
    from planner.solvers.model import build

    bounded = chosen = 0
    for seed, (problem, best) in enumerate(cases()[:60]):
        model = build(problem)
        choice, bound = minibucket.bounded(model, dp.clock_of(Budget(), 1e9), None, limit=4)
        if best is not None:
            bounded += 1
            assert bound <= best * (1 + 1e-9), seed
        if choice is not None:
            chosen += 1
            verdict = evaluate(problem, choice)
            assert best is not None and verdict.feasible and verdict.cost >= best
    assert min(bounded, chosen) > 20


@pytest.mark.parametrize("seeds", [25, pytest.param(80, marks=pytest.mark.slow)])
def test_the_least_cost_with_each_strategy_is_that_of_brute_force(seeds: int) -> None:
    from planner.solvers.exact.elimination import compile_tree
    from planner.solvers.model import build

    checked = 0
    for seed in range(seeds):
        problem = replace(random_problem(seed), usage_limit=None)
        model = build(problem)
        tree = compile_tree(model)
        assert tree is not None
        value, least = tree.marginals(model.cost)
        exact = least_with(problem)
        assert value == min(float(each.min()) for each in exact)
        np.testing.assert_array_equal(least, np.concatenate(exact))
        checked += sum(int((np.isfinite(each) & (each != value)).sum()) for each in exact)
    assert checked > 3.75 * seeds


@pytest.mark.parametrize("seeds", [40, pytest.param(120, marks=pytest.mark.slow)])
def test_variables_in_parts_bound_the_optimum_and_what_each_strategy_costs(seeds: int) -> None:
    """Of random problems without memory, tables of at most four entries: integers stay integers,
    shifts between parts only gain."""
    from planner.solvers.exact.minibucket import split_tree
    from planner.solvers.model import build

    split, gained, total = 0, 0, 0
    for seed in range(seeds):
        problem = replace(random_problem(seed), usage_limit=None)
        model = build(problem)
        tree, exact = split_tree(model, 4), least_with(problem)
        best = min(float(each.min()) for each in exact)
        value, least = tree.marginals(model.cost)
        assert value == tree.run(model.cost)[0] and value <= best
        assert np.isinf(value) or value == round(value)
        assert (least <= np.concatenate(exact)).all() and (least >= value).all()
        tight = tree.tighten(model.cost)
        assert value <= tight <= tree.tighten(model.cost) <= best  # begins where that ended
        dearer = {pair: 2.0 * table + 1.0 for pair, table in model.pairs.items()}
        again, fresh = (
            tree.with_pairs(dearer).marginals(model.cost),
            split_tree(replace(model, pairs=dearer), 4).marginals(model.cost),
        )
        assert again[0] == fresh[0]
        np.testing.assert_array_equal(again[1], fresh[1])
        assert tree.exact == (not tree.parts) and (not tree.exact or value == best)
        split, gained, total = (
            split + (not tree.exact),
            gained + (value < tight),
            total + (value < best),
        )
    assert split > seeds / 3 and gained > seeds / 12
    assert total > seeds / 12


def test_large_integers_stay_exact() -> None:
    rng = np.random.default_rng(1)
    big = 2**54
    cost = tuple(big + rng.integers(0, 3, 3) for _ in range(5))
    tables = tuple(big + rng.integers(0, 3, (3, 3)) for _ in range(4))
    problem = Problem(cost, np.array([(i, i + 1) for i in range(4)]), np.arange(4), tables)
    assert evaluate(problem, solve(problem, "dp").choice).cost == brute_force(problem)


def test_a_budget_of_work_is_deterministic_and_anytime() -> None:
    problem = chain_problem(3, 6, 18, 0.3)
    first, again = (
        solve(problem, "dp", Budget(work=200_000)),
        solve(problem, "dp", Budget(work=200_000)),
    )
    assert first == again
    assert first.status == "feasible" and first.stopped == "work"
    assert first.bound is not None and evaluate(problem, first.choice).cost >= first.bound


@pytest.mark.parametrize("seeds", [40, pytest.param(120, marks=pytest.mark.slow)])
def test_a_limit_that_only_the_smallest_options_keep_takes_eliminations_alone(
    seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the smallest plan is found by. Problems whose smallest usage some choice has."""
    from planner.solvers import dp
    from planner.solvers.exact.elimination import compile_tree
    from planner.solvers.model import build

    def unwanted(*_: object) -> None:
        raise AssertionError("prices of memory, where no choice of options is left")

    monkeypatch.setattr(dp, "Dual", unwanted)
    checked = 0
    for seed in range(seeds):
        drawn = random_problem(seed)
        if not len(drawn.live_node):
            continue
        each = [np.zeros(len(c), np.int64) for c in drawn.cost]
        for i, use in zip(drawn.live_node.tolist(), drawn.live_usage, strict=True):
            each[i] = each[i] + use
        problem = replace(
            drawn,
            live_node=np.arange(len(each)),
            live_span=np.tile([[0, 1]], (len(each), 1)),
            live_usage=tuple(each),
            usage_limit=sum(int(u.min()) for u in each),
        )
        best, found = brute_force(problem), solve(problem, "dp")
        assert (found.status, found.choice and evaluate(problem, found.choice).cost) == (
            ("optimal", best) if best is not None else ("infeasible", ())
        ), seed
        tree = compile_tree(build(problem))
        assert tree is not None and found.work <= 2 * tree.entries
        checked += best is not None
    assert checked > seeds / 3


def test_options_that_no_choice_within_the_limit_has_are_known() -> None:
    from planner.solvers.dp import affordable
    from planner.solvers.model import build

    left_out = 0
    for seed in range(120):
        model = build(problem := random_problem(seed))
        if model.memory is None or (model.memory.extreme(False) > model.memory.limit).any():
            continue
        for kept, least in zip(affordable(model), least_with(problem), strict=True):
            out = np.setdiff1d(np.arange(len(least)), kept)
            assert not np.isfinite(least[out]).any()
            left_out += len(out)
    assert left_out > 20


def test_labels_grown_again_keep_what_a_narrow_beam_dropped() -> None:
    """Regrets count from the value under the prices, also after an earlier beam raised the
    bound."""
    from planner.solvers.dp import clock_of, solve_model
    from planner.solvers.model import build

    for seed, (problem, best) in enumerate(cases()):
        found = solve_model(build(problem), clock_of(Budget(), 2e9), caps=(1, 2, 3, 5, 1_000_000))
        assert (found.choice is None) == (best is None), seed
        if best is not None and found.choice is not None:
            assert evaluate(problem, found.choice).cost == best, seed


def test_labels_of_least_regret_alone_grow_as_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is beaten is so by a label of no more regret: looked at in parts or all at once, beams
    keep the same labels and prove the same."""
    from planner.solvers.dp import clock_of, solve_model
    from planner.solvers.exact import labels
    from planner.solvers.model import build

    parts = 0

    def counted(regret: np.ndarray, cap: int) -> list[np.ndarray]:
        nonlocal parts
        found = list(least_first(regret, cap))
        parts += len(found) > 1
        return found

    least_first, answers = labels._least_first, []
    monkeypatch.setattr(labels, "_least_first", counted)
    for first in (2, 1 << 40):
        monkeypatch.setattr(labels, "FIRST", first)
        found = [solve_model(build(p), clock_of(Budget(), 2e9), caps=(2, 5)) for p, _ in cases()]
        answers.append([(None if f.choice is None else tuple(f.choice), f.bound) for f in found])
        assert bool(parts) == (first == 2)
        parts = 0
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_recursive_is_near_the_optimum_where_memory_binds() -> None:
    """An encoder and a decoder on 8 x 8 devices in half of the memory: its alphabet has to have
    strategies of both sides of the limit."""
    from benchmarks.own_problems import problem_on, searcher
    from planner.machine.mesh_choices import two_axes

    search = searcher("t5-small")
    mesh = two_axes(search.request.topology, 8)
    free = problem_on(search, mesh)
    fastest = evaluate(free, solve(free, "dp").choice)
    limit = (sum(int(u.min()) for u in free.live_usage) + fastest.peak_usage) // 2
    tight = problem_on(search, mesh, limit)
    exact, quick = solve(tight, "dp"), solve(tight, "recursive")
    assert exact.status == "optimal"
    best = evaluate(tight, exact.choice).cost
    assert fastest.cost < best <= evaluate(tight, quick.choice).cost <= 1.01 * best
