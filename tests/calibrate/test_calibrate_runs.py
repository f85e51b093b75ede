"""`plan calibrate --runs` on synthetic clusters: the shipped model with hidden rates and noise, so
that the truth is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from costmodels.hardware.device import load_device
from costmodels.runtimes import Rates, load_runtime
from planner.calibrate.learn import learn, prepared, read
from planner.calibrate.runs.fit import WIDTHS, Prepared
from planner.cli import main
from planner.errors import PlanError

SIZES = {
    "model": "GPT",
    "hidden": 4096,
    "heads": 32,
    "seq": 2048,
    "hardware": "A100-80GB",
    "metric": "step_time_s",
    "value": 1.0,
    "precision": "bf16",
    "sequence_parallel": True,
    "recompute": "none",
    "zero": 1,
}
LEARNED = [(8, 64, 4, 2, 8, 1), (8, 64, 2, 1, 32, 2), (8, 32, 8, 1, 4, 4)]
"""(layers, devices, tp, pp, dp, microbatch) of the three runs."""
UNSEEN = [
    (8, 64, 8, 1, 8, 2),
    (8, 64, 1, 4, 16, 1),
    (16, 64, 4, 1, 16, 1),
    (8, 16, 2, 1, 8, 2),
    (16, 128, 4, 4, 8, 2),
    (8, 32, 4, 4, 2, 1),
    (8, 8, 2, 2, 2, 1),
    (8, 64, 1, 1, 64, 1),
]


def rows(shapes: list[tuple[int, ...]]) -> list[dict[str, Any]]:
    keys = ("layers", "devices", "tp", "pp", "dp", "microbatch")
    return [
        {**SIZES, **dict(zip(keys, shape, strict=True)), "global_batch": 512} for shape in shapes
    ]


@pytest.fixture(scope="module")
def cluster() -> tuple[list[Prepared], list[Prepared]]:
    few, left = prepared([{"source": "", **r} for r in rows(LEARNED)], "")
    unseen, more = prepared([{"source": "", **r} for r in rows(UNSEEN)], "")
    assert not left
    assert not more
    return few, unseen


def hidden(seed: int) -> Rates:
    """Rates of a cluster that reaches less of everything than the shipped profile says, each by its
    own amount."""
    rng, shipped = np.random.default_rng(seed), load_runtime("megatron").rates
    return replace(
        shipped,
        **{
            k: (
                getattr(shipped, k)
                * float(np.exp((1 if k == "launch_s" else -1) * w * rng.uniform(0.5, 2.0)))
            )
            for k, w in WIDTHS.items()
        },
    )


def measure(runs: list[Prepared], rates: Rates, seed: int) -> list[Prepared]:
    """The runs with the time they take at hidden rates, 2 % of noise."""
    rng = np.random.default_rng(seed + 1000)
    return [
        replace(
            r, case=replace(r.case, measured_s=r.step_s(rates) * float(np.exp(rng.normal(0, 0.02))))
        )
        for r in runs
    ]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(6))
def test_three_runs_at_least_halve_the_median_error(
    cluster: tuple[list[Prepared], list[Prepared]], seed: int
) -> None:
    few, unseen = (measure(runs, hidden(seed), seed + k) for k, runs in enumerate(cluster))
    (found,) = learn(few)

    def error(rates: Rates) -> float:
        return median(abs(r.step_s(rates) / (r.case.measured_s or 0.0) - 1) for r in unseen)

    assert error(found.shipped) > 0.1
    assert error(found.rates) <= error(found.shipped) / 2
    assert found.runtime == "megatron"
    assert set(found.errors) == set(WIDTHS) - {"stragglers"}  # of compiled programs
    assert all(0 < e <= WIDTHS[k] for k, e in found.errors.items()), (
        "runs never make a rate less sure than before them"
    )


def test_what_the_runs_say_nothing_about_stays_as_it_ships(
    cluster: tuple[list[Prepared], list[Prepared]],
) -> None:
    shipped = load_runtime("megatron").rates
    alone = [
        r for r in cluster[1] if r.case.row["devices"] == 8
    ]  # one node: nothing crosses the network
    (found,) = learn(measure([*alone, *alone], replace(shipped, matmul=shipped.matmul * 0.7), 1))
    assert found.rates.outer == pytest.approx(shipped.outer, rel=1e-6)
    assert found.errors["outer"] == pytest.approx(WIDTHS["outer"], rel=1e-6)
    assert found.rates.matmul < 0.9 * shipped.matmul


def test_the_error_that_is_reported_is_of_runs_left_out(
    cluster: tuple[list[Prepared], list[Prepared]],
) -> None:
    few = measure(cluster[0], hidden(3), 3)
    (found,) = learn(few)
    (seen,) = {abs(few[0].step_s(found.rates) / (few[0].case.measured_s or 0.0) - 1)}
    (without,) = learn(few[1:])
    assert found.after[0] == pytest.approx(
        abs(few[0].step_s(without.rates) / (few[0].case.measured_s or 0.0) - 1)
    )
    assert found.after[0] > seen


def test_the_command_writes_a_file_that_plans_use(
    cluster: tuple[list[Prepared], list[Prepared]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = measure(cluster[0], hidden(1), 1)
    runs, target = tmp_path / "mine.jsonl", tmp_path / "mine.toml"
    lines = [{**r, "value": p.case.measured_s} for r, p in zip(rows(LEARNED), few, strict=True)] + [
        {**rows(LEARNED)[0], "cp": 2}
    ]
    runs.write_text("\n".join(json.dumps(r) for r in lines))
    assert main(["calibrate", "--runs", str(runs), "-o", str(target)]) == 0
    said = capsys.readouterr()
    assert "3 runs; median error of runs left out" in said.out
    assert "1 runs: degrees do not multiply to the devices" in said.err
    mine = load_device(str(target))
    assert mine.name == "mine"
    assert mine.rates["megatron"]["matmul"] == pytest.approx(learn(few)[0].rates.matmul, rel=1e-4)
    assert main(["hardware", str(target)]) == 0
    assert "rates.megatron" in capsys.readouterr().out
    # a plan of the same configuration now takes the time that was measured
    again, _ = prepared([{"source": "", **r} for r in rows(LEARNED)], str(target))
    for before, after in zip(few, again, strict=True):
        assert after.cost.step_time_s == pytest.approx(before.step_s(learn(few)[0].rates), rel=1e-3)
    assert main(["calibrate", "--runs", str(runs), "-o", str(target)]) == 2
    assert "P053" in capsys.readouterr().err


def test_a_run_may_name_its_history(tmp_path: Path) -> None:
    """A file beside the runs, of W&B, xprof or a program, in the place of metric and value."""
    (tmp_path / "history.csv").write_text("_step,iteration-time\n0,9\n1,8\n2,0.5\n3,0.5\n")
    sizes = {k: v for k, v in rows(LEARNED)[0].items() if k not in ("metric", "value")}
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps({**sizes, "history": "history.csv"}))
    (row,) = read(path)
    assert (row["metric"], row["value"]) == ("step_time_s", 0.5)
    path.write_text(json.dumps({**sizes, "history": "gone.csv"}))
    with pytest.raises(PlanError, match="P185.*:1: its history .*gone.csv. cannot be read"):
        read(path)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "P185"),
        ('{"model": "GPT"}', "P185"),
        ("[]", "P185"),
        ("", "P186"),
        ("three", "P186"),
        ("devices", "P186"),
        ("odd", "P186"),
    ],
)
def test_files_that_teach_nothing_are_refused(
    text: str, code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = rows(LEARNED)[:2]
    made = {
        "three": [{**r, "cp": 2} for r in some],
        "devices": [some[0], {**some[1], "hardware": "H100"}, some[1]],
        "odd": [{**r, "layers": "many"} for r in some],
    }
    path = tmp_path / "runs.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in made[text]) if text in made else text)
    target = tmp_path / "out.toml"
    assert main(["calibrate", "--runs", str(path), "-o", str(target)]) == 2
    assert code in capsys.readouterr().err
    assert not target.exists()


def test_options_of_measuring_say_nothing_to_runs(tmp_path: Path) -> None:
    from planner.cli import parser
    from planner.commands.calibrate import run

    args = parser("calibrate").read(
        ["--runs", "x.jsonl", "--quick", "-o", str(tmp_path / "a.toml")]
    )
    with pytest.raises(PlanError, match="P182"):
        run(args)
