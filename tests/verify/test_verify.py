"""plan verify: a process that compiles and runs, a report that can fail, and the smaller models it
falls back on."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from planner.errors import PlanError
from planner.execution.fewer_repeats import fewer_repeats, follow
from planner.graph.repeats import find_runs
from planner.ops.lookup import rule_of
from planner.pins.pins import Pins
from planner.sharding.rule import legal
from planner.verify import worker
from planner.verify.extents import Extents, window
from planner.verify.report import FLOPS, TRAFFIC, Figure, Numbers, VerifyReport
from planner.verify.shrink import fits, shrink, within_goals
from planner.workload.model import Model, Workload

ROOT = Path(__file__).parents[2]
MESH = Pins(mesh={"data": (2,), "model": (2,)})


def strategy(source: str, **options: Any) -> planner.Strategy:
    return planner.plan(
        source,
        devices=4,
        batch=8,
        pins=MESH,
        baselines=False,
        hardware=str(ROOT / "benchmarks" / "eager.toml"),
        **options,
    )


def wide(source: str, workload: str) -> planner.Strategy:
    """On the eight devices of this process."""
    pins = Pins(mesh={"data": (2,), "model": (4,)})
    return planner.plan(
        source,
        devices=8,
        batch=8,
        workload=workload,
        pins=pins,
        baselines=False,
        hardware=str(ROOT / "benchmarks" / "eager.toml"),
    )


@pytest.fixture(scope="module")
def mlp() -> planner.Strategy:
    return strategy("zoo:mlp-tiny")


def test_a_right_program_is_verified_and_the_report_survives_json(mlp: planner.Strategy) -> None:
    report = worker.verify(mlp, "zoo:mlp-tiny")
    assert report.ok and not report.findings()
    judged = {f.what: f for f in report.figures if f.judged}
    assert {"dot FLOPs", "argument bytes"} < set(judged) and any(
        w.startswith("all-reduce over") for w in judged
    )
    assert judged["dot FLOPs"].compiled > 0 and report.numbers is not None
    assert (
        0 <= report.numbers.error < 1e-5
        and report.numbers.gradients is not None
        and 0 < report.numbers.gradients < 1e-5
    )
    assert report.numbers.size == "full size"
    text = report.text()
    assert "exact" in text and "verified" in text and "data=2, model=2" in text
    assert VerifyReport.from_dict(json.loads(report.to_json())) == report


@pytest.mark.slow
def test_another_tolerance_is_a_finding_and_jit_is_not_judged_by_bytes(
    mlp: planner.Strategy,
) -> None:
    report = worker.verify(mlp, "zoo:mlp-tiny", backend="jit", tolerance=1e-12)
    assert not report.ok and report.findings() == ("numbers are beyond the tolerance",)
    assert "BEYOND" in report.text() and not any(f.judged for f in report.figures)


@pytest.mark.slow
def test_without_running_nothing_is_run(mlp: planner.Strategy) -> None:
    report = worker.verify(mlp, "zoo:mlp-tiny", run=False)
    assert report.ok and report.numbers is None and "not asked for" in report.text()


def test_another_model_and_no_time_are_errors_with_codes(mlp: planner.Strategy) -> None:
    with pytest.raises(PlanError) as error:
        worker.verify(mlp, "zoo:mlp-tiny,hidden=48")
    assert error.value.code == "P051"
    with pytest.raises(PlanError) as error:
        worker.verify(mlp, "zoo:mlp-tiny", timeout_s=0.01)
    assert error.value.code == "P161"
    with pytest.raises(PlanError) as error:
        worker.verify(mlp, "zoo:mlp-tiny", backend="pmap")
    assert error.value.code == "P018"


def test_the_caller_does_not_import_jax() -> None:
    code = (
        "import sys, planner.verify.worker, planner.verify.shrink; raise SystemExit('jax' in"
        " sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_worker_whose_caller_was_killed_ends(tmp_path: Path) -> None:
    asked = tmp_path / "asked.json"
    asked.write_text(json.dumps({"timeout_s": -worker.GRACE_S}))
    code = (
        "import sys, time, pathlib, planner.verify.worker as worker\n"
        "worker.end_in_time(pathlib.Path(sys.argv[1])); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(asked)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGALRM


def test_a_report_fails_for_each_kind_of_difference() -> None:
    base = VerifyReport(
        "m",
        "shard_map",
        {"data": 2},
        "train",
        "from shapes",
        (Figure("dot FLOPs", 8, 8, "FLOPs"),),
        Numbers("full size", 4, 1e-7, 1e-6, "w", 1e-4),
    )
    assert base.ok
    assert not replace(base, figures=(Figure("all-reduce over data", 8, 9, of=TRAFFIC),)).ok
    assert replace(base, figures=(Figure("temporaries", None, 9, judged=False),)).ok
    assert base.numbers is not None
    for numbers in (
        replace(base.numbers, gradients=1e-3),
        replace(base.numbers, error=math.nan),
        replace(base.numbers, gradients=math.inf),
    ):
        bad = replace(base, numbers=numbers)
        assert (
            not bad.ok
            and "NOT VERIFIED" in bad.text()
            and not VerifyReport.from_dict(json.loads(bad.to_json())).ok
        )
    missing = replace(base, numbers=None, not_run="not finished within 5 s")
    assert not missing.ok and "not finished" in missing.text() and replace(missing, asked=False).ok


def states(report: VerifyReport) -> dict[str, str]:
    return {v.name: v.state for v in report.verdicts}


def test_prices_are_verdicts_of_their_own_and_no_error() -> None:
    """Numbers and traffic decide; FLOPs and memory that a compiler makes others are said, each in
    its own words."""
    sent, dots = (
        Figure("all-reduce over data", 64, 64, of=TRAFFIC),
        Figure("dot FLOPs", 10_000, 10_068, "FLOPs", of=FLOPS),
    )
    peak = Figure("peak", 2 * 2**30, 3 * 2**30, tolerance=0.1)
    numbers = Numbers("full size", 4, 1e-7, 2e-6, "w", 1e-4)
    right = VerifyReport(
        "m",
        "shard_map",
        {"data": 2},
        "train",
        "from shapes",
        (sent, replace(dots, by="up +68 FLOPs by the compiler (rematerialization)"), peak),
        numbers,
    )
    assert (
        right.ok
        and not right.findings()
        and states(right) == {"numbers": "ok", "traffic": "ok", "FLOPs": "apart", "memory": "apart"}
    )
    assert right.text(200).splitlines()[-2:] == [
        (
            "numbers: equal within 2.0e-06 · traffic: exact · FLOPs: +0.68 %, up +68 FLOPs by the"
            " compiler (rematerialization) · memory: 3.0 GiB where 2.0 GiB were planned"
        ),
        "verified",
    ]
    data = right.to_dict()
    assert (
        data["ok"]
        and data["verdicts"]["FLOPs"]["state"] == "apart"
        and {"findings", "figures", "numbers", "notes"} < set(data)
    )
    assert VerifyReport.from_dict(data) == right
    wrong = replace(right, figures=(replace(sent, compiled=96), dots, peak))
    assert (
        not wrong.ok
        and states(wrong)["traffic"] == "wrong"
        and wrong.findings() == ("all-reduce over data predicted 64 B, compiled 96 B",)
    )
    changed = replace(
        right, figures=(replace(sent, compiled=96, own=32, by="cse"), dots, peak)
    )  # all of it by a pass of the compiler
    assert (
        changed.ok
        and states(changed)["traffic"] == "apart"
        and "all-reduce over data +50.00 % by the compiler (cse)" in changed.text(200)
    )
    assert not replace(right, figures=(replace(sent, compiled=96, own=31), dots, peak)).ok
    assert (
        replace(right, figures=(dots, peak)).verdicts[1].says == "none"
    )  # every device computes the same
    placed = replace(
        right,
        program="jit",
        figures=(replace(sent, judged=False), replace(dots, judged=False)),
        asked=False,
        numbers=None,
    )
    assert placed.ok and set(states(placed).values()) == {"not judged"}


@pytest.mark.slow
def test_what_is_compiled_is_the_text_that_emit_writes(
    mlp: planner.Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loops and all, with the same options, and the same program is run."""
    from planner.verify import compiled, numerics

    source = "zoo:mlp-tiny,layers=6"
    wide(source, "train").save(tmp_path / "s.json")
    loaded: list[str] = []
    real = numerics.load_program
    for module in (numerics, compiled):
        monkeypatch.setattr(
            module,
            "load_program",
            lambda program, *more, **options: (
                loaded.append(program.text) or real(program, *more, **options)
            ),
        )
    strategy = planner.Strategy.load(tmp_path / "s.json")
    for unroll in (False, True):
        loaded.clear()
        reports: list[VerifyReport] = []
        request = {
            "strategy": str(tmp_path / "s.json"),
            "source": source,
            "backend": "shard_map",
            "run": True,
            "tolerance": None,
            "timeout_s": 600.0,
            "unroll": unroll,
        }
        worker.work(request, lambda phase, report, reports=reports: reports.append(report))
        written = planner.emit.from_strategy.program(strategy, source, unroll=unroll).text
        assert (
            loaded.count(written) == 2
            and ("lax.scan" in written.split("def loss_of")[1].split("def ")[0]) is not unroll
        )
        assert (
            reports[-1].ok
            and ("as loops" in reports[-1].compiled) is not unroll
            and {v.says for v in reports[-1].verdicts[1:]}
            == {"exact", "arguments and outputs exact"}
        )


