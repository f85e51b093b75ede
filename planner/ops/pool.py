"""Pooling and resizing: batch and channels split, space stays whole."""

from __future__ import annotations

from planner.graph import Graph, Node
from planner.ops.base import Call, NoRule, Operator, register
from planner.rule import Rule, parse


def _space_rule(node: Node, graph: Graph) -> Rule:
    (shape,), (out,) = graph.shapes(node.inputs[:1]), graph.shapes(node.outputs[:1])
    if sum(1 for o in node.outputs if o) > 1:
        raise NoRule("indices as outputs")
    if shape[:2] != out[:2]:
        raise NoRule("batch or channels resized")
    space = lambda stem: " ".join(f"{stem}{i}!" for i in range(len(shape) - 2))  # noqa: E731
    return parse(f"n c {space('x')} -> n c {space('y')}", (shape,), (out,))


def _window(call: Call) -> str:
    n = len(call.in_shapes[0]) - 2
    kernel = tuple(call.attr("kernel_shape"))  # type: ignore[arg-type]
    strides, dilations = (tuple(call.node.attrs.get(k, (1,) * n)) for k in ("strides", "dilations"))  # type: ignore[arg-type]
    pads = tuple(call.node.attrs.get("pads", (0,) * 2 * n))  # type: ignore[arg-type]
    return f"{kernel}, {strides}, {pads}, {dilations}, {call.out_shapes[0][2:]}"


def _max_pool(call: Call) -> str:
    return f"{call.use('max_pool')}({call.args[0]}, {_window(call)})"


def _average_pool(call: Call) -> str:
    return f"{call.use('average_pool')}({call.args[0]}, {_window(call)}, {bool(call.attr('count_include_pad', 0))})"


def _resize(call: Call) -> str:
    mode, coordinate = str(call.attr("mode", "nearest")), str(call.attr("coordinate_mode", "half_pixel"))
    slope = f", {call.attr('cubic_coeff_a', -0.75)!r}" if mode == "cubic" else ""
    nearest = str(call.attr("nearest_mode", "round_prefer_floor"))
    scales = tuple(float(s) for s in call.attr("scales"))[2:]  # type: ignore[union-attr, arg-type]
    return f"{call.use('resize')}({call.args[0]}, {call.out_shapes[0][2:]}, {scales}, {mode!r}, {coordinate!r}, {nearest!r}{slope})"


register(
    Operator("MaxPool", _space_rule, _max_pool, saves="in"),
    Operator("AveragePool", _space_rule, _average_pool, saves=""),
    Operator("Resize", _space_rule, _resize, saves=""),
)
