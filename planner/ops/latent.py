"""Attention to a cache of latents, as steps of generation compute it (planner.serving.latent): all
heads read the same latents and the same part of keys that rotates, so that they are the rows of one
product with the cache, which is read once. What makes a head's keys and values of latents acts on
its queries and on its result instead (`HeadProduct`).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from planner.graph.ir import Graph, Node
from planner.ops.attention import CACHED_BESIDE, cached_kernel
from planner.ops.base import Call, Operator, register
from planner.ops.cost import Kernel, Passes, Pieces
from planner.sharding.rule import KernelCollective, Rule, parse


def _cached_rule(node: Node, graph: Graph) -> Rule:
    """Batch, heads of the queries and positions of the cache (t), whose sums are then put together,
    as in attention to cached keys and values; latents are whole on every device that has heads."""
    shapes = graph.shapes(node.inputs)
    (q, turned, new), past = shapes[:3], shapes[4]
    mask = shapes[6] if len(shapes) > 6 else ()
    b, h = "b" if q[0] > 1 else "1", "h" if q[1] > 1 else "1"
    line = f"{b} {h} s! r!, {b} {h} s! p!, {b} 1 s! r!, {b} 1 s! p!, {b} 1 t r!, {b} 1 t p!"
    if mask:
        cells = [b, "1", "s", "t"][4 - len(mask) :]
        line += ", " + " ".join("1" if m == 1 else c for m, c in zip(mask, cells, strict=True))
    results = graph.shapes(node.outputs[:1])
    rule = parse(f"{line} -> {b} {h} s r!", shapes, results, no_pad=frozenset({"t"}))
    rows = tuple(f for f in (b, h, "s") if f in rule.sizes)
    joined = tuple(
        KernelCollective("t", "all-reduce", over, 1, 0) for over in (rows, rows, (*rows, "r"))
    )
    pairs = q[0] * q[1] * q[2] * (past[2] + new[2])
    return replace(rule, inner=joined, flops=2.0 * pairs * (q[3] + turned[3] + new[3]))


def _widths(node: Node, graph: Graph) -> tuple[int, int]:
    """(columns of a head that a HeadProduct reads, columns that the matrix has of each)."""
    x, w = graph.shapes(node.inputs)
    (out,) = graph.shapes(node.outputs)
    narrow = out if node.attrs["back"] else x
    return narrow[3], w[0 if node.attrs["transposed"] else 1] // x[1]


def _product_rule(node: Node, graph: Graph) -> Rule:
    """Batch and heads, of which the matrix has its columns."""
    x, w = graph.shapes(node.inputs)
    (out,) = graph.shapes(node.outputs)
    _, size = _widths(node, graph)
    b, h, columns, sizes = (
        "b" if x[0] > 1 else "1",
        *(("h", "(h m!)", {"h": x[1], "m": size}) if x[1] > 1 else ("1", "m!", {})),
    )
    matrix = f"{columns} r!" if node.attrs["transposed"] else f"r! {columns}"
    ends = ("r!", "n!") if node.attrs["back"] else ("n!", "r!")
    rule = parse(
        f"{b} {h} s! {ends[0]}, {matrix} -> {b} {h} s {ends[1]}",
        (x, w),
        (out,),
        sizes=sizes,
        no_pad=frozenset({"h"}),
    )
    return replace(rule, flops=2.0 * prod(x) * out[3])


def _product(call: Call) -> str:
    back, transposed = call.attr("back"), call.attr("transposed")
    width = (call.global_out if back else call.global_in)[0][3]
    size = call.global_in[1][0 if transposed else 1] // call.global_in[0][1]
    start = call.attr("start")
    assert isinstance(start, int)
    return (
        f"{call.use('head_product')}({', '.join(call.args)}, {size},"
        f" ({start}, {start + width}), {bool(back)}, {bool(transposed)})"
    )


def _product_passes(pieces: Pieces, operands: np.ndarray, results: np.ndarray) -> list[Passes]:
    """One kernel, which reads its columns of the matrix and no others."""
    width, size = _widths(pieces.node, pieces.graph)
    name, passes = pieces.node.inputs[1], list[Passes]()
    for split, share, read, written in zip(
        pieces.splits, pieces.share("").tolist(), operands.tolist(), results.tolist(), strict=True
    ):
        others = (1 - width / size) * pieces.bytes_of(name, pieces.operand_shape(1, split))
        passes.append(((Kernel(pieces.rule.flops * share, read - others + written),), ()))
    return passes


register(
    Operator(
        "CachedLatentAttention",
        _cached_rule,
        cached_kernel("cached_latent_attention", 6),
        saves="",
        kind="attention",
        roles={"t": "sequence", "h": "tensor"},
        words={"b": "batch", "h": "heads", "t": "keys"},
        own_precision=(6,),
        caches=(4, 5),
        gpu_beside=CACHED_BESIDE,
    ),
    Operator(
        "HeadProduct",
        _product_rule,
        _product,
        passes=_product_passes,
        roles={"h": "tensor"},
        words={"b": "batch", "h": "heads"},
    ),
)
