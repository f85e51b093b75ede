"""The contest's JSON: round trips, malformed files, and solving from the file."""

from __future__ import annotations

import gzip
import io
import json
import random
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from benchmarks.iopddl_varied import varied
from planner.errors import PlanError
from planner.solvers.iopddl import problem_of, read_problem, solve_file, write_solution
from planner.solvers.problem import FORBIDDEN, Solution, evaluate
from tests.solvers.problems import brute_force

EXAMPLE: dict[str, Any] = {
    "problem": {
        "name": "example",
        "nodes": {
            "intervals": [[30, 70], [40, 70], [50, 120], [110, 140], [110, 150]],
            "costs": [[15], [55, 65], [25, 45, 35], [85, 75], [95]],
            "usages": [[10], [25, 25], [15, 20, 15], [10, 10], [15]],
        },
        "edges": {
            "nodes": [[0, 1], [0, 2], [1, 3], [2, 4], [3, 4]],
            "costs": [[30, 40], [50, 10, 40], [90, 10, 20, 80], [60, 20, 30], [70, 60]],
        },
        "usage_limit": 50,
    }
}


def test_the_contest_example(tmp_path: Path) -> None:
    path, out = tmp_path / "p.json.gz", tmp_path / "s.json"
    path.write_bytes(gzip.compress(json.dumps(EXAMPLE).encode()))
    for name in ("auto", "dp", "ilp"):
        text = io.StringIO()
        result = solve_file(path, 20, name, out, out=text)
        assert result.verdict is not None and result.verdict.cost == 445 and result.exit_code == 0
        assert result.solution.status == "optimal"
        assert "cost        445" in text.getvalue() and "gap         0.0000 %" in text.getvalue()
        choice = json.loads(out.read_text())
        assert evaluate(read_problem(path), choice).cost == 445
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.json.gz", "s.json"]


def test_without_numba_what_is_not_proven_says_what_would_be_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.json").write_text(json.dumps(EXAMPLE))
    cases: list[tuple[Literal["optimal", "feasible"], bool, bool]] = [
        ("feasible", False, True),
        ("feasible", True, False),
        ("optimal", False, False),
    ]
    for status, there, noted in cases:
        monkeypatch.setattr(
            "planner.solvers.solve",
            lambda *_, status=status: Solution((0, 0, 2, 1, 0), status, None, "auto"),
        )
        monkeypatch.setattr(
            "planner.solvers.neighbourhood.search.numba_is_there", lambda there=there: there
        )
        solve_file(tmp_path / "p.json", 20, out=io.StringIO())
        assert ("meshwright[fast]" in capsys.readouterr().err) == noted


def test_the_last_column_is_the_second_endpoint_and_intervals_are_half_open() -> None:
    problem = problem_of(EXAMPLE)
    assert problem.tables[2].tolist() == [[90, 10], [20, 80]]
    assert evaluate(problem, (0, 0, 2, 1, 0)).peak_usage == 50


@pytest.mark.parametrize("seed", range(12))
def test_an_instance_under_other_numbers_has_the_same_optimum(seed: int) -> None:
    again = {"problem": varied(EXAMPLE["problem"], random.Random(seed), 0.0, 0.0, 1.0)}
    assert again != EXAMPLE and brute_force(problem_of(again)) == 445
    other = varied(EXAMPLE["problem"], random.Random(seed), 0.5, 0.6, 0.9)
    assert other["usage_limit"] == 45 and len(other["edges"]["nodes"]) < 5
    assert sorted(map(sum, other["nodes"]["costs"])) != sorted(
        map(sum, EXAMPLE["problem"]["nodes"]["costs"])
    )


def test_self_edges_go_to_the_node() -> None:
    body = json.loads(json.dumps(EXAMPLE))
    body["problem"]["edges"] = {"nodes": [[1, 1]], "costs": [[1, 1000, 1000, FORBIDDEN]]}
    problem = problem_of(body)
    assert problem.cost[1].tolist() == [56, FORBIDDEN] and len(problem.edges) == 0


