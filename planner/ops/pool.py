"""Pooling and resizing: batch and channels split, rows where their pieces line up
(planner.ops.space)."""

from __future__ import annotations

from math import prod

import numpy as np

from planner.graph.ir import Graph, Node
from planner.ops.base import Call, NoRule, Operator, register
from planner.ops.cost import Pieces
from planner.ops.space import Reach, brought, cut_of, reach, spelled, window, with_rows
from planner.sharding.rule import Rule, Split, parse


def _pool_rule(node: Node, graph: Graph) -> Rule:
    (shape,), (out,) = graph.shapes(node.inputs[:1]), graph.shapes(node.outputs[:1])
    cut = (
        reach(shape, out, window(node.attrs, tuple(node.attrs["kernel_shape"])))  # type: ignore[arg-type]
        if graph.tensors[node.inputs[0]].is_float
        else None
    )
    return _space_rule(node, graph, cut)


def _resize_rule(node: Node, graph: Graph) -> Rule:
    """Rows split where each makes the same number of rows, which no neighbour has a part in."""
    (shape,), (out,) = graph.shapes(node.inputs[:1]), graph.shapes(node.outputs[:1])
    cut = None
    if (
        len(shape) > 2
        and shape[2] > 1
        and out[2] % shape[2] == 0
        and node.attrs.get("mode", "nearest") == "nearest"
    ):
        modes = (
            node.attrs.get("coordinate_mode", "half_pixel"),
            node.attrs.get("nearest_mode", "round_prefer_floor"),
        )
        at_center = modes[0] in ("half_pixel", "pytorch_half_pixel") and str(modes[1]).startswith(
            "round"
        )
        if (at_center or modes == ("asymmetric", "floor")) and node.attrs["scales"][2] == out[  # type: ignore[index]
            2
        ] // shape[2]:
            cut = Reach(0, out[2] // shape[2], 0, 0, wide=True)
    return _space_rule(node, graph, cut)


def _space_rule(node: Node, graph: Graph, cut: Reach | None) -> Rule:
    (shape,), (out,) = graph.shapes(node.inputs[:1]), graph.shapes(node.outputs[:1])
    if sum(1 for o in node.outputs if o) > 1:
        raise NoRule("indices as outputs")
    if shape[:2] != out[:2]:
        raise NoRule("batch or channels resized")
    xs, ys = spelled(len(shape) - 2, cut)
    return with_rows(
        parse(f"n c {xs} -> n c {ys}", (shape,), (out,), sizes=cut.sizes if cut else {}), cut
    )


def _window(call: Call) -> tuple[str, Reach | None]:
    """Arguments that say the window, and the reach of cut rows: the neighbours' rows then stand
    where the padding was."""
    kernel, strides, pads, dilations = window(call.node.attrs, tuple(call.attr("kernel_shape")))  # type: ignore[arg-type]
    cut = cut_of(call, kernel)
    if cut is not None:
        pads = tuple(0 if i == cut.dim else p for i, p in enumerate(pads))
    return f"{kernel}, {strides}, {pads}, {dilations}, {call.out_shapes[0][2:]}", cut


def _max_pool(call: Call) -> str:
    text, cut = _window(call)
    return f"{call.use('max_pool')}({brought(call, cut, '-jnp.inf')}, {text})"


def _average_pool(call: Call) -> str:
    text, cut = _window(call)
    counted = bool(call.attr("count_include_pad", 0))
    if cut is None:
        return f"{call.use('average_pool')}({call.args[0]}, {text}, {counted})"
    low, size = (
        call.node.attrs.get("pads", (0,) * 2 * (cut.dim + 1))[cut.dim],  # type: ignore[index]
        call.global_in[0][2 + cut.dim],
    )
    rows = f"{cut.dim}, {low}, {size}, {call.start(cut.factor)}"
    return f"{call.use('average_pool_rows')}({brought(call, cut)}, {text}, {counted}, {rows})"


def _resize(call: Call) -> str:
    mode, coordinate = (
        str(call.attr("mode", "nearest")),
        str(call.attr("coordinate_mode", "half_pixel")),
    )
    slope = f", {call.attr('cubic_coeff_a', -0.75)!r}" if mode == "cubic" else ""
    nearest = str(call.attr("nearest_mode", "round_prefer_floor"))
    scales = tuple(float(s) for s in call.attr("scales"))[2:]  # type: ignore[union-attr]
    return (
        f"{call.use('resize')}({call.args[0]}, {call.out_shapes[0][2:]}, {scales}, {mode!r},"
        f" {coordinate!r}, {nearest!r}{slope})"
    )


def _positions(pieces: Pieces, results: np.ndarray) -> np.ndarray:
    """Bytes of where the largest elements are: one a window, along one dim after the other from the
    last."""
    if not pieces.trained:
        return np.zeros(len(pieces.splits))

    def size(split: Split) -> float:
        source, result = pieces.operand_shape(0, split), pieces.result_shape(0, split)
        return float(sum(prod(source[:d] + result[d:]) for d in range(2, len(result))))

    return np.array([size(split) for split in pieces.splits])


register(
    # The positions wait for an element of their gradient, which a partitioner would sum over all
    # devices.
    Operator(
        "MaxPool",
        _pool_rule,
        _max_pool,
        workspace=_positions,
        by_piece=lambda node: True,
        looks_again=True,
    ),
    Operator("AveragePool", _pool_rule, _average_pool, saves=""),
    Operator("Resize", _resize_rule, _resize, saves=""),
)
