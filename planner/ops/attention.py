"""Attention and rotary embedding.

Three ways to cut the positions of attention: queries alone (every device then needs all keys,
gathered or fanned out by the layouts around it); queries and keys by the same axes, pieces of keys
passing by on a ring ("ring"), balanced where a causal mask is all that hides keys; or not at all,
layouts around it turning cut positions into cut heads and back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from planner.graph.ir import Graph, Node
from planner.ops.attention_cost import (
    attention_passes,
    attention_products,
    attention_workspace,
    kernel_rows,
    saved_rows,
)
from planner.ops.attention_kernels import can_balance, is_balanced, pieces_met, reach_of
from planner.ops.attention_pairs import Positions
from planner.ops.base import Call, NoRule, Operator, register
from planner.ops.cost import bilinear
from planner.ops.pointwise import letters
from planner.ops.ties import masked_keys
from planner.sharding.layout import group
from planner.sharding.rule import Dim, KernelCollective, Rule, parse

CACHED_BESIDE = 6
"""Kernels of a step that attends to a cache, beside the first that reads it: scores of the newest
keys, the largest of all, the weights of both, and the sums of values (benchmarks/RESULTS.md, "Bytes
of a decode step")."""


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
    if q[2] > 1 and k[2] > 1 and not node.attrs.get("cap", 0):  # no ring has a cap of scores
        inner = _ring(rule, reach_of(node, graph))
        inner += _halves(rule) if can_balance(node, graph) else ()
        rule = replace(rule, paired={"ring": ("s", "t")}, inner=inner)
    # 2*B*H*S*T*(D+E), every pair of a query and a key (of a window): kernels that skip those that a
    # causal mask hides are priced without them (attention_cost.py).
    pairs = q[2] * Positions.of(node).counted_keys(k[2])
    return replace(rule, flops=2.0 * out[0] * heads * pairs * (q[3] + v[3]))


def _ring(rule: Rule, reach: int) -> tuple[KernelCollective, ...]:
    """k and v pass every other device, or those that a window reaches back from; in the backward
    pass once more, and their gradients as far, in float32, and then home, in the type of k and v.
    """

    def along(
        over: tuple[str, ...], forward: int, itemsize: int, **options: Any
    ) -> KernelCollective:
        options |= {"alike": ("s", "t"), "reach": reach}
        return KernelCollective("ring", "collective-permute", over, forward, 1, itemsize, **options)

    collectives: list[KernelCollective] = []
    for dims in rule.operands[1:3]:
        over = tuple(f for dim in dims for f in dim)
        collectives += [
            along(over, 1, 0, ring=True, kept=False),
            along(over, 0, 4, ring=True),
            along(over, 0, 0),
        ]
    return tuple(collectives)


def _halves(rule: Rule) -> tuple[KernelCollective, ...]:
    """What devices exchange on entering and on leaving a balanced ring: half of queries, keys and
    values, and of the result on its way back; in the backward pass of all of these, of the result's
    gradient, and of the gradients of the first three."""

    def half(
        dims: tuple[Dim, ...], forward: int, backward: int, **options: Any
    ) -> KernelCollective:
        over = tuple(f for dim in dims for f in dim)
        options |= {"alike": ("s", "t"), "halved": True, "kept": False}
        return KernelCollective("ring", "collective-permute", over, forward, backward, 0, **options)

    operands = [half(dims, 1, 1) for dims in rule.operands[:3]]
    gradients = [half(dims, 0, 1, operand=k) for k, dims in enumerate(rule.operands[:3])]
    (result,) = rule.results
    return (*operands, *gradients, half(result, 1, 0, for_result=True), half(result, 0, 2))


def _attention(call: Call) -> str:
    mask = call.args[3] if len(call.args) > 3 and call.args[3] else "None"
    placed = call.attr("causal", 0) or call.attr("segments", 0)
    start = call.start("s") if placed and "s" in call.rule.sizes else "0"
    q, k, v = call.args[:3]
    scale, causal = repr(call.attr("scale")), bool(call.attr("causal", 0))
    window = f", window={call.attr('window')!r}" if call.attr("window", 0) else ""
    name = f', name="{call.saved_as}"' if call.saved_as else ""
    if call.split.axes("ring"):
        around = call.axis_text("ring")
        if is_balanced(call.rule, call.split, call.mesh):
            return f"{call.use('balanced_ring_attention')}({q}, {k}, {v}, {scale}, {around}{name})"
        devices = group(call.split.axes("ring"), call.mesh)
        met = pieces_met(call.rule, call.rule.local(call.split, call.mesh), devices)
        pieces = f", pieces={met}" if met < devices else ""
        return (
            f"{call.use('ring_attention')}({q}, {k}, {v}, {mask}, {scale}, {causal}, {start},"
            f" {around}{window}{pieces}{name})"
        )
    window += f", cap={call.attr('cap')!r}" if call.attr("cap", 0) else ""
    flags = f"{scale}, {causal}, {bool(call.attr('guard', 0))}"
    if start == "0":
        arguments = window + (f", mask={mask}" if mask != "None" else "") + name
        return f"{call.use('fused_attention')}({q}, {k}, {v}, {flags}{arguments})"
    text = f"{call.use('attention')}({q}, {k}, {v}, {mask}, {flags}, {start}{window})"
    return f'checkpoint_name({text}, "{call.saved_as}")' if name else text


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


def cached_kernel(function: str, operands: int) -> Callable[[Call], str]:
    """Writes the call of a kernel that attends to a cache, of so many operands and a mask behind
    them."""

    def text(call: Call) -> str:
        mask = call.args[operands] if len(call.args) > operands else ""
        axes = call.axis_text("t") if call.axes("t") else "()"
        cap = f", {call.attr('cap')!r}" if call.attr("cap", 0) else ""
        return (
            f"{call.use(function)}({', '.join(call.args[:operands])}, {mask or 'None'},"
            f" {call.attr('scale')!r}, {axes}{cap})"
        )

    return text


def _rotary_rule(node: Node, graph: Graph) -> Rule:
    shapes = graph.shapes(node.inputs)
    x = shapes[0]
    if len(shapes) != 3:
        raise NoRule("positions given separately")
    names = letters(len(x))
    names[-1] += "!"
    sides = []
    for shape in shapes:
        aligned = names[len(x) - len(shape) :]
        sides.append(" ".join("1" if s == 1 else n for s, n in zip(shape, aligned, strict=True)))
    return parse(",".join(sides) + "->" + " ".join(names), shapes, (x,))


register(
    Operator(
        "Attention",
        _attention_rule,
        _attention,
        kind="attention",
        passes=attention_passes,
        workspace=attention_workspace,
        saves_beside=saved_rows,
        names_itself=True,
        named_beside=kernel_rows,
        products=attention_products,
        roles={"s": "sequence", "g": "tensor", "r": "tensor"},
        words={"b": "batch", "g": "heads", "r": "heads", "s": "queries", "t": "keys"},
        own_precision=(3,),
        extents=True,
        ties=masked_keys,
    ),
    Operator(
        "CachedAttention",
        _cached_rule,
        cached_kernel("cached_attention", 5),
        saves="",
        kind="attention",
        roles={"t": "sequence", "g": "tensor", "r": "tensor"},
        own_precision=(5,),
        caches=(3, 4),
        gpu_beside=CACHED_BESIDE,
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
