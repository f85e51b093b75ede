"""Windows and samples of images: pools with other norms or with indices, grids, regions, deformable
convolution, blocks added up.

What is sampled stays whole in space. The places where it is sampled (a grid's points, regions,
offsets) split freely, as batch and channels do: an image that lacks their factor is equal on every
device, and its gradient a sum still pending.
"""

from __future__ import annotations

from math import prod

from planner.graph.ir import Graph, Node
from planner.ops.base import Call, NoRule, Operator, jnp_dtype, register
from planner.ops.cost import Dots, Product
from planner.sharding.rule import Rule, parse


def _numbered(stem: str, count: int, mark: str = "!") -> str:
    return " ".join(f"{stem}{i}{mark}" for i in range(count))


def _shapes(
    node: Node, graph: Graph
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    return graph.shapes(node.inputs), graph.shapes(tuple(o for o in node.outputs if o))


def _pool_rule(node: Node, graph: Graph) -> Rule:
    shapes, outs = _shapes(node, graph)
    n = len(shapes[0]) - 2
    result = f"n c {_numbered('y', n)}"
    return parse(f"n c {_numbered('x', n)} -> {', '.join([result] * len(outs))}", shapes, outs)


def _window(call: Call) -> str:
    kernel, strides, pads, dilations = (
        tuple(call.attr(k))  # type: ignore[arg-type]
        for k in ("kernel_shape", "strides", "pads", "dilations")
    )
    return f"{kernel}, {strides}, {pads}, {dilations}, {call.out_shapes[0][2:]}"


def _lp_pool(call: Call) -> str:
    return f"{call.use('lp_pool')}({call.args[0]}, {call.attr('p')!r}, {_window(call)})"


def _max_pool_indices(call: Call) -> str:
    """Indices count in the whole tensor, so pieces need to know where they begin."""
    live = [k for k, o in enumerate(call.node.outputs) if o]
    dtype = jnp_dtype(call.out_dtypes[-1]) if 1 in live else "jnp.int32"
    place = (
        f"{call.start('n')}, {call.start('c')}, {call.global_in[0][1]},"
        f" {bool(call.attr('storage_order', 0))}, {dtype}"
    )
    text = f"{call.use('max_pool_indices')}({call.args[0]}, {_window(call)}, {place})"
    return text if len(live) == 2 else f"{text}[{live[0]}]"


def _unpool_rule(node: Node, graph: Graph) -> Rule:
    shapes, outs = _shapes(node, graph)
    n = len(shapes[0]) - 2
    return parse(
        f"n c {_numbered('x', n)}, n c {_numbered('x', n)} -> n c {_numbered('y', n)}", shapes, outs
    )


def _max_unpool(call: Call) -> str:
    return f"{call.use('max_unpool')}({call.args[0]}, {call.args[1]}, {call.out_shapes[0][2:]})"


def _col2im_rule(node: Node, graph: Graph) -> Rule:
    shapes, outs = _shapes(node, graph)
    window = prod(node.attrs["block"])  # type: ignore[arg-type]
    return parse(
        f"n (c k!) b! -> n c {_numbered('y', len(outs[0]) - 2)}", shapes, outs, sizes={"k": window}
    )


def _col2im(call: Call) -> str:
    keys = ("image", "block", "blocks", "strides", "pads", "dilations")
    return f"{call.use('col2im')}({call.args[0]}, {', '.join(repr(tuple(call.attr(k))) for k in keys)})"  # type: ignore[arg-type]  # noqa: E501


def _grid_rule(node: Node, graph: Graph) -> Rule:
    shapes, outs = _shapes(node, graph)
    n = len(shapes[0]) - 2
    points = _numbered("p", n, "")
    return parse(f"n c {_numbered('x', n)}, n {points} z! -> n c {points}", shapes, outs)


def _grid_sample(call: Call) -> str:
    how = f"{call.attr('mode')!r}, {call.attr('padding')!r}, {bool(call.attr('align_corners', 0))}"
    return f"{call.use('grid_sample')}({call.args[0]}, {call.args[1]}, {how})"


def _regions_rule(node: Node, graph: Graph) -> Rule:
    """Regions and channels split; which image a region is of is data, so images are whole."""
    shapes, outs = _shapes(node, graph)
    others = "r z!, r" if len(shapes) == 3 else "r z!"
    return parse(f"n! c h! w!, {others} -> r c i! j!", shapes, outs)


def _roi_align(call: Call) -> str:
    if int(call.attr("ratio")) <= 0:  # type: ignore[arg-type]
        raise NoRule(
            "as many samples per cell as the region is large (sampling_ratio 0): their number is"
            " run-time data"
        )
    how = f"{tuple(call.attr('cells'))}, {call.attr('scale')!r}, {call.attr('ratio')}, {bool(call.attr('half_pixel'))}, {bool(call.attr('most'))}"  # type: ignore[arg-type]  # noqa: E501
    return f"{call.use('roi_align')}({', '.join(call.args)}, {how})"


def _max_roi_pool(call: Call) -> str:
    return f"{call.use('max_roi_pool')}({', '.join(call.args)}, {tuple(call.attr('cells'))}, {call.attr('scale')!r})"  # type: ignore[arg-type]  # noqa: E501


def _deform_rule(node: Node, graph: Graph) -> Rule:
    """Filters, groups or channels, and the result's rows and columns split; channels that share
    offsets go together where there are several such groups."""
    shapes, outs = _shapes(node, graph)
    group, moved = int(node.attrs["group"]), int(node.attrs["offset_group"])  # type: ignore[arg-type]
    sizes: dict[str, int] = {}
    if group == moved == 1:
        x, w, o, offset, mask = "c", "o c", "o", "z!", "t!"
    elif group == 1:
        x, w, o, offset, mask = "(m c!)", "o (m c!)", "o", "(m z!)", "(m t!)"
        sizes = {"m": moved, "c": shapes[0][1] // moved}
    elif moved in (1, group):
        x, w, o = "(g c!)", "(g o!) c!", "(g o!)"
        offset, mask = ("z!", "t!") if moved == 1 else ("(g z!)", "(g t!)")
        sizes = {"g": group, "c": shapes[1][1], "o": shapes[1][0] // group}
    else:
        x, w, o, offset, mask = "x!", "o! c!", "o!", "z!", "t!"
    taps = prod(shapes[1][2:])
    if offset != "z!":
        sizes |= {"z": 2 * taps} | ({"t": taps} if len(shapes) > 3 else {})
    masked = f", n {mask} r s" if len(shapes) > 3 else ""
    return parse(
        f"n {x} h! w!, {w} k0! k1!, n {offset} r s{masked} -> n {o} r s",
        shapes,
        outs,
        sizes=sizes,
        flops=2.0 * prod(outs[0]) * prod(shapes[1][1:]),
    )


def _deform_conv(call: Call) -> str:
    window = ", ".join(repr(tuple(call.attr(k))) for k in ("strides", "pads", "dilations"))  # type: ignore[arg-type]
    mask = call.args[3] if len(call.args) > 3 else "None"
    return (
        f"{call.use('deform_conv')}({', '.join(call.args[:3])}, {mask}, {window},"
        f" {call.start('r')}, {call.start('s')})"
    )


def _deform_products(dots: Dots) -> tuple[Product, ...]:
    """The weight's gradient, and one product for all that makes the patches."""
    return (Product(dots.flops, (1 in dots.trained) + bool(dots.trained - {1})),)


register(
    Operator("LpPool", _pool_rule, _lp_pool, saves="in out"),
    Operator("MaxPoolIndices", _pool_rule, _max_pool_indices, saves="in"),
    Operator("MaxUnpool", _unpool_rule, _max_unpool, saves="in1"),
    Operator("Col2Im", _col2im_rule, _col2im, saves=""),
    Operator("GridSample", _grid_rule, _grid_sample, saves="in"),
    Operator("RoiAlign", _regions_rule, _roi_align, saves="in"),
    Operator("MaxRoiPool", _regions_rule, _max_roi_pool, saves="in"),
    Operator("DeformConv", _deform_rule, _deform_conv, products=_deform_products),
)
