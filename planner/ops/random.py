"""Operators that draw. What they draw is a hash of a seed and the global index, equal under any
split."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from planner.graph.ir import Graph, Node
from planner.ops.base import Call, NoRule, Operator, jnp_dtype, register
from planner.ops.pointwise import letters
from planner.sharding.rule import KernelCollective, Rule, parse

_SEED_LIMIT = 2**31 - 1  # any seed will do


def _complete(factors: list[str]) -> tuple[KernelCollective, ...]:
    """Collectives that never run: they say that a result lacking a factor is complete, not a term
    of a sum."""
    return tuple(KernelCollective(f, "all-reduce", (), 0, 0) for f in factors)


def _dropout_rule(node: Node, graph: Graph) -> Rule:
    """Every dim splits. Operands: x and a scalar seed (planner.workload.train_eval_mode); results:
    y and the next seed, which is whole on every device."""
    shapes = graph.shapes(node.inputs)
    if len(shapes) != 2 or graph.tensors[node.inputs[1]].is_float:
        raise NoRule("a mask as output")
    factors = letters(len(shapes[0]))
    names = " ".join(factors)
    live = [i for i, o in enumerate(node.outputs) if o]
    return parse(
        f"{names}, -> {', '.join((names, '')[i] for i in live)}",
        shapes,
        tuple((shapes[0], ())[i] for i in live),
        inner=_complete(factors),
    )


def _drawn_rule(node: Node, graph: Graph) -> Rule:
    """Every dim splits. Operand: a scalar seed (planner.workload.train_eval_mode); results: what is
    drawn and the next seed."""
    if len(node.inputs) != 1:
        raise NoRule("drawn where no seed was handed on")
    live = [i for i, o in enumerate(node.outputs) if o]
    shape = graph.tensors[node.outputs[0]].shape
    factors = letters(len(shape))
    return parse(
        f"-> {', '.join((' '.join(factors), '')[i] for i in live)}",
        ((),),
        tuple((shape, ())[i] for i in live),
        inner=_complete(factors),
    )


def _place(call: Call, shape: tuple[int, ...]) -> str:
    """Where this device's piece lies in the whole: its first index, and strides."""
    starts = ", ".join(call.start(f) for f in letters(len(shape)))
    strides = ", ".join(str(prod(shape[d + 1 :]) % 2**32) for d in range(len(shape)))
    return f"[{starts}], [{strides}]"


def _dropout(call: Call) -> str:
    if len(call.args) < 2:
        raise NoRule("no seed: the graph is in neither mode (planner.workload.train_eval_mode)")
    text = (
        f"{call.use('dropout')}({call.args[0]}, {call.args[1]}, {call.attr('ratio')!r},"
        f" {_place(call, call.global_in[0])})"
    )
    live = [i for i, o in enumerate(call.node.outputs) if o]
    return text if len(live) == 2 else f"{text}[{live[0]}]"


def _drawn(helper: str, *numbers: str) -> Callable[[Call], str]:
    """Kernel text of numbers that are drawn, with the attributes that say how they spread."""

    def text(call: Call) -> str:
        if not call.args:
            raise NoRule("no seed: the graph is in neither mode (planner.workload.train_eval_mode)")
        spread = ", ".join(repr(call.attr(name)) for name in numbers)
        live = [i for i, o in enumerate(call.node.outputs) if o]
        drawn = (
            f"{call.use(helper)}({call.args[0]}, {spread}, {call.out_shapes[0]},"
            f" {jnp_dtype(call.out_dtypes[0])}, {_place(call, call.global_out[0])})"
        )
        return drawn if len(live) == 2 else f"{drawn}[0]"

    return text


register(
    Operator(
        "Dropout",
        _dropout_rule,
        _dropout,
        saves="",
        fusible=True,
        index_limit=lambda node, graph, slot: _SEED_LIMIT if slot == 1 else 0,
    ),
    *(
        Operator(
            name,
            _drawn_rule,
            kernel,
            saves="",
            fusible=True,
            index_limit=lambda node, graph, slot: _SEED_LIMIT,
        )
        for name, kernel in (
            ("RandomUniform", _drawn("uniform", "low", "high")),
            ("RandomNormal", _drawn("normal", "mean", "scale")),
        )
    ),
)
