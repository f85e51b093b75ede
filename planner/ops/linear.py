"""Products: MatMul, Einsum, convolutions."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import prod

from planner.graph.ir import KEPT_FLOAT8, Graph, Node
from planner.ops.base import Call, NoRule, Operator, register
from planner.ops.cost import Dots, Product, bilinear
from planner.ops.space import brought, cut_of, reach, spelled, window, with_rows
from planner.sharding.rule import Rule, parse


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

    line = f"{side(a, 'k m' if node.attrs.get('trans_a') else 'm k')},{side(b, 'n k' if node.attrs.get('trans_b') else 'k n')}"  # noqa: E501
    result = " ".join(
        ["1" if s == 1 else n for s, n in zip(out[:-2], names, strict=True)] + ["m n"]
    )
    rule = parse(f"{line} -> {result}", (a, b), (out,))
    k = a[-2] if node.attrs.get("trans_a") else a[-1]
    return replace(rule, flops=2.0 * prod(out) * k)


def _matmul(call: Call) -> str:
    a, b = call.args
    if call.wide:
        b = f"{call.use('pad_to')}({b}, {0 if call.node.attrs.get('trans_b') else 1}, {call.wide})"
    if call.float8:
        turned = ", True" if call.node.attrs.get("trans_b") else ""
        kernel = "rows8" if call.node.attrs.get(KEPT_FLOAT8) else "dot8"
        return f"{call.use(kernel)}({a}, {b}{turned})"
    if call.node.attrs.get("trans_a"):
        a = f"jnp.swapaxes({a}, -1, -2)"
    if call.node.attrs.get("trans_b"):
        if (
            len(call.in_shapes[1]) == 2
        ):  # no transposed copy: it would be kept for the backward pass in the weight's place
            return f'jnp.einsum("...k,nk->...n", {a}, {b})'
        b = f"jnp.swapaxes({b}, -1, -2)"
    return f"jnp.matmul({a}, {b})"


def _matmul_products(dots: Dots) -> tuple[Product, ...]:
    """Of a gradient that sums over one element (a weight with one column, a device with one row)
    compilers make a multiplication."""

    def summed(slot: int) -> Fraction:
        """Over how many elements a device sums the gradient of an operand."""
        operand_factors = {f for dim in dots.rule.operands[slot] for f in dim}
        terms = (
            n * dots.share.get(f, Fraction(1))
            for f, n in dots.rule.sizes.items()
            if f not in operand_factors
        )
        return prod(terms, start=Fraction(1))

    multiplied = sum(summed(slot) == 1 for slot in dots.trained)
    return (Product(dots.flops, len(dots.trained), multiplied=multiplied),)


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


def _einsum_sums_last(node: Node, slot: int) -> bool:
    terms, _, result = str(node.attrs["equation"]).replace(" ", "").partition("->")
    return terms.split(",")[slot][-1:] not in result


def _einsum_matrices(node: Node) -> tuple[int, ...]:
    """Operands of two in which one of the last two letters is summed over, the other is of the
    result alone, and the letters before are of everything."""
    terms, _, result = str(node.attrs["equation"]).replace(" ", "").partition("->")
    sides = terms.split(",")
    slots = []
    for slot, term in enumerate(sides if len(sides) == 2 else ()):
        other = sides[1 - slot]
        last = [(letter in other, letter in result) for letter in term[-2:]]
        everywhere = all(letter in other and letter in result for letter in term[:-2])
        if sorted(last) == [(False, True), (True, False)] and everywhere:
            slots.append(slot)
    return tuple(slots)


def _conv_rule(node: Node, graph: Graph) -> Rule:
    """Batch, output channels, input channels (summed) and groups split, and rows where their pieces
    line up (planner.ops.space)."""
    x, w = graph.shapes(node.inputs[:2])
    (out,) = graph.shapes(node.outputs)
    groups = int(node.attrs.get("group", 1))  # type: ignore[arg-type]
    cut = reach(x, out, window(node.attrs, w[2:]))
    (xs, ys), ks = spelled(len(x) - 2, cut), _taps(len(x) - 2)
    if groups == 1:
        line = f"n c {xs}, o c {ks} -> n o {ys}"
        sizes = {"c": x[1]}
    else:
        line = f"n (g c!) {xs}, (g o!) c! {ks} -> n (g o!) {ys}"
        sizes = {"g": groups, "c": x[1] // groups, "o": w[0] // groups}
    rule = parse(line, (x, w), (out,), sizes={**sizes, **(cut.sizes if cut else {})})
    return with_rows(replace(rule, flops=2.0 * prod(out) * prod(w[1:])), cut)


def _taps(rank: int) -> str:
    return " ".join(f"k{i}!" for i in range(rank))


def _conv(call: Call) -> str:
    n = len(call.in_shapes[0]) - 2
    groups = int(call.attr("group", 1))  # type: ignore[arg-type]
    kernel = call.global_in[1][2:]
    _, strides, pads, dilations = window(call.node.attrs, kernel)
    padding = [(pads[i], pads[i + n]) for i in range(n)]
    cut = cut_of(call, kernel)
    if cut is not None:  # the neighbours' rows stand where the padding was
        padding[cut.dim] = (0, 0)
    local_groups = call.rule.local(call.split, call.mesh)["g"] if groups > 1 else 1
    helper = call.use("conv")
    return (
        f"{helper}({brought(call, cut)}, {call.args[1]}, {strides}, {padding}, {dilations},"
        f" {local_groups})"
    )


def _conv_transpose_rule(node: Node, graph: Graph) -> Rule:
    x, w = graph.shapes(node.inputs[:2])
    (out,) = graph.shapes(node.outputs)
    groups = int(node.attrs.get("group", 1))  # type: ignore[arg-type]
    cut = reach(x, out, window(node.attrs, w[2:]), transposed=True)
    (xs, ys), ks = spelled(len(x) - 2, cut), _taps(len(x) - 2)
    sizes = cut.sizes if cut else {}
    if groups == 1:
        rule = parse(f"n c {xs}, c o {ks} -> n o {ys}", (x, w), (out,), sizes=sizes)
    else:
        sizes = {"g": groups, "c": x[1] // groups, "o": w[1], **sizes}
        rule = parse(f"n (g c!) {xs}, (g c!) o! {ks} -> n (g o!) {ys}", (x, w), (out,), sizes=sizes)
    return with_rows(replace(rule, flops=2.0 * prod(x) * prod(w[1:])), cut)


def _conv_transpose(call: Call) -> str:
    groups = call.rule.local(call.split, call.mesh)["g"] if int(call.attr("group", 1)) > 1 else 1  # type: ignore[arg-type]
    kernel = call.global_in[1][2:]
    _, strides, pads, dilations = window(call.node.attrs, kernel)
    cut = cut_of(call, kernel, transposed=True)
    if cut is not None:  # windows begin with the first row that is brought in
        pads = tuple(p + cut.before * cut.step if i == cut.dim else p for i, p in enumerate(pads))
    return (
        f"{call.use('conv_transpose')}({brought(call, cut)}, {call.args[1]}, {strides}, {pads},"
        f" {dilations}, {call.out_shapes[0][2:]}, {groups})"
    )


def _conv_step_rule(node: Node, graph: Graph) -> Rule:
    """Batch and channels split."""
    shapes = graph.shapes(node.inputs)
    b, c = ("1" if n == 1 else name for n, name in zip(shapes[0][:2], "bc", strict=True))
    line = f"{b} {c} k!, {b} {c} 1, {c} 1 w! -> {b} {c} 1, {b} {c} k!"
    return parse(line, shapes, graph.shapes(node.outputs))


register(
    Operator(
        "MatMul",
        _matmul_rule,
        _matmul,
        kind="product",
        gradient=bilinear,
        products=_matmul_products,
        pads="n",
        matrices=lambda node: (0, 1),
        float8=lambda node: not node.attrs.get("trans_a"),
        sums_last=lambda node, slot: (
            bool(node.attrs.get("trans_b", 0)) if slot == 1 else not node.attrs.get("trans_a", 0)
        ),
        words={"m": "rows", "n": "columns", "k": "sums"},
    ),
    Operator(
        "Einsum",
        _einsum_rule,
        _einsum,
        kind="product",
        gradient=bilinear,
        sums_last=_einsum_sums_last,
        matrices=_einsum_matrices,
    ),
    Operator(
        "Conv",
        _conv_rule,
        _conv,
        kind="convolution",
        gradient=bilinear,
        counted="g",
        # Where the batch is cut and the groups are not, XLA's partitioner makes the gradient of the
        # filters of a grouped convolution several times too large (jax 0.10.2).
        by_piece=lambda node: int(node.attrs.get("group", 1)) > 1,  # type: ignore[arg-type]
    ),
    Operator(
        "ConvStep",
        _conv_step_rule,
        lambda c: f"{c.use('conv_step')}({', '.join(c.args)})",
        saves="",
        caches=(0,),
        words={"b": "batch", "c": "channels"},
    ),
    Operator(
        "ConvTranspose",
        _conv_transpose_rule,
        _conv_transpose,
        kind="convolution",
        gradient=bilinear,
        counted="g",
    ),
)
