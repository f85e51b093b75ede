"""The benchmarks that hold prices against this machine: what they draw, their scores, and
strategies priced, emitted and run."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import chosen_cpu, one_device, rank_cpu
from benchmarks.chosen_cpu import CASES, CHOSEN, LEAST_HELD, PINNED, Case, interval
from benchmarks.rank_cpu import DEVICES, DRAWN, MODELS, Row, combinations, drawn, scores
from benchmarks.rank_cpu_run import instructions


def priced(step_time_s: float) -> Any:
    return SimpleNamespace(cost=SimpleNamespace(step_time_s=step_time_s))


def test_at_least_forty_strategies_of_three_models_are_ranked() -> None:
    assert len(MODELS) == 3
    assert DRAWN * len(MODELS) >= 40
    assert all(
        len(set(combinations(model))) == len(combinations(model)) >= 2 * DRAWN for model in MODELS
    )
    assert DEVICES == 8


def test_what_is_drawn_spans_the_prices_and_does_not_depend_on_the_order_of_the_pool() -> None:
    pool = {f"s{k}": priced(1.0 + k) for k in range(50)}
    found = drawn(pool, 10)
    prices = [s.cost.step_time_s for s in found.values()]
    assert [int(p - 1) // 5 for p in prices] == list(range(10))  # one of each tenth, cheapest first
    assert drawn(dict(reversed(pool.items())), 10) == found
    assert len(drawn({k: pool[k] for k in list(pool)[:3]}, 10)) == 3


@pytest.mark.slow
def test_scores_of_known_orders() -> None:
    rows = [Row("a", str(k), k + 1.0, (10.0 * (k + 1), 99.0), (1.0,)) for k in range(4)]
    rows = [Row(r.model, r.pins, r.priced_s, r.wall_s, (9.0 - k,)) for k, r in enumerate(rows)]
    lines, reached = scores(rows)
    assert [line.split()[:3] for line in lines[2:]] == [
        ["a", "4", "1.00"],
        ["mean", "4", "1.00"],
        ["pooled", "4", "1.00"],
    ]
    assert lines[2].split()[-1] == "-1.00"  # CPU time the other way round
    assert reached == pytest.approx(1.0)
    other = [Row("b", r.pins, r.priced_s, (1 / r.wall_s[0],), r.cpu_s) for r in rows]
    lines, reached = scores(rows + other)
    assert [line.split()[2] for line in lines[2:5]] == ["1.00", "-1.00", "0.00"]
    assert reached <= 0


def case_of(**wall_s: float) -> Case:
    """A case whose chosen plan takes a second a step in each of nine rounds, and the pinned ones
    what is given, all with a tenth more in every other round."""
    rounds = {
        name: tuple(t * (1.1 if k % 2 else 1.0) for k in range(9))
        for name, t in {CHOSEN: 1.0, **dict.fromkeys(PINNED, 2.0), **wall_s}.items()
    }
    return Case("m", 8, 8, "data=8", {}, rounds, rounds)


def test_a_case_holds_where_no_pinned_plan_is_faster() -> None:
    assert len(CASES) == 10 > LEAST_HELD
    case = case_of()
    assert case.holds and case.ratios == dict.fromkeys(PINNED, 0.5)
    slower = case_of(**{"ZeRO-3": 0.9})
    assert not slower.holds and not slower.undecided
    assert chosen_cpu.line(slower).startswith("MISSED m, 8 devices")
    assert slower.paired("ZeRO-3") == pytest.approx((1 / 0.9, 1 / 0.9, 1 / 0.9))


def test_a_case_that_misses_by_one_round_is_not_told_from_one_that_holds() -> None:
    wall = dict(case_of(**{"ZeRO-3": 1.01}).wall_s)
    wall["ZeRO-3"] = (*wall["ZeRO-3"][:4], 0.95, *wall["ZeRO-3"][5:])
    unsure = Case("m", 8, 8, "data=8", {}, wall, wall)
    assert not unsure.holds
    assert unsure.undecided
    assert chosen_cpu.line(unsure).startswith("unsure m, 8 devices")


def test_intervals_of_medians_hold_them_19_times_in_20() -> None:
    assert interval(range(9)) == (1, 4, 7)
    assert interval(range(5)) == (0, 2, 4)
    draw = random.Random(0)
    found = [interval([draw.gauss(0, 1) for _ in range(15)]) for _ in range(2000)]
    assert 0.95 <= sum(low <= 0 <= high for low, _, high in found) / 2000 <= 0.985


def test_programs_of_the_same_instructions_are_told_by_them() -> None:
    line = (
        "  %dot.1 = f32[8,8]{{1,0}} dot(%a, %b), lhs_contracting_dims={{{0}}},"
        ' rhs_contracting_dims={{0}}, metadata={{op_name="dot" stack_frame_id={1}}}'
    )
    here, there, other = (
        f'HloModule jit_step\n{line.format(*numbers)}\nFileNames\n3 "/tmp/{numbers}.py"'
        for numbers in ((1, 5), (1, 9), (0, 5))
    )
    assert instructions(here) == instructions(there) != instructions(other)


def test_without_a_gpu_nothing_is_held_against_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(one_device, "platform", lambda: "cpu")
    assert one_device.main([]) == 0
    assert "no GPU" in capsys.readouterr().out


@pytest.mark.slow
def test_strategies_are_priced_emitted_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "gpt", ("zoo:gpt-tiny", 8))
    monkeypatch.setattr(
        rank_cpu, "combinations", lambda model: ["dp=8", "pp=8,zero=1"]
    )  # two layers have no eight stages: no plan
    (row,) = rank_cpu.run_model("gpt", "cpu", 3, tmp_path)
    assert row.pins == "dp=8"
    assert len(row.wall_s) == len(row.cpu_s) == 3
    assert 0 < min(row.wall_s) < 60
    assert row.priced_s > 0


@pytest.mark.slow
def test_the_chosen_plan_is_run_beside_three_others(tmp_path: Path) -> None:
    case = chosen_cpu.run_case("zoo:mlp,layers=2", 2, 16, "cpu", 2, tmp_path)
    assert set(case.least_s) == set(case.priced_s) == {CHOSEN, *PINNED}
    assert all(0 < t < 60 for t in case.least_s.values())
    assert {len(times) for times in (*case.wall_s.values(), *case.cpu_s.values())} == {2}