@pytest.mark.slow
def test_what_the_cpu_compiler_expands_is_named_and_counted_apart(tmp_path: Path) -> None:
    """The gradient of a depthwise convolution's weight: a grouped convolution, which XLA for CPU
    multiplies out and reads the diagonal of."""
    import onnx

    from tests.reader.reader_models import model, rand

    text = (
        "(float[8,16,12] x) => (float[8,16,12] y) { h = MatMul(x, v) y = Conv <group = 16, pads ="
        " [1, 1]> (h, w) }"
    )
    onnx.save(model(text, 18, v=rand(12, 12), w=rand(16, 1, 3)), tmp_path / "m.onnx")
    wide(str(tmp_path / "m.onnx"), "train").save(tmp_path / "s.json")
    reports: list[VerifyReport] = []
    request = {
        "strategy": str(tmp_path / "s.json"),
        "source": str(tmp_path / "m.onnx"),
        "backend": "shard_map",
        "run": True,
        "tolerance": None,
        "timeout_s": 600.0,
    }
    worker.work(request, lambda phase, report: reports.append(report))
    found = reports[-1]
    assert found.ok, found.text()
    assert (
        states(found)["FLOPs"] == "apart"
        and "by the compiler (convolution-group-converter" in found.verdicts[2].says
    )
    assert any(
        line.startswith("dot FLOPs +") and "convolution-group-converter +" in line
        for line in found.differences
    )


