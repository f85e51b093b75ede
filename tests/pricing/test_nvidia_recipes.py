"""What NVIDIA's recipes do beside what their tables say: blocks that wait in the host's memory,
eight-bit weights, a loss that overwrites the logits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodels.frameworks.peak_memory import peak
from costmodels.precision import load_recipe
from planner.calibrate.runs.fit import Prepared, prepare
from planner.calibrate.runs.nvidia import LOSS_SAVED, OFFLOADED, is_recipe, weights
from planner.calibrate.runs.rows import case_of, level, runtime_of, sequence_parallel

SMALL = {
    "source": "NVIDIA Megatron-Bridge performance summary",
    "model": "LLAMA3_70B",
    "layers": 8,
    "hidden": 1024,
    "heads": 8,
    "kv_heads": 8,
    "ffn": 4096,
    "vocab": 32000,
    "seq": 2048,
    "hardware": "DGX-GB200",
    "devices": 8,
    "tp": 1,
    "pp": 1,
    "vpp": 1,
    "dp": 8,
    "zero": 3,
    "microbatch": 1,
    "global_batch": 8,
    "recompute": "none",
    "precision": "FP8",
    "metric": "step_time_s",
    "value": 1.0,
    "notes": "task 'Pre-Training Performance'",
}


@pytest.fixture(scope="module")
def offloaded() -> Prepared:
    return prepare(case_of({**SMALL, "layers": 80}))


def test_offloaded_blocks_leave_the_device(offloaded: Prepared) -> None:
    """Forty of eighty blocks wait in the host's memory, and one is on its way: 41 of 80 blocks'
    kept tensors are here, and all that enters blocks."""
    runtime = offloaded.case.runtime
    kernels = runtime.kernels
    assert kernels is not None
    assert kernels.offloaded_share == OFFLOADED["70b", "gb200", True] / 80
    whole, here = (
        peak(offloaded.memory, replace(runtime, kernels=replace(kernels, offloaded_share=share)))
        for share in (0.0, kernels.offloaded_share)
    )
    assert here == offloaded.cost.memory
    entering = offloaded.memory.entering * (1 + runtime.memory_slack + runtime.pipeline_slack)
    assert (here.activations - entering) / (whole.activations - entering) == pytest.approx(
        41 / 80, rel=1e-6
    )
    assert here.temporary == whole.temporary


def test_only_runs_with_fsdp_offload() -> None:
    for other in ({"zero": 1}, {"model": "LLAMA3_8B"}, {"source": "another"}):
        kernels = runtime_of({**SMALL, **other}, int(other.get("zero", 3))).kernels
        assert kernels is not None
        assert kernels.offloaded_share == 0


def test_eight_bit_weights_where_one_copy_serves() -> None:
    fp8, bf16 = load_recipe("fp8"), load_recipe("bf16-mixed")
    assert weights(SMALL, fp8).parameter_bytes == 1
    for other in (
        {"hardware": "DGX-H100"},
        {"precision": "MXFP8"},
        {"source": "torchtitan benchmarks"},
    ):
        assert weights({**SMALL, **other}, fp8) == fp8
    assert weights({**SMALL, "precision": "BF16"}, bf16) == bf16
    assert case_of(SMALL).recipe == replace(fp8, parameter_bytes=1)


def test_the_loss_and_the_allocator_are_the_recipes() -> None:
    recipe, other = (
        runtime_of(SMALL, 1),
        runtime_of({**SMALL, "source": "Megatron-LM examples/llama README (H100 FP8)"}, 1),
    )
    assert recipe.kernels is not None
    assert other.kernels is not None
    assert recipe.kernels.logit_saved == LOSS_SAVED < other.kernels.logit_saved
    grows = [
        runtime_of({**SMALL, **more}, 1).pipeline_slack == 0
        for more in (
            {"model": "LLAMA3.1_405B"},
            {"model": "LLAMA3.1_405B", "hardware": "DGX-H100"},
            {},
            {"notes": "task 'SFT Performance'"},
            {"model": "LLAMA3.1_405B", "precision": "BF16"},
        )
    ]
    assert grows == [True, False, False, True, False]


def test_megatrons_example_is_configured_as_the_recipes() -> None:
    example = {
        **SMALL,
        "source": "Megatron-LM examples/llama README (H100 FP8)",
        "zero": None,
        "sequence_parallel": None,
    }
    assert is_recipe(example)
    assert (level(example), sequence_parallel(example)) == (1, True)
    assert not is_recipe({**example, "source": "Megatron-LM README H100 weak scaling"})


def test_every_second_product_is_kept_where_every_second_is_made_again() -> None:
    titan, other = (
        runtime_of({**SMALL, "source": s, "recompute": "selective", "hardware": "H100"}, 3).kernels
        for s in ("torchtitan benchmarks", "another")
    )
    assert titan is not None
    assert other is not None
    assert {name: titan.saved[name] / other.saved[name] for name in other.saved} == {
        "product": 0.5,
        "into residual": 0.5,
        "attention": 1.0,
    }
    assert titan.recomputed[0] == 1 - titan.saved["product"]
