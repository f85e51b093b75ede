"""What a step took, read from logs, histories of W&B and overviews of xprof."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.support.measured_steps import COLUMNS, step_seconds

STEPS = [90.0, 2.0, 0.5, 0.4, 0.6, 0.5, 7.0]
"""Compiling, caches, steps, a checkpoint; half a second in the middle."""


def read(tmp_path: Path, name: str, content: Any) -> float:
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return step_seconds(path)


def csv_of(*columns: tuple[str, list[Any]]) -> str:
    rows = [[name for name, _ in columns], *zip(*(values for _, values in columns), strict=True)]
    return "".join(",".join(f'"{cell}"' for cell in row) + "\n" for row in rows)


@pytest.mark.parametrize("column", COLUMNS)
def test_a_column_of_step_times_is_found_under_every_launchers_name(
    column: str, tmp_path: Path
) -> None:
    rows = [{"_step": i, "loss": 3.0, column: s} for i, s in enumerate(STEPS)]
    assert read(tmp_path, "a.jsonl", "".join(json.dumps(r) + "\n" for r in rows)) == 0.5
    assert read(tmp_path, "a.json", rows) == 0.5
    count = list(range(len(STEPS)))
    assert read(tmp_path, "a.csv", csv_of(("_step", count), (column, STEPS))) == 0.5
    chart = csv_of(
        ("Step", count),
        (f"sunny-run-1 - {column}", STEPS),
        (f"sunny-run-1 - {column}__MIN", STEPS),
        (f"sunny-run-1 - {column}__MAX", STEPS),
    )
    assert read(tmp_path, "chart.csv", chart) == 0.5


def test_without_such_a_column_the_clock_of_the_rows_counts(tmp_path: Path) -> None:
    """Every tenth step logged; rows of an evaluation between them have no step of training."""
    at, rows = 100.0, []
    for i, seconds in enumerate(STEPS):
        at += 10 * seconds
        rows.append({"_step": 2 * i, "train/global_step": 10 * (i + 1), "_runtime": at})
        rows.append({"_step": 2 * i + 1, "_runtime": at + 0.1, "eval/loss": 1.0})
    assert read(tmp_path, "h.json", rows) == pytest.approx(0.5)
    plain = [
        {"_step": i, "_timestamp": 1.7e9 + sum(STEPS[: i + 1]), "_runtime": None} for i in range(7)
    ]
    assert read(tmp_path, "h.jsonl", "\n".join(map(json.dumps, plain))) == pytest.approx(0.5)


def test_an_overview_of_xprof_has_an_average(tmp_path: Path) -> None:
    tables = [
        {"cols": [], "rows": [], "p": {"device_idle_time_percent": "3.1%"}},
        {"cols": [], "rows": [{"c": [{"v": "1"}]}], "p": {"steptime_ms_average": "512.5"}},
        "what another tool wrote",
    ]
    assert read(tmp_path, "overview_page.json", tables) == pytest.approx(0.5125)
    assert read(tmp_path, "one.json", {"p": {"steptime_ms_average": "9.3 ms"}}) == pytest.approx(
        0.0093
    )


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", csv_of(("loss", [1.0] * 9)), "it has 0 steps"),
        ("a.csv", "", "it has 0 steps"),
        ("a.json", [{"seconds": 1.0}] * 2, "it has 2 steps; the first 2"),
        ("a.json", [{"seconds": True}, {"seconds": "nan"}, {"seconds": -1}], "it has 0 steps"),
        ("a.json", 7, "it has 0 steps"),
        ("a.jsonl", "[1]\n{}\n", "is no row"),
        ("a.json", [{"p": {"steptime_ms_average": "0.0"}}], "has no step"),
        ("a.json", "[" * 100_000, "nested too deep|Expecting"),
        (
            "a.csv",
            csv_of(("a - seconds", STEPS), ("b - seconds", STEPS)),
            "it has 2 runs: a - seconds, b - seconds",
        ),
    ],
)
def test_what_has_no_steps_is_told(name: str, content: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        read(tmp_path, name, content)
    with pytest.raises(OSError):
        step_seconds(tmp_path / "none.json")


def test_hostile_rows_are_told_or_left_out(tmp_path: Path) -> None:
    lines = ['{"seconds": 2.0}'] * 4
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"seconds": 1' + "0" * 400 + "}"]))
    assert step_seconds(tmp_path / "a.jsonl") == 2.0
    (tmp_path / "b.jsonl").write_text("\n".join([*lines, "[" * 100_000]))
    with pytest.raises(ValueError, match="nested too deep"):
        step_seconds(tmp_path / "b.jsonl")


@given(st.lists(st.floats(0.01, 100), min_size=3, max_size=20))
def test_clocks_and_columns_agree(seconds: list[float]) -> None:
    import tempfile

    at, rows = 0.0, []
    for i, s in enumerate(seconds):
        at += s
        rows.append({"_step": i, "_runtime": at, "seconds": s})
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "a.json"
        path.write_text(json.dumps(rows))
        logged = step_seconds(path)
        path.write_text(json.dumps([{k: v for k, v in r.items() if k != "seconds"} for r in rows]))
        assert step_seconds(path) == pytest.approx(logged, rel=1e-6)
