"""plan check: which cause it was, exit codes, formats, budgets, and that the baseline is never
touched."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import planner
from planner.cache.folder import Cache
from planner.cli import main
from planner.errors import PlanError
from planner.report.check import FORMATS, markdown
from planner.strategy.strategy import Strategy
from planner.whatif.gate import Limit, Report, Row, check, read_budget, tolerances
from planner.whatif.reprice import manual

SPEC = "zoo:gpt-tiny,hidden=512,seq=128,layers=1"
GROWN = SPEC.replace("layers=1", "layers=2")


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("check") / "base.plan.json"
    planner.plan(SPEC, devices=8, batch=16).save(path)
    return path


@pytest.fixture
def strategy(baseline: Path) -> Strategy:
    return Strategy.load(baseline)


def test_json_has_bytes_and_flops_whole(
    strategy: Strategy, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the table prints them, and as the baseline has them."""
    assert main(["check", SPEC, "--against", str(baseline), "--format", "json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    for what, key in (
        ("memory", "memory_per_device_bytes"),
        ("FLOPs per device", "flops_per_device"),
    ):
        row = figures[what]
        assert row["repriced"] == row["best"] == row["recorded"] == strategy.costs[key]


def test_nothing_changed(strategy: Strategy) -> None:
    report = check(strategy, SPEC)
    assert report.ok and report.causes == () and report.verdict == "nothing changed"
    assert all(
        r.change(r.repriced) in (0.0, None) and r.change(r.best) in (0.0, None) for r in report.rows
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices", [pytest.param(8, marks=pytest.mark.slow), 16], ids=["a node", "two nodes"]
)
def test_what_was_planned_before_is_not_searched_again(devices: int, tmp_path: Path) -> None:
    """Neither after the plan itself, on the same machine as a file has it, nor by the next check;
    the answer is the same."""
    made, known = (
        planner.plan(SPEC, devices=devices, batch=16, pins="tp=2", cache=tmp_path),
        Cache(tmp_path),
    )
    path = saved(made)
    alone = check(Strategy.load(path), SPEC)
    assert check(Strategy.load(path), SPEC, cache=known) == alone
    assert (known.hits, known.lookups) == (1, 2), "without its pins it was not planned before"
    again = Cache(tmp_path)
    assert check(Strategy.load(path), SPEC, cache=again) == alone and alone.pin_cost is not None
    assert again.hits == again.lookups == 2


def test_a_grown_model_fails_and_is_named(strategy: Strategy) -> None:
    report = check(strategy, GROWN)
    assert not report.ok and not report.cured
    assert any(c.startswith("the model changed: +") for c in report.causes)
    assert {r.what for r in report.regressions} == {"step", "memory"}
    assert check(strategy, GROWN, tolerance={"step": 9.0, "memory": 9.0}).ok


def test_a_changed_cost_model_is_told_from_a_changed_model(strategy: Strategy) -> None:
    cheaper = {
        **strategy.costs,
        "step_time_s": strategy.costs["step_time_s"] / 1.5,
        "compute_time_s": strategy.costs["compute_time_s"] / 2,
    }
    report = check(replace(strategy, costs=cheaper), SPEC)
    assert (
        not report.ok
        and any("cost model changed" in c for c in report.causes)
        and not any("the model changed" in c for c in report.causes)
    )


@pytest.mark.slow
def test_changed_links_are_told_from_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    import planner.whatif.reprice as reprice

    made = Strategy.load(
        saved(planner.plan(SPEC, devices=16, batch=16, mode="data-parallel", baselines=False))
    )
    now, moved = reprice.machine_now(made)
    assert moved == "" and now.devices == 16
    slower = reprice.Topology(
        now.device, (now.levels[0], replace(now.levels[1], bandwidth_bytes_per_s=1e9))
    )
    monkeypatch.setattr(reprice, "for_devices", lambda name, n: slower)
    report = check(made, SPEC)
    assert not report.ok and any("machine's description changed" in c for c in report.causes)


def saved(s: Strategy) -> Path:
    import tempfile

    path = Path(tempfile.mkdtemp()) / "s.json"
    s.save(path)
    return path


def test_a_stale_plan_is_cured_by_planning_again(strategy: Strategy) -> None:
    """The recorded decisions are worse than before, the best plan is not: planning again cures
    it."""
    whole = {n: {**row, "split": {}} for n, row in strategy.nodes.items()}
    report = check(replace(strategy, nodes=whole), SPEC)
    assert not report.ok and report.cured and "planning again cures it" in report.verdict
    assert any(c.startswith("a better plan exists: -") for c in report.causes)


def test_the_best_plan_now_keeps_the_pins_and_says_what_they_cost() -> None:
    """A pinned plan is no stale one; without its pins, and under another objective, other plans
    would be best."""
    pinned = Strategy.load(
        saved(planner.plan(SPEC, devices=8, batch=16, pins="tp=4,zero=1,micro=2", baselines=False))
    )
    report = check(pinned, SPEC)
    assert report.ok and report.verdict == "nothing changed" and report.pin_cost is not None
    free = planner.plan(SPEC, devices=8, batch=16, baselines=False).costs
    assert report.pin_cost.pins == (
        "tensor = 4",
        "microbatches = 2",
        "zero_stage = 1",
    ) and report.pin_cost.free_step_s == pytest.approx(free["step_time_s"], rel=1e-5)
    assert (
        report.pin_cost.cost_s
        == pytest.approx(pinned.costs["step_time_s"] - free["step_time_s"], rel=1e-4)
        and report.pin_cost.cost_s > 0
    )
    for name, render in FORMATS.items():
        assert name in ("junit", "badge") or "tensor = 4" in render(report)
    assert json.loads(FORMATS["json"](report))["pins"]["cost_s"] == pytest.approx(
        report.pin_cost.cost_s, rel=1e-5
    )
    lost = replace(
        pinned,
        provenance={**pinned.provenance, "pins": {"*.no_such_layer": {"split": {"n": ["model"]}}}},
    )
    with pytest.raises(PlanError, match="P023"):
        check(lost, SPEC)


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("asked", [{"mode": "data-parallel"}, {"objective": "memory"}])
def test_the_best_plan_now_is_searched_for_as_the_baseline_was(asked: dict[str, str]) -> None:
    made = Strategy.load(saved(planner.plan(SPEC, devices=8, batch=16, baselines=False, **asked)))  # type: ignore[arg-type]
    report = check(made, SPEC)
    assert report.verdict == "nothing changed" and (report.pin_cost is not None) == (
        "mode" in asked
    )


def test_decisions_that_do_not_carry_over_are_a_reason_not_an_error(strategy: Strategy) -> None:
    report = check(strategy, "zoo:mlp-tiny")
    assert "repriced" in report.reasons and all(r.repriced is None for r in report.rows)
    assert "re-priced" in FORMATS["text"](report)


def test_nothing_fits_any_more_is_a_finding(strategy: Strategy) -> None:
    tight = replace(strategy, costs={**strategy.costs, "memory_limit_bytes": 200_000})
    report = check(tight, SPEC)
    assert not report.ok and "best" in report.reasons and report.verdict.startswith("no plan fits")
    assert (
        report.causes[-1].startswith("the recorded plan fits no more: ")
        and report.causes[-1] in report.verdict
    )
    for name, render in FORMATS.items():
        assert "no plan" in render(report) or name == "json"


def test_the_baseline_is_never_rewritten_and_exit_codes(
    baseline: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))  # the grown model is checked twice
    before = baseline.read_bytes(), baseline.stat().st_mtime_ns
    assert main(["check", SPEC, "--against", str(baseline)]) == 0
    assert "ok: nothing changed" in capsys.readouterr().out
    assert main(["check", GROWN, "--against", str(baseline)]) == 1
    assert "FAILED" in capsys.readouterr().out
    assert (
        main(["check", GROWN, "--against", str(baseline), "--tolerance", "step=900%,memory=900%"])
        == 0
    )
    assert main(["check", "zoo:nothing", "--against", str(baseline)]) == 2
    strategy = Strategy.load(baseline)
    none = saved(replace(strategy, costs={**strategy.costs, "memory_limit_bytes": 20_000}))
    assert main(["check", SPEC, "--against", str(none)]) == 3
    assert "plan with more devices" in capsys.readouterr().out
    assert (baseline.read_bytes(), baseline.stat().st_mtime_ns) == before


