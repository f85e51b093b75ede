"""What is found of a whole plan: a speed that nobody would accept comes first, with its cause and
what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from planner.api import plan
from planner.graph.findings import Finding
from planner.search.findings import LARGE, of_plan

COSTS = {
    "model_flops_utilization": 0.001,
    "step_time_s": 1.0,
    "exposed_communication_time_s": 0.0,
    "bubble_time_s": 0.0,
    "optimizer_time_s": 0.0,
    "distinct_work": 1.0,
}


def found(
    notes: tuple[str, ...] = (),
    kind: str = "train",
    parameters: int = LARGE + 1,
    nodes: dict[str, Any] | None = None,
    **costs: float,
) -> tuple[Finding, ...]:
    model = SimpleNamespace(plain=SimpleNamespace(notes=notes), workload=SimpleNamespace(kind=kind))
    return of_plan(
        model, SimpleNamespace(parameters=parameters), {**COSTS, **costs}, nodes or {}, 2
    )  # type: ignore[arg-type]


def test_a_slow_plan_of_a_large_model_is_the_first_finding() -> None:
    notes = (
        Finding("tie", "a tie"),
        "an assumption",
        Finding("experts", "gathered"),
        Finding("frozen", "not trained: 'b'"),
    )
    assert [f.kind for f in found(notes)] == ["speed", "frozen", "tie", "experts"]
    assert "0.10%" in found(notes)[0] and "experts were not recognised" in found(notes)[0]
    for other in ({"parameters": LARGE}, {"kind": "infer"}, {"model_flops_utilization": 0.02}):
        assert "speed" not in [f.kind for f in found(notes, **other)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"exposed_communication_time_s": 0.8}, "80% of the step waits for communication"),
        ({"bubble_time_s": 0.7}, "70% of the step are pipeline bubbles"),
        ({"distinct_work": 0.125}, "12.5% of it is distinct"),
        ({"optimizer_time_s": 0.79}, "79% of the step is the optimizer's pass"),
        ({}, "too few rows at a time"),
        ({"notes": (Finding("attention", "of its own"),)}, "attention was not recognised"),
        (
            {"nodes": {"n": {"unsupported": "Foo has no rule", "time_s": 0.2, "times": 7}}},
            "first Foo has no rule",
        ),
    ],
)
def test_the_cause_is_named(given: dict[str, Any], words: str) -> None:
    assert words in found(**given)[0]


def test_a_plan_with_next_to_no_rows_says_so_in_its_file() -> None:
    strategy = plan("zoo:llama3-8b,layers=2,seq=2", devices=8, batch=8, baselines=False)
    assert (
        strategy.costs["model_flops_utilization"] < 0.02 and strategy.findings[0]["kind"] == "speed"
    )


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("source", "options", "why"),
    [
        ("zoo:gpt2-small,layers=4", {}, ""),
        ("zoo:gpt2-small,layers=4", {"precision": "fp32"}, "it computes in float32"),
        ("zoo:gpt2-small,layers=4", {"precision": "fp32", "pins": "micro=4"}, "it computes in"),
        ("zoo:gpt2-small,layers=4", {"hardware": "mi300x"}, "the device has no fused kernel"),
        ("zoo:gpt2-small,layers=4", {"hardware": "cpu"}, ""),
        ("zoo:gpt2-small,layers=4", {"runtime": "megatron"}, ""),
        ("zoo:resnet-tiny", {}, ""),
    ],
)
def test_attention_that_no_fused_kernel_serves_is_told(
    source: str, options: dict[str, Any], why: str
) -> None:
    """With the share of the step that `plan explain` has for its kernels, and the reason."""
    strategy = plan(source, devices=8, batch=64, baselines=False, **options)
    rows = [row["text"] for row in strategy.findings if "no fused kernel serves it" in row["text"]]
    told = bool(why)
    assert len(rows) == told and (not told or why in rows[0])
    kernels = (
        sum(
            row["kernels"]["step_s"]
            for node, row in strategy.details.items()
            if strategy.nodes[node]["op"] == "Attention"
        )
        if told
        else 0.0
    )
    assert not told or f"takes {100 * kernels / strategy.costs['step_time_s']:.0f} % of" in rows[0]
