"""The benchmarks that hold prices against this machine: their scores, and one strategy priced, emitted and run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import one_device, rank_cpu
from benchmarks.rank_cpu import DEVICES, MODELS, PINS, Row, scores


def test_at_least_forty_strategies_of_three_models_are_ranked() -> None:
    assert len(MODELS) == len(PINS) == 3
    assert sum(len(set(pins)) for pins in PINS.values()) >= 40
    assert DEVICES == 8


def test_scores_of_known_orders() -> None:
    rows = [Row("a", str(k), k + 1.0, (10.0 * (k + 1),) * 3) for k in range(4)] + [Row("b", str(k), k + 1.0, (9.0 - k, 100.0, 1.0 - k / 10)) for k in range(4)]
    lines, worst = scores(rows)
    assert worst == pytest.approx(-1.0)
    assert [line.split()[:3] for line in lines[2:4]] == [["a", "4", "1.00"], ["b", "4", "-1.00"]]


def test_without_a_gpu_nothing_is_held_against_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(one_device, "platform", lambda: "cpu")
    assert one_device.main([]) == 0
    assert "no GPU" in capsys.readouterr().out


@pytest.mark.slow
def test_a_strategy_is_priced_emitted_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "gpt", ("zoo:gpt-tiny", 8))
    monkeypatch.setitem(PINS, "gpt", ("dp=8", "pp=8,zero=1"))  # two layers have no eight stages: left out
    (row,) = rank_cpu.run_model("gpt", "cpu", 3, tmp_path)
    assert row.pins == "dp=8"
    assert len(row.measured_s) == 3
    assert 0 < min(row.measured_s) < 60
    assert row.priced_s > 0
