"""Reductions, scans along an axis and selections. A summed dim may be cut: the result is partial
over its axes."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from planner.graph.ir import Graph, Node
from planner.ops.base import Call, Operator, jnp_dtype, register
from planner.ops.pointwise import letters
from planner.ops.ties import along_axis
from planner.sharding.rule import Rule, parse


def _reduce_rule(node: Node, graph: Graph) -> Rule:
    (shape,), (out,) = graph.shapes(node.inputs[:1]), graph.shapes(node.outputs)
    axes = {int(a) for a in node.attrs["axes"]}  # type: ignore[union-attr]
    whole = node.op not in ("ReduceSum", "ReduceMean")
    names = letters(len(shape))
    left = " ".join(n + ("!" if whole and i in axes else "") for i, n in enumerate(names))
    keep = node.attrs.get("keepdims", 1)
    right = " ".join("1" if i in axes else n for i, n in enumerate(names) if keep or i not in axes)
    rule = parse(f"{left} -> {right}", (shape,), (out,), linear=() if whole else (0,))
    return rule if whole else replace(rule, flops=0.0)


def _reduce(function: str):
    def kernel(call: Call) -> str:
        return f"{function}({call.args[0]}, axis={tuple(call.attr('axes'))}, keepdims={bool(call.attr('keepdims', 1))})"  # type: ignore[arg-type]  # noqa: E501

    return kernel


def _mean(call: Call) -> str:
    """Divides by the global count: a cut dim leaves partial sums of the global mean."""
    axes: tuple[int, ...] = tuple(call.attr("axes"))  # type: ignore[arg-type]
    count = prod(call.global_in[0][a] for a in axes)
    return (
        f"jnp.sum({call.args[0]}, axis={axes}, keepdims={bool(call.attr('keepdims', 1))}) / {count}"
    )


def _axis_rule(node: Node, graph: Graph) -> Rule:
    """One axis whole, on the operand and on every result (whose extent there may differ)."""
    (shape,), outs = (
        graph.shapes(node.inputs[:1]),
        graph.shapes(tuple(o for o in node.outputs if o)),
    )
    axis = int(node.attrs["axis"])  # type: ignore[arg-type]
    names = letters(len(shape))
    left = " ".join("i!" if i == axis else n for i, n in enumerate(names))
    squeezed = len(outs[0]) < len(shape)
    right = " ".join(
        n if i != axis else "o!" for i, n in enumerate(names) if i != axis or not squeezed
    )
    return parse(f"{left} -> {','.join([right] * len(outs))}", (shape,), outs)


def _cumsum(call: Call) -> str:
    return (
        f"{call.use('cumsum')}({call.args[0]}, {call.attr('axis')},"
        f" {bool(call.attr('exclusive', 0))}, {bool(call.attr('reverse', 0))})"
    )


def _topk(call: Call) -> str:
    text = (
        f"{call.use('top_k')}({call.args[0]}, {call.attr('k')}, {call.attr('axis')},"
        f" {bool(call.attr('largest', 1))})"
    )
    live = [i for i, o in enumerate(call.node.outputs) if o]
    return text if len(live) == 2 else f"{text}[{live[0]}]"


def _arg(function: str):
    return lambda c: (
        f"{function}({c.args[0]}, axis={c.attr('axis')},"
        f" keepdims={bool(c.attr('keepdims', 1))}).astype(jnp.int32)"
    )


def _onehot_rule(node: Node, graph: Graph) -> Rule:
    (shape,), (out,) = graph.shapes(node.inputs[:1]), graph.shapes(node.outputs)
    axis = int(node.attrs["axis"])  # type: ignore[arg-type]
    names = letters(len(shape))
    return parse(
        f"{' '.join(names)} -> {' '.join([*names[:axis], 'v', *names[axis:]])}",
        (shape,),
        (out,),
        no_pad=frozenset({"v"}),
    )


def _onehot(call: Call) -> str:
    width = call.rule.local(call.split, call.mesh)["v"]
    on, off = call.attr("on_value", 1.0), call.attr("off_value", 0.0)
    x, depth = call.args[0], call.rule.sizes["v"]
    # In the output's own type: float32 here would carry on into everything that is added to it in a
    # bfloat16 program.
    dtype = f", dtype={jnp_dtype(call.out_dtypes[0])}" if call.out_dtypes else ""
    hot = (
        f"jax.nn.one_hot(jnp.where({x} < 0, {x} + {depth}, {x}) - {call.start('v')}, {width},"
        f" axis={call.attr('axis')}{dtype})"
    )
    return hot if (on, off) == (1.0, 0.0) else f"({off!r} + ({on!r} - {off!r}) * {hot})"


register(
    Operator("ReduceSum", _reduce_rule, _reduce("jnp.sum"), saves=""),
    Operator("ReduceMean", _reduce_rule, _mean, saves=""),
    Operator("ReduceMax", _reduce_rule, _reduce("jnp.max"), saves="in", extents=True),
    Operator("ReduceMin", _reduce_rule, _reduce("jnp.min"), saves="in", extents=True),
    Operator("ReduceProd", _reduce_rule, _reduce("jnp.prod"), saves="in", extents=True),
    Operator("CumSum", _axis_rule, _cumsum, saves="", extents=True, ties=along_axis),
    Operator("TopK", _axis_rule, _topk, saves="out"),
    Operator("ArgMax", _axis_rule, _arg("jnp.argmax"), saves=""),
    Operator("ArgMin", _axis_rule, _arg("jnp.argmin"), saves=""),
    Operator(
        "OneHot",
        _onehot_rule,
        _onehot,
        saves="",
        counted="v",
        index_limit=lambda node, graph, slot: int(node.attrs["depth"]),  # type: ignore[arg-type]
    ),
)
