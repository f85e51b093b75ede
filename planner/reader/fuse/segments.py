"""Masks of packed sequences: positions have the number of their sequence, and a query sees the keys
of its own.

    Equal(ids [B, S, 1], ids [B, 1, S])    alone, or joined with what positions say (causal, window)
"""

from __future__ import annotations

import math

from planner.reader.draft.draft import Op
from planner.reader.fuse.masks import MASKED, Masks, without_positions
from planner.reader.fuse.matcher import Finder


def segments_of(find: Finder, masks: Masks, op: Op, place: Op) -> str:
    """The numbers [B, 1, 1, T] of which a mask leaves queries the keys of their own, beside nothing
    but positions, which become attributes; "" where it is no such mask. Every query sees its own
    key, so that any low number masks alike. place: what new operations stand before."""
    draft, mask = find.draft, op.inputs[3]
    batch, _, s, _ = draft.shape(op.inputs[0])
    t = draft.shape(op.inputs[1])[2]
    where = find.maker(mask, "Where")
    if where is not None and draft.is_float(mask):
        high, low = draft.scalar(where.inputs[1]), draft.scalar(where.inputs[2])
        if high != 0.0 or low is None or low > MASKED:
            return ""
        mask = where.inputs[0]
    if s != t or draft.dtype(mask) != "bool":
        return ""
    segment_ids, others = set[str](), list[str]()
    for part in conjunction(find, mask):
        (others.append if not (ids := _compared(find, part, batch, s)) else segment_ids.add)(
            ids or part
        )
    attrs = dict(op.attrs)
    if len(segment_ids) != 1 or (others and without_positions(masks, attrs, others, s, t)):
        return ""
    op.attrs.update(attrs)
    op.attrs["segments"] = 1
    (ids,) = segment_ids
    return find.insert(place, "Reshape", [ids], shape=(batch, 1, 1, t))


def _compared(find: Finder, name: str, batch: int, size: int) -> str:
    """The numbers [B, S] of which a condition [B, 1, S, S] or [B, S, S] compares all with all, ""
    where it does not."""
    draft = find.draft
    for _ in range(3):
        if (view := find.maker(name, "Expand", "Reshape")) is None:
            break
        name = view.inputs[0]
    equal = find.maker(name, "Equal")
    if equal is None or draft.is_float(equal.inputs[0]) or draft.dtype(equal.inputs[0]) == "bool":
        return ""
    sides = {draft.shape(i)[-2:]: i for i in equal.inputs}
    if set(sides) != {(size, 1), (1, size)} or len(draft.shape(name)) not in (3, 4):
        return ""
    if math.prod(draft.shape(name)) != batch * size * size:
        return ""
    sources = {_viewed(find, i) for i in equal.inputs}
    ids = sources.pop()
    return ids if not sources and draft.shape(ids) == (batch, size) else ""


def _viewed(find: Finder, name: str) -> str:
    """What a tensor is a view of, none of its elements moved."""
    for _ in range(4):
        view = find.maker(name, "Reshape")
        if view is None:
            break
        name = view.inputs[0]
    return name


def conjunction(find: Finder, mask: str) -> list[str]:
    """The conditions that a mask joins."""
    parts, stack = list[str](), [mask]
    while stack:
        name = stack.pop()
        maker = find.maker(name, "And", "Expand")
        if maker is not None and maker.op == "And":
            stack.extend(maker.inputs[::-1])
        elif maker is not None:
            stack.append(maker.inputs[0])
        else:
            parts.append(name)
    return parts
