"""LSTM, GRU and RNN. Only the batch splits: a step needs the whole hidden state."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import prod

from planner.graph.ir import Graph, Node
from planner.ops.base import Call, NoRule, Operator, register
from planner.ops.cost import Dots, Product
from planner.sharding.rule import Rule, parse

_OPERANDS = ("s! b i!", "p! q! i!", "p! q! h!", "p! z!", "b", "p! b h!", "p! b h!", "p! y!")
_RESULTS = ("s! p! b h!", "p! b h!", "p! b h!")
STANDARD = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh"), "RNN": ("tanh",)}
KNOWN = frozenset(
    {"relu", "tanh", "sigmoid", "softsign", "softplus", "affine", "hardsigmoid", "elu", "leakyrelu"}
)


def recurrent_rule(node: Node, graph: Graph) -> Rule:
    """x [S, B, I] and states [D, B, H] split over the batch; weights are whole."""
    shapes = graph.shapes(node.inputs)
    outs = graph.shapes(tuple(o for o in node.outputs if o))
    left = [side if name else "" for side, name in zip(_OPERANDS, node.inputs, strict=False)]
    right = [side for side, o in zip(_RESULTS, node.outputs, strict=False) if o]
    rule = parse(f"{','.join(left)} -> {','.join(right)}", shapes, outs)
    x, w, r = shapes[:3]
    return replace(rule, flops=2.0 * x[0] * x[1] * (prod(w) + prod(r)))


def settings(call: Call) -> str:
    """The arguments direction, activation names per direction, and bound."""
    direction = str(call.attr("direction", "forward"))
    activations = call.node.attrs.get("activations")
    count = 2 if direction == "bidirectional" else 1
    names = STANDARD[call.node.op] * count
    if activations:
        names = tuple(str(a).lower() for a in activations)  # type: ignore[union-attr]
    if not set(names) <= KNOWN:
        raise NoRule(f"activations {', '.join(sorted(set(names) - KNOWN))}")
    return f"{direction!r}, {names!r}, {call.node.attrs.get('clip')!r}"


def chosen(call: Call, text: str, count: int) -> str:
    """The wanted ones of `count` results."""
    live = [i for i, o in enumerate(call.node.outputs) if o]
    if len(live) == count:
        return text
    return f"{text}[{live[0]}]" if len(live) == 1 else f"tuple({text}[i] for i in {tuple(live)})"


def operands(call: Call, count: int) -> list[str]:
    """Operand expressions, None for those absent."""
    return [a or "None" for a in call.args] + ["None"] * (count - len(call.args))


def _rnn(call: Call) -> str:
    return chosen(call, f"{call.use('rnn')}({', '.join(operands(call, 6))}, {settings(call)})", 2)


def _gru(call: Call) -> str:
    after = bool(call.attr("linear_before_reset", 0))
    return chosen(
        call, f"{call.use('gru')}({', '.join(operands(call, 6))}, {settings(call)}, {after})", 2
    )


def lstm_full(call: Call) -> str:
    """The kernel of an LSTM with sequence lengths, peepholes, other activations or a bound."""
    return chosen(
        call, f"{call.use('lstm_full')}({', '.join(operands(call, 8))}, {settings(call)})", 3
    )


def _lstm(call: Call) -> str:
    x, w, r, b, lengths, h0, c0, peepholes = operands(call, 8)
    if (lengths, peepholes) != ("None", "None") or {"activations", "clip"} & set(call.node.attrs):
        return lstm_full(call)
    return chosen(
        call,
        f"{call.use('lstm')}({x}, {w}, {r}, {b}, {h0}, {c0},"
        f" {call.attr('direction', 'forward')!r})",
        3,
    )


def _products(dots: Dots) -> tuple[Product, ...]:
    """The gates' product with the whole sequence, and with the hidden state at each step, which
    sums its weight's gradient over a device's rows."""
    inputs, hidden = dots.shapes[1][-1], dots.shapes[2][-1]
    rows, hot = dots.shapes[0][1] * dots.share.get("b", Fraction(1)), dots.trained
    return (
        Product(dots.flops * Fraction(inputs, inputs + hidden), len(hot & {0, 1})),
        Product(
            dots.flops * Fraction(hidden, inputs + hidden),
            (1 + (2 in hot)) if hot else 0,
            inside=True,
            multiplied=int(rows == 1 and 2 in hot),
        ),
    )


register(
    *(
        Operator(name, recurrent_rule, kernel, saves="in out", kind="recurrent", products=_products)
        for name, kernel in (("LSTM", _lstm), ("GRU", _gru), ("RNN", _rnn))
    )
)
