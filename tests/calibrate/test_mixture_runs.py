"""Published runs of mixtures of experts: how their programs multiply experts' rows, and what that
is in their prices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.expert_arms import DEGREES, torchtitan
from planner.calibrate.runs import xla
from planner.calibrate.runs.fit import prepare
from planner.calibrate.runs.rows import Case, case_of

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
