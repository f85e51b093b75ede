"""Reports of plans with pipeline stages: what a stage does tick by tick, bars, curve, trace and
file that add up to the price, and what is said."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

import planner
from planner.cli import main
from planner.commands.common import priced
from planner.execution.pipeline import BUBBLE, Pipeline
from planner.report.baselines import baseline_name
from planner.report.explain import by_operator, explain, explain_node, find_nodes
from planner.report.html.bars import passes_of, timeline, total
from planner.report.html.derive import Detail, work_out
from planner.report.html.fold import fold
from planner.report.html.memory import series
from planner.report.html.page import page
from planner.report.html.view import View
from planner.report.summary import summary, techniques
from planner.report.ticks import PASSES, stretches, ticks
from planner.report.trace import trace
from planner.strategy import schema
from planner.strategy.strategy import Strategy
from tests.report.html_plans import Page, detail, plan, view
from tests.report.test_html import sound

GPT, DEEP, LLAMA, T5 = (
    "zoo:gpt-tiny,layers=5",
    "zoo:gpt-tiny,layers=8",
    "zoo:llama-tiny,layers=4",
    "zoo:t5-tiny",
)
# uneven stages, both schedules, every recompute, gradients reduced in every tick, an encoder that
# every stage runs
CASES = [
    (GPT, "pp=4,dp=2,micro=8,zero=1,recompute=block"),
    (GPT, "pp=2,dp=2,tp=2,micro=4,zero=2"),
    (DEEP, "pp=8,micro=2"),
    (LLAMA, "pp=4,tp=2,micro=4,schedule=gpipe"),
    (T5, "pp=2,tp=2,dp=2,micro=4,recompute=block-keep"),
    (T5, "pp=2,dp=4,micro=4,schedule=gpipe"),
    (DEEP, "pp=2,dp=4,micro=4,virtual=2,zero=2"),
    (DEEP, "pp=4,tp=2,micro=8,schedule=zb-h1"),
    (GPT, "pp=2,dp=4,micro=4,schedule=zb-h1,recompute=block"),
]


@given(st.integers(2, 6), st.integers(1, 5), st.integers(2, 4))
def test_every_stage_passes_every_chunk_once_each_way(
    stages: int, groups: int, chunks: int
) -> None:
    p = Pipeline(
        0, 1, stages * chunks, stages, stages * groups, "interleaved", virtual_stages=chunks
    )
    handed: dict[tuple[str, int, int], int] = {}
    for stage in range(stages):
        found = [*ticks(p, stage)]
        assert (
            len(found) == p.ticks + stages * chunks - 1
            and sum(t.forward is not None for t in found)
            == sum(t.backward is not None for t in found)
            == p.ticks
        )
        assert (
            [t.epilogue for t in found if t.epilogue is not None]
            == [*range(p.microbatches)]
            == [t.epilogue_back for t in found if t.epilogue_back is not None]
        )
        assert sum(s.count for s in stretches(p, stage)) == len(found)
        for k, t in enumerate(found):
            for name, m, chunk in (
                ("forward", t.forward, t.chunks[0]),
                ("backward", t.backward, t.chunks[1]),
            ):
                if m not in (None, BUBBLE):
                    assert handed.setdefault((name, chunk * stages + stage, m), k) == k
            if t.epilogue is not None:
                handed["epilogue", 0, t.epilogue] = k
    assert len(handed) == p.microbatches * (2 * stages * chunks + 1)
    for (
        name,
        c,
        m,
    ), k in handed.items():  # what a chunk makes is there a tick later at the next one
        if name == "forward" and c:
            assert k == handed[name, c - 1, m] + 1
        if name == "backward":
            assert (
                k
                == (
                    handed[name, c + 1, m] + 1
                    if c < stages * chunks - 1
                    else handed["epilogue", 0, m]
                )
                and k >= handed["forward", c, m]
            )
        if name == "epilogue":
            assert k == handed["forward", stages * chunks - 1, m]


@given(st.integers(2, 9), st.integers(2, 20), st.sampled_from(("1f1b", "gpipe", "zb-h1")))
def test_every_stage_sees_every_microbatch_once_in_each_pass(
    stages: int, microbatches: int, schedule: str
) -> None:
    p = Pipeline(0, 1, stages, stages, microbatches, schedule)
    handed: dict[tuple[str, int, int], int] = {}
    for stage in range(stages):
        found = [*ticks(p, stage)]
        for name in PASSES[:4]:
            seen = [m for t in found if (m := getattr(t, name)) is not None]
            real = [m for m in seen if m != BUBBLE]
            assert sorted(real) == [*range(microbatches)]
            times = p.epilogue_passes if name.startswith("epilogue") else p.ticks
            assert len(seen) == times and (real == sorted(real)) != (
                (schedule == "gpipe" and name.endswith("back"))
                or (schedule == "gpipe" and name == "backward")
            )
        handed |= {
            (name, stage, m): k for k, t in enumerate(found) for name, m in t.passes if m != BUBBLE
        }
        waited = [(k, t.weights) for k, t in enumerate(found) if t.weights is not None]
        assert [m for _, m in waited] == [*range(microbatches if schedule == "zb-h1" else 0)]
        assert all(k >= handed["backward", stage, m] for k, m in waited)
        assert all(k - m == 2 * (stages - 1) for k, m in waited)
        together = [(t.first, t.last, t.count) for t in stretches(p, stage)]
        assert sum(n for *_, n in together) == len(found) and len(together) <= 9
    for (
        name,
        stage,
        m,
    ), k in handed.items():  # what a stage makes is there a tick later at the next one
        if name == "forward" and stage:
            assert k == handed[name, stage - 1, m] + 1
        if name == "backward" and stage < stages - 1:
            assert k == handed[name, stage + 1, m] + 1
        if name == "epilogue":
            assert k == handed["forward", stages - 1, m]


@pytest.mark.one_in(9)
@pytest.mark.parametrize(("spec", "pins"), CASES)
def test_every_bar_of_every_stage_adds_up_to_the_step(spec: str, pins: str) -> None:
    s, d = plan(pins, spec), detail(pins, spec)
    t, c, p = timeline(d), s.costs, d.pipeline
    assert (
        p is not None
        and len(t.stages) == p.stages == dict(s.mesh_shape)["stage"]
        and c["bubble_time_s"] > 0
    )
    assert d.grad_accumulate_s == pytest.approx(d.step_s, rel=1e-9) and d.step_s == pytest.approx(
        c["step_time_s"], rel=1e-5
    )
    for stage in t.stages:
        kinds = total(stage)
        assert sum(x.time_s for x in stage) == pytest.approx(d.step_s, rel=1e-9)
        assert kinds["bubble"] == pytest.approx(c["bubble_time_s"], rel=1e-5)
        assert kinds["comm"] == pytest.approx(c["exposed_communication_time_s"], rel=1e-5)
        assert kinds["forward"] + kinds["backward"] + kinds.get("recompute", 0.0) == pytest.approx(
            c["compute_time_s"], rel=1e-5
        )
        assert kinds.get("recompute", 0.0) == pytest.approx(c["recompute_time_s"], rel=1e-5)
    seconds = {name: sum(x.time_s for x in parts) for name, parts in passes_of(d).items()}
    assert sum(seconds.values()) == pytest.approx(sum(x.time_s for x in t.micro), rel=1e-9)
    late = seconds["epilogue"] + seconds["epilogue_back"]
    weight_ticks = p.microbatch_schedule.weight_ticks
    assert weight_ticks * seconds["weights"] + p.ticks * (
        seconds["forward"] + seconds["backward"]
    ) + p.epilogue_passes * late + t.ends_s == pytest.approx(d.step_s, rel=1e-9)
    assigned = next(b for b in t.blocks if b.per_stage)
    assert assigned.repeats == p.blocks_per_stage and assigned.total_s == pytest.approx(
        p.ticks * sum(x.time_s for x in t.micro if x.run == assigned.run), rel=1e-9
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("spec", "pins"), CASES)
def test_the_curve_peaks_at_the_priced_memory(spec: str, pins: str) -> None:
    s, d = plan(pins, spec), detail(pins, spec)
    curve, p = series(d), d.pipeline
    assert p is not None
    assert (
        curve.total_bytes[curve.peak] == pytest.approx(d.memory_bytes, abs=8)
        and d.memory_bytes == s.costs["memory_per_device_bytes"]
    )
    assert list(curve.times_s) == sorted(curve.times_s)
    kept = dict(curve.bands)["activations"]
    ring = sum(r.saved_bytes for r in d.rows if not r.after_blocks)
    assert (
        kept[-1] == 0
        and kept[0] == pytest.approx(0.0 if p.schedule == "gpipe" else ring)
        and max(kept) >= ring
    )
    parts = s.costs["memory_breakdown_bytes"]
    assert dict(curve.bands)["parameters"][0] == pytest.approx(parts["parameters"], abs=1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("spec", "pins"), CASES)
def test_the_trace_has_a_process_per_stage_as_long_as_the_step(spec: str, pins: str) -> None:
    s = plan(pins, spec)
    events = json.loads(trace(priced(s, spec)))["traceEvents"]
    stages = dict(s.mesh_shape)["stage"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {k: f"stage {k}" for k in range(stages)} | {
        stages: "inside a full tick, on any stage",
        stages + 1: "memory of a device over the last microbatch",
    }
    for stage in range(stages):
        mine = sorted(
            (e["ts"], e["ts"] + e["dur"], e["name"])
            for e in events
            if e["ph"] == "X" and e["pid"] == stage
        )
        assert mine[-1][1] == pytest.approx(1e6 * s.costs["step_time_s"], rel=1e-4) and sum(
            b - a for a, b, _ in mine
        ) == pytest.approx(mine[-1][1], rel=1e-4)
        assert all(a[1] <= b[0] + 0.01 for a, b in pairwise(mine))
        words = [w for *_, w in mine]
        chunks = s.techniques.get("virtual", 1)
        passes = [
            f"{way} {m}" + (f" virtual stage {v}" if chunks > 1 else "")
            for way in ("forward", "backward")
            for m in range(s.techniques["microbatches"])
            for v in range(chunks)
        ]
        assert all(words.count(each) == 1 for each in passes) and "bubble" in words
    tick = sum(e["dur"] for e in events if e["ph"] == "X" and e["pid"] == stages)
    assert tick == pytest.approx(
        1e6 * sum(x.time_s for x in timeline(detail(pins, spec)).micro), rel=1e-3, abs=1
    )


def test_a_long_pipeline_has_a_short_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, pins = CASES[0]
    whole = trace(priced(plan(pins, spec), spec))
    monkeypatch.setattr("planner.report.trace.MOST_TICKS", 10)
    folded = trace(priced(plan(pins, spec), spec))
    assert len(folded) < len(whole)
    ends = [
        max(
            e["ts"] + e["dur"]
            for e in json.loads(text)["traceEvents"]
            if e["ph"] == "X" and e["pid"] == 0
        )
        for text in (whole, folded)
    ]
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("spec", "pins"), CASES)
def test_the_file_says_what_a_stage_holds(spec: str, pins: str) -> None:
    s, d = plan(pins, spec), detail(pins, spec)
    p = d.pipeline
    assert p is not None
    jsonschema.validate(json.loads(s.to_json()), schema.schema())
    assert [b["per_stage"] for b in s.blocks if "per_stage" in b] == [p.blocks_per_stage]
    seconds = sum(t for _, _, t in by_operator(s))
    assert seconds + s.costs["recompute_time_s"] == pytest.approx(
        s.costs["compute_time_s"], rel=1e-4
    )
    held = [row for row in s.tensors.values() if "stage" in row]
    assert {row["stage"] for row in held} == {p.stage_of(i) for i in p.nodes} and all(
        "label" in row for row in held
    )
    rails = fold(d)
    assert sum(len(line.moves) for line in rails.lines) == len(d.moves)
    handed = [m for m in d.moves if m.when == "handed"]
    assert {m.phase for m in handed} == {"forward", "backward"} and all(
        m.axes == ("stage",) for m in handed
    )


def test_pages_of_staged_plans_are_sound() -> None:
    assert (
        "blocks 1, 3"
        in sound(page([view("pp=2,dp=4,micro=4,virtual=2", "", "zoo:gpt-tiny,layers=4")])).text
    )
    for spec, pins in (CASES[0], CASES[3]):
        v = view(pins, "", spec)
        source = page([v])
        text = sound(source).text
        assert (
            all(f"stage {k}" in text for k in range(4))
            and "pipeline bubble" in text
            and "keep lock-step" in text
            and "to the next stage" in text
        )
        assert "each on one of 4 pipeline stages" in text and "on each of 4 stages" in text
        both = sound(page([view(pins, "A", spec), view("tp=2,micro=2", "B")])).text
        assert "pipeline bubbles" in both and "No pipeline" in both
        bare = sound(page([View("", "s.json", v.strategy, None, "no model")])).text
        assert "keep lock-step" in bare and "pipeline bubble" in bare


def test_many_stages_leave_some_out() -> None:
    pins = "pp=8,micro=2"
    d = detail(pins, DEEP)
    assert d.pipeline is not None
    text = page([view(pins, "", DEEP)])
    assert text.count('class="stagerow"') == 8 and "likewise" not in text
    import planner.report.html.lens as lens

    before, lens.STAGES = lens.STAGES, 4
    try:
        text = page([view(pins, "", DEEP)])
    finally:
        lens.STAGES = before
    assert text.count('class="stagerow"') == 4 and "stages 2 to 5 likewise" in Page.of(text).text


@pytest.mark.slow
def test_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, pins = "zoo:gpt-tiny,layers=4", "pp=2,tp=2,dp=2,micro=4,schedule=1f1b"
    s = planner.plan(spec, devices=8, batch=16, pins=pins)
    assert techniques(s)[0] == "2 pipeline stages (1F1B, 2 blocks each)"
    assert (
        "1 of 5 ticks" in summary(s, 100)
        and "2 pipeline stages" in explain(s, 100)
        and "1 are a bubble" in explain(s, 100)
    )
    name = find_nodes(s, "h.3.mlp.c_fc")[0]
    text = explain_node(s, name, 140, detail=s.details[name], asked="h.3.mlp.c_fc.weight")
    assert (
        "2 of its 4 repeats on each of 2 stages" in text
        and "repeat 3 is on stage 1" in text
        and "in bubbles" in text
    )
    assert "counts on the last only" in explain_node(
        s, "loss", 140
    ) and "its own microbatch" in explain_node(s, find_nodes(s, "wte")[0], 140)
    interleaved = planner.plan(spec, devices=8, batch=16, pins="pp=2,tp=2,dp=2,micro=4,virtual=2")
    assert (
        techniques(interleaved)[0]
        == "2 pipeline stages (interleaved 1F1B, 2 virtual stages of 1 block each)"
    )
    assert "1 of 9 ticks" in summary(interleaved, 100)
    text = explain_node(
        interleaved, name, 140, detail=interleaved.details[name], asked="h.3.mlp.c_fc.weight"
    )
    assert "stage 0: repeats 0 to 0 and 2 to 2" in text and "repeat 3 is on stage 1" in text
    assert (
        baseline_name("megatron", {"mesh": {"stage": 16, "data": 16, "tensor": 4}, "zero_stage": 1})
        == "tensor 4 x data 16 x pipeline 16 + ZeRO-1"
    )
    s.save(tmp_path / "s.json")
    capsys.readouterr()
    assert main(["explain", str(tmp_path / "s.json"), "h.1.mlp.c_fc"]) == 0
    assert "repeat 1 is on stage 0" in capsys.readouterr().out
    assert (
        main(
            [
                "check",
                spec,
                "--against",
                str(tmp_path / "s.json"),
                "--tolerance",
                "step=900%,memory=900%",
            ]
        )
        == 0
    )
    assert "bubble" in capsys.readouterr().out
    assert main(["compare", spec, "--devices", "8", "--batch", "16", "--pin", pins]) == 0
    assert "1F1B" in capsys.readouterr().out


@pytest.mark.slow
def test_a_picture_of_stages(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from planner.report.html.plots import png

    for spec, pins in (CASES[0], CASES[3]):
        png(plan(pins, spec), detail(pins, spec), tmp_path / "p.png")
        assert (tmp_path / "p.png").stat().st_size > 10_000


def test_unstaged_plans_say_nothing_of_stages() -> None:
    s: Strategy = plan("tp=2,micro=2")
    d: Detail = work_out(priced(s, "zoo:gpt-tiny,hidden=256,layers=3"))
    assert d.pipeline is None and timeline(d).stages == () and not any(r.bubble_s for r in d.rows)
    assert "stages" not in explain(s, 100) and not any(
        "stage" in row for row in s.tensors.values() if "label" in row
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("pins", ["pp=2,tp=2,dp=2,micro=4", "dp=4,tp=2,micro=4,recompute=block"])
def test_differences_name_what_the_program_names(pins: str) -> None:
    """Products and collectives of repeated blocks are called alike in predictions and in programs,
    which have one function for all repeats."""
    import re

    from planner.verify.hlo.origins import _COLLECTIVE, _NODE
    from planner.verify.predicted import flops_by_node, named_uses, predict

    s = plan(pins, "zoo:gpt-tiny,layers=4")
    assert s.graph is not None
    found, source = (
        predict(s.graph, s.plan, workload="train"),
        planner.emit(s, "zoo:gpt-tiny,layers=4"),
    )
    said = {
        m.group(1)
        for line in source.splitlines()
        if (m := _NODE.search(line) or _COLLECTIVE.search(line))
    }
    flops = flops_by_node(found.flow, found.runs)
    assert (
        set(flops) <= said
        and sum(flops.values()) == found.flops
        and "/transformer/h.*/mlp/c_fc/MatMul" in flops
    )
    uses = named_uses(found.flow.graph, found.runs, found.uses)
    assert not [u.what for u in uses if re.search(r"\bh\.\d", u.what)] and [
        u.total_bytes for u in uses
    ] == [u.total_bytes for u in found.uses]
    assert {
        u.what for u in uses if u.phase in ("forward", "backward") and u.axes == ("tensor",)
    } <= said


def test_a_node_of_stages_cut_anywhere_counts_what_one_device_runs() -> None:
    """Two stages of a model whose four layers are two dense ones and two with experts: both
    attentions of the dense layers are on the first stage, which recomputes them."""
    made = planner.plan(
        "zoo:deepseek-tiny,layers=4,dense_layers=2",
        devices=4,
        batch=8,
        precision="fp32",
        hardware=str(Path(__file__).parents[2] / "benchmarks" / "eager.toml"),
        baselines=False,
        pins="pp=2,expert=2,micro=2,schedule=1f1b",
    )
    assert made.techniques["cuts"] == ["/model/layers.2/mlp/Add"]
    dense, routed = "/model/layers.0/self_attn/Attention", "/model/layers.2/self_attn/Attention"
    experts = "/model/layers.2/mlp/ReduceSum_4"
    kernels = {n: made.details[n]["kernels"] for n in (dense, routed, experts)}
    assert [kernels[n]["times"] for n in (dense, routed, experts)] == [4, 2, 4]
    assert [kernels[n]["again"] for n in (dense, routed, experts)] == [True, True, False]
    one = 2 * kernels[dense]["forward_s"] + kernels[dense]["backward_s"]
    assert kernels[dense]["step_s"] == pytest.approx(4 * one)
    assert kernels[dense]["bubble_s"] == pytest.approx(2 * one)  # one of three ticks, two layers
    sent = {(m["kind"], m["phase"]) for m in made.details[experts]["moves"]}
    assert {("all-gather", "forward"), ("reduce-scatter", "backward")} <= sent
