"""How frameworks add up gradients that do not do so inside products, as Megatron-LM does, read from
their code.

Sources: deepspeedai/DeepSpeed, `deepspeed/runtime/bf16_optimizer.py` (sums in float32, to which a
float32 copy of each gradient is added, and which are sent) and `runtime/zero/config.py` (buckets);
PyTorch's autograd adds a gradient to the one that is there. huggingface/nanotron,
`src/nanotron/optim/gradient_accumulator.py` (sums in float32 of all parameters, whatever the ZeRO
stage, beside the gradients of the microbatch) and `models/llama.py` (get_block_compute_costs:
stages have even shares of products, the head among them). Read in 2026-11.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from costmodels.precision import Recipe
from costmodels.runtimes import Runtime

Row = Mapping[str, Any]
BUCKETS_BYTES = 2 * 500_000_000 * 2
"""DeepSpeed's: of gradients to reduce and of parameters to gather, in two bytes an element."""
IN_PLACE_BYTES = 2 + 2 + 2.0
"""Read a gradient and its sum, write the sum, each of two bytes."""
IN_FLOAT32_BYTES = 2 + 4 + 4.0
"""The same with sums of float32."""
BY_COPY_BYTES = IN_FLOAT32_BYTES + 4 + 4
"""As DeepSpeed does: the gradient's float32 copy is written and read."""


def as_run(row: Row, profile: Runtime) -> Runtime:
    """The profile of a row of DeepSpeed or nanotron; others' as it is."""
    if _nanotron(row):
        return replace(profile, summing_bytes=IN_FLOAT32_BYTES, wider_sums=2.0, balance="products")
    if not _deepspeed(row):
        return profile
    return replace(
        profile,
        tensor_overlap=0.0,
        blocking="BigScience" in str(row["source"]) and "A100" in str(row["hardware"]),
        wider_sums=2.0 if _in_float32(row) else 1.0,
        summing_bytes=BY_COPY_BYTES if _in_float32(row) else IN_PLACE_BYTES,
        overhead_bytes=profile.overhead_bytes + BUCKETS_BYTES * bool(row.get("zero")),
    )


def held(row: Row, recipe: Recipe) -> Recipe:
    """The recipe of precision with what gradients take: sums of float32 beside a microbatch's."""
    if not _nanotron(row) and not (_deepspeed(row) and _in_float32(row)):
        return recipe
    return replace(recipe, gradient_bytes=recipe.gradient_bytes + 4)


def _nanotron(row: Row) -> bool:
    return "nanotron" in str(row["source"]).lower()


def _deepspeed(row: Row) -> bool:
    text = f"{row['source']} {row.get('notes', '')}".lower()
    return any(word in text for word in ("deepspeed", "bigscience", "vtrain"))


def _in_float32(row: Row) -> bool:
    return str(row.get("precision") or "").startswith("bf16")