def test_what_is_too_large_runs_shrunk_under_the_same_splits(tmp_path: Path) -> None:
    """In this process, which has eight devices: a time limit that no model meets."""
    source = "zoo:gpt-tiny,layers=4"
    made = wide(source, "infer")
    made.save(tmp_path / "s.json")
    reports: list[VerifyReport] = []
    request = {
        "strategy": str(tmp_path / "s.json"),
        "source": source,
        "backend": "shard_map",
        "run": True,
        "tolerance": 1e-4,
        "timeout_s": 1e-9,
    }
    worker.work(request, lambda phase, report: reports.append(report))
    assert reports[-1].ok, reports[-1].text()
    assert reports[-1].numbers is not None and reports[-1].numbers.size.startswith(
        "shrunk model (it would take about"
    )
    assert any("repeats 4 to 2" in n for n in reports[-1].notes)


LARGE = (
    "zoo:gpt2-medium",
    "zoo:llama3-8b",
    "zoo:mixtral-8x7b",
    "zoo:bert-large",
    "zoo:t5-base",
    "zoo:vit-l16",
    "zoo:resnet101",
)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("kind", ["infer", "train"])
@pytest.mark.parametrize("source", LARGE)
def test_large_models_shrink_within_the_goals(source: str, kind: str) -> None:
    graph = Model.open(source, Workload(kind=kind, batch=8), 8).graph(1)
    small = shrink(graph, 40e6)
    assert within_goals(small) and fits(small, small, None)
    ids = {n.id for n in graph.nodes}
    assert {n.id for n in small.nodes} <= ids and {n.op for n in small.nodes} == {
        n.op for n in graph.nodes
    }
    assert all(small.tensors[i].shape[:1] == graph.tensors[i].shape[:1] for i in small.inputs)
    for name in small.weights:
        for new, old in zip(small.tensors[name].shape, graph.tensors[name].shape, strict=True):
            assert math.gcd(new, 8) == math.gcd(old, 8)
    assert small.notes[-1].startswith(f"shrunk from {graph.parameters:,}")
    assert shrink(small) is small


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["infer", pytest.param("train", marks=pytest.mark.slow)])
def test_a_shrunk_plan_is_legal_and_its_graph_runs_like_its_twin(kind: str) -> None:
    from planner.verify.numerics import compare, seeded_values

    source = "zoo:gpt2-small,seq=64"
    made = wide(source, kind)
    assert made.graph is not None
    graph, plan = made.graph, made.plan
    small = shrink(graph, plan=plan)
    few = follow(plan, graph, small)
    assert few.repeated_blocks and {r for _, _, r in few.repeated_blocks} == {2}
    for node in small.nodes:
        assert legal(rule_of(node, small)[0], few.splits[node.id], dict(few.mesh))
    found, _ = compare(
        small, few, workload=kind, backend="shard_map", values=seeded_values(small, {})
    )
    assert found.outputs < 1e-5 and found.gradients < 1e-5