ROWS = (
    Row("step", "s", 1.0, 1.5, 1.2, 0.02),
    Row("memory", "B", 1e9, None, 1e9, 0.05),
    Row("compute", "s", 0.0, None, 0.0, None),
)
FAILED = Report(
    "a|<b>\nmodel",
    "plans/x.json",
    ROWS,
    ("the model changed: +3 nodes, 50 % more",),
    (Limit("memory", "B", 2.0, 1.0), Limit("devices", "", 8, 8)),
)


def test_formats_escape_and_parse() -> None:
    data = json.loads(FORMATS["json"](FAILED))
    assert (
        data["ok"] is False
        and data["figures"]["step"]["best_change"] == pytest.approx(0.2)
        and data["figures"]["memory"]["repriced"] is None
    )
    root = ET.fromstring(FORMATS["junit"](FAILED))
    assert root[0].attrib["failures"] == "2" and [
        c.attrib["name"] for c in root.iter("testcase") if c.find("failure") is not None
    ] == ["step", "budget memory"]
    lines = FORMATS["github"](FAILED).splitlines()
    assert (
        len(lines) == 2
        and all(line.startswith("::error file=plans/x.json,title=plan check%3A ") for line in lines)
        and "50 %25 more" in lines[0]
    )
    text = markdown(FAILED)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert (
        len(rows) == 2 + len(ROWS)
        and len({line.count(" | ") for line in rows if "---" not in line}) == 1
        and "&lt;b>" in text
    )


