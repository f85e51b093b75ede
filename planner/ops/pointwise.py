"""Element-wise operators: one rule for all, broadcasting included; one line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planner.graph.ir import OF_PRODUCT, Graph, Node
from planner.ops.base import Call, Operator, jnp_dtype, register
from planner.ops.cost import Reads, Slots, bilinear
from planner.sharding.rule import Rule, parse


def letters(rank: int) -> list[str]:
    """Factor names for the dims of a result, outermost first: d0 d1 ..."""
    return [f"d{i}" for i in range(rank)]


def broadcast_line(shapes: Sequence[tuple[int, ...]], out: tuple[int, ...]) -> str:
    """The rule of a broadcasting operator: dims align from the right, a dim of size one has no
    factor."""
    names = letters(len(out))
    sides = []
    for shape in shapes:
        aligned = names[len(out) - len(shape) :] if shape else []
        sides.append(" ".join("1" if s == 1 else n for s, n in zip(shape, aligned, strict=True)))
    result = " ".join("1" if s == 1 else n for s, n in zip(out, names, strict=True))
    return ",".join(sides) + "->" + result


def pointwise_rule(node: Node, graph: Graph, linear: tuple[int, ...] = ()) -> Rule:
    """Rule of any element-wise operator with one result."""
    shapes, outs = graph.shapes(node.inputs), graph.shapes(node.outputs[:1])
    results = [outs[0]]
    line = broadcast_line(shapes, outs[0])
    return parse(line, shapes, results, linear=linear)


def _linear_in(*slots: int):
    return lambda node, graph: pointwise_rule(node, graph, slots)


def uneven_never(rule: Rule, slot: int) -> Rule:
    """The same rule with the factors of one operand cut only evenly: for kernels whose value or
    slope is infinite at 0.

    Padding holds zeros. Its results are cut off again, but the backward pass would first multiply
    their infinite slope by a zero: NaN.
    """
    return replace(rule, no_pad=rule.no_pad | {f for dim in rule.operands[slot] for f in dim})


def _pole(slot: int):
    """Rule of an operator that has a pole, or an infinite slope, where operand `slot` is 0."""
    return lambda node, graph: uneven_never(pointwise_rule(node, graph), slot)


def _power(node: Node, graph: Graph) -> Rule:
    """x ** y has a finite slope at x = 0 only for constant exponents of 1 and more (and 0)."""
    rule, exponent = pointwise_rule(node, graph), graph.constants.get(node.inputs[1])
    smooth = (
        exponent is not None
        and bool(np.all((exponent >= 1) | (exponent == 0)))
        and exponent.size == 1
    )
    return rule if smooth else uneven_never(rule, 0)


def _scaled(node: Node, graph: Graph) -> Rule:
    """Mul and Div by a constant are linear in the other operand; a divisor is never padded (with
    zeros)."""
    if node.op == "Div" and graph.tensors[node.outputs[0]].is_float:
        return uneven_never(_linear_scale(node, graph), 1)
    return _linear_scale(node, graph)


def _linear_scale(node: Node, graph: Graph) -> Rule:
    constant = [graph.tensors[n].role == "constant" for n in node.inputs]
    if node.attrs.get(OF_PRODUCT):
        return pointwise_rule(node, graph, (0,))
    if constant[1] and not constant[0]:
        return pointwise_rule(node, graph, (0,))
    if node.op == "Mul" and constant[0] and not constant[1]:
        return pointwise_rule(node, graph, (1,))
    return pointwise_rule(node, graph)


def _division(present: Slots, trained: Slots) -> Reads:
    """The divisor, and the dividend where the divisor has a gradient."""
    return Reads(frozenset({0, 1} if 1 in trained else {1}))


def _text(pattern: str):
    return lambda call: pattern.format(*call.args)


def _lean(function: str):
    return lambda call: f"{call.use('lean')}({function})({call.args[0]})"


def _clip(call: Call) -> str:
    low, high = call.node.attrs.get("min"), call.node.attrs.get("max")
    return f"jnp.clip({call.args[0]}, {low!r}, {high!r})"


def _cast(call: Call) -> str:
    return f"{call.args[0]}.astype({jnp_dtype(call.out_dtypes[0])})"


def _gelu(call: Call) -> str:
    if call.attr("approximate", "none") == "tanh":
        return f"{call.use('lean')}(jax.nn.gelu)({call.args[0]})"
    return f"{call.use('gelu')}({call.args[0]})"


def _pow(call: Call) -> str:
    return f"jnp.power({call.args[0]}, {call.args[1]})"


def _div(call: Call) -> str:
    if call.dtypes and "int" in call.dtypes[0]:
        return f"{call.use('truncated_div')}({call.args[0]}, {call.args[1]})"
    return f"({call.args[0]} / {call.args[1]})"


_UNARY = {
    "Relu": "jax.nn.relu({0})",
    "Sigmoid": "jax.nn.sigmoid({0})",
    "Tanh": "jnp.tanh({0})",
    "Erf": "jax.lax.erf({0})",
    "Exp": "jnp.exp({0})",
    "Log": "jnp.log({0})",
    "Sqrt": "jnp.sqrt({0})",
    "Reciprocal": "(1 / {0})",
    "Abs": "jnp.abs({0})",
    "Sin": "jnp.sin({0})",
    "Cos": "jnp.cos({0})",
    "Tan": "jnp.tan({0})",
}
_COMPOSED = {
    "Softplus": "jax.nn.softplus",
    "Silu": "jax.nn.silu",
    "Softsign": "jax.nn.soft_sign",
    "HardSwish": "jax.nn.hard_swish",
    "Mish": "(lambda x: x * jnp.tanh(jax.nn.softplus(x)))",
}
"""Several steps each, of which nothing is kept but the operand."""
_UNARY_NO_GRAD = {
    "IsNaN": "jnp.isnan({0})",
    "Not": "jnp.logical_not({0})",
    "Floor": "jnp.floor({0})",
    "Ceil": "jnp.ceil({0})",
    "Round": "jnp.round({0})",
    "Sign": "jnp.sign({0})",
}
_BINARY = {"Max": "jnp.maximum({0}, {1})", "Min": "jnp.minimum({0}, {1})"}
_COMPARE = {
    "Equal": "({0} == {1})",
    "Less": "({0} < {1})",
    "LessOrEqual": "({0} <= {1})",
    "Greater": "({0} > {1})",
    "GreaterOrEqual": "({0} >= {1})",
    "And": "jnp.logical_and({0}, {1})",
    "Or": "jnp.logical_or({0}, {1})",
    "Xor": "jnp.logical_xor({0}, {1})",
}

_POLES = frozenset({"Log", "Sqrt", "Reciprocal"})
_COMPARING = frozenset({"Relu", "Abs"})
_STEPS = frozenset({"Floor", "Ceil", "Round", "Sign"})

for _name, _pattern in _UNARY.items():
    register(
        Operator(
            _name,
            _pole(0) if _name in _POLES else pointwise_rule,
            _text(_pattern),
            saves="in",
            fusible=True,
            compares=_name in _COMPARING,
        )
    )
for _name, _function in _COMPOSED.items():
    register(Operator(_name, pointwise_rule, _lean(_function), saves="in", fusible=True))
for _name, _pattern in _UNARY_NO_GRAD.items():
    register(
        Operator(
            _name,
            pointwise_rule,
            _text(_pattern),
            saves="",
            fusible=True,
            differentiable=_name not in _STEPS,
        )
    )
for _name, _pattern in _BINARY.items():
    register(Operator(_name, pointwise_rule, _text(_pattern), saves="in", fusible=True))
for _name, _pattern in _COMPARE.items():
    register(Operator(_name, pointwise_rule, _text(_pattern), saves="", fusible=True))
register(
    Operator(
        "Add",
        _linear_in(0, 1),
        _text("({0} + {1})"),
        saves="",
        fusible=True,
        adds=(0, 1),
        commutes=True,
    ),
    Operator("Sub", _linear_in(0, 1), _text("({0} - {1})"), saves="", fusible=True, adds=(0,)),
    Operator("Neg", _linear_in(0), _text("(-{0})"), saves="", fusible=True),
    Operator(
        "Identity",
        _linear_in(0),
        _text("{0}"),
        saves="",
        fusible=True,
        free=True,
        adds=(0,),
        passes_values=True,
    ),
    Operator(
        "Mul",
        _scaled,
        _text("({0} * {1})"),
        saves="in",
        fusible=True,
        gradient=bilinear,
        commutes=True,
        starts_at_one=(0, 1),
    ),
    Operator("Div", _scaled, _div, saves="in", fusible=True, gradient=_division),
    Operator("Pow", _power, _pow, saves="in", fusible=True),
    Operator(
        "Mod",
        pointwise_rule,
        lambda c: f"jnp.{'fmod' if c.attr('fmod', 0) else 'mod'}({c.args[0]}, {c.args[1]})",
        saves="",
        fusible=True,
    ),
    Operator("Where", pointwise_rule, _text("jnp.where({0}, {1}, {2})"), saves="in0", fusible=True),
    Operator("Cast", pointwise_rule, _cast, saves="", fusible=True, passes_values=True),
    Operator(
        "Clip", pointwise_rule, _clip, saves="in", fusible=True, compares=True, passes_values=True
    ),
    Operator(
        "Gelu",
        pointwise_rule,
        _gelu,
        saves="in",
        fusible=True,
        keeps_slope=lambda node: node.attrs.get("approximate", "none") == "tanh",
    ),
    Operator(
        "Elu",
        pointwise_rule,
        lambda c: f"jax.nn.elu({c.args[0]}, {c.attr('alpha', 1.0)!r})",
        saves="in",
        fusible=True,
    ),
    Operator(
        "LeakyRelu",
        pointwise_rule,
        lambda c: f"jax.nn.leaky_relu({c.args[0]}, {c.attr('alpha', 0.01)!r})",
        saves="in",
        fusible=True,
        compares=True,
    ),
    Operator(
        "HardSigmoid",
        pointwise_rule,
        lambda c: (
            f"jnp.clip({c.attr('alpha', 0.2)!r} * {c.args[0]} + {c.attr('beta', 0.5)!r}, 0, 1)"
        ),
        saves="in",
        fusible=True,
    ),
)
