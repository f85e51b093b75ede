"""Attention of ONNX: softmax over keys, linear attention, and rotary embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from planner.reader.draft.shapes import ShapeError
from planner.reader.lower.call import Call, Unsupported
from planner.reader.lower.math import number
from planner.reader.lower.opaque import keep_or_expand

Rule = Callable[[Call], None]


def split_heads(call: Call, x: str, heads: int) -> str:
    """[B, S, H*D] -> [B, H, S, D]."""
    b, s, width = call.draft.shape(x)
    if heads < 1 or width % heads:
        raise ShapeError(f"{heads} heads do not divide the width of {[b, s, width]}")
    return call.emit(
        "Transpose",
        [call.emit("Reshape", [x], shape=(b, s, heads, width // heads))],
        {"perm": (0, 2, 1, 3)},
    )


def join_heads(call: Call, x: str) -> str:
    """[B, H, S, D] -> [B, S, H*D], this node's first output."""
    b, h, s, d = call.draft.shape(x)
    turned = call.emit("Transpose", [x], {"perm": (0, 2, 1, 3)})
    return call.emit("Reshape", [turned], shape=(b, s, h * d), out=call.name(0))


def _attention(call: Call) -> None:
    """The Attention operator of opset 23 and later, in its 3-d and 4-d forms, with key/value caches
    concatenated."""
    windows = call.attr("left_window_size", -1) >= 0 or call.attr("right_window_size", -1) >= 0
    cap = float(call.attr("softcap", 0.0))
    if cap < 0 or call.wants(3) or call.has(6) or windows:
        keep_or_expand(call, "")
        return
    q, k, v = call.inputs[:3]
    flat = len(call.shape()) == 3
    if flat:
        heads, groups = int(call.attr("q_num_heads", 0)), int(call.attr("kv_num_heads", 0))
        q, k, v = (
            split_heads(call, q, heads),
            split_heads(call, k, groups),
            split_heads(call, v, groups),
        )
    if call.has(4):
        k, v = (
            call.emit("Concat", [call.arg(4), k], {"axis": 2}),
            call.emit("Concat", [call.arg(5), v], {"axis": 2}),
        )
    for slot, present in ((1, k), (2, v)):
        if call.wants(slot):
            call.bind(present, slot)
    mask = call.arg(3)
    if mask and call.draft.shape(mask)[-1:] not in ((call.draft.shape(k)[-2],), (1,)):
        raise Unsupported("a mask shorter than the keys")
    y = attend(
        call,
        (q, k, v),
        mask,
        past=call.shape(4)[2] if call.has(4) else 0,
        causal=bool(call.attr("is_causal", 0)),
        attrs={"scale": float(call.attr("scale", call.draft.shape(q)[-1] ** -0.5)), "cap": cap},
        out="" if flat else call.name(0),
    )
    call.bind(join_heads(call, y) if flat else y)


# One parameter more than most: what is attended to, in which order, and what it is called.
def attend(
    call: Call,
    operands: tuple[str, str, str],
    mask: str,
    *,
    past: int,
    causal: bool,
    attrs: dict[str, Any],
    out: str = "",
) -> str:
    """Attention of q [B, H, S, D] to k, v [B, G, past + S, ..]: causal where the mask of positions
    is the operator's own, else a mask that says it too. Of `attrs` a cap and a window of 0 are
    none."""
    s, t = (call.draft.shape(x)[2] for x in operands[:2])
    attrs = {k: v for k, v in attrs.items() if v} | {"causal": int(causal and s == t and not past)}
    if causal and not attrs["causal"]:
        seen = _seen(call, (s, t), past, int(attrs.pop("window", 0)))
        mask = both_masks(call, mask, seen) if seen else mask
    if mask:
        attrs["guard"] = 1  # the operator gives zeros for rows that are masked everywhere
    return call.emit("Attention", [*operands, *([mask] if mask else [])], attrs, out=out)


