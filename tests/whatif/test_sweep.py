"""`plan sweep`: series and points, searches for batch and devices, fronts, what runs cost, and the
answers. Its tables are in tests/report/test_terminal.py."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import planner.api
from costmodels import load_device
from planner.cli import main
from planner.commands.sweep import prices
from planner.errors import PlanError
from planner.report.sweep import Asked, answers, as_json, sweep_text
from planner.strategy.strategy import Strategy
from planner.support import console
from planner.whatif.sweep import Sweeper, device_counts, sized
from planner.whatif.sweep_rows import (
    Point,
    Row,
    TrainingRun,
    best_run,
    fewest,
    first_too_large,
    front,
    run_of,
)

GOLDEN = Path(__file__).parents[1].joinpath("golden")
TINY, MLP = "zoo:gpt-tiny", "zoo:mlp-tiny"
GIB = 2**30


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="module")
def some() -> Strategy:
    return Strategy.load(GOLDEN / "gpt.plan.json")


def row(
    some: Strategy,
    hardware: str,
    n: int,
    step_s: float = 1.0,
    memory: int = 40 * GIB,
    *,
    batch: int = 512,
    dims: tuple[tuple[str, int], ...] = (),
    fit: str = "yes",
) -> Row:
    """A row whose plan has given figures: 2 M tokens a step."""
    costs = {
        **some.costs,
        "step_time_s": step_s,
        "tokens_per_step": 2**21,
        "tokens_per_s_per_device": 2**21 / step_s / n,
        "memory_per_device_bytes": memory,
        "model_flops_utilization": 0.4,
        "fit": fit,
    }
    plan = replace(some, costs=costs, workload={**some.workload, "batch": batch}, graph=None)
    return Row(Point(hardware, n, dims, batch), n, plan, device=load_device(hardware))


def refused(hardware: str, n: int, **more: Any) -> Row:
    error = PlanError(
        "P021",
        "no plan fits: 91.3 GiB a device in the smallest plan priced, 76.0 GiB usable",
        exit_code=3,
        help=["16 devices fit (re-priced: 41 ms)", "other hardware"],
    )
    return Row(Point(hardware, n, **more), n, error=error, device=load_device(hardware))


@contextlib.contextmanager
def unwatched(said: str) -> Iterator[console.Live]:
    yield console.Live(False)


def sweeper(source: str, **more: Any) -> Sweeper:
    common = {"workload": "train", "pins": None, "dims": {}, **more}
    return Sweeper(source, common, unwatched, planner.api.plan)


# --- runs and answers


def test_a_run_costs_what_its_device_hours_do(some: Strategy) -> None:
    r = row(some, "h100-sxm", 64, step_s=2.0)
    run = run_of(r, 2e12, {})
    hours = 2e12 / 2**21 * 2.0 / 3600
    assert run.days == pytest.approx(hours / 24) and run.device_hours == pytest.approx(64 * hours)
    assert run.usd == pytest.approx(64 * hours * 6.88) and run.kwh == pytest.approx(
        64 * hours * 0.7
    )
    assert run_of(r, 2e12, {"": 2.0}).usd == pytest.approx(run.device_hours * 2)
    assert run_of(r, 2e12, {"": 2.0, "h100-sxm": 3.0}).usd == pytest.approx(run.device_hours * 3)
    unknown = run_of(row(some, "tpu-v7x", 64), 1e12, {})
    assert unknown.usd is None and unknown.kwh is None and unknown.device_hours > 0


dollars = st.floats(1, 1e6)
run = st.builds(
    lambda d, h, u: TrainingRun(d, h, u, None, 1.0),
    st.floats(0.1, 100),
    st.floats(1, 1e6),
    st.one_of(st.none(), dollars),
)
runs = st.lists(st.one_of(st.none(), run), max_size=8)


@given(runs, st.floats(0.1, 100), st.floats(1, 1e6))
def test_the_answer_keeps_its_limits_and_none_that_keeps_them_is_better(
    found: list[TrainingRun | None], days: float, usd: float
) -> None:
    for limits in ((days, None), (None, usd), (days, usd)):
        i = best_run(found, *limits)
        keep = [
            r
            for r in found
            if r
            and (limits[0] is None or r.days <= limits[0])
            and (limits[1] is None or (r.usd is not None and r.usd <= limits[1]))
        ]
        best = found[i] if i is not None else None
        assert (best is None) == (not keep) and (best is None or best in keep)
        if best is not None and limits[0] is not None:
            assert (best.usd if best.usd is not None else 1e9) == min(
                r.usd if r.usd is not None else 1e9 for r in keep
            ), "the cheapest that keeps the deadline"
        elif best is not None:
            assert best.days == min(r.days for r in keep), "the first to be done within the budget"


def test_fewest_and_first_too_large(some: Strategy) -> None:
    rows = [
        refused("h100-sxm", 8),
        row(some, "h100-sxm", 16),
        row(some, "h100-sxm", 32),
        row(some, "b200", 8),
        refused("b200", 8, dims=(("seq", 65536),)),
    ]
    assert fewest(rows) == {("h100-sxm", ()): 16, ("b200", ()): 8}
    assert first_too_large(rows) is rows[4], "8 H100 never fitted; B200 did before"
    assert first_too_large(rows[:4]) is None
    said = answers(rows, [None] * 5, Asked())
    assert (
        said[0] == "fewest that fit: 16 x h100-sxm"
        and said[1] == "first that no longer fits: 8 x b200, seq 65,536"
    )
    assert "what would make 8 x h100-sxm fit: 16 devices fit (re-priced: 41 ms)" in said


def test_a_larger_batch_on_fewer_devices_is_no_first_that_fails(some: Strategy) -> None:
    rows = [
        refused("h100-sxm", 2, batch=64),
        row(some, "h100-sxm", 8, batch=64),
        refused("h100-sxm", 2, batch=512),
        refused("h100-sxm", 8, batch=512),
    ]
    assert first_too_large(rows) is rows[3], "at 2 devices the smaller batch did not fit either"
    said = answers(rows, [None] * 4, Asked())
    assert said[1] == "first that no longer fits: 8 x h100-sxm, batch 512" and said[2].startswith(
        "what would make 2 x h100-sxm, batch 64 fit: "
    )
    assert (
        first_too_large([row(some, "h100-sxm", 8, batch=64), refused("h100-sxm", 4, batch=64)])
        is not None
    ), "fewer devices alone do tell"


def test_what_is_pinned_against_the_largest_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", TINY, "--devices", "2", "--batch", "max", "--pin", "micro=2"]) == 2
    assert "2 microbatches are pinned" in capsys.readouterr().err


def test_deadlines_and_budgets_in_words(some: Strategy) -> None:
    rows = [
        row(some, "h100-sxm", 64, 2.0),
        row(some, "h100-sxm", 128, 1.1),
        row(some, "tpu-v5p", 64, 3.0),
    ]
    found = [run_of(r, 2e12, {}) for r in rows]

    def said(**asked: Any) -> str:
        return answers(rows, found, Asked(2e12, **asked))[0]

    assert said(deadline_s=30 * 86400).startswith(
        "cheapest within 30 days: 64 x h100-sxm in 22.1 days, 33,908 device-hours, 233,290 USD"
    )
    assert said(deadline_s=20 * 86400).startswith(
        "cheapest within 20 days: 128 x h100-sxm in 12.1 days"
    )
    assert (
        said(deadline_s=86400)
        == "within 1 day: none of these; nearest is 128 x h100-sxm in 12.1 days, 37,299"
        " device-hours, 256,619 USD"
    )
    assert said(deadline_s=7200).startswith("within 2 hours: none of these;")
    assert said(budget_usd=240e3).startswith(
        "fastest within 240,000 USD: 64 x h100-sxm in 22.1 days"
    )
    assert "; cheapest of all: 64 x tpu-v5p in 33.1 days" in said(budget_usd=240e3)
    assert said(budget_usd=1e3).startswith(
        "within 1,000 USD: none of these; nearest is 64 x tpu-v5p"
    )


def test_a_front_has_no_row_that_another_betters(some: Strategy) -> None:
    rows = [
        row(some, "h100-sxm", 8, s, m)
        for s, m in ((2.0, 5), (1.0, 9), (1.0, 8), (3.0, 5), (4.0, 1))
    ]
    assert [
        (r.strategy.costs["step_time_s"], r.strategy.costs["memory_per_device_bytes"])
        for r in front(rows)
        if r.strategy
    ] == [(1.0, 8), (2.0, 5), (4.0, 1)]


# --- points


def test_counts_of_devices_are_ones_the_hardware_comes_in() -> None:
    from planner.machine.topology import for_devices
    from planner.machine.topology_file import from_file

    for name in ("h100-sxm", "gb200-nvl72", "tpu-v5e", "tpu-v7x"):
        found = device_counts(name)
        assert (
            found == sorted(set(found))
            and found[0] <= 2
            and all(for_devices(name, n).devices == n for n in found)
        )
    assert device_counts("h100-sxm")[:9] == [1, 2, 4, 8, 16, 24, 32, 40, 48]
    assert (
        all(from_file("dgx-h100", n).devices == n for n in device_counts("dgx-h100"))
        and device_counts("dgx-h100")[0] == 8
    )


def test_sizes_of_zoo_models_are_options_of_their_specs() -> None:
    assert sized("zoo:llama3-8b,seq=4096,layers=2", {"seq": 8192}) == (
        "zoo:llama3-8b,layers=2,seq=8192",
        {},
    )
    assert sized("model.onnx", {"seq": 8192}) == ("model.onnx", {"seq": 8192})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("2.4/h", {"": 2.4}),
        ("2.4", {"": 2.4}),
        ("h100=2.4,v5e=1.1/h", {"h100": 2.4, "v5e": 1.1}),
        (None, {}),
    ],
)
def test_prices(text: str | None, found: dict[str, float]) -> None:
    assert prices(text) == found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "devices", "batch"), [("zoo:llama-tiny", 7, 8), (TINY, 6, 8), (MLP, 4, 64)]
)
def test_a_row_is_the_plan_of_its_point(model: str, devices: int, batch: int) -> None:
    row = sweeper(model).row(Point("h100", devices, batch=batch)).strategy
    plan = planner.plan(model, hardware="h100", devices=devices, batch=batch)
    assert (
        row is not None
        and row.costs == plan.costs
        and row.techniques == plan.techniques
        and row.mesh_shape == plan.mesh_shape
    )


@pytest.mark.slow
def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    common: dict[str, Any] = {"hardware": "h100", "devices": 2}
    limit = 8 * 2**20
    s = sweeper(MLP, memory_limit_bytes=limit)
    best = s.row(Point("h100", 2, batch="max"))
    assert (
        best.strategy is not None
        and best.strategy.techniques["microbatches"] == 1
        and not best.strategy.techniques["offload"]
    )
    batch = best.strategy.workload["batch"]
    more = planner.plan(
        MLP, **common, batch=batch, memory_limit_bytes=limit, pins="micro=1", baselines=False
    )
    assert (
        more.costs["memory_per_device_bytes"]
        == best.strategy.costs["memory_per_device_bytes"]
        <= limit
    )
    with pytest.raises(PlanError, match="P021"):
        planner.plan(
            MLP,
            **common,
            batch=batch + batch // 2,
            memory_limit_bytes=limit,
            pins="micro=1,offload=none",
            remedies=False,
        )


def test_the_fewest_devices_fit_and_fewer_do_not() -> None:
    """Fewer do not even with optimizer state in the host's memory, which is tried where nothing
    else fits."""
    two, four = (
        planner.plan(
            MLP, hardware="h100", devices=n, batch=64, objective="memory", pins=pins
        ).costs["memory_per_device_bytes"]
        for n, pins in ((2, "offload=optimizer"), (4, None))
    )
    limit = int(1.025 * four)  # with room for the upper end of its range
    assert limit < two
    found = sweeper(MLP, memory_limit_bytes=limit).row(Point("h100", None, batch=64))
    assert found.strategy is not None and found.devices == 4
    assert (
        found.strategy.costs["fit"] == "yes"
        or found.strategy.baselines["with_room"]["fit"] == "yes"
    )


@pytest.mark.slow
def test_the_fewest_devices_hold_all_unless_it_is_sent_away() -> None:
    """Two fit with optimizer state in the host's memory, and not without; with all that can be sent
    away next to anything fits one device."""
    plain, sent = (
        planner.plan(
            MLP, hardware="h100", devices=2, batch=64, objective="memory", pins=pins
        ).costs["memory_per_device_bytes"]
        for pins in ("", "offload=optimizer")
    )
    limit = (plain + sent) // 2
    assert sent < limit < plain
    assert planner.plan(
        MLP, hardware="h100", devices=2, batch=64, memory_limit_bytes=limit
    ).techniques["offload"], "a plan for two is one with state away"
    alone, away = (
        sweeper(MLP, memory_limit_bytes=limit, pins=pins).row(Point("h100", None, batch=64))
        for pins in (None, "offload=optimizer")
    )
    assert alone.strategy is not None and (alone.devices, alone.strategy.techniques["offload"]) == (
        4,
        [],
    )
    assert away.strategy is not None and (away.devices, away.strategy.techniques["offload"]) == (
        2,
        ["optimizer"],
    )


@pytest.mark.slow
def test_the_front_goes_from_the_fastest_plan_to_the_smallest() -> None:
    rows = sweeper(MLP).front(Point("h100", 4, batch=64))
    figures = [
        (r.strategy.costs["step_time_s"], r.strategy.costs["memory_per_device_bytes"])
        for r in rows
        if r.strategy
    ]
    assert (
        len(figures) == len(rows) > 1
        and figures == sorted(figures)
        and [m for _, m in figures] == sorted((m for _, m in figures), reverse=True)
    )
    fast, small = (
        planner.plan(MLP, hardware="h100", devices=4, batch=64, objective=what, baselines=False)
        for what in ("step", "memory")
    )
    assert (
        figures[0][0] == fast.costs["step_time_s"]
        and figures[-1][1] == small.costs["memory_per_device_bytes"]
    )
    assert [
        r.strategy for r in sweeper(MLP, objective="memory").front(Point("h100", 4, batch=64))
    ] == [r.strategy for r in rows], "whatever single rows would minimise"


# --- the command


def swept(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict[str, Any]:
    assert main(["sweep", *argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_scaling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))  # half of the points come twice

    def batches(*more: str) -> list[int]:
        return [r["batch"] for r in swept(capsys, MLP, "--devices", "2..8", *more)["rows"]]

    assert (
        batches("--batch", "64") == batches("--scaling", "strong", "--batch", "64") == [64, 64, 64]
    )
    assert batches("--scaling", "weak", "--batch", "64") == [64, 128, 256]
    alone = batches()
    assert (
        len(set(batches("--scaling", "strong"))) == 1
        and batches("--scaling", "strong")[0] == alone[0]
    )


def test_sizes_under_tokens_held(capsys: pytest.CaptureFixture[str]) -> None:
    found = swept(
        capsys, TINY, "--devices", "2", "--dim", "seq=16,32..64", "--tokens-per-step", "4k"
    )
    assert [(r["dims"]["seq"], r["batch"], r["tokens_per_step"]) for r in found["rows"]] == [
        (16, 256, 4096),
        (32, 128, 4096),
        (64, 64, 4096),
    ]
    assert (
        found["first_too_large"] is None
        and found["best"] is None
        and found["rows"][0]["run"] is None
    )


def test_hardware_by_every_name_and_runs_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    found = swept(
        capsys,
        MLP,
        "--devices",
        "8",
        "--batch",
        "64",
        "--hardware",
        "h100,dgx-a100,v5e:2x4,tpu-v4",
        "--tokens",
        "1B",
        "--price",
        "dgx-a100=9,h100-sxm=2.5",
    )
    rows = {r["hardware"]: r for r in found["rows"]}
    assert {h: r["devices"] for h, r in rows.items()} == {
        "h100": 8,
        "dgx-a100": 8,
        "v5e:2x4": 8,
        "tpu-v4": 8,
    }
    assert (
        rows["h100"]["run"]["usd_per_h"] == 2.5
        and rows["v5e:2x4"]["run"]["usd_per_h"] == load_device("v5e").usd_per_h
    )
    assert rows["dgx-a100"]["run"]["usd_per_h"] == 9 and rows["v5e:2x4"]["run"]["kwh"] is None


def test_the_title_leaves_out_what_rows_set_anew(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", f"{TINY},layers=1,seq=4", "--devices", "2", "--dim", "seq=8,16"]) == 0
    title = capsys.readouterr().out.splitlines()[0]
    assert title.startswith("gpt-tiny,layers=1 (zoo)") and "seq=4" not in title


@pytest.mark.parametrize("width", [60, 80, 100])
def test_rows_fit_and_what_all_plans_do_is_said_once(width: int, some: Strategy) -> None:
    techniques = {**some.techniques, "blocks": "written-out", "zero_stage": 1}
    rows = [
        row(replace(some, techniques={**techniques, "microbatches": m}), "h100-sxm", n)
        for n, m in ((8, 64), (16, 32), (32, 1))
    ]
    text = sweep_text(TINY, rows, [None] * 3, Asked(), width, False)
    title, table = text.split("devices", 1)
    assert "blocks written out" in " ".join(title.split()) and "written out" not in table
    assert "64 microbatches" in text and "32 microbatches" in text
    assert all(len(line) <= width for line in text.splitlines())
    under = [line for line in table.splitlines() if line.startswith("    data ")]
    assert len(under) == (0 if width == 100 else 3)


def test_questions_without_an_answer_are_findings(capsys: pytest.CaptureFixture[str]) -> None:
    found = swept(
        capsys,
        MLP,
        "--devices",
        "2,4",
        "--batch",
        "64",
        "--tokens",
        "1T",
        "--deadline",
        "1h",
        code=1,
    )
    assert found["best"] is None and found["deadline_s"] == 3600
    assert (
        main(
            ["sweep", MLP, "--devices", "2,4", "--batch", "64", "--tokens", "1M", "--budget", "1M"]
        )
        == 0
    )
    assert "within 1 M USD: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--devices", "2", "--deadline", "30d"], "--tokens 2T"),
        (["--devices", "2", "--tokens", "many"], "'many' is not an amount"),
        (["--devices", "2", "--tokens", "1B", "--deadline", "30"], "30d"),
        (["--devices", "2", "--tokens", "1B", "--price", "free"], "is not a price"),
        (["--devices", "2", "--tokens", "1B", "--price", "b200=3"], "not among the hardware"),
        (["--hardware", "h100"], "how many devices"),
        (["--devices", "2", "--batch", "max", "--pareto"], "contradict"),
        (["--devices", "2", "--scaling", "wide"], "strong, weak"),
        (["--devices", "2", "--dim", "seq=8..4"], "runs backwards"),
        (["--devices", "2", "--hardware", "h1000"], "P010"),
        (["--devices", "fewest", "--hardware", "h1000"], "P010"),
        (["--devices", "2", "--dim", "sequence=16,32"], "P071"),
        (["--devices", "2", "--dim", "seq=8,16", "--dim", "seq=4"], "--dim seq=8,16,4"),
        (["--devices", "16", "--hardware", "v5e:2x4,v5e:4x4"], "leave --devices out"),
    ],
)
def test_what_cannot_be_swept_says_so(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", TINY, *argv]) == 2
    assert says in capsys.readouterr().err


def test_rows_that_are_done_stay_when_it_is_interrupted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import planner.api as api

    real, calls = api.plan, [0]

    def plan(*args: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise KeyboardInterrupt
        return real(*args, **more)

    monkeypatch.setattr(api, "plan", plan)
    assert main(["sweep", MLP, "--devices", "2..8", "--batch", "64"]) == 130
    out, err = capsys.readouterr()
    assert ", 2 devices, batch 64" in out and "these are the rows that were done" in err


def test_json_holds_what_the_table_shows(some: Strategy) -> None:
    rows = [row(some, "h100-sxm", 64, 2.0), refused("h100-sxm", 8, batch=512)]
    found = as_json("zoo:gpt-tiny", rows, [run_of(rows[0], 1e12, {}), None], Asked(1e12, 1e9))
    assert (
        json.loads(json.dumps(found)) == found
        and found["best"] == 0
        and found["first_too_large"] == 1
    )
    assert (
        found["rows"][1]["error"]["code"] == "P021"
        and found["rows"][1]["fit"] == "no"
        and found["rows"][0]["step_time_s"] == 2.0
    )


@pytest.mark.slow
def test_a_topology_file_says_how_many_devices_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As slices do."""
    link = '[[level]]\nname = "{}"\nsize = {}\nbandwidth = "25 GB/s"\nlatency = "3 us"\n'
    monkeypatch.chdir(tmp_path)
    mixed = Path("mixed.toml")
    mixed.write_text(
        '[[group]]\ndevice = "h100-sxm"\ndevices = 8\n[[group]]\ndevice = "a100-80gb"\ndevices'
        " = 8\n" + link.format("near", 8) + link.format("far", 2)
    )
    assert main(["sweep", MLP, "--hardware", f"{mixed},v5e:2x2", "--batch", "64", "--json"]) == 0
    assert [row["devices"] for row in json.loads(capsys.readouterr().out)["rows"]] == [16, 4]
    assert (
        main(["sweep", MLP, "--hardware", str(mixed), "--batch", "max", "--memory-limit", "40MiB"])
        == 0
        and "16 devices" in capsys.readouterr().out
    )
    assert (
        main(["sweep", MLP, "--hardware", f"{mixed},h100", "--batch", "64"]) == 2
        and "how many devices" in capsys.readouterr().err
    )


