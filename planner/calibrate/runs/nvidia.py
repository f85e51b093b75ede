"""What NVIDIA's recipes do that their tables of results do not say, read from the recipes and
scripts that they publish.

Sources: NVIDIA-NeMo/Megatron-Bridge, `scripts/performance`: `configs/llama` (activations
offloaded), `perf_plugins.py` (the allocator), `utils/overrides.py` (the loss);
`training/mixed_precision.py` (eight-bit weights). NVIDIA/TransformerEngine:
`pytorch/cross_entropy.py`, `pytorch/csrc/quantizer.cpp`. NVIDIA/Megatron-LM,
`examples/llama/README.md`: its configuration is that of NeMo's performance scripts. All read in
2026-11.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from costmodels.precision import Recipe
from costmodels.runtimes import Runtime

Row = Mapping[str, Any]
OFFLOADED = {
    ("70b", "gb200", True): 40,
    ("70b", "gb200", False): 20,
    ("70b", "b200", True): 5,
    ("405b", "gb200", True): 92,
}
"""(model, device, eight-bit products) -> blocks whose saved tensors are offloaded, of
Llama under Megatron's FSDP (`cpu_offloading_num_layers`)."""
LOSS_SAVED, LOSS_MOVED = 2.0, (6.0, 4.0)
"""Transformer Engine's loss writes the gradient over the bf16 logits: bytes saved of each; read
twice and written once forward, scaled backward."""


def is_recipe(row: Row) -> bool:
    """Whether a row runs one of NVIDIA's recipes."""
    return any(
        word in str(row["source"]) for word in ("Megatron-Bridge", "NeMo", "Megatron-LM examples")
    )


def as_run(row: Row, zero: int, profile: Runtime) -> Runtime:
    """The profile of a row of Megatron-Bridge, with its loss, the blocks that it offloads and its
    allocator; others' as it is."""
    kernels = profile.kernels
    if kernels is None or "Megatron-Bridge" not in str(row["source"]):
        return profile
    blocks = OFFLOADED.get((_size(row), _device(row), _eight_bit(row)), 0) if zero == 3 else 0
    kernels = replace(
        kernels,
        logit_saved=LOSS_SAVED,
        logit_bytes=LOSS_MOVED,
        offloaded_share=blocks / float(row["layers"]),
    )
    return replace(
        profile, kernels=kernels, pipeline_slack=0.0 if _expandable(row) else profile.pipeline_slack
    )


def weights(row: Row, recipe: Recipe) -> Recipe:
    """The recipe of precision with what the weights take: eight bits where one copy serves all
    products, which Blackwell's tensor cores read either way round.

    Hopper needs a transposed copy beside it, and blocks that share a scale (MXFP8) a copy for each
    direction: two bytes, as in bf16.
    """
    one = (
        is_recipe(row)
        and _eight_bit(row)
        and _device(row) in ("gb200", "b200")
        and not str(row["precision"]).lower().startswith("mx")
    )
    return replace(recipe, parameter_bytes=1) if one else recipe


def _expandable(row: Row) -> bool:
    """Whether the scripts let the allocator's segments grow (`expandable_segments`): free pieces
    then join, whatever order they were freed in."""
    tuned = "SFT" in str(row.get("notes", ""))
    return _eight_bit(row) and (_size(row), _device(row), tuned) in (
        ("405b", "gb200", False),
        ("70b", "gb200", True),
        ("70b", "h100", True),
    )


def _size(row: Row) -> str:
    return str(row["model"]).lower().rpartition("_")[2]


def _device(row: Row) -> str:
    return str(row["hardware"]).lower().removeprefix("dgx-")


def _eight_bit(row: Row) -> bool:
    return "fp8" in str(row.get("precision") or "").lower()