@given(st.text(), st.text(), st.lists(st.text(), max_size=2))
def test_annotations_are_one_command_a_line_whatever_names_hold(
    model: str, baseline: str, causes: list[str]
) -> None:
    """As the runner reads them: a line is a command; properties end at the first `::` and are told
    apart by commas; %25, %0A, %0D, %3A and %2C stand for what they escape."""
    report = replace(FAILED, model=model, baseline=baseline, causes=tuple(causes))
    text = FORMATS["github"](report)
    lines = text.split("\n")
    assert len(lines) == 2 and "\r" not in text
    for line in lines:
        kind, properties, message = re.fullmatch(r"::(\w+) (.*?)::(.*)", line, re.S).groups()  # type: ignore[union-attr]
        table = dict(p.split("=", 1) for p in properties.split(","))
        assert kind == "error" and table.keys() == {"file", "title"}
        for escaped, plain in (
            ("%2C", ","),
            ("%3A", ":"),
            ("%0A", "\n"),
            ("%0D", "\r"),
            ("%25", "%"),
        ):
            table = {k: v.replace(escaped, plain) for k, v in table.items()}
            message = message.replace(escaped, plain) if escaped not in ("%2C", "%3A") else message
        assert (
            table["file"] == baseline
            and table["title"].startswith("plan check: ")
            and message.startswith(f"{model}: ")
        )


@given(st.text(), st.lists(st.text(), max_size=2))
def test_junit_is_xml_of_the_shape_that_readers_know(model: str, causes: list[str]) -> None:
    """testsuites > testsuite(name, tests, failures, errors) > testcase(name, classname) >
    failure(type, message), counted right; as Jenkins' schema has it."""
    root = ET.fromstring(FORMATS["junit"](replace(FAILED, model=model, causes=tuple(causes))))
    assert root.tag == "testsuites" and [x.tag for x in root] == ["testsuite"]
    (suite,) = root
    assert set(suite.attrib) == {"name", "tests", "failures", "errors"} and {
        c.tag for c in suite
    } == {"testcase"}
    assert (
        int(suite.attrib["tests"]) == len(suite) == 5
        and int(suite.attrib["failures"]) == len(suite.findall("testcase/failure")) == 2
    )
    assert all(set(c.attrib) == {"name", "classname"} for c in suite) and all(
        set(f.attrib) == {"type", "message"} for f in suite.iter("failure")
    )


def test_formats_all_name_the_verdict() -> None:
    fine = replace(FAILED, rows=ROWS[1:], limits=(), causes=())
    for name, render in FORMATS.items():
        assert "nothing changed" in render(fine) or name in ("junit", "badge")
        assert "step" in render(FAILED)


def test_a_badge_says_the_figures_or_the_first_finding() -> None:
    fine = replace(FAILED, rows=ROWS[1:], limits=(), causes=())
    over = replace(fine, limits=FAILED.limits)
    lost = replace(FAILED, reasons={"best": "no plan fits"})
    told = [json.loads(FORMATS["badge"](r)) for r in (fine, FAILED, over, lost)]
    assert [(t["message"], t["color"]) for t in told] == [
        ("953.7 MiB", "brightgreen"),
        ("step +50.0 %", "red"),
        ("memory over budget", "red"),
        ("no plan fits", "red"),
    ]


