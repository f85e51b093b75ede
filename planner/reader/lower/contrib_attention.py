"""Attention and rotary embeddings of onnxruntime's own domain, com.microsoft, written in those of
ONNX. Read as onnxruntime 1.32 computes them.

GroupQueryAttention counts a row's real tokens (seqlens_k), which exporters sum from the attention
mask. Keys of the cache and new ones lie one behind the other here, and that mask itself says which
of them are real, as in exports of transformers: the same numbers where the cache is full, or a
prompt without a cache has its padding behind it, which is all that onnxruntime takes; and padding
before a prompt is none of it either. Where no mask was summed, prompts have no padding that counts.
"""

from __future__ import annotations

from collections.abc import Callable

from planner.reader.draft.shapes import ShapeError
from planner.reader.lower.attention import attend, both_masks, counted, join_heads, split_heads
from planner.reader.lower.call import Call, Unsupported
from planner.reader.lower.contrib import cut
from planner.reader.lower.contrib_fused import integer_product
from planner.reader.lower.math import number
from planner.reader.onnx.records import BUFFER

Rule = Callable[[Call], None]

_NOT_READ = {11: "sinks", 12: "a quantised cache", 13: "a quantised cache", 16: "packed rows"}
"""Operands of GroupQueryAttention that are not read."""


def _parts(call: Call, x: str, widths: list[int]) -> list[str]:
    """The pieces of the last dim."""
    shape = call.draft.shape(x)
    if sum(widths) != shape[-1] or min(widths) < 1:
        raise ShapeError(f"{list(shape)} in parts of {widths}")
    names = [f"{call.name(0)}/part_{k}" for k in range(len(widths))]
    shapes = [(*shape[:-1], n) for n in widths]
    return call.draft.add_many("Split", [x], {"axis": len(shape) - 1}, names, shapes)


