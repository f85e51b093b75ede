"""Attention from its parts.

    scores  = MatMul(q * a, k^T * b) * c [+ mask | where(mask, ., lowest)]      scale = a b c
    weights = Softmax(scores) over the keys [zero where NaN: the guard for rows masked everywhere]
    output  = MatMul(weights, v)

q, k, v keep [B, H, S, D]; three-dimensional ones get heads of 1. Casts of the scores to float32 and back belong to the operator.
A mask that is a constant lower triangle becomes causal = 1; a boolean one ANDed with other conditions leaves only those.
An additive mask of 0 and -inf is exactly a boolean one. Additive masks with finite lows stay additive: on rows that are masked
everywhere they mean something else. Keys and values repeated over groups of heads go in unrepeated.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from planner.reader.draft import Op
from planner.reader.finder import Finder
from planner.reader.masks import MASKED, Masks

_LOWEST = -1e30
"""An additive mask at or below this absorbs any score it is added to, so replacing the score is the same as adding."""


def attentions(find: Finder) -> None:
    """Fuses every product of softmax weights and values whose scores are a product of queries and keys."""
    masks = Masks(find.draft)
    for root in list(find.draft.ops):
        if root.op == "MatMul" and id(root) not in find.gone:
            _attention(find, masks, root)
    for op in find.draft.ops:
        if op.op == "Attention" and id(op) not in find.gone:
            _simplify_mask(find, masks, op)


class _Match:
    """Parts found so far."""

    def __init__(self) -> None:
        self.inside: list[Op] = []
        self.scale = 1.0
        self.guard = False
        self.mask: str = ""
        self.masked_fill: tuple[str, float, bool] | None = None  # condition, fill, True when the condition attends
        self.scores: Op | None = None


def _attention(find: Finder, masks: Masks, root: Op) -> None:
    draft = find.draft
    rank = len(draft.shape(root.outputs[0]))
    if root.attrs.get("trans_a") or rank not in (3, 4) or any(len(draft.shape(i)) != rank for i in root.inputs):
        return
    match = _Match()
    softmax = _weights(find, root.inputs[0], match)
    if softmax is None or softmax.attrs["axis"] != rank - 1 or not _scores(find, softmax.inputs[0], match):
        return
    scores = match.scores
    assert scores is not None
    if scores.attrs.get("trans_a") or any(len(draft.shape(i)) != rank for i in scores.inputs):
        return
    q, k = (_unscaled(find, name, match) for name in scores.inputs)
    if not find.closed(root, match.inside) or {draft.dtype(x) for x in (q, k, root.inputs[1])} != {draft.dtype(root.outputs[0])}:
        return
    if not scores.attrs.get("trans_b"):
        k = find.insert(root, "Transpose", [k], {"perm": (*range(rank - 2), rank - 1, rank - 2)})
    v = root.inputs[1]
    if root.attrs.get("trans_b"):
        v = find.insert(root, "Transpose", [v], {"perm": (*range(rank - 2), rank - 1, rank - 2)})
    shapes = [draft.shape(x) for x in (q, k, v)]
    if rank == 4 and not _fit(shapes):
        return
    if rank == 3 and (len({s[0] for s in shapes}) != 1 or shapes[1][1] != shapes[2][1]):
        return
    mask = _mask_operand(find, root, match)
    if mask and rank == 3 and len(draft.shape(mask)) == 3:
        mask = find.insert(root, "Reshape", [mask], shape=(draft.shape(mask)[0], 1, *draft.shape(mask)[1:]))
    attrs: dict[str, Any] = {"scale": match.scale, "causal": 0}
    if match.guard and mask:
        attrs["guard"] = 1
    operands = [q, k, v]
    if rank == 3:
        operands = [find.insert(root, "Reshape", [x], shape=(draft.shape(x)[0], 1, *draft.shape(x)[1:])) for x in operands]
        made = find.insert(root, "Attention", [*operands, *([mask] if mask else [])], attrs)
        find.fuse(root, match.inside, "Reshape", [made], {})
        new = draft.maker[made]
        new.members = root.members
        _simplify_mask(find, masks, new, root)
    else:
        find.fuse(root, match.inside, "Attention", [*operands, *([mask] if mask else [])], attrs)


def _fit(shapes: list[tuple[int, ...]]) -> bool:
    (b, h, _, d), (bk, g, t, dk), (bv, gv, tv, _) = shapes
    return b == bk == bv and g == gv and t == tv and d == dk and g > 0 and h % g == 0 and (g == h or g == 1)


def _weights(find: Finder, name: str, match: _Match) -> Op | None:
    """The Softmax behind the weights, through the guard and casts."""
    for _ in range(4):
        op = find.maker(name, "Softmax", "Where", "Cast")
        if op is None:
            return None
        match.inside.append(op)
        if op.op == "Softmax":
            return op
        if op.op == "Cast":
            if not (find.draft.is_float(op.inputs[0]) and find.draft.is_float(name)):
                return None
            name = op.inputs[0]
            continue
        nan = find.maker(op.inputs[0], "IsNaN")
        if nan is None or nan.inputs[0] != op.inputs[2] or find.draft.scalar(op.inputs[1]) != 0.0:
            return None
        match.inside.append(nan)
        match.guard = True
        name = op.inputs[2]
    return None


def _scores(find: Finder, name: str, match: _Match) -> bool:
    """Walks up from the Softmax to the product of queries and keys, taking in scale, mask and casts."""
    draft = find.draft
    full = draft.shape(name)
    for _ in range(8):
        op = find.maker(name)
        if op is None or draft.shape(name) != full:
            return False
        if op.op == "MatMul":
            match.inside.append(op)
            match.scores = op
            return True
        if op.op == "Cast" and draft.is_float(op.inputs[0]) and draft.is_float(name):
            match.inside.append(op)
            name = op.inputs[0]
            continue
        scaled = find.scaled(op)
        if scaled is not None:
            match.inside.append(op)
            name, match.scale = scaled[0], match.scale * scaled[1]
            continue
        if match.mask or match.masked_fill or match.scale != 1.0:
            return False  # a second mask, or a mask under the scale
        step = _masked(find, op, full, match)
        if step is None:
            return False
        match.inside.append(op)
        name = step
    return False


def _masked(find: Finder, op: Op, full: tuple[int, ...], match: _Match) -> str | None:
    """The scores under Add(scores, mask) or Where(condition, scores, fill)."""
    draft = find.draft
    if op.op == "Add":
        for scores, mask in (op.inputs, op.inputs[::-1]):
            if draft.shape(scores) == full and find.maker(scores, "MatMul", "Mul", "Div", "Cast") is not None and _reaches(find, scores):
                match.mask = mask
                return scores
    if op.op == "Where":
        for slot, attends in ((1, True), (2, False)):
            fill = draft.scalar(op.inputs[3 - slot])
            scores = op.inputs[slot]
            if fill is not None and fill <= _LOWEST and draft.shape(scores) == full and _reaches(find, scores):
                match.masked_fill = (op.inputs[0], fill, attends)
                return scores
    return None


def _reaches(find: Finder, name: str) -> bool:
    """True when a product of two tensors lies up the chain of scales and casts."""
    for _ in range(5):
        op = find.maker(name, "MatMul", "Mul", "Div", "Cast")
        if op is None:
            return False
        if op.op == "MatMul":
            return True
        scaled = find.scaled(op)
        name = op.inputs[0] if op.op == "Cast" else scaled[0] if scaled else ""
        if not name:
            return False
    return False


def _unscaled(find: Finder, name: str, match: _Match) -> str:
    """q or k with scalar factors moved into the scale."""
    for _ in range(3):
        op = find.maker(name, "Mul", "Div")
        scaled = find.scaled(op)
        if op is None or scaled is None or len(find.uses(name)) != 1:
            break
        match.inside.append(op)
        name, match.scale = scaled[0], match.scale * scaled[1]
    return name


def _mask_operand(find: Finder, root: Op, match: _Match) -> str:
    """The operand for what was found: the additive mask itself, a boolean condition, or one made additive."""
    draft = find.draft
    if match.mask:
        return match.mask
    if match.masked_fill is None:
        return ""
    condition, fill, attends = match.masked_fill
    if not attends:
        condition = find.insert(root, "Not", [condition])
    if fill == -math.inf:
        return condition
    dtype = np.dtype("float32")
    zero, low = (draft.constant(f"{root.outputs[0]}/{what}", np.asarray(v, dtype)) for what, v in (("zero", 0.0), ("low", max(fill, -3.4028235e38))))
    return find.insert(root, "Where", [condition, zero, low])


def _simplify_mask(find: Finder, masks: Masks, op: Op, place: Op | None = None) -> None:
    """Constant masks become causal = 1 or vanish; -inf masks become boolean; conjunctions lose their constant parts."""
    draft = find.draft
    if len(op.inputs) < 4 or not op.inputs[3]:
        return
    s, t = draft.shape(op.inputs[0])[2], draft.shape(op.inputs[1])[2]
    mask, find.changed = op.inputs[3], True
    kind = masks.kind(mask, s, t)
    if kind in ("all", "causal"):
        del op.inputs[3:]
        op.attrs.pop("guard", None)
        op.attrs["causal"] = 1 if kind == "causal" else op.attrs["causal"]
        return
    where = find.maker(mask, "Where")
    if draft.dtype(mask) != "bool" and where is not None:
        high, low = draft.scalar(where.inputs[1]), draft.scalar(where.inputs[2])
        if high == 0.0 and low is not None and low <= MASKED:
            if masks.kind(where.inputs[0], s, t) in ("all", "causal"):
                op.attrs["causal"] = int(masks.kind(where.inputs[0], s, t) == "causal" or op.attrs["causal"] == 1)
                del op.inputs[3:]
                op.attrs.pop("guard", None)
                return
            if low == -math.inf:
                mask = where.inputs[0]
    if draft.dtype(mask) == "bool":
        mask = _reduce_conjunction(find, masks, op, mask, s, t, place or op)
    while mask and (expand := find.maker(mask, "Expand")) is not None:
        mask = expand.inputs[0]
    del op.inputs[3:]
    if mask:
        op.inputs.append(mask)
        find.readers.setdefault(mask, []).append(op)
    else:
        op.attrs.pop("guard", None)


def _reduce_conjunction(find: Finder, masks: Masks, op: Op, mask: str, s: int, t: int, place: Op) -> str:
    """And(causal, always, rest...) -> rest, with causal = 1."""
    parts: list[str] = []
    stack = [mask]
    while stack:
        name = stack.pop()
        maker = find.maker(name, "And", "Expand")
        if maker is not None and maker.op == "And":
            stack.extend(maker.inputs[::-1])
        elif maker is not None:
            stack.append(maker.inputs[0])
        else:
            parts.append(name)
    rest: list[str] = []
    for part in parts:
        kind = masks.kind(part, s, t)
        if kind == "causal":
            op.attrs["causal"] = 1
        elif kind != "all" and part not in rest:
            rest.append(part)
    if len(rest) == len(parts):
        return mask
    if not rest:
        return ""
    joined = rest[0]
    for part in rest[1:]:
        joined = find.insert(place, "And", [joined, part])
    return joined


def repeated_heads(find: Finder) -> None:
    """Keys and values that an exporter repeated over groups of heads enter Attention with their own heads."""
    for op in list(find.draft.ops):
        if op.op != "Attention":
            continue
        found = [_unrepeated(find, name) for name in op.inputs[1:3]]
        if found[0] is None or found[1] is None or found[0][1] != found[1][1]:
            continue
        heads = found[0][1]
        for slot, each in enumerate(found, 1):
            assert each is not None
            _, _, t, d = find.draft.shape(op.inputs[slot])
            source, _, swapped = each
            b = find.draft.shape(op.inputs[0])[0]
            x = find.insert(op, "Reshape", [source], shape=(b, t, heads, d) if swapped else (b, heads, t, d))
            op.inputs[slot] = find.insert(op, "Transpose", [x], {"perm": (0, 2, 1, 3)}) if swapped else x


def _unrepeated(find: Finder, name: str) -> tuple[str, int, bool] | None:
    """(source, G, swapped) when `name` [B, H, T, D] is a source of G heads with each repeated H/G times in a row.

    swapped: the source is laid out [B, T, G, D].
    """
    draft = find.draft
    b, h, t, d = draft.shape(name)
    gather = find.maker(name, "Gather")
    if gather is not None and gather.attrs["axis"] == 1 and len(draft.shape(gather.inputs[0])) == 4:
        g = draft.shape(gather.inputs[0])[1]
        index = draft.value(gather.inputs[1])
        repeated = index is not None and h % g == 0 and bool((index == np.repeat(np.arange(g), h // g)).all())
        return (gather.inputs[0], g, False) if repeated else None
    swap = find.maker(name, "Transpose")
    if swap is not None:
        if swap.attrs["perm"] != (0, 2, 1, 3):
            return None
        name = swap.inputs[0]
    merge = find.maker(name, "Reshape")
    spread = find.maker(merge.inputs[0], "Expand") if merge is not None else None
    if spread is None:
        return None
    axis = 3 if swap is not None else 2
    before, after = draft.shape(spread.inputs[0]), draft.shape(spread.outputs[0])
    if len(before) != 5 or before[axis] != 1 or before[:axis] + before[axis + 1 :] != after[:axis] + after[axis + 1 :]:
        return None
    g, r = after[axis - 1], after[axis]
    expected = (b, t, g, r, d) if swap is not None else (b, g, r, t, d)
    return (spread.inputs[0], g, swap is not None) if after == expected and g * r == h else None
