"""A few dozen published runs (facts with their source in each row) priced as the framework ran them: a change that makes estimates worse is seen here.

Rows of these sources set constants of the profiles, so the bounds are no claim about other runs; `benchmarks.published_runs` prints held-out figures.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.published_runs import main, outcomes, prepare_all
from benchmarks.published_scores import Outcome, choice, errors, fitting, kendall, order
from costmodels.runtime import Rates
from planner.runs.fit import Prepared

ROWS = Path(__file__).with_name("golden") / "published_runs.jsonl"
MOST = {"Hagemann": 0.075, "vTrain": 0.15, "mosaicml": 0.045}
"""Mean error of each source's rows."""


@pytest.fixture(scope="module")
def prepared() -> list[Prepared]:
    found, left = prepare_all([json.loads(line) for line in ROWS.read_text().splitlines()])
    assert not left
    return found


@pytest.mark.parametrize("source", MOST)
def test_estimates_of_published_runs_stay_as_good_as_they_are(prepared: list[Prepared], source: str) -> None:
    mine = [p for p in prepared if str(p.case.row["source"]).startswith(source) and p.case.measured_s]
    assert len(mine) >= 8
    assert errors(outcomes(mine, [p.step_s() for p in mine]))["mean"] <= MOST[source]


def test_runs_that_ran_out_of_memory_are_told(prepared: list[Prepared]) -> None:
    mine = [p for p in prepared if str(p.case.row["source"]).startswith("Hagemann")]
    found = outcomes(mine, [p.step_s() for p in mine])
    told = fitting(found)
    assert told["out_of_memory"] >= 10
    assert told["precision"] >= 0.91
    assert told["recall"] >= 0.91
    assert choice(found)["picks_out_of_memory"] == 0
    assert order(found)[0] >= 0.9


def test_slower_parts_make_a_step_longer(prepared: list[Prepared]) -> None:
    run = next(p for p in prepared if p.case.row["tp"] > 1 and p.case.row["pp"] > 1 and p.case.row["dp"] > 1 and p.case.measured_s)
    as_is = run.step_s(Rates())
    for slower in (Rates(matmul=0.8), Rates(memory=0.8), Rates(attention=0.8), Rates(inner=0.5), Rates(outer=0.2)):
        assert run.step_s(slower) > as_is


def test_scores_of_known_outcomes() -> None:
    def run(measured: float | None, priced: float, size: float) -> Outcome:
        return Outcome("g", measured, priced, size, 10.0)

    rows = [run(1.0, 1.1, 5.0), run(2.0, 1.8, 9.6), run(None, 0.5, 9.0), run(None, 0.4, 12.0)]
    assert errors(rows)["mean"] == pytest.approx(0.1)
    assert fitting(rows) == {"rows": 4, "out_of_memory": 2, "said": 1, "precision": 1.0, "recall": 0.5, "edge_rows": 1, "edge_right": 1.0}
    assert choice(rows)["picks_out_of_memory"] == 1
    assert kendall([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)
    assert kendall([1, 2, 3], [3, 2, 1]) == -1


def test_the_command_prints_what_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()][-2:]
    rows.append({**rows[0], "cp": 2})
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert main(["--runs", str(path), "--no-fit", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["left_out"] == {"context parallelism": 1}
    assert printed["sources"][0]["rows"] == 2