def test_repeats_keep_what_leaves_the_last_one() -> None:
    graph = Model.open("zoo:llama-tiny,layers=6", Workload(kind="train", batch=4), 1).graph(1)
    small = fewer_repeats(graph, find_runs(graph), 2)
    assert [repeats for _, _, repeats in find_runs(small)] == [2] and small.outputs == graph.outputs
    assert small.parameters < graph.parameters and len(small.nodes) < len(graph.nodes)


@settings(max_examples=200)
@given(st.data())
def test_a_window_of_the_same_axis_is_the_same(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 40))
    step = data.draw(st.sampled_from([1, 2, 3, -1, -2]))
    start = data.draw(st.integers(0, n - 1 if step < 0 else n))
    end = data.draw(st.integers(-1, n - 1) if step < 0 else st.integers(0, n))
    found = window((start, end, step), n, n, len(range(start, end, step)))
    assert found is not None and len(range(*found, step)) == len(range(start, end, step))


def test_windows_follow_ends_fractions_and_shifts() -> None:
    assert window((0, 2048, 1), 2049, 65, 64) == (0, 64)  # all but the last
    assert window((1, 2049, 1), 2049, 65, 64) == (1, 65)  # all but the first
    assert window((64, 128, 1), 128, 16, 8) == (8, 16)  # the second half
    assert window((0, 1, 1), 128, 16, 1) == (0, 1)
    assert window((127, -1, -1), 128, 16, 16) == (15, -1)  # reversed
    assert window((0, 100, 1), 128, 16, 50) is None


def test_stored_indices_stay_inside_their_tables() -> None:
    """BERT's positions are a stored row that looks up a table: both shrink, and no index is left
    outside."""
    graph = Model.open("zoo:bert-large", Workload(kind="infer", batch=8), 8).graph(1)
    small = shrink(graph)
    extents, stored = Extents(small), 0
    for look in extents.lookups:
        value = small.constants.get(look.leaf)
        if value is None and small.weights[look.leaf].kind == "inline":
            value = np.asarray(small.weights[look.leaf].proto)
        if value is not None:
            column = value if look.column is None else value[..., look.column]
            assert column.max() < small.tensors[look.table].shape[look.axis]
            stored += 1
    assert stored


def test_it_is_said_that_programs_wait_for_rows_that_a_framework_sends_beside_kernels() -> None:
    model = "zoo:mixtral-8x7b,layers=2,hidden=256,heads=4,kv_heads=4,ff=512,vocab=1024,seq=512"
    said = {}
    for how in ("waiting", "beside"):
        pins = Pins({"expert": (8,)}, {"exchanges": how})
        strategy = planner.plan(
            model,
            devices=8,
            hardware="h100",
            batch=32,
            runtime="megatron",
            pins=pins,
            baselines=False,
        )
        assert strategy.graph is not None
        said[how] = worker.routing_notes(strategy.graph, strategy.plan_for(strategy.graph))
    assert [n for n in said["beside"] if n not in said["waiting"]] == [
        "experts' rows are priced as sent beside other kernels, as the plan's framework does; this"
        " program's kernels wait for them"
    ]
