"""Products: MatMul, Einsum, convolutions."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from planner.graph import Graph, Node
from planner.ops.base import Call, NoRule, Operator, register
from planner.rule import Rule, parse


def _matmul_rule(node: Node, graph: Graph) -> Rule:
    """`batch m k, batch k n -> batch m n`, batch dims broadcasting, either operand transposed."""
    a, b = graph.shapes(node.inputs)
    (out,) = graph.shapes(node.outputs)
    if len(a) < 2 or len(b) < 2:
        raise NoRule("a vector operand")
    names = [f"b{i}" for i in range(len(out) - 2)]

    def side(shape: tuple[int, ...], last: str) -> str:
        batch = names[len(names) - (len(shape) - 2) :] if len(shape) > 2 else []
        return " ".join(["1" if s == 1 else n for s, n in zip(shape, batch, strict=False)] + [last])

    line = f"{side(a, 'k m' if node.attrs.get('trans_a') else 'm k')},{side(b, 'n k' if node.attrs.get('trans_b') else 'k n')}"
    result = " ".join(["1" if s == 1 else n for s, n in zip(out[:-2], names, strict=True)] + ["m n"])
    rule = parse(f"{line} -> {result}", (a, b), (out,))
    k = a[-2] if node.attrs.get("trans_a") else a[-1]
    return replace(rule, flops=2.0 * prod(out) * k)


def _matmul(call: Call) -> str:
    a, b = call.args
    if call.node.attrs.get("trans_a"):
        a = f"jnp.swapaxes({a}, -1, -2)"
    if call.node.attrs.get("trans_b"):
        if len(call.in_shapes[1]) == 2:  # no transposed copy: it would be kept for the backward pass in the weight's place
            return f'jnp.einsum("...k,nk->...n", {a}, {b})'
        b = f"jnp.swapaxes({b}, -1, -2)"
    return f"jnp.matmul({a}, {b})"


def _einsum_rule(node: Node, graph: Graph) -> Rule:
    equation = str(node.attrs["equation"]).replace(" ", "")
    if "..." in equation or "->" not in equation:
        raise NoRule("an implicit or elliptic equation")
    left, right = equation.split("->")
    terms = left.split(",")
    if any(len(set(t)) != len(t) for t in (*terms, right)):
        raise NoRule("a repeated index")
    shapes, outs = graph.shapes(node.inputs), graph.shapes(node.outputs)
    rule = parse(",".join(" ".join(t) for t in terms) + "->" + " ".join(right), shapes, outs)
    return replace(rule, flops=2.0 * prod(rule.sizes.values()) if len(terms) > 1 else 0.0)


def _einsum(call: Call) -> str:
    return f"jnp.einsum({str(call.attr('equation')).replace(' ', '')!r}, {', '.join(call.args)})"


def _spatial(rank: int, stem: str) -> str:
    return " ".join(f"{stem}{i}!" for i in range(rank))


def _conv_rule(node: Node, graph: Graph) -> Rule:
    """Batch, output channels, input channels (summed) and groups split; space stays whole."""
    x, w = graph.shapes(node.inputs[:2])
    (out,) = graph.shapes(node.outputs)
    n, groups = len(x) - 2, int(node.attrs.get("group", 1))  # type: ignore[arg-type]
    xs, ks, ys = _spatial(n, "x"), _spatial(n, "k"), _spatial(n, "y")
    if groups == 1:
        line = f"n c {xs}, o c {ks} -> n o {ys}"
        sizes = {"c": x[1]}
    else:
        line = f"n (g c!) {xs}, (g o!) c! {ks} -> n (g o!) {ys}"
        sizes = {"g": groups, "c": x[1] // groups, "o": w[0] // groups}
    rule = parse(line, (x, w), (out,), sizes=sizes)
    return replace(rule, flops=2.0 * prod(out) * prod(w[1:]))


def _conv(call: Call) -> str:
    n = len(call.in_shapes[0]) - 2
    groups = int(call.attr("group", 1))  # type: ignore[arg-type]
    pads = call.node.attrs.get("pads", (0,) * 2 * n)
    padding = [(pads[i], pads[i + n]) for i in range(n)]  # type: ignore[index]
    strides, dilations = (tuple(call.node.attrs.get(k, (1,) * n)) for k in ("strides", "dilations"))  # type: ignore[arg-type]
    local_groups = call.rule.local(call.split, call.mesh)["g"] if groups > 1 else 1
    helper = call.use("conv")
    return f"{helper}({call.args[0]}, {call.args[1]}, {strides}, {padding}, {dilations}, {local_groups})"


def _conv_transpose_rule(node: Node, graph: Graph) -> Rule:
    x, w = graph.shapes(node.inputs[:2])
    (out,) = graph.shapes(node.outputs)
    n, groups = len(x) - 2, int(node.attrs.get("group", 1))  # type: ignore[arg-type]
    xs, ks, ys = _spatial(n, "x"), _spatial(n, "k"), _spatial(n, "y")
    if groups == 1:
        rule = parse(f"n c {xs}, c o {ks} -> n o {ys}", (x, w), (out,))
    else:
        sizes = {"g": groups, "c": x[1] // groups, "o": w[1]}
        rule = parse(f"n (g c!) {xs}, (g c!) o! {ks} -> n (g o!) {ys}", (x, w), (out,), sizes=sizes)
    return replace(rule, flops=2.0 * prod(x) * prod(w[1:]))


def _conv_transpose(call: Call) -> str:
    n = len(call.in_shapes[0]) - 2
    groups = call.rule.local(call.split, call.mesh)["g"] if int(call.attr("group", 1)) > 1 else 1  # type: ignore[arg-type]
    pads = tuple(call.node.attrs.get("pads", (0,) * 2 * n))  # type: ignore[arg-type]
    strides, dilations = (tuple(call.node.attrs.get(k, (1,) * n)) for k in ("strides", "dilations"))  # type: ignore[arg-type]
    return f"{call.use('conv_transpose')}({call.args[0]}, {call.args[1]}, {strides}, {pads}, {dilations}, {call.out_shapes[0][2:]}, {groups})"


register(
    Operator("MatMul", _matmul_rule, _matmul, saves="in"),
    Operator("Einsum", _einsum_rule, _einsum, saves="in"),
    Operator("Conv", _conv_rule, _conv, saves="in"),
    Operator("ConvTranspose", _conv_transpose_rule, _conv_transpose, saves="in"),
)
