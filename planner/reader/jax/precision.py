"""The precision that a JAX function computes in, as a recipe of `costmodels.precision`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import prod

import numpy as np

from planner.reader.jax.trace import Trace, Value

PRODUCTS = ("MatMul", "Conv")
"""What the translation writes products as."""


def precision_of(trace: Trace, leaves: Iterable[Value]) -> str:
    """The recipe of a traced function, by the type of most results of products, and of most
    parameters."""
    products, weights = Counter[str](), Counter[str]()
    for node in trace.nodes:
        if node.op_type in PRODUCTS:
            result = trace.types[node.output[0]]
            products[np.dtype(result.dtype).name] += prod(result.shape)
    for leaf in leaves:
        if leaf.parameter:
            weights[np.dtype(leaf.dtype).name] += prod(leaf.shape)
    kind, stored = (max(sizes, key=sizes.__getitem__, default="") for sizes in (products, weights))
    if kind == "bfloat16":
        return "bf16-pure" if stored == kind else "bf16-mixed"
    return "fp16" if kind == "float16" else "fp32"
