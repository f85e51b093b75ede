"""The operator table: one entry an operator, with all that the planner asks of it
(docs/adding-an-operator.md)."""

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