def test_nothing_feasible_is_a_finding(tmp_path: Path) -> None:
    body = json.loads(json.dumps(EXAMPLE))
    body["problem"]["usage_limit"] = 5
    path, out = tmp_path / "p.json", tmp_path / "s.json"
    path.write_text(json.dumps(body))
    text = io.StringIO()
    result = solve_file(path, 20, "auto", out, out=text)
    assert result.exit_code == 3 and result.solution.status == "infeasible" and not out.exists()
    assert "infeasible" in text.getvalue()


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda p: p.pop("nodes"), "nodes"),
        (lambda p: p["nodes"].pop("costs"), "costs"),
        (lambda p: p["nodes"]["costs"][1].clear(), "node 1"),
        (lambda p: p["nodes"]["costs"][1].append("x"), "node 1"),
        (lambda p: p["nodes"]["costs"][1].append(2**70), "node 1"),
        (lambda p: p["nodes"]["usages"][2].pop(), "node 2"),
        (lambda p: p["nodes"]["usages"][2].__setitem__(0, -4), "node 2"),
        (lambda p: p["nodes"]["intervals"].__setitem__(0, [1]), "node 0"),
        (lambda p: p["nodes"]["intervals"].pop(), "intervals"),
        (lambda p: p["edges"]["nodes"].__setitem__(0, [0, 9]), "edge 0"),
        (lambda p: p["edges"]["nodes"].__setitem__(0, [0, 1, 2]), "edge 0"),
        (lambda p: p["edges"]["costs"][3].pop(), "edge 3"),
        (lambda p: p["edges"]["costs"].pop(), "edge tables"),
        (lambda p: p["edges"]["costs"].__setitem__(0, [[30], [40]]), "edge 0"),
        (lambda p: p.__setitem__("usage_limit", "much"), "usage_limit"),
        (lambda p: p.__setitem__("usage_limit", 1.5), "usage_limit"),
    ],
)
def test_malformed_files_get_an_error(tmp_path: Path, edit, says: str) -> None:  # type: ignore[no-untyped-def]
    body = json.loads(json.dumps(EXAMPLE))
    edit(body["problem"])
    path = tmp_path / "p.json"
    path.write_text(json.dumps(body))
    with pytest.raises(PlanError) as caught:
        read_problem(path)
    assert caught.value.code == "S003" and says in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"{", b"[1, 2]", b"\x1f\x8bnope", b"null", b"[" * 100_000])
def test_no_traceback_for_rubbish(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(data)
    with pytest.raises(PlanError):
        read_problem(path)
    with pytest.raises(PlanError):
        read_problem(tmp_path / "absent.json")


def test_bad_options(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(EXAMPLE))
    with pytest.raises(PlanError, match="did you mean 'dp'"):
        solve_file(path, 1, "dq")
    with pytest.raises(PlanError, match="positive"):
        solve_file(path, 0)
    with pytest.raises(PlanError):
        write_solution((1, 2), tmp_path / "no" / "such" / "folder.json")


def test_forbidden_entries_in_a_solution_are_a_failure() -> None:
    body = json.loads(json.dumps(EXAMPLE))
    body["problem"]["edges"]["costs"][0] = [FORBIDDEN, 40]
    problem = problem_of(body)
    verdict = evaluate(problem, np.zeros(5, np.int64))
    assert verdict.forbidden == 1 and not verdict.feasible


INSTANCES = Path(__file__).parents[3] / "shared" / "data" / "iopddl"


@pytest.mark.slow
@pytest.mark.skipif(not INSTANCES.exists(), reason="contest instances are not here")
@pytest.mark.parametrize(
    ("name", "cost"),
    [("M", 49916828783), ("N", 197740450806), ("S", 1511272720), ("U", 2141786579)],
)
def test_the_kept_records_are_what_they_claim(name: str, cost: int) -> None:
    records = Path(__file__).parents[2] / "benchmarks" / "records"
    choice = json.loads(gzip.decompress((records / f"{name}.solution.json.gz").read_bytes()))
    verdict = evaluate(read_problem(INSTANCES / f"{name}.json.gz"), choice)
    assert verdict.feasible and verdict.cost == cost