def counted(call: Call, shape: tuple[int, ...], start: int = 0) -> str:
    """Whole numbers in a row, from `start` on."""
    n = math.prod(shape)
    attrs = {"start": start, "delta": 1, "dtype": "int64"}
    return call.emit("Reshape", [call.emit("Range", [], attrs, shape=(n,))], shape=shape)


def _seen(call: Call, sizes: tuple[int, int], past: int, window: int) -> str:
    """Which keys queries behind `past` of them see: those before, or the last so many (`window`);
    "" where that is all."""
    s, t = sizes
    keys, rows = counted(call, (1, t)), counted(call, (s, 1), past)
    seen = "" if past >= t - 1 else call.emit("LessOrEqual", [keys, rows])
    if 0 < window < past + s:
        first = call.emit("Sub", [rows, number(call, window, "int64")])
        near = call.emit("Greater", [keys, first])
        seen = call.emit("And", [seen, near]) if seen else near
    return seen


def both_masks(call: Call, mask: str, seen: str) -> str:
    """A mask, booleans or scores to add, of those keys alone that `seen` says."""
    if not mask:
        return seen
    if call.draft.dtype(mask) == "bool":
        return call.emit("And", [mask, seen])
    return call.emit("Where", [seen, mask, number(call, -math.inf, call.draft.dtype(mask))])


def _linear_attention(call: Call) -> None:
    """LinearAttention of opset 27 with a decay a head: operands by heads. Other forms are entered
    by ONNX's body."""
    heads, groups = int(call.attr("q_num_heads", 0)), int(call.attr("kv_num_heads", 0))
    b, s, wide = call.shape()
    rule = str(call.attr("update_rule", "gated_delta"))
    usual = rule in ("gated", "gated_delta") and heads == groups and heads > 0
    beta = rule == "gated_delta"
    plain = usual and call.has(4)
    plain = plain and call.shape(4) == (b, s, heads) and (not beta or call.has(5))
    if not plain or wide % heads or (beta and call.shape(5) != (b, s, heads)):
        keep_or_expand(call, "")
        return
    operands = [
        call.emit("Reshape", [x], shape=(b, s, heads, call.draft.shape(x)[-1] // heads))
        for x in call.inputs[:3]
    ]
    operands += [call.arg(4), *([call.arg(5)] if beta else [])]
    if call.has(3):
        operands += [*([] if beta else [""]), call.arg(3)]
    scale = float(call.attr("scale", 0.0)) or (wide // heads) ** -0.5
    attrs = {"scale": scale, "chunk": max(1, int(call.attr("chunk_size", 64)))}
    names = [f"{call.name(0)}/heads", call.name(1)]
    y, state = call.draft.add_many("LinearAttention", operands, attrs, names, None)
    width = heads * call.draft.shape(y)[-1]
    call.bind(call.emit("Reshape", [y], shape=(b, s, width), out=call.name(0)))
    call.bind(state, 1)


def _rotary(call: Call) -> None:
    """RotaryEmbedding of opset 23: caches of half width, gathered by position and doubled; [B, S,
    H*D] inputs are split."""
    if call.attr("interleaved", 0) or call.attr("rotary_embedding_dim", 0):
        keep_or_expand(call, "")
        return
    x, flat = call.arg(0), len(call.shape()) == 3
    if flat:
        x = split_heads(call, x, int(call.attr("num_heads", 0)))
    tables = []
    for k in (1, 2):
        table = call.arg(k)
        if call.has(3):
            table = call.emit("Gather", [table, call.arg(3)], {"axis": 0})
        b, s, half = call.draft.shape(table)
        table = call.emit("Concat", [table, table], {"axis": 2})
        tables.append(call.emit("Reshape", [table], shape=(b, 1, s, 2 * half)))
    y = call.emit("RotaryEmbedding", [x, *tables], out="" if flat else call.name(0))
    call.bind(join_heads(call, y) if flat else y)


ATTENTION: dict[str, Rule] = {
    "Attention": _attention,
    "LinearAttention": _linear_attention,
    "RotaryEmbedding": _rotary,
}
