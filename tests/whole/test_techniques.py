"""The benchmark of techniques: its page is that of its records, and rows that are wrong fail."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from benchmarks import techniques
from benchmarks.technique_rows import ALONE, DEVICES, MODELS, POOL, drawn, mixed
from benchmarks.techniques import Outcome, document, stored, verdict
from planner.pins.pins import parse_pins

PAGE = Path(__file__).parents[2] / "docs" / "techniques.md"
GOOD = Outcome(1e-6, 1e-6, 1e-6, 4, {}, 100, "data=8", "2026-01-01")


def test_the_page_is_that_of_the_records() -> None:
    assert PAGE.read_text() == document(stored(techniques.RECORDS)), (
        "python -m benchmarks.techniques --page docs/techniques.md"
    )


def test_rows_are_told_apart_and_fill_the_machine() -> None:
    rows = [*ALONE, *drawn(30, 0), *mixed(39, 1), *mixed(39, 2)]
    assert len({r.key for r in rows}) == len(rows) and list(drawn(30, 0)) == list(
        drawn(30, 0)
    ) != list(drawn(30, 1))
    assert {r.source for r in drawn(30, 0)} == set(MODELS) and {
        r.source for r in mixed(len(POOL), 1)
    } == {source for source, _ in POOL}
    for row in rows:
        for mesh in parse_pins(row.pins).mesh_choices(DEVICES):
            assert prod(mesh.values()) == DEVICES, row


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (replace(GOOD, loss=2e-4), "error 2.0e-04"),
        (replace(GOOD, gradients=2e-4), "error 2.0e-04"),
        (replace(GOOD, parameters=float("inf")), "error inf"),
        (replace(GOOD, judged=0), "error"),
        (replace(GOOD, differs={"all-reduce over data": (1, 2)}), "1 predicted, 2 compiled"),
        (replace(GOOD, peak_bytes=101), "memory 1.01x"),
        (Outcome(refused="ended with code 1"), "ended with code 1"),
    ],
)
def test_a_wrong_row_fails(outcome: Outcome, says: str) -> None:
    row = next(r for r in ALONE if r.less)
    other = next(
        r for r in ALONE if (r.what, r.source, r.batch) == (row.less, row.source, row.batch)
    )
    assert says in verdict(row, {row.key: outcome, other.key: GOOD}, ALONE)[0]
    assert verdict(row, {row.key: replace(GOOD, peak_bytes=99), other.key: GOOD}, ALONE) == (
        "",
        0.99,
    )


def test_rows_that_hold_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, file = list[str](), tmp_path / "records.jsonl"

    def run(row: techniques.Row) -> Outcome:
        ran.append(row.source)
        return GOOD if len(ran) > 1 else replace(GOOD, differs={"dot FLOPs": (1, 2)})

    monkeypatch.setattr(techniques, "run", run)
    arguments = ["--only", "three axes", "--drawn", "0", "--records", str(file)]
    assert techniques.main(arguments) == 1 and len(ran) == len({*ran})
    first = ran[0]
    ran[:] = [first]
    assert techniques.main(arguments) == 0 and ran == [first, first]
    assert (
        len([json.loads(line) for line in file.read_text().splitlines()]) == len(stored(file)) + 1
    )
