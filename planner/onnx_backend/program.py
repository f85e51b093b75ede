"""A Graph as a function: the statements the emitter writes for it, on one device.

Programs hold 64-bit types in 32 bits, as accelerators do; ONNX compares types exactly. So the same
statements are written with every dtype as a name (FLOAT64, INT64, ...) that is bound to the real
one, and run with jax's 64-bit types on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from planner.emit.body import Body
from planner.emit.program import check_kernels
from planner.emit.source import helper_sources
from planner.errors import PlanError
from planner.execution.layout_flow import derive
from planner.execution.plan import Plan
from planner.graph.ir import DTYPE_BYTES, Graph
from planner.ops import NoRule
from planner.reader.draft.fold import numpy_dtype
from planner.workload.weights import load_one

HEADER = """import functools
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name"""
INDICES = ("int64", "uint64")
EXACT = frozenset(DTYPE_BYTES) - {"float8_e4m3fn", "float8_e5m2", "int4", "uint4"}
"""Types that kernels compute with as ONNX says; the smaller ones saturate and round in ways of
their own."""

ONCE = {"xla_disable_hlo_passes": "fusion"}
"""Fused code computes a value again for each of its readers, rounded in another order; here each
statement is run once, as ONNX defines it."""


class ExactBody(Body):
    """Statements with exact dtypes: names in capitals, bound where the text is run."""

    def _dtype(self, tensor: str) -> str:
        return self.flow.graph.tensors[tensor].dtype.upper()

    def node(self, index: int) -> None:
        """Write one node; 64-bit integers that its kernel holds in 32 bits are widened."""
        super().node(index)
        for name in self.flow.graph.nodes[index].outputs:
            if name and self.flow.graph.tensors[name].dtype in INDICES:
                variable = self.variables[name, ()]
                self.lines.append(
                    f"{variable} = {variable}.astype({self.flow.graph.tensors[name].dtype.upper()})"
                )


def source(graph: Graph) -> tuple[str, dict[str, np.ndarray]]:
    """(text of a function `run(inputs, weights)`, arrays it calls CONSTANTS). Raises PlanError for
    operators without a kernel."""
    check_kernels(graph)
    odd = sorted({t.dtype for t in graph.tensors.values()} - EXACT)
    if odd:
        raise PlanError("P170", f"no kernel computes with {', '.join(odd)}")
    flow = derive(graph, Plan((), {}), training=False)
    body = ExactBody(flow, "jit")
    for store, names in (("inputs", graph.inputs), ("weights", tuple(graph.weights))):
        for name in names:
            if name in flow.source:
                variable = body.fresh("w" if store == "weights" else "x")
                body.lines.append(f"{variable} = {store}[{name!a}]")
                body.bind(name, flow.source[name], variable)
    try:
        for index in range(len(graph.nodes)):
            body.node(index)
    except NoRule as reason:
        raise PlanError("P170", f"no kernel for this form of an operator: {reason}") from None
    results = [
        f"jnp.asarray({body.value(o, flow.source[o].stored)}, {graph.tensors[o].dtype.upper()})"
        for o in graph.outputs
    ]
    lines = [line if isinstance(line, str) else line() for line in body.lines]
    text = "\n".join(
        [
            "def run(inputs, weights):",
            *(f"    {line}" for line in lines),
            f"    return [{', '.join(results)}]",
        ]
    )
    return "\n\n\n".join([HEADER, *helper_sources(body.helpers), text]), body.arrays


def function_of(
    graph: Graph, folder: str | None = None
) -> tuple[Callable[[Any, Any], list[Any]], dict[str, np.ndarray]]:
    """The graph as a function `run(inputs, weights)` of arrays by name, and its weights. Raises
    PlanError."""
    text, arrays = source(graph)
    space: dict[str, Any] = {name.upper(): numpy_dtype(name) for name in EXACT} | {
        "CONSTANTS": arrays,
        **{key.upper(): value for key, value in arrays.items()},
    }
    exec(compile(text, f"<{graph.name[:40]!a}>", "exec"), space)
    return space["run"], {name: load_one(graph, name, folder) for name in graph.weights}


def compiled(
    graph: Graph, folder: str | None = None
) -> Callable[[Mapping[str, Any]], list[np.ndarray]]:
    """The graph as a jitted function of its inputs by name; weights are loaded once. Raises
    PlanError."""
    import jax

    run, weights = function_of(graph, folder)
    function = jax.jit(run, compiler_options=ONCE)

    def call(inputs: Mapping[str, Any]) -> list[np.ndarray]:
        with jax.enable_x64(True):
            return [np.asarray(y) for y in function(dict(inputs), weights)]

    return call


def fits(arrays: Sequence[Any]) -> bool:
    """Whether all values are tensors of types a Graph holds."""
    return all(isinstance(a, np.ndarray) and a.dtype.name in EXACT for a in arrays)
