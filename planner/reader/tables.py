"""(domain, operator) -> lowering rule, gathered from the three tables of rules."""

from __future__ import annotations

from collections.abc import Callable

from planner.reader.lower import Call
from planner.reader.lower_math import MATH
from planner.reader.lower_nets import NETS
from planner.reader.lower_shape import SHAPE

TABLE: dict[tuple[str, str], Callable[[Call], None]] = {("", op): rule for table in (MATH, SHAPE, NETS) for op, rule in table.items()}
TABLE |= {("com.microsoft", op): TABLE[("", op)] for op in ("Gelu", "SimplifiedLayerNormalization", "FusedMatMul", "QuickGelu")}
