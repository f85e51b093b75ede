"""Speculative decoding: the paper's closed forms, and what plans say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.cli import main
from planner.errors import PlanError
from planner.serving.draft import DRAFTED, break_even, draft_of, figures, gain, tokens
from planner.serving.result import Serving
from planner.serving.serve import serve
from tests.serving.test_continuous import Fixed

MODEL = "zoo:llama3-8b,layers=4,cache=1"


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("drafted", [1, 3, 7])
def test_tokens_and_gain_are_those_of_the_paper(acceptance: float, drafted: int) -> None:
    """Equation 1 and theorem 3.8: (1 - a^(g + 1)) / (1 - a), over g c + 1."""
    expected = (1 - acceptance ** (drafted + 1)) / (1 - acceptance)
    assert tokens(acceptance, drafted) == pytest.approx(expected)
    assert gain(acceptance, drafted, 0.1, 1.0) == pytest.approx(expected / (0.1 * drafted + 1))


@pytest.mark.parametrize("cost", [0.05, 0.2, 0.5])
def test_where_a_step_waits_for_memory_an_acceptance_above_the_cost_pays(cost: float) -> None:
    """Corollary 3.9: where a > c some g pays, by at least (1 + a) / (1 + c)."""
    assert min(break_even(g, cost, 1.0) or 1.0 for g in DRAFTED) == pytest.approx(cost)
    for acceptance in (cost + 0.05, 0.95):
        best = max(gain(acceptance, g, cost, 1.0) for g in DRAFTED)
        assert best >= (1 + acceptance) / (1 + cost) - 1e-12


def test_a_draft_that_never_pays_says_so() -> None:
    assert break_even(1, 0.5, 1.6) is None and break_even(1, 0.5, 1.4) is not None
    # A step of one row takes 0.01 s, each row more as long again: nothing is gained by passing two.
    made = figures(Fixed(0.0, 0.01, 0.0, 0.01), 4, 100, 0.001)
    assert made["break_even"] is None and made["verify"]["1"] == pytest.approx(2.0)


@pytest.mark.slow
def test_what_pays_for_one_sequence_pays_less_for_many() -> None:
    few, many = (
        serve(MODEL, prompt=512, generate=64, concurrency=n, devices=1, draft=0.1) for n in (1, 512)
    )
    a, b = few.service["draft"], many.service["draft"]
    assert a["sequences"] == 1 and b["sequences"] == 512
    assert 0.1 <= a["break_even"] < 0.2 and (b["break_even"] or 1) > a["break_even"] + 0.1
    assert a["gains"][-1]["gain"] > 2 and a["gains"][-1]["gain"] > b["gains"][-1]["gain"]
    assert "draft   pays from" in str(few)


def test_a_model_that_drafts_costs_what_its_step_takes(tmp_path: Path) -> None:
    made = serve(
        MODEL,
        prompt=512,
        generate="32..64",
        rate=20,
        devices=1,
        draft="zoo:llama3-8b,layers=1,cache=1",
    )
    draft = made.service["draft"]
    # A layer and the head beside four layers and the head.
    assert 0.3 < draft["cost"] < 0.8
    made.save(tmp_path / "p.json")
    assert Serving.load(tmp_path / "p.json").to_json() == made.to_json()
    data = json.loads((tmp_path / "p.json").read_text())
    data["service"]["draft"]["cost"] = "x"
    text = json.dumps(data).removeprefix('{"kind": "serving",')
    (tmp_path / "q.json").write_text('{\n  "kind": "serving",' + text)
    with pytest.raises(PlanError) as e:
        Serving.load(tmp_path / "q.json")
    assert e.value.code == "P057"


def test_what_is_no_draft_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert draft_of("0.05") == 0.05 and draft_of("zoo:x") == "zoo:x"
    for share in ("0", "1", "-0.1", "nan", "7"):
        with pytest.raises(PlanError) as e:
            draft_of(share)
        assert e.value.code == "P226"
    assert (
        main(["zoo:llama-tiny,cache=1", "--workload", "infer", "--devices", "2", "--draft", "0.1"])
        == 2
    )
    assert "error[P222]" in capsys.readouterr().err
