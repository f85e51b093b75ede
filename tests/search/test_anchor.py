"""`--calibrate-with`: prices scaled to a measured step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import planner
from costmodels.runtimes import load_runtime
from planner.cli import main
from planner.errors import PlanError
from planner.search.anchor import Anchor, assumed, read_anchor
from planner.strategy.read import load
from planner.strategy.strategy import Strategy
from planner.verify.timing import pricer_of
from planner.whatif.reprice import own_model, reprice

SPEC = "zoo:llama-tiny"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Strategy]:
    """A plan of one node, and its file."""
    path = tmp_path_factory.mktemp("anchor") / "node.plan.json"
    strategy = planner.plan(SPEC, devices=8, batch=64, baselines=False)
    strategy.save(path)
    return path, strategy


def step_of(strategy: Strategy) -> float:
    return float(strategy.costs["step_time_s"])


@pytest.mark.slow
def test_a_plan_that_was_measured_is_priced_as_measured(node: tuple[Path, Strategy]) -> None:
    """The same plan again takes what was measured: all of it is rates but launches and latencies."""
    path, before = node
    slow = 1.5 * step_of(before)
    after = planner.plan(
        "zoo:llama3-8b,layers=2",
        devices=8,
        batch=64,
        baselines=False,
        calibrate_with=f"{path}={slow:.6g}s",
    )
    plain = planner.plan("zoo:llama3-8b,layers=2", devices=8, batch=64, baselines=False)
    assert step_of(after) == pytest.approx(1.5 * step_of(plain), rel=0.01)


@pytest.mark.slow
def test_the_range_is_narrow_for_the_same_model(node: tuple[Path, Strategy]) -> None:
    path, before = node
    asked = f"{path}={1.2 * step_of(before):.6g}s"
    same = planner.plan(SPEC, devices=16, batch=64, baselines=False, calibrate_with=asked)
    other = planner.plan(
        "zoo:gpt-tiny", devices=16, batch=64, baselines=False, calibrate_with=asked
    )
    widths = [
        s.costs["step_time_range_s"][1] / s.costs["step_time_range_s"][0] for s in (same, other)
    ]
    assert widths[0] < 1.12 < widths[1]
    assert any(f"{path} was priced" in a and "wide" not in a for a in same.assumptions)
    assert any("the range is as wide as without" in a for a in other.assumptions)


def test_the_file_keeps_it(node: tuple[Path, Strategy], tmp_path: Path) -> None:
    """Later commands price the plan as it was."""
    path, before = node
    made = planner.plan(
        SPEC,
        devices=16,
        batch=64,
        baselines=False,
        calibrate_with=f"{path}={1.3 * step_of(before):.6g}s",
    )
    made.save(tmp_path / "p.json")
    read = Strategy.load(tmp_path / "p.json")
    pricer = pricer_of(read)
    assert pricer.rates.matmul == pytest.approx(1 / 1.3, rel=1e-3)
    assert pricer.rates.stragglers == load_runtime("jax-shard_map").per_device["gpu"].stragglers
    again = reprice(read, own_model(read, SPEC), pricer.topology)
    assert again.cost.step_time_s == pytest.approx(step_of(made))
    assert again.table["step_time_range_s"] == pytest.approx(made.costs["step_time_range_s"])


def test_a_log_of_the_program_is_a_step(node: tuple[Path, Strategy], tmp_path: Path) -> None:
    path, before = node
    log = tmp_path / "log.jsonl"
    seconds = [90.0, 2.0, 0.5, 0.4, 0.6, 0.5, 7.0]
    log.write_text(
        "".join(json.dumps({"step": i, "seconds": s}) + "\n" for i, s in enumerate(seconds))
    )
    scale = step_of(before) / 0.5
    log.write_text(
        "".join(json.dumps({"step": i, "seconds": s * scale}) + "\n" for i, s in enumerate(seconds))
    )
    assert read_anchor(f"{path}={log}").slower == pytest.approx(1.0)
    overview = tmp_path / "overview_page.json"
    overview.write_text(json.dumps([{"p": {"steptime_ms_average": f"{2e3 * step_of(before)}"}}]))
    assert read_anchor(f"{path}={overview}").slower == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("plan.json", "is not PLAN=STEP"),
        ("{}=", "is not PLAN=STEP"),
        ("{}=soon", "is no time"),
        ("{}=9000s", "is no step of it"),
        ("{}=none.jsonl", "cannot be read"),
        ("{}=short.jsonl", "has 1 steps"),
        ("{}=bad.jsonl", "cannot be read"),
    ],
)
def test_what_is_no_anchor_is_an_error(
    node: tuple[Path, Strategy],
    value: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.jsonl").write_text('{"seconds": 1.0}\n')
    (tmp_path / "bad.jsonl").write_text('[1, 2]\n{"seconds": "x"}\n')
    with pytest.raises(PlanError, match="--calibrate-with") as found:
        read_anchor(value.format(node[0]))
    assert found.value.code == "P225"
    assert said in str(found.value)


def test_an_anchor_is_of_the_same_device_and_no_anchored_plan(
    node: tuple[Path, Strategy], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, before = node
    with pytest.raises(PlanError, match="on h100-sxm under"):
        planner.plan(SPEC, devices=8, hardware="a100", batch=64, calibrate_with=f"{path}=1ms")
    twice = tmp_path / "twice.json"
    step = f"{step_of(before):.6g}s"
    planner.plan(SPEC, devices=8, batch=64, baselines=False, calibrate_with=f"{path}={step}").save(
        twice
    )
    with pytest.raises(PlanError, match="with an anchor itself"):
        read_anchor(f"{twice}={step}")
    assert (
        main(
            [
                SPEC,
                "--devices",
                "8",
                "--workload",
                "infer",
                "--calibrate-with",
                f"{path}={step}",
                "--prompt",
                "8",
                "--generate",
                "4",
                "--concurrency",
                "4",
            ]
        )
        == 2
    )
    assert "--calibrate-with" in capsys.readouterr().err


def test_what_is_assumed() -> None:
    anchor = Anchor("node.json", "llama", "h100-sxm", 8, "jax-shard_map", 2.0, 3.0)
    assert assumed(anchor, "llama") == (
        "prices x 1.5: node.json was priced 2 s a step on 8 devices and took 3 s"
    )
    assert "it is of llama" in assumed(anchor, "gpt")


def test_rates_of_a_file_are_checked(node: tuple[Path, Strategy], tmp_path: Path) -> None:
    path = node[0]
    data = json.loads(path.read_text())
    for rates in ({"jax-shard_map": {"matmul": 0.0}}, {"jax-shard_map": {"speed": 1.0}}):
        data["topology"]["anchor"] = {"model": "m", "rates": rates}
        (tmp_path / "odd.json").write_text(json.dumps(data))
        with pytest.raises(PlanError, match="topology.anchor"):
            load(tmp_path / "odd.json")
