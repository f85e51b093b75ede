"""Plans for engines (`--for vllm`, `--for sglang`): rows by DeepEP's kernels, halves of a batch that
take turns, prompts without padding; no program, and the engine is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.latent_serving import FEW_LAYERS, LOW_LATENCY, Run, priced
from costmodels.collectives import DISPATCH
from costmodels.runtimes import ENGINES, load_runtime, runtime_names
from planner.cli import main
from planner.errors import PlanError
from planner.execution.collectives import collectives
from planner.pricing.frameworks.dispatch import dispatched, generates
from planner.serving.engines import hand_over
from planner.serving.joint import Phase
from planner.serving.result import Serving
from planner.serving.serve import program, serve

MODEL = "zoo:deepseek-v3,layers=5,experts=64"
ASK: dict[str, Any] = {
    "prompt": 1024,
    "generate": 64,
    "concurrency": 512,
    "devices": 16,
    "hardware": "h100",
    "precision": "fp8",
}


def sent(phase: Phase) -> dict[str, list[float]]:
    """Kind of an exchange of rows -> bytes of each run of it that a device sends."""
    made = collectives(phase.flow, (), phase.pricer.itemsize)
    found: dict[str, list[float]] = {}
    for use in dispatched(phase.base, phase.flow, phase.pricer, made):
        if use.inside and use.phase == "forward":
            found.setdefault(use.kind, []).append(use.payload_bytes)
    return found


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("engine", "kind"), [(e, k) for e in ("sglang", "vllm") for k in ("prompts", "generation")]
)
def test_rows_once_to_each_node_or_to_each_expert(engine: str, kind: str) -> None:
    """By hand: rows of 7,168 elements, a byte there and two back, 1.25 times the mean on the busiest
    device; once for each of eight experts, or in SGLang's prompts once for each of the nodes that
    hold four of eight groups of experts, four nodes."""
    each, tokens = (32, 1) if kind == "generation" else (8, 1024)
    run, rows = Run("", kind, 32, 1024, each, 0.0), each * tokens
    _, phase = priced(run, "fp8", engine, FEW_LAYERS)
    times = 8.0
    if engine == "sglang" and not run.generates:
        nodes = 4 * (1 - (3 / 4) ** 4)
        times = nodes * (1 - (1 - 1 / nodes) ** 8)
    there = 1.25 * rows * times * 7168
    found = sent(phase)
    assert set(found) == {DISPATCH}
    wanted = [there, 2 * there] * (len(found[DISPATCH]) // 2)
    assert found[DISPATCH] == pytest.approx(wanted, rel=0.03)
    assert generates(phase.base.graph) == run.generates


@pytest.mark.slow
@pytest.mark.parametrize("devices", [32, pytest.param(128, marks=pytest.mark.slow)])
def test_exchanges_are_near_those_that_were_measured(devices: int) -> None:
    """DeepEP's low-latency kernels on H800 (docs/legacy.md there), to which nothing was fitted:
    within a third, 1.25 times the mean on the busiest device among it."""
    _, phase = priced(Run("", "generation", devices, 4096, 128, 0.0), "fp8", "sglang", FEW_LAYERS)
    layers = sum(1 for node in phase.base.graph.nodes if node.op == "RoutedExperts")
    measured = 1e-6 * sum(LOW_LATENCY[devices])
    assert 0.67 < phase.exchange_s / layers / measured < 1.33


@pytest.mark.slow
def test_halves_take_turns_where_that_is_shorter() -> None:
    run = Run("", "prompts", 32, 1024, 8, 0.0)
    pair, phase = priced(run, "fp8", "sglang", FEW_LAYERS)
    whole, rows_s = phase.cost.step_time_s, phase.exchange_s
    assert 0 < rows_s < whole
    assert phase.seconds() == pytest.approx(max(whole - rows_s, rows_s))
    assert phase.seconds(phase) == whole  # half of the batch that takes as long is no gain
    _, emitted = priced(run, "fp8", "", FEW_LAYERS)
    assert emitted.seconds() == emitted.cost.step_time_s
    assert pair.ttft_s < 0.8 * emitted.cost.step_time_s


def test_prompts_of_engines_have_no_padding() -> None:
    _, phase = priced(Run("", "prompts", 32, 1024, 8, 0.0), "fp8", "sglang", FEW_LAYERS)
    found = [n for n in phase.base.graph.nodes if n.op == "Attention"]
    assert found and all(len(n.inputs) == 3 and n.attrs["causal"] for n in found)


@pytest.mark.slow
def test_a_plan_for_an_engine_is_its_own(tmp_path: Path) -> None:
    """Cheaper than the emitted program's, kept in its file, no program of it, and handed to no other
    engine."""
    made, usual = (serve(MODEL, engine=e, **ASK) for e in ("sglang", ""))
    row, other = (next(r for r in m.rows if r["label"] == "ep=16 tp=1") for m in (made, usual))
    assert row["ttft_s"] < 0.8 * other["ttft_s"] and row["tpot_s"] < other["tpot_s"]
    made.save(tmp_path / "plan.json")
    again = Serving.load(tmp_path / "plan.json")
    assert again.shape.engine == "sglang" and "SGLang with DeepEP" in " ".join(str(again).split())
    with pytest.raises(PlanError, match="P224.*for sglang"):
        program(again, MODEL)
    shared = replace(again, rows=(row,), figures={**again.figures, **row})
    text = " ".join(hand_over(shared, "sglang").text.split())
    for words in ("--moe-a2a-backend deepep", "--enable-two-batch-overlap", "--quantization fp8"):
        assert words in text
    with pytest.raises(PlanError, match="P192.*priced as sglang"):
        hand_over(shared, "vllm")
    told = replace(shared, service={**shared.service, "engine": "vllm"})
    text = " ".join(hand_over(told, "vllm").text.split())
    assert "--all2all-backend deepep_low_latency" in text and "--enable-dbo" in text
    bad = (tmp_path / "plan.json").read_text().replace('"engine": "sglang"', '"engine": "x; rm"')
    (tmp_path / "bad.json").write_text(bad)
    with pytest.raises(PlanError, match="P057"):
        Serving.load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--for", "megatron"], "does not take --for megatron"),
        (["--for", "vllm", "--runtime", "jax-jit"], "contradict each other"),
    ],
)
def test_what_is_no_engine_is_refused(
    more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ["--workload", "infer", "--prompt", "8", "--generate", "4", "--concurrency", "4"]
    assert main(["zoo:llama-tiny,cache=1", "--devices", "2", *ask, *more]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_profiles_of_engines_say_where_their_constants_are_from() -> None:
    for name in ENGINES:
        profile = load_runtime(name)
        assert profile.serves and profile.kernels is None and name not in runtime_names()
        told = {*profile.sources, *profile.guessed}
        assert {"rows_once", "serves", "time_spread", "fused_traffic", "per_device"} <= told
    assert load_runtime("sglang").rows_once and not load_runtime("vllm").rows_once