def test_an_answer_prefers_rows_that_fit_with_room_and_flags_one_that_does_not() -> None:
    roomy = sweeper(MLP).row(Point("h100", 8, batch=64))
    assert roomy.strategy is not None
    tight = replace(
        roomy,
        devices=4,
        strategy=replace(roomy.strategy, costs={**roomy.strategy.costs, "fit": "tight"}),
    )
    runs = [TrainingRun(1.0, 10.0, 20.0, None, 2.0), TrainingRun(2.0, 20.0, 40.0, None, 2.0)]
    asked = Asked(1e6, deadline_s=3 * 86_400.0)
    assert (
        asked.best([tight, roomy], runs) == 1 and asked.best([tight, roomy], [runs[0], None]) == 0
    )
    assert "tight" not in answers([tight, roomy], runs, asked)[0]
    assert "tight in memory: it may run out" in answers([tight], runs[:1], asked)[0]
    assert (
        as_json(MLP, [tight], runs[:1], asked)["best_is_tight"]
        and not as_json(MLP, [tight, roomy], runs, asked)["best_is_tight"]
    )


def test_a_sweep_is_bounded_in_devices_and_keeps_its_time_for_all_points(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", MLP, "--devices", "1..99999999999", "--time-limit", "2"]) == 2
    assert "P003" in capsys.readouterr().err
    left = iter([60.0, 0.0])  # for the first point, and after it
    monkeypatch.setattr(Sweeper, "left_s", property(lambda self: next(left)))
    assert main(["sweep", MLP, "--devices", "2,4,8", "--batch", "64", "--time-limit", "60"]) == 0
    shown = capsys.readouterr()
    assert (
        "--time-limit: 1 of 3 points were planned in 60 s" in shown.err and "2 devices" in shown.out
    )
    monkeypatch.undo()
    assert (
        Sweeper(
            MLP, {"time_limit_s": 0.0}, lambda said: contextlib.nullcontext(), planner.api.plan
        ).left_s
        == 0.0
    )
    assert Sweeper(MLP, {}, lambda said: contextlib.nullcontext(), planner.api.plan).left_s is None
