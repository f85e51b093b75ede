"""The operator table. A new operator = one line (its rule), a kernel text, and one line in the
oracle's list (tests/ops/test_oracle.py)."""

from planner.ops import (
    attention,
    control,
    experts,
    index,
    linear,
    loss,
    norm,
    pointwise,
    pool,
    quant,
    random,
    rare,
    recurrent,
    reduce,
    sample,
    shape,
    signal,
)
from planner.ops.base import OPERATORS, Call, NoRule, Operator, operator_of

__all__ = [
    "OPERATORS",
    "Call",
    "NoRule",
    "Operator",
    "attention",
    "control",
    "experts",
    "index",
    "linear",
    "loss",
    "norm",
    "operator_of",
    "pointwise",
    "pool",
    "quant",
    "random",
    "rare",
    "recurrent",
    "reduce",
    "sample",
    "shape",
    "signal",
]
