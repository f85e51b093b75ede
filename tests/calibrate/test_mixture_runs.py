"""Published runs of mixtures of experts: how their programs multiply experts' rows, and what that
is in their prices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.expert_arms import DEGREES, torchtitan
from planner.calibrate.runs import xla
from planner.calibrate.runs.fit import prepare
from planner.calibrate.runs.mixtures import Routing, routing_of
from planner.calibrate.runs.rows import Case, Left, case_of, plan_of
from planner.ops.expert_load import expert_nodes

IRONWOOD: dict[str, Any] = {
    "source": "tpu-recipes Ironwood",
    "model": "qwen3-235b-a22b",
    "layers": 94,
    "hidden": 4096,
    "heads": 64,
    "kv_heads": 4,
    "ffn": 12288,
    "vocab": 151936,
    "seq": 4096,
    "hardware": "TPU7x (Ironwood)",
    "devices": 128,
    "tp": 1,
    "pp": 1,
    "zero": 3,
    "global_batch": 4096,
    "recompute": "full",
    "precision": "bf16",
    "metric": "step_time_s",
    "value": 30.0,
    "notes": "devices = CHIPS (2 JAX devices per chip)",
}
TRILLIUM = IRONWOOD | {
    "source": "tpu-recipes TPU v6e",
    "model": "mixtral-8x7b",
    "layers": 32,
    "heads": 32,
    "kv_heads": 8,
    "vocab": 32000,
    "ffn": 14336,
    "hardware": "TPU v6e",
    "devices": 256,
    "global_batch": 2048,
    "notes": "",
}


def test_a_recipe_that_drops_is_read_with_its_dispatch() -> None:
    assert xla.drops(TRILLIUM) and not xla.drops(IRONWOOD)
    assert case_of(TRILLIUM).spec.endswith(",form=capacity")
    assert not case_of(TRILLIUM).runtime.grouped_experts
    assert case_of(IRONWOOD).runtime.grouped_experts


@pytest.mark.slow
def test_rows_of_all_experts_by_one_kernel_take_less_than_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No sums of gradients in float32 and no blocks that are half full; eight bits reach experts
    there, and in blocks do not."""
    monkeypatch.setattr("planner.ops.experts.kernel_of", lambda *_: "")

    def compute_s(case: Case, grouped: bool) -> float:
        runtime = replace(case.runtime, grouped_experts=grouped)
        return prepare(replace(case, runtime=runtime)).cost.compute_time_s

    wide, short = case_of(IRONWOOD), case_of(IRONWOOD | {"precision": "fp8_full"})
    assert compute_s(wide, True) < 0.8 * compute_s(wide, False)
    gained = [compute_s(wide, g) - compute_s(short, g) for g in (True, False)]
    assert gained[0] > 2 * gained[1]


@pytest.mark.slow
def test_degrees_of_experts_are_slower_at_the_size_of_torchtitans_issue() -> None:
    """pytorch/torchtitan issue 1624: the 16B model within a node, EP 1 to 4."""
    first, second, fourth = (torchtitan(degree) for degree in DEGREES)
    assert first < second < fourth


@pytest.mark.slow
def test_the_program_of_a_mixture_is_priced_near_its_step() -> None:
    step = 27.02  # DeepSeek-V3 on 128 chips of Ironwood (AI-Hypercomputer/tpu-recipes@c8cfe2f)
    row = IRONWOOD | {
        "model": "deepseek-v3",
        "layers": 61,
        "hidden": 7168,
        "heads": 128,
        "kv_heads": 128,
        "ffn": 18432,
        "vocab": 129280,
        "global_batch": 2048,
        "recompute": "selective",
    }
    assert prepare(case_of(row)).step_s() == pytest.approx(step, rel=0.15)


BRIDGE: dict[str, Any] = {
    "source": "NVIDIA Megatron-Bridge performance summary",
    "model": "Qwen3_30B_a3B",
    "layers": 48,
    "hidden": 2048,
    "heads": 32,
    "seq": 4096,
    "hardware": "DGX-GB200",
    "devices": 8,
    "tp": 1,
    "pp": 1,
    "dp": 8,
    "ep": 8,
    "microbatch": 4,
    "global_batch": 512,
    "precision": "MXFP8",
    "metric": "tokens_per_s_per_device",
    "value": 26112,
    "notes": "release '26.04.01 NeMo Container'",
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, Routing("layers", True, False)),
        ({"notes": "release '26.08 NeMo Container'"}, Routing("whole", True, True)),
        ({"hardware": "DGX-B200", "notes": "release '26.02'"}, Routing("layers", False, False)),
        ({"hardware": "DGX-H100", "precision": "FP8"}, Routing("none", True, False)),
        ({"model": "Qwen3_235B_a22B", "hardware": "DGX-H100"}, Routing("none", True, True)),
        ({"model": "Kimi_K2", "notes": "release '26.06'"}, Routing("none", True, False)),
        ({"model": "GPT OSS 120B", "hardware": "DGX-GB300"}, Routing("layers", False, False)),
    ],
)
def test_what_a_recipe_of_a_mixture_does(change: dict[str, Any], expected: Routing) -> None:
    assert routing_of(BRIDGE | change) == expected


def test_a_mixture_under_megatron_is_priced_with_its_recipe() -> None:
    """Rows travel over the expert axis; a step that is captured whole, and exchanges beside
    products, take less."""
    case = case_of(BRIDGE)
    base, plan = plan_of(case)
    i, experts = next(expert_nodes(base.graph))
    split = plan.splits[base.graph.nodes[i].id]
    assert experts == 128 and split.axes("expert-b") == ("expert",)
    assert plan.exchanges == "waiting"
    priced = prepare(case).step_s()
    captured = prepare(case_of(BRIDGE | {"notes": "release '26.06 NeMo Container'"})).step_s()
    assert captured < 0.8 * priced
    plain = BRIDGE | {"model": "GPT OSS 120B", "layers": 36, "hidden": 2880, "heads": 64}
    with pytest.raises(Left, match="experts"):
        case_of(plain | {"source": "somewhere else"})


@pytest.mark.slow
def test_experts_are_on_ranks_of_tensor_parallelism_too() -> None:
    """With a degree of 32 over 16 replicas of two ranks each rank has experts of its own."""
    row = BRIDGE | {"devices": 32, "tp": 2, "dp": 16, "ep": 32, "hardware": "DGX-H100"}
    case = case_of(row)
    base, plan = plan_of(case)
    i, _ = next(expert_nodes(base.graph))
    split = plan.splits[base.graph.nodes[i].id]
    assert split.axes("expert-b") == ("expert",) and split.axes("expert-s") == ("model",)
    assert dict(plan.mesh) == {"expert": 16, "model": 2}
    with pytest.raises(Left, match="tensor parallelism"):
        case_of(row | {"ep": 1024})