def _rotated(call: Call, x: str, tables: tuple[str, str], positions: str, interleaved: bool) -> str:
    """x [B, H, S, D] with its first features turned by the angles of tables [positions, half as
    many]; positions [B, S], or none: tokens count from 0."""
    shape = call.draft.shape(x)
    b, h, s, d = shape
    turned = 2 * call.draft.shape(tables[0])[-1]
    if turned > d:
        raise ShapeError(f"angles for {turned} of {d} features")
    sides = []
    for table in tables:
        call.draft.records.kinds.setdefault(table, BUFFER)
        rows = (
            call.emit("Gather", [table, positions], {"axis": 0})
            if positions
            else cut(call, table, 0, 0, s)
        )
        rows = call.emit("Concat", [rows, rows], {"axis": len(call.draft.shape(rows)) - 1})
        lead = call.draft.shape(positions)[0] if positions else 1
        sides.append(call.emit("Reshape", [rows], shape=(lead, 1, s, turned)))
    first = x if turned == d else cut(call, x, 3, 0, turned)
    if interleaved:
        first = _by_halves(call, first, (b, h, s, turned // 2, 2))
    rotated = call.emit("RotaryEmbedding", [first, *sides])
    if interleaved:
        rotated = _by_halves(call, rotated, (b, h, s, 2, turned // 2))
    if turned == d:
        return rotated
    return call.emit("Concat", [rotated, cut(call, x, 3, turned, d)], {"axis": 3})


def _by_halves(call: Call, x: str, shape: tuple[int, ...]) -> str:
    """Features that alternate as two halves, or the other way."""
    pairs = call.emit("Reshape", [x], shape=shape)
    pairs = call.emit("Transpose", [pairs], {"perm": (0, 1, 2, 4, 3)})
    return call.emit("Reshape", [pairs], shape=call.draft.shape(x))


def _rotary(call: Call) -> None:
    """x [B, S, H*D] or [B, H, S, D], positions [B, S] or the first one [1]."""
    flat, positions, width = len(call.shape()) == 3, call.arg(1), call.shape()[-1]
    rotated = int(call.attr("rotary_embedding_dim", 0))
    if call.attr("is_packed_batching", 0):
        raise Unsupported("sequences packed into one")
    size = rotated or 2 * call.shape(2)[-1]
    heads = int(call.attr("num_heads", 0)) or (width // size if size else 0)
    x = split_heads(call, call.arg(0), heads) if flat else call.arg(0)
    if call.shape(1) in ((), (1,)):
        s = call.draft.shape(x)[2]
        steps = counted(call, (1, s))
        positions = call.emit("Add", [call.emit("Reshape", [positions], shape=(1, 1)), steps])
    tables = (call.arg(2), call.arg(3))
    y = _rotated(call, x, tables, positions, bool(call.attr("interleaved", 0)))
    call.bind(join_heads(call, y) if flat else y)


def _with_past(call: Call, k: str, v: str, slot: int) -> tuple[str, str, int]:
    """Keys and values behind those of the cache, which are the second and third output, and how
    many the cache has."""
    past = 0
    if call.has(slot):
        past = call.shape(slot)[2]
        k = call.emit("Concat", [call.arg(slot), k], {"axis": 2}, out=call.name(1))
        v = call.emit("Concat", [call.arg(slot + 1), v], {"axis": 2}, out=call.name(2))
    call.bind(k, 1)
    call.bind(v, 2)
    return k, v, past


def _group_query(call: Call) -> None:
    """query [B, S, (H + 2 G) D] or three of them, cache [B, G, P, D], numbers of tokens, angles."""
    heads, groups = int(call.attr("num_heads")), int(call.attr("kv_num_heads"))
    _refuse_forms(call)
    q, k, v = call.inputs[:3]
    if not k:
        width = call.shape()[-1] // max(1, heads + 2 * groups)
        q, k, v = _parts(call, q, [heads * width, groups * width, groups * width])
    q, k, v = (split_heads(call, x, n) for x, n in ((q, heads), (k, groups), (v, groups)))
    q, k = _normed(call, q, 14, "q"), _normed(call, k, 15, "k")
    s, d = call.draft.shape(q)[2:]
    past = call.shape(3)[2] if call.has(3) else 0
    if call.attr("do_rotary", 0):
        positions = call.arg(9) or _positions(call, past, s)
        interleaved = bool(call.attr("rotary_interleaved", 0))
        tables = (call.arg(7), call.arg(8))
        q, k = (_rotated(call, x, tables, positions, interleaved) for x in (q, k))
    k, v, _ = _with_past(call, k, v, 3)
    mask = call.arg(10)
    if seen := _real(call, past, s):
        mask = both_masks(call, mask, seen)
    window = int(call.attr("local_window_size", -1))
    attrs = {
        "scale": float(call.attr("scale", 0.0)) or d**-0.5,
        "cap": float(call.attr("softcap", 0.0)),
        "window": window if 0 < window < past + s else 0,
    }
    causal = bool(call.attr("causal", 1))
    call.bind(
        join_heads(call, attend(call, (q, k, v), mask, past=past, causal=causal, attrs=attrs))
    )


def _refuse_forms(call: Call) -> None:
    """Raises Unsupported for what is not read of GroupQueryAttention."""
    unread = [what for slot, what in _NOT_READ.items() if call.has(slot)]
    unread += ["a smooth softmax"] * (call.attr("smooth_softmax", 0) == 1)
    unread += ["its scores as an output"] * call.wants(3)
    unread += ["a cache of the window's size"] * bool(call.attr("sliding_window_cache", 0))
    if unread:
        raise Unsupported(f"GroupQueryAttention with {unread[0]}")


def _normed(call: Call, x: str, slot: int, which: str) -> str:
    """Heads normalised by the scale of a slot, where it is given."""
    if not call.has(slot):
        return x
    epsilon = call.attr(f"{which}_norm_epsilon", call.attr("qk_norm_epsilon", 1e-6))
    attrs = {"axis": 3, "epsilon": float(epsilon)}
    return call.emit("RMSNormalization", [x, call.arg(slot)], attrs)


def _before(call: Call, new: int) -> str:
    """How many tokens each row has in the cache [B, 1]."""
    total = call.emit("Cast", [call.arg(5)], {"to": "int64"})
    total = call.emit("Reshape", [total], shape=(-1 if not call.shape(5) else call.shape(5)[0], 1))
    return call.emit("Sub", [total, number(call, new - 1, "int64")])


def _positions(call: Call, past: int, new: int) -> str:
    """Positions of the new tokens [B, new]; "" where they count from 0."""
    if past:
        return call.emit("Add", [_before(call, new), counted(call, (1, new))])
    if not (mask := _summed(call, past + new)):
        return ""
    real = call.emit("Cast", [mask], {"to": "int64"})
    return call.emit("CumSum", [real], {"axis": 1, "exclusive": 1, "reverse": 0})


def _real(call: Call, past: int, new: int) -> str:
    """Which keys are real: [B, 1, 1, past + new] booleans, "" where all are."""
    total = past + new
    if mask := _summed(call, total):
        seen = call.emit("Cast", [mask], {"to": "bool"})
    elif past:
        places = counted(call, (1, total))
        newest = call.emit("GreaterOrEqual", [places, number(call, past, "int64")])
        seen = call.emit("Less", [places, _before(call, new)])
        seen = call.emit("Or", [seen, newest])
    else:
        return ""
    return call.emit("Reshape", [seen], shape=(call.draft.shape(seen)[0], 1, 1, total))


def _summed(call: Call, total: int) -> str:
    """The mask [B, total] whose sums, less one, are the numbers of tokens; "" where they come from
    elsewhere. Raises ShapeError for a mask of another length."""
    draft = call.draft
    maker = draft.maker.get(call.arg(5))
    while maker is not None and maker.op in ("Cast", "Reshape", "Sub", "Add"):
        if maker.op in ("Sub", "Add") and abs(draft.scalar(maker.inputs[1]) or 0.0) != 1.0:
            return ""
        maker = draft.maker.get(maker.inputs[0])
    if maker is None or maker.op != "ReduceSum" or tuple(maker.attrs["axes"]) != (1,):
        return ""
    source = draft.maker.get(maker.inputs[0])
    mask = source.inputs[0] if source is not None and source.op == "Cast" else maker.inputs[0]
    shape = draft.shape(mask)
    if len(shape) == 2 and shape[1] != total:
        raise ShapeError(f"an attention mask of {list(shape)} for {total} tokens in all")
    return mask if len(shape) == 2 else ""


def _multi_head(call: Call) -> None:
    """Projected queries, keys and values, in the forms that they come in, with a bias, a mask of
    keys, scores to add, and a cache."""
    heads = int(call.attr("num_heads"))
    if call.wants(3) or call.has(8) or call.has(9):
        raise Unsupported("MultiHeadAttention with its scores as an output, or a cache in place")
    q, k, v = (*call.inputs[:3], "", "")[:3]
    bias = call.arg(3)
    if len(call.shape()) == 5:  # [B, S, H, 3, D]
        q, k, v = _stacked(call, q, 3)
    elif k and len(call.draft.shape(k)) == 5:  # [B, T, H, 2, D]
        k, v = _stacked(call, k, 2)
    width = call.draft.shape(q)[-1]
    if bias:
        rest = call.draft.shape(bias)[0] - 2 * width
        parts = _parts(call, bias, [width, width, rest])
        q, k, v = (
            call.emit("Add", [x, part]) if len(call.draft.shape(x)) == 3 else x
            for x, part in zip((q, k, v), parts, strict=True)
        )
    q, k, v = (
        split_heads(call, x, heads) if len(call.draft.shape(x)) == 3 else x for x in (q, k, v)
    )
    k, v, past = _with_past(call, k, v, 6)
    b, _, s, d = call.draft.shape(q)
    mask = _keys(call, call.arg(4), call.arg(5), (b, s, call.draft.shape(k)[2]))
    attrs = {"scale": float(call.attr("scale", 0.0)) or d**-0.5}
    causal = bool(call.attr("unidirectional", 0))
    call.bind(
        join_heads(call, attend(call, (q, k, v), mask, past=past, causal=causal, attrs=attrs))
    )


def _stacked(call: Call, x: str, count: int) -> list[str]:
    """[B, S, H, count, D] as so many [B, S, H*D]."""
    b, s, h, _, d = call.draft.shape(x)
    pieces = [cut(call, x, 3, n, n + 1) for n in range(count)]
    return [call.emit("Reshape", [p], shape=(b, s, h * d)) for p in pieces]


def _keys(call: Call, mask: str, added: str, sizes: tuple[int, int, int]) -> str:
    """A mask of keys (1 is seen) and scores to add, as one mask; sizes: batch, queries, keys."""
    if not mask:
        return added
    batch, queries, keys = sizes
    shape = call.draft.shape(mask)
    if shape == (batch,) and keys != 1:  # how many of each row are seen
        places = counted(call, (1, keys))
        count = call.emit("Cast", [mask], {"to": "int64"})
        seen = call.emit("Less", [places, call.emit("Reshape", [count], shape=(batch, 1))])
    elif shape in ((batch, keys), (batch, queries, keys)):
        seen = call.emit("Cast", [mask], {"to": "bool"})
    else:
        raise Unsupported(f"a mask of keys of shape {list(shape)}")
    rows = queries if len(shape) == 3 else 1
    seen = call.emit("Reshape", [seen], shape=(batch, 1, rows, keys))
    if not added:
        return seen
    low = number(call, float(call.attr("mask_filter_value", -10000.0)), call.draft.dtype(added))
    return call.emit("Where", [seen, added, low])


def _packed_attention(call: Call) -> None:
    """x [B, S, C] by weights [C, q + k + v] and a bias, then attention; the cache is one tensor
    [2, B, H, P, D]."""
    if call.has(6):
        raise Unsupported("a cache in place")
    projected = call.emit("MatMul", call.inputs[:2])
    if call.has(2):
        projected = call.emit("Add", [projected, call.arg(2)])
    _of_projected(call, projected, call.arg(3), call.arg(4), call.arg(5))


def _quantised_attention(call: Call) -> None:
    """Attention of quantised x and weights as `_packed_attention`: the product is one of whole
    numbers."""
    integer_product(call, [call.arg(k) for k in (0, 1, 3, 4, 6, 7, 2)])
    projected = call.frame.env[call.node.output[0]] or ""
    _of_projected(call, projected, call.arg(5), call.arg(8), "")


def _of_projected(call: Call, projected: str, mask: str, cache: str, added: str) -> None:
    """Attention of queries, keys and values in one tensor."""
    heads = int(call.attr("num_heads"))
    if call.attr("do_rotary", 0) or call.attr("past_present_share_buffer", 0):
        raise Unsupported("rotary embeddings, or a cache in place")
    total = call.draft.shape(projected)[-1]
    widths = [int(n) for n in call.attr("qkv_hidden_sizes", [])] or [total // 3] * 3
    q, k, v = (split_heads(call, x, heads) for x in _parts(call, projected, widths))
    b, _, s, d = call.draft.shape(q)
    past = 0
    if cache:
        past, shape = call.draft.shape(cache)[3], call.draft.shape(cache)[1:]
        before = [
            call.emit("Reshape", [cut(call, cache, 0, n, n + 1)], shape=shape) for n in range(2)
        ]
        k, v = (
            call.emit("Concat", [p, x], {"axis": 2}) for p, x in zip(before, (k, v), strict=True)
        )
    if call.wants(1):
        both = [call.emit("Reshape", [x], shape=(1, *call.draft.shape(x))) for x in (k, v)]
        call.bind(call.emit("Concat", both, {"axis": 0}, out=call.name(1)), 1)
    mask = _keys(call, mask, added, (b, s, past + s))
    attrs = {"scale": float(call.attr("scale", 0.0)) or d**-0.5}
    causal = bool(call.attr("unidirectional", 0))
    call.bind(
        join_heads(call, attend(call, (q, k, v), mask, past=past, causal=causal, attrs=attrs))
    )


CONTRIB_ATTENTION: dict[str, Rule] = {
    "RotaryEmbedding": _rotary,
    "GroupQueryAttention": _group_query,
    "MultiHeadAttention": _multi_head,
    "Attention": _packed_attention,
    "QAttention": _quantised_attention,
}
