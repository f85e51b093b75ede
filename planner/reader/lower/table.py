"""(domain, operator) -> lowering rule, gathered from the tables of rules."""

from __future__ import annotations

from collections.abc import Callable

from planner.reader.jax.trace import DOMAIN, FUSED
from planner.reader.lower.attention import ATTENTION
from planner.reader.lower.call import Call
from planner.reader.lower.contrib import CONTRIB
from planner.reader.lower.contrib_attention import CONTRIB_ATTENTION
from planner.reader.lower.contrib_fused import CONTRIB_FUSED
from planner.reader.lower.control import CONTROL
from planner.reader.lower.draws import DRAWS
from planner.reader.lower.einsum import einsum
from planner.reader.lower.experts import moe
from planner.reader.lower.index import INDEX
from planner.reader.lower.jax import fused_attention
from planner.reader.lower.layers import NETS
from planner.reader.lower.math import MATH
from planner.reader.lower.rare import RARE
from planner.reader.lower.sequence import SEQUENCE
from planner.reader.lower.shape import SHAPE

TABLE: dict[tuple[str, str], Callable[[Call], None]] = {
    ("", op): rule
    for rules in (MATH, SHAPE, INDEX, NETS, ATTENTION, RARE, CONTROL, SEQUENCE, DRAWS)
    for op, rule in rules.items()
}
TABLE["", "Einsum"] = einsum
TABLE |= {
    ("com.microsoft", op): TABLE["", op]
    for op in ("Gelu", "SimplifiedLayerNormalization", "FusedMatMul", "QuickGelu")
}
for rules in (CONTRIB, CONTRIB_ATTENTION, CONTRIB_FUSED):
    TABLE |= {("com.microsoft", op): rule for op, rule in rules.items()}
TABLE["com.microsoft", "MoE"] = moe
TABLE[DOMAIN, FUSED] = fused_attention
