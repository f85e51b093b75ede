"""(domain, operator) -> lowering rule, gathered from the tables of rules."""

from __future__ import annotations

from collections.abc import Callable

from planner.reader.call import Call
from planner.reader.lower_control import CONTROL
from planner.reader.lower_index import INDEX
from planner.reader.lower_math import MATH
from planner.reader.lower_moe import moe
from planner.reader.lower_nets import NETS
from planner.reader.lower_rare import RARE
from planner.reader.lower_sequence import SEQUENCE
from planner.reader.lower_shape import SHAPE

TABLE: dict[tuple[str, str], Callable[[Call], None]] = {("", op): rule for rules in (MATH, SHAPE, INDEX, NETS, RARE, CONTROL, SEQUENCE) for op, rule in rules.items()}
TABLE |= {("com.microsoft", op): TABLE["", op] for op in ("Gelu", "SimplifiedLayerNormalization", "FusedMatMul", "QuickGelu")}
TABLE["com.microsoft", "MoE"] = moe
