"""Attention and rotary embedding.

Three ways to cut the positions of attention: queries alone (every device then needs all keys,
gathered or fanned out by the layouts around it); queries and keys by the same axes, pieces of keys
passing by on a ring ("ring"); or not at all, layouts around it turning cut positions into cut heads
and back.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import prod

import numpy as np

from planner.graph.ir import Graph, Node
from planner.ops.base import Call, NoRule, Operator, register
from planner.ops.cost import Dots, Pieces, Product, bilinear
from planner.ops.pointwise import letters
from planner.ops.ties import masked_keys
from planner.sharding.layout import group
from planner.sharding.rule import KernelCollective, Rule, Split, parse

QUERY_BLOCK = 1024
"""Queries per block of the emitted kernel (planner/emit/runtime/kernels/kernels.py; a test holds
the two together)."""


def in_query_blocks(queries: int) -> bool:
    """Whether the emitted kernel runs over blocks of queries and makes their scores again in the
    backward pass."""
    return queries > QUERY_BLOCK and queries % QUERY_BLOCK == 0


def _attention_rule(node: Node, graph: Graph) -> Rule:
    """Batch, key-value heads, query heads per key-value head and query positions split; keys only
    together with the queries, on a ring.

    Splitting query positions alone leaves the gradients of k and v partial; the kernel then needs
    its shard's first position for a causal mask. A mask has all keys (u) of the queries it is cut
    to.
    """
    shapes = graph.shapes(node.inputs)
    q, k, v = shapes[:3]
    (out,) = graph.shapes(node.outputs[:1])
    heads, kv = q[1], k[1]
    h, g = ("(g r)", "g") if kv not in (1, heads) else ("g", "g") if kv == heads else ("r", "1")
    sizes = {"g": kv, "r": heads // kv} if kv != heads else {"g": kv}
    if kv == 1 and heads != 1:
        sizes = {"r": heads}
    batch = "1" if q[0] == 1 else "b"
    kb = "1" if k[0] == 1 else "b"
    vb = "1" if v[0] == 1 else "b"
    if heads == 1:
        h = g = "1"
        sizes = {}
    line = f"{batch} {h} s d!, {kb} {g} t! d!, {vb} {g} t! e"
    if len(shapes) > 3 and shapes[3]:
        mask = shapes[3]
        full = (out[0], heads, q[2], k[2])
        cells = [batch if batch != "1" else "1", h, "s", "u!"][4 - len(mask) :]
        line += ", " + " ".join(
            "1" if m == 1 and f != 1 else c
            for m, f, c in zip(mask, full[4 - len(mask) :], cells, strict=True)
        )
    elif len(shapes) > 3:
        line += ", "
    rule = parse(f"{line} -> {batch} {h} s e", shapes, (out,), sizes=sizes, no_pad=frozenset({"s"}))
    if q[2] > 1 and k[2] > 1:
        rule = replace(rule, paired={"ring": ("s", "t")}, inner=_ring(rule))
    # 2*B*H*S*T*(D+E), halved where the causal mask lets the kernel skip: counted in full here, as
    # the emitted kernel computes it.
    return replace(rule, flops=2.0 * out[0] * heads * q[2] * k[2] * (q[3] + v[3]))


def _ring(rule: Rule) -> tuple[KernelCollective, ...]:
    """k and v pass every other device; in the backward pass once more, and their gradients in
    float32 as far and then home."""
    found: list[KernelCollective] = []
    for dims in rule.operands[1:3]:
        over = tuple(f for dim in dims for f in dim)
        found += [
            KernelCollective("ring", "collective-permute", over, 1, 1, 0, ring=True, kept=False),
            KernelCollective("ring", "collective-permute", over, 0, 1, ring=True),
            KernelCollective("ring", "collective-permute", over, 0, 1),
        ]
    return tuple(found)


def _attention(call: Call) -> str:
    mask = call.args[3] if len(call.args) > 3 and call.args[3] else "None"
    start = call.start("s") if call.attr("causal", 0) and "s" in call.rule.sizes else "0"
    q, k, v = call.args[:3]
    flags = (
        f"{call.attr('scale')!r}, {bool(call.attr('causal', 0))}, {bool(call.attr('guard', 0))},"
        f" {start}"
    )
    if call.split.axes("ring"):
        return (
            f"{call.use('ring_attention')}({q}, {k}, {v}, {mask}, {flags},"
            f" {call.axis_text('ring')})"
        )
    if mask == "None" and start == "0":
        return f"{call.use('fused_attention')}({q}, {k}, {v}, {flags.rsplit(', ', 1)[0]})"
    return f"{call.use('attention')}({q}, {k}, {v}, {mask}, {flags})"


def _cached_rule(node: Node, graph: Graph) -> Rule:
    """Batch and heads as in attention; positions of the cache (t) may be cut too: each device then
    attends to its piece, and numerators, denominators and the largest score are put together. The
    new tokens' own keys and values are whole on every device.
    """
    shapes = graph.shapes(node.inputs)
    (q, k, v, past), mask = shapes[:4], shapes[5] if len(shapes) > 5 else ()
    heads, kv, batch = q[1], past[1], "b" if q[0] > 1 else "1"
    h, g, sizes = (
        ("(g r)", "g", {"g": kv, "r": heads // kv})
        if kv not in (1, heads)
        else ("g", "g", {"g": kv})
        if kv > 1
        else ("r", "1", {"r": heads})
    )
    if heads == 1:
        h, g, sizes = "1", "1", {}
    line = (
        f"{batch} {h} s! d!, {batch} {g} s! d!, {batch} {g} s! e, {batch} {g} t d!, {batch} {g} t e"
    )
    if mask:
        full, cells = (q[0], heads, q[2], past[2]), [batch, h, "s", "t"][4 - len(mask) :]
        line += ", " + " ".join("1" if m == 1 else c for m, c in zip(mask, cells, strict=True))
        assert all(m in (1, n) for m, n in zip(mask, full[4 - len(mask) :], strict=True))
    rule = parse(
        f"{line} -> {batch} {h} s e",
        shapes,
        graph.shapes(node.outputs[:1]),
        sizes=sizes,
        no_pad=frozenset({"t"}),
    )
    rows = tuple(f for f in (batch, "g", "r", "s") if f in rule.sizes)
    joined = tuple(
        KernelCollective("t", "all-reduce", over, 1, 0) for over in (rows, rows, (*rows, "e"))
    )
    return replace(
        rule, inner=joined, flops=2.0 * q[0] * heads * q[2] * (past[2] + k[2]) * (q[3] + v[3])
    )


def _cached(call: Call) -> str:
    mask = call.args[5] if len(call.args) > 5 and call.args[5] else "None"
    axes = call.axis_text("t") if call.axes("t") else "()"
    return (
        f"{call.use('cached_attention')}({', '.join(call.args[:5])}, {mask},"
        f" {call.attr('scale')!r}, {axes})"
    )


def _rotary_rule(node: Node, graph: Graph) -> Rule:
    shapes = graph.shapes(node.inputs)
    x = shapes[0]
    if len(shapes) != 3:
        raise NoRule("positions given separately")
    names = letters(len(x))
    names[-1] += "!"
    sides = []
    for shape in shapes:
        own = names[len(x) - len(shape) :]
        sides.append(" ".join("1" if s == 1 else n for s, n in zip(shape, own, strict=True)))
    return parse(",".join(sides) + "->" + " ".join(names), shapes, (x,))


def _attention_products(dots: Dots) -> tuple[Product, ...]:
    """Scores = q k', whose share does not depend on how the values' width (e) is cut and which the
    backward pass recomputes; and their product with v."""
    d, e = dots.shapes[0][-1], dots.shapes[2][-1]
    work, share, hot = Fraction(dots.rule.flops), dots.share, dots.trained
    of_scores = prod(share[f] for f in share if f != "e") * work * Fraction(d, d + e)
    of_values = prod(share.values()) * work * Fraction(e, d + e)
    return (
        Product(of_scores, len(hot & {0, 1}), int(bool(hot))),
        Product(of_values, (2 in hot) + bool(hot & {0, 1, 3})),
    )


def _attention_workspace(pieces: Pieces, results: np.ndarray) -> np.ndarray:
    """Scores and their gradient in float32, the weights as computed with."""
    each = zip(pieces.splits, pieces.share("e").tolist(), results.tolist(), strict=True)
    return np.array([_scores_bytes(pieces, *split) for split in each])


def _scores_bytes(pieces: Pieces, split: Split, share: float, results: float) -> float:
    """The workspace under one split. share: of the scores; results: bytes of the results."""
    graph, node, rule, trained = pieces.graph, pieces.node, pieces.rule, pieces.trained
    itemsize = pieces.itemsize("float32")
    q, _, v = graph.shapes(node.inputs[:3])
    around = group(split.axes("ring"), pieces.mesh)
    scores = rule.flops / (2 * (q[3] + v[3])) * share / around
    queries = rule.local(split, pieces.mesh).get("s", q[2])
    size = (
        scores
        * (QUERY_BLOCK / queries if in_query_blocks(queries) else 1)
        * (4 + (2 if trained else 1) * itemsize)
    )
    if around > 1:
        # The next piece of keys beside this one, results and gradients summed up in float32, and
        # what is on its way of these.
        keys = sum(pieces.bytes_of(node.inputs[k], pieces.operand_shape(k, split)) for k in (1, 2))
        wide = itemsize / pieces.itemsize(graph.tensors[node.inputs[0]].dtype)
        size += keys + (3 * wide * keys + 2 * wide * results if trained else wide * results)
    # The residual stream's gradient, as wide as the result, as carried and as added to.
    return size + (2 * results if trained and pieces.repeated else 0.0)


def _ring_saves(pieces: Pieces) -> np.ndarray:
    """On a ring the result, and a float32 for each row of scores."""

    def kept(split: Split) -> float:
        if not split.axes("ring"):
            return 0.0
        (out,), local = pieces.rule.results, pieces.rule.local(split, pieces.mesh)
        rows, width = (prod(local[f] for dim in dims for f in dim) for dims in (out[:3], out[3:]))
        dtype = pieces.graph.tensors[pieces.node.outputs[0]].dtype
        return rows * (width * pieces.itemsize(dtype) + 4)

    return np.array([kept(split) for split in pieces.splits])


register(
    Operator(
        "Attention",
        _attention_rule,
        _attention,
        kind="attention",
        workspace=_attention_workspace,
        saves_beside=_ring_saves,
        products=_attention_products,
        roles={"s": "sequence", "g": "tensor", "r": "tensor"},
        words={"b": "batch", "g": "heads", "r": "heads", "s": "queries", "t": "keys"},
        own_precision=(3,),
        extents=True,
        ties=masked_keys,
    ),
    Operator(
        "CachedAttention",
        _cached_rule,
        _cached,
        saves="",
        kind="attention",
        roles={"t": "sequence", "g": "tensor", "r": "tensor"},
        own_precision=(5,),
        caches=(3, 4),
    ),
    Operator(
        "RotaryEmbedding",
        _rotary_rule,
        lambda c: f"{c.use('rotary')}({', '.join(c.args)})",
        saves="in1 in2",
        fusible=True,
        gradient=bilinear,
        extents=True,
    ),
)
