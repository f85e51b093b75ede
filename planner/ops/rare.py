"""Operators of rarer models: inverse and hyperbolic functions, bits, windows over channels, slices
written at indices."""

from __future__ import annotations

from planner.graph.ir import Graph, Node
from planner.ops.base import Call, Operator, register
from planner.ops.pointwise import letters, pointwise_rule, uneven_never
from planner.sharding.rule import Rule, parse

_FUNCTIONS = {
    "Acos": "arccos",
    "Asin": "arcsin",
    "Asinh": "arcsinh",
    "Atan": "arctan",
    "Atanh": "arctanh",
    "Cosh": "cosh",
    "Sinh": "sinh",
}
_BITS = {"BitwiseAnd": "&", "BitwiseOr": "|", "BitwiseXor": "^"}


def _function(name: str):
    return lambda call: f"jnp.{name}({call.args[0]})"


def _between(symbol: str):
    return lambda call: f"({call.args[0]} {symbol} {call.args[1]})"


def _shift(call: Call) -> str:
    """Logical shifts; operands are unsigned."""
    return (
        f"jnp.{'left_shift' if call.attr('direction') == 'LEFT' else 'right_shift'}({call.args[0]},"
        f" {call.args[1]})"
    )


def _is_inf(call: Call) -> str:
    return (
        f"{call.use('is_inf')}({call.args[0]}, {bool(call.attr('detect_negative', 1))},"
        f" {bool(call.attr('detect_positive', 1))})"
    )


def _shrink(call: Call) -> str:
    return (
        f"{call.use('shrink')}({call.args[0]}, {call.attr('bias', 0.0)!r},"
        f" {call.attr('lambd', 0.5)!r})"
    )


def _selu(call: Call) -> str:
    return (
        f"({call.attr('gamma', 1.0507009873554805)!r} * jax.nn.elu({call.args[0]},"
        f" {call.attr('alpha', 1.6732632423543772)!r}))"
    )


def _lrn_rule(node: Node, graph: Graph) -> Rule:
    """Neighbouring channels are read: channels stay whole, batch and space split."""
    (shape,) = graph.shapes(node.inputs)
    line = " ".join(["n", "c!", *(f"x{i}" for i in range(len(shape) - 2))])
    return parse(f"{line} -> {line}", (shape,), (shape,))


def _lrn(call: Call) -> str:
    numbers = (
        f"{call.attr('size')!r}, {call.attr('alpha', 1e-4)!r}, {call.attr('beta', 0.75)!r},"
        f" {call.attr('bias', 1.0)!r}"
    )
    return f"{call.use('local_response')}({call.args[0]}, {numbers})"


def _along_axis(node: Node, graph: Graph) -> Rule:
    (shape,) = graph.shapes(node.inputs)
    axis = int(node.attrs.get("axis", -1)) % len(shape)  # type: ignore[arg-type]
    line = " ".join(n + ("!" if i == axis else "") for i, n in enumerate(letters(len(shape))))
    return parse(f"{line} -> {line}", (shape,), (shape,))


def _lp_normalize(call: Call) -> str:
    return (
        f"{call.use('lp_normalize')}({call.args[0]}, {call.attr('axis', -1)}, {call.attr('p', 2)})"
    )


def _hardmax(call: Call) -> str:
    return f"{call.use('hardmax')}({call.args[0]}, {call.attr('axis', -1)})"


def _scatter_nd_rule(node: Node, graph: Graph) -> Rule:
    """The dims that are indexed stay whole, and so do the index tuples; the dims of the slices pass
    through."""
    data, indices, updates = graph.shapes(node.inputs)
    depth = indices[-1]
    rest = [f"d{i}" for i in range(len(data) - depth)]
    tuples = [f"i{i}!" for i in range(len(indices) - 1)]
    data_dims = " ".join([*(f"v{i}!" for i in range(depth)), *rest])
    return parse(
        f"{data_dims}, {' '.join([*tuples, 'z!'])}, {' '.join([*tuples, *rest])} -> {data_dims}",
        (data, indices, updates),
        (data,),
    )


def _scatter_nd(call: Call) -> str:
    return f"{call.use('scatter_nd')}({', '.join(call.args)}, {call.attr('reduction', 'none')!r})"


for _name, _jnp in _FUNCTIONS.items():
    register(Operator(_name, pointwise_rule, _function(_jnp), fusible=True))
for _name, _symbol in _BITS.items():
    register(Operator(_name, pointwise_rule, _between(_symbol), saves="", fusible=True))
register(
    Operator(
        "Acosh",
        lambda node, graph: uneven_never(pointwise_rule(node, graph), 0),
        _function("arccosh"),
        saves="in",
        fusible=True,
    ),
    Operator("BitwiseNot", pointwise_rule, lambda c: f"(~{c.args[0]})", saves="", fusible=True),
    Operator("BitShift", pointwise_rule, _shift, saves="", fusible=True),
    Operator("IsInf", pointwise_rule, _is_inf, saves="", fusible=True),
    Operator("Shrink", pointwise_rule, _shrink, fusible=True),
    Operator("Selu", pointwise_rule, _selu, fusible=True),
    Operator("LRN", _lrn_rule, _lrn),
    Operator("LpNormalization", _along_axis, _lp_normalize),
    Operator("Hardmax", _along_axis, _hardmax, saves=""),
    Operator("ScatterND", _scatter_nd_rule, _scatter_nd, saves="in1"),
)