@pytest.mark.parametrize("text", ["page=x", "markdown", "=x"])
def test_writes_without_a_known_format_or_a_file_are_refused(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", SPEC, "--against", "none.json", "--write", text]) == 2
    assert "error[P018]: --write" in capsys.readouterr().err


@given(st.floats(0, 50), st.floats(0, 50))
def test_tolerances_read_back(step: float, memory: float) -> None:
    found = tolerances(f"step={step:.6f}%, memory={memory:.6f}")
    assert found["step"] == pytest.approx(step / 100, abs=1e-7) and found[
        "memory"
    ] == pytest.approx(memory, abs=1e-5)


@pytest.mark.parametrize(
    "text", ["step", "step=", "step=x%", "speed=2%", "step=-1%", "step=nan", "=2%"]
)
def test_bad_tolerances(text: str) -> None:
    with pytest.raises(PlanError, match="P064"):
        tolerances(text)


def test_budgets(tmp_path: Path, strategy: Strategy) -> None:
    path = tmp_path / "budget.toml"
    path.write_text(f'["zoo:*"]\nmemory = "1 kB"\ndevices = 64\n["{SPEC}"]\nstep_time = "1 s"\n')
    assert read_budget(path, SPEC) == {"memory": 1000.0, "devices": 64.0, "step_time": 1.0}
    report = check(strategy, SPEC, budget=path)
    assert (
        not report.ok
        and [x.ok for x in report.limits] == [False, True, True]
        and "memory over its budget" in report.verdict
    )
    assert "raise it in its file" in FORMATS["text"](report) and "if this is meant" not in FORMATS[
        "text"
    ](report)
    for bad in (
        "x = 1",
        '["zoo:*"]\nspeed = 1',
        '["zoo:*"]\nmemory = 5',
        '["zoo:*"]\ndevices = 0',
        "[[",
        '["other"]\ndevices = 1',
    ):
        path.write_text(bad)
        with pytest.raises(PlanError, match="P065"):
            read_budget(path, SPEC)
    with pytest.raises(PlanError, match="P065"):
        read_budget(tmp_path / "none.toml", SPEC)


def test_manual_prices_a_plan_as_the_search_did(strategy: Strategy) -> None:
    again = manual(strategy, SPEC)
    assert again.costs["step_time_s"] == pytest.approx(strategy.costs["step_time_s"], rel=1e-5)
    assert {n: r["split"] for n, r in again.nodes.items()} == {
        n: r["split"] for n, r in strategy.nodes.items()
    }
    assert again.solver["name"] == "manual" and again.solver["gap"] is None


def test_manual_refuses_what_cannot_be(strategy: Strategy) -> None:
    node = next(n for n in strategy.nodes if n.endswith("c_fc/MatMul"))

    def edited(**row: object) -> Strategy:
        return replace(strategy, nodes={**strategy.nodes, node: {**strategy.nodes[node], **row}})

    axis = strategy.mesh[0]["name"]
    cases: list[tuple[str, Strategy]] = [
        ("P061", edited(split={"nothing": [axis]})),
        ("P061", edited(split={"n": ["no-axis"]})),
        ("P061", edited(split={"n": [axis], "k": [axis]})),
        ("P060", replace(strategy, mesh=({"name": "data", "size": 4, "levels": []},))),
        ("P060", replace(strategy, techniques={**strategy.techniques, "zero_stage": 7})),
        ("P060", replace(strategy, techniques={**strategy.techniques, "recompute": "all"})),
        ("P060", replace(strategy, techniques={**strategy.techniques, "zero_group": ["nowhere"]})),
        ("P035", replace(strategy, techniques={**strategy.techniques, "microbatches": 5})),
        ("P062", replace(strategy, nodes={**strategy.nodes, "ghost": strategy.nodes[node]})),
        ("P051", replace(strategy, nodes={n: r for n, r in strategy.nodes.items() if n != node})),
        ("P051", replace(strategy, model={**strategy.model, "sha256": "0"})),
        ("P021", replace(strategy, costs={**strategy.costs, "memory_limit_bytes": 1000})),
    ]
    for code, bad in cases:
        with pytest.raises(PlanError) as e:
            manual(bad, SPEC)
        assert e.value.code == code, str(e.value)
    other = manual(edited(split={}), SPEC)
    assert (
        other.nodes[node]["split"] == {}
        and other.costs["step_time_s"] != strategy.costs["step_time_s"]
    )


@pytest.mark.parametrize("table", ["zoo:llama-tiny", "llama-tiny", "llama-*", "*"])
def test_a_budget_s_table_is_named_like_the_model(table: str, tmp_path: Path) -> None:
    path = tmp_path / "b.toml"
    path.write_text(f'["{table}"]\nmemory = "1 GiB"\n')
    assert read_budget(path, "zoo:llama-tiny") == {"memory": 2**30}
    if table == "*":
        return
    with pytest.raises(PlanError, match="has tables for") as e:
        read_budget(path, "model.onnx")
    assert e.value.code == "P065" and "did you mean" not in str(e.value)
