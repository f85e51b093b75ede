"""Quantised operators: rules of their plain forms, with scales and zero points that are whole or
cut with their channel.

Sums that are quantised again must be complete, so the summed dim of QLinearMatMul and QLinearConv
stays whole; MatMulInteger and ConvInteger leave 32-bit sums that may be partial, cut evenly only
(padding is not the zero point).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from planner.graph.ir import Graph, Node
from planner.ops.base import Call, NoRule, Operator, jnp_dtype, register
from planner.ops.pointwise import letters
from planner.sharding.rule import Rule, parse

BYTES = frozenset({"int8", "uint8", "int16", "uint16", "int32"})


def _vector(shape: tuple[int, ...], factor: str, present: bool) -> str:
    """The side of a scale or zero point: absent, one number, or one per index of a factor."""
    if not present or not shape:
        return ""
    return "1" if shape == (1,) else factor


def _per_axis(node: Node, graph: Graph) -> Rule:
    """QuantizeLinear and DequantizeLinear: element-wise; a vector of scales is cut with its
    axis."""
    shapes, (out,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    if node.attrs.get("block_size"):
        raise NoRule("scales per block")
    names = letters(len(out))
    line = " ".join(names)
    factor = (
        names[int(node.attrs.get("axis", 1)) % len(out)]  # type: ignore[arg-type]
        if any(len(s) > 0 and s != (1,) for s in shapes[1:])
        else ""
    )
    sides = [
        line,
        *(_vector(s, factor, bool(n)) for s, n in zip(shapes[1:], node.inputs[1:], strict=True)),
    ]
    return parse(f"{','.join(sides)} -> {line}", shapes, (out,))


def _eight_bit(call: Call, slots: Sequence[int]) -> None:
    odd = sorted({call.dtypes[k] for k in slots if k < len(call.dtypes) and call.dtypes[k]} - BYTES)
    if odd:
        raise NoRule(f"type {', '.join(odd)}")


def _typed(call: Call, slot: int) -> str:
    """An operand in its own type (constants of one number are literals), None when absent."""
    if slot >= len(call.args) or not call.args[slot]:
        return "None"
    return f"jnp.asarray({call.args[slot]}, {jnp_dtype(call.dtypes[slot])})"


def _axis(call: Call) -> int:
    return int(call.attr("axis", 1))  # type: ignore[arg-type]


def _whole_scales(call: Call) -> None:
    if call.node.attrs.get("block_size") or call.node.attrs.get("precision"):
        raise NoRule("scales per block, or another precision")


def _quantize(call: Call) -> str:
    _whole_scales(call)
    if len(call.args) < 3 or not call.args[2]:
        raise NoRule("no zero point")
    _eight_bit(call, [2])
    return (
        f"{call.use('quantize')}({_typed(call, 0)}, {_typed(call, 1)}, {_typed(call, 2)},"
        f" {_axis(call)})"
    )


def _dequantize(call: Call) -> str:
    _whole_scales(call)
    _eight_bit(call, [0])
    if call.node.attrs.get("output_dtype"):
        raise NoRule("another result type")
    return (
        f"{call.use('dequantize')}({_typed(call, 0)}, {_typed(call, 1)}, {_typed(call, 2)},"
        f" {_axis(call)})"
    )


def _matrix_sides(
    a: tuple[int, ...], b: tuple[int, ...], out: tuple[int, ...], k: str
) -> tuple[str, str, str]:
    if len(a) < 2 or len(b) < 2:
        raise NoRule("a vector operand")
    batch = [f"b{i}" for i in range(len(out) - 2)]

    def side(shape: tuple[int, ...], last: str) -> str:
        aligned = batch[len(batch) - (len(shape) - 2) :] if len(shape) > 2 else []
        return " ".join(
            [*("1" if s == 1 else n for s, n in zip(shape, aligned, strict=False)), last]
        )

    return side(a, f"m {k}"), side(b, f"{k} n"), side(out, "m n")


def _matmul_integer_rule(node: Node, graph: Graph) -> Rule:
    shapes, (out,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    left, right, result = _matrix_sides(shapes[0], shapes[1], out, "k")
    zeros = [
        _vector(s, f, bool(n)) for s, f, n in zip(shapes[2:], "mn", node.inputs[2:], strict=False)
    ]
    if any(len(s) > 1 for s in shapes[2:]):
        raise NoRule("zero points per matrix")
    rule = parse(
        ",".join([left, right, *zeros]) + f" -> {result}", shapes, (out,), no_pad=frozenset({"k"})
    )
    return replace(rule, flops=2.0 * prod(out) * shapes[0][-1])


def _matmul_integer(call: Call) -> str:
    _eight_bit(call, [0, 1])
    args = [*call.args[:2], _typed(call, 2), _typed(call, 3)]
    return f"{call.use('matmul_integer')}({', '.join(args)})"


def _qlinear_matmul_rule(node: Node, graph: Graph) -> Rule:
    shapes, (out,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    left, right, result = _matrix_sides(shapes[0], shapes[3], out, "k!")
    if any(len(shapes[k]) > 1 for k in (1, 2, 4, 5, 6, 7)):
        raise NoRule("scales per matrix")
    vectors = [
        _vector(shapes[k], f, True)
        for k, f in ((1, "m"), (2, "m"), (4, "n"), (5, "n"), (6, "m"), (7, "m"))
    ]
    sides = [left, *vectors[:2], right, *vectors[2:]]
    rule = parse(f"{','.join(sides)} -> {result}", shapes, (out,))
    return replace(rule, flops=2.0 * prod(out) * shapes[0][-1])


def _qlinear_matmul(call: Call) -> str:
    _eight_bit(call, [0, 3, 7])
    args = [call.args[k] if k in (0, 3) else _typed(call, k) for k in range(8)]
    return f"{call.use('qlinear_matmul')}({', '.join(args)})"


def _conv_sides(
    x: tuple[int, ...], w: tuple[int, ...], groups: int, whole: bool
) -> tuple[str, str, str, str, dict[str, int]]:
    """Sides of x, w and the result, the factor of an output channel, and sizes."""
    spread = lambda stem: " ".join(f"{stem}{i}!" for i in range(len(x) - 2))  # noqa: E731
    if groups == 1:
        c = "c!" if whole else "c"
        return f"n {c} {spread('x')}", f"o {c} {spread('k')}", f"n o {spread('y')}", "o", {}
    sizes = {"g": groups, "c": x[1] // groups, "o": w[0] // groups}
    return (
        f"n (g c!) {spread('x')}",
        f"(g o!) c! {spread('k')}",
        f"n (g o!) {spread('y')}",
        "(g o!)",
        sizes,
    )


def _groups(node: Node) -> int:
    return int(node.attrs.get("group", 1))  # type: ignore[arg-type]


def _conv_integer_rule(node: Node, graph: Graph) -> Rule:
    shapes, (out,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    left, right, result, channel, sizes = _conv_sides(shapes[0], shapes[1], _groups(node), False)
    zeros = [
        _vector(s, f, bool(n))
        for s, f, n in zip(shapes[2:], ("", channel), node.inputs[2:], strict=False)
    ]
    rule = parse(
        ",".join([left, right, *zeros]) + f" -> {result}",
        shapes,
        (out,),
        sizes=sizes,
        no_pad=frozenset({"c"}),
    )
    return replace(rule, flops=2.0 * prod(out) * prod(shapes[1][1:]))


def _qlinear_conv_rule(node: Node, graph: Graph) -> Rule:
    shapes, (out,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    left, right, result, channel, sizes = _conv_sides(shapes[0], shapes[3], _groups(node), True)
    one = lambda k: _vector(shapes[k], channel, True)  # noqa: E731
    sides = [left, one(1), one(2), right, one(4), one(5), one(6), one(7)]
    if len(shapes) > 8:
        sides.append(channel if node.inputs[8] else "")
    rule = parse(f"{','.join(sides)} -> {result}", shapes, (out,), sizes=sizes)
    return replace(rule, flops=2.0 * prod(out) * prod(shapes[3][1:]))


def _window(call: Call) -> str:
    n = len(call.in_shapes[0]) - 2
    if str(call.attr("auto_pad", "NOTSET")) != "NOTSET":
        raise NoRule("automatic padding")
    pads = call.node.attrs.get("pads", (0,) * 2 * n)
    padding = [(pads[i], pads[i + n]) for i in range(n)]  # type: ignore[index]
    strides, dilations = (tuple(call.node.attrs.get(k, (1,) * n)) for k in ("strides", "dilations"))  # type: ignore[arg-type]
    groups = call.rule.local(call.split, call.mesh)["g"] if _groups(call.node) > 1 else 1
    return f"{strides}, {padding}, {dilations}, {groups}"


def _conv_integer(call: Call) -> str:
    _eight_bit(call, [0, 1])
    args = [*call.args[:2], _typed(call, 2), _typed(call, 3)]
    return f"{call.use('conv_integer')}({', '.join(args)}, {_window(call)})"


def _qlinear_conv(call: Call) -> str:
    _eight_bit(call, [0, 3, 7])
    args = [call.args[k] if k in (0, 3) else _typed(call, k) for k in range(9)]
    return f"{call.use('qlinear_conv')}({', '.join(args)}, {_window(call)})"


register(
    Operator("QuantizeLinear", _per_axis, _quantize, saves="", fusible=True),
    Operator("DequantizeLinear", _per_axis, _dequantize, saves="", fusible=True),
    Operator("MatMulInteger", _matmul_integer_rule, _matmul_integer, saves=""),
    Operator("QLinearMatMul", _qlinear_matmul_rule, _qlinear_matmul, saves=""),
    Operator("ConvInteger", _conv_integer_rule, _conv_integer, saves=""),
    Operator("QLinearConv", _qlinear_conv_rule, _qlinear_conv, saves=""),
)
