"""Along one axis, or per sample: Fourier transforms, running products, reversed sequences, caches
written at a position, determinants."""

from __future__ import annotations

from planner.graph.ir import Graph, Node
from planner.ops.base import Call, Operator, register
from planner.ops.pointwise import letters
from planner.sharding.rule import Rule, parse


def _dft_rule(node: Node, graph: Graph) -> Rule:
    """The transformed axis and the pairs stay whole."""
    (shape,), (out,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    axis, last = int(node.attrs["axis"]), len(shape) - 1  # type: ignore[arg-type]
    side = lambda i, p: " ".join(  # noqa: E731
        i if k == axis else p if k == last else n for k, n in enumerate(letters(len(shape)))
    )
    return parse(f"{side('i!', 'p!')} -> {side('o!', 'q!')}", (shape,), (out,))


def _dft(call: Call) -> str:
    return (
        f"{call.use('dft')}({call.args[0]}, {call.attr('axis')}, {call.attr('length')},"
        f" {bool(call.attr('inverse'))}, {bool(call.attr('onesided'))})"
    )


def _cum_prod_rule(node: Node, graph: Graph) -> Rule:
    (shape,) = graph.shapes(node.inputs)
    line = " ".join(
        "i!" if k == node.attrs["axis"] else n for k, n in enumerate(letters(len(shape)))
    )
    return parse(f"{line} -> {line}", (shape,), (shape,))


def _cum_prod(call: Call) -> str:
    return (
        f"{call.use('cumprod')}({call.args[0]}, {call.attr('axis')},"
        f" {bool(call.attr('exclusive', 0))}, {bool(call.attr('reverse', 0))})"
    )


def _reverse_rule(node: Node, graph: Graph) -> Rule:
    """Time stays whole."""
    shape, lengths = graph.shapes(node.inputs)
    names = letters(len(shape))
    line = " ".join("t!" if k == node.attrs["time_axis"] else n for k, n in enumerate(names))
    return parse(
        f"{line}, {names[int(node.attrs['batch_axis'])]} -> {line}",  # type: ignore[arg-type]
        (shape, lengths),
        (shape,),
    )


def _reverse(call: Call) -> str:
    return (
        f"{call.use('reverse_sequence')}({call.args[0]}, {call.args[1]}, {call.attr('time_axis')},"
        f" {call.attr('batch_axis')})"
    )


def _cache_rule(node: Node, graph: Graph) -> Rule:
    """The axis that is written along stays whole."""
    shapes = graph.shapes(node.inputs)
    names = letters(len(shapes[0]))
    side = lambda s: " ".join(s if k == node.attrs["axis"] else n for k, n in enumerate(names))  # noqa: E731
    where = f", {names[0]}" if len(shapes) > 2 else ""
    return parse(f"{side('s!')}, {side('u!')}{where} -> {side('s!')}", shapes, (shapes[0],))


def _cache(call: Call) -> str:
    where = call.args[2] if len(call.args) > 2 else "None"
    return (
        f"{call.use('write_cache')}({call.args[0]}, {call.args[1]}, {where}, {call.attr('axis')},"
        f" {bool(call.attr('circular', 0))})"
    )


def _det_rule(node: Node, graph: Graph) -> Rule:
    shapes, outs = graph.shapes(node.inputs), graph.shapes(node.outputs)
    names = " ".join(letters(len(outs[0])))
    return parse(f"{names} i! j! -> {names}", shapes, outs)


register(
    Operator("DFT", _dft_rule, _dft, saves=""),
    Operator("CumProd", _cum_prod_rule, _cum_prod),
    Operator("ReverseSequence", _reverse_rule, _reverse, saves="in1"),
    Operator("TensorScatter", _cache_rule, _cache, saves="in2"),
    Operator("Det", _det_rule, lambda call: f"jnp.linalg.det({call.args[0]})", saves="in out"),
)
