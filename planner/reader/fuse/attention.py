"""Attention from its parts.

    scores  = MatMul(q * a, k^T * b) * c [+ bias] [+ mask | where(mask, ., lowest)]      scale = a b
            c
    or      d tanh(MatMul(q * a, k^T * b) * c) and then masks    cap = d, scale = a b c d
    weights = Softmax(scores) over the keys [zero where NaN: the guard for rows masked everywhere]
    output  = MatMul(weights, v)

q, k, v keep [B, H, S, D]; three-dimensional ones get heads of 1. Casts of the scores to float32 and
back belong to the operator. A mask that is a constant lower triangle becomes causal = 1, one that
is a band under the diagonal a window too; a boolean one ANDed with other conditions leaves only
those. One that compares the numbers of positions with themselves, all or those of a causal mask, is
these numbers (segments of packed sequences). An additive mask of 0 and -inf is exactly a
boolean one. Additive masks with finite lows stay additive: on rows that are masked everywhere they
mean something else. Several that are added (ALiBi's slopes and a causal mask) are one, without
those that are causal. Scores may be written with batch and heads in one dim. A factor that is no
constant (a learned temperature) goes to the queries. Keys and values repeated over groups of heads
go in unrepeated.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from planner.graph.findings import Finding
from planner.reader.draft.draft import Draft, Op
from planner.reader.fuse.masks import LOWEST, MASKED, Masks, without_positions
from planner.reader.fuse.matcher import Finder
from planner.reader.fuse.segments import conjunction, segments_of

_BEHIND = 10
"""Operations between a product and what is looked for behind it, at most."""
_LOWEST = -1e30
"""An additive mask at or below this absorbs any score it is added to, so replacing the score is the
same as adding."""


def attentions(find: Finder) -> None:
    """Fuses every product of softmax weights and values whose scores are a product of queries and
    keys."""
    masks = Masks(find.draft)
    for root in list(find.draft.ops):
        if root.op == "MatMul" and id(root) not in find.gone:
            _attention(find, masks, root)
    _unknown(find)
    for op in find.draft.ops:
        if op.op == "Attention" and id(op) not in find.gone:
            _simplify_mask(find, masks, op)


def _unknown(find: Finder) -> None:
    """A finding on products of softmax weights and values that are no known form of attention."""
    draft, unfused = find.draft, list[tuple[Op, int]]()
    for root in draft.ops:
        if root.op != "MatMul" or id(root) in find.gone or root.attrs.get("trans_a"):
            continue
        name = root.inputs[0]
        for _ in range(_BEHIND):
            op = find.maker(
                name, "Dropout", "Where", "Cast", "Mul", "Reshape", "Transpose", "Slice", "Softmax"
            )
            if op is None or op.op == "Softmax":
                break
            name = op.inputs[2 if op.op == "Where" else 0]
        else:
            op = None
        if (
            op is not None
            and op.op == "Softmax"
            and op.attrs["axis"] == len(draft.shape(name)) - 1
            and _scored(find, op.inputs[0])
        ):
            unfused.append((root, math.prod(draft.shape(name))))
    if unfused:
        first, scores = unfused[0]
        which = (
            f"attention {first.id!r} is"
            if len(unfused) == 1
            else f"{len(unfused)} attentions (the first {first.id!r}) are"
        )
        draft.notes.append(
            Finding(
                "attention",
                f"{which} of no known form: run and priced by parts, with {scores:,} scores a layer"
                " that pass through memory several times (docs/exporting.md, Attention)",
            )
        )


def _scored(find: Finder, name: str) -> bool:
    """Whether a product of two tensors that are no weights lies behind what a softmax takes,
    through element-wise operations, beside others (sinks) too."""
    stack, seen = [(name, 0)], {name}
    while stack:
        name, depth = stack.pop()
        op = find.maker(name)
        if (
            op is None
            or depth > _BEHIND
            or op.op
            not in (
                "MatMul",
                "Add",
                "Sub",
                "Mul",
                "Div",
                "Where",
                "Cast",
                "Reshape",
                "Transpose",
                "Tanh",
                "Min",
                "Max",
                "Clip",
                "Concat",
            )
        ):
            continue
        if op.op == "MatMul":
            if not any(find.draft.is_leaf(i) for i in op.inputs):
                return True
            continue
        for i in op.inputs:
            if i and i not in seen:
                seen.add(i)
                stack.append((i, depth + 1))
    return False


class _Match:
    """Parts found so far."""

    def __init__(self) -> None:
        self.inside: list[Op] = []
        self.scale = 1.0
        self.cap = 0.0  # of scores that go through a hyperbolic tangent: what they stay below
        self.guard = False
        self.added: list[
            tuple[str, bool]
        ] = []  # what is added to the scores, and whether to scores with batch and heads in one dim
        self.factors: list[str] = []
        self.split: tuple[int, ...] = ()  # batch and heads, where the scores hold them in one dim
        self.fill = 0.0  # what masked scores are replaced by
        self.conditions: list[tuple[str, bool]] = []  # where; True when the condition attends
        self.scores: Op | None = None


def _matched(find: Finder, root: Op) -> tuple[_Match, int] | None:
    """What the products, scales and masks before a product of weights and values are, and the rank
    of the attention (3 where nothing tells heads); None where it is no attention."""
    draft = find.draft
    rank = len(draft.shape(root.outputs[0]))
    if (
        root.attrs.get("trans_a")
        or rank not in (3, 4)
        or any(len(draft.shape(i)) != rank for i in root.inputs)
    ):
        return None
    match = _Match()
    softmax = _weights(find, root.inputs[0], match)
    if (
        softmax is None
        or softmax.attrs["axis"] != len(draft.shape(softmax.outputs[0])) - 1
        or not _scores(find, softmax.inputs[0], match)
    ):
        return None
    scores = match.scores
    assert scores is not None
    attention_rank = len(draft.shape(softmax.outputs[0]))
    scores_rank = len(draft.shape(scores.outputs[0]))
    if (
        scores.attrs.get("trans_a")
        or any(len(draft.shape(i)) != scores_rank for i in scores.inputs)
        or (scores_rank != attention_rank and not match.split)
    ):
        return None
    return match, attention_rank


def _operands(find: Finder, root: Op, match: _Match, attention_rank: int) -> list[str] | None:
    """Queries, keys and values of the attention's rank, none transposed; None where they do not fit
    together."""
    draft, scores = find.draft, match.scores
    assert scores is not None
    rank, scores_rank = len(draft.shape(root.outputs[0])), len(draft.shape(scores.outputs[0]))
    q, k = (_unscaled(find, name, match) for name in scores.inputs)
    if not find.closed(root, match.inside) or {draft.dtype(x) for x in (q, k, root.inputs[1])} != {
        draft.dtype(root.outputs[0])
    }:
        return None
    if not scores.attrs.get("trans_b"):
        k = _transposed(find, root, k, scores_rank)
    if match.split and scores_rank != attention_rank:
        q, k = (
            find.insert(root, "Reshape", [x], shape=(*match.split, *draft.shape(x)[1:]))
            for x in (q, k)
        )
    v = root.inputs[1]
    if root.attrs.get("trans_b"):
        v = _transposed(find, root, v, rank)
    if rank != attention_rank:
        v = find.insert(root, "Reshape", [v], shape=(*match.split, *draft.shape(v)[1:]))
    shapes = [draft.shape(x) for x in (q, k, v)]
    if attention_rank == 4 and not _fit(shapes):
        return None
    if attention_rank == 3 and (len({s[0] for s in shapes}) != 1 or shapes[1][1] != shapes[2][1]):
        return None
    return [q, k, v]


def _transposed(find: Finder, root: Op, name: str, rank: int) -> str:
    """A tensor whose last two dims change places."""
    return find.insert(root, "Transpose", [name], {"perm": (*range(rank - 2), rank - 1, rank - 2)})


def _attention(find: Finder, masks: Masks, root: Op) -> None:
    """Fuses the attention that ends in a product, where it is one."""
    draft = find.draft
    matched = _matched(find, root)
    if matched is None:
        return
    match, attention_rank = matched
    operands = _operands(find, root, match, attention_rank)
    if operands is None:
        return
    shapes = [draft.shape(x) for x in operands]
    for factor in match.factors:
        operands[0] = find.insert(root, "Mul", [operands[0], factor])
    attrs: dict[str, Any] = {"scale": match.scale, "causal": 0}
    if match.cap:
        attrs["cap"] = match.cap
    mask = _mask_operand(find, masks, root, match, attrs, shapes)
    if mask and attention_rank == 3 and len(draft.shape(mask)) == 3:
        mask = find.insert(
            root, "Reshape", [mask], shape=(draft.shape(mask)[0], 1, *draft.shape(mask)[1:])
        )
    if match.guard and mask:
        attrs["guard"] = 1
    if attention_rank == 3:
        operands = [
            find.insert(root, "Reshape", [x], shape=(draft.shape(x)[0], 1, *draft.shape(x)[1:]))
            for x in operands
        ]
    if len(draft.shape(root.outputs[0])) == 3:
        fused = find.insert(root, "Attention", [*operands, *([mask] if mask else [])], attrs)
        find.fuse(root, match.inside, "Reshape", [fused], {})
        new = draft.maker[fused]
        new.members = root.members
        _simplify_mask(find, masks, new, root)
    else:
        find.fuse(root, match.inside, "Attention", [*operands, *([mask] if mask else [])], attrs)


def _fit(shapes: list[tuple[int, ...]]) -> bool:
    (b, h, _, d), (bk, g, t, dk), (bv, gv, tv, _) = shapes
    return (
        b == bk == bv
        and g == gv
        and t == tv
        and d == dk
        and g > 0
        and h % g == 0
        and (g == h or g == 1)
    )


def _weights(find: Finder, name: str, match: _Match) -> Op | None:
    """The Softmax behind the weights, through the guard and casts."""
    for _ in range(5):
        op = find.maker(name, "Softmax", "Where", "Cast", "Reshape")
        if op is None:
            return None
        match.inside.append(op)
        if op.op == "Softmax":
            return op
        if op.op == "Reshape":
            shape, before = find.draft.shape(name), find.draft.shape(op.inputs[0])
            if match.split or len(before) != 4 or shape != (before[0] * before[1], *before[2:]):
                return None
            match.split, name = before[:2], op.inputs[0]
            continue
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
    """Walks up from the Softmax to the product of queries and keys, taking in scale, mask and
    casts."""
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
        if op.op == "Tanh":
            if match.cap or match.factors or match.scale <= 0:
                return False
            match.inside.append(op)
            name, match.cap = op.inputs[0], match.scale
            continue
        if (factor := _factor(find, op, full)) is not None:
            match.inside.append(op)
            name = factor[0]
            match.factors.append(factor[1])
            continue
        if (
            op.op == "Reshape"
            and match.split in ((), full[:2])
            and len(full) == 4
            and draft.shape(op.inputs[0]) == (full[0] * full[1], *full[2:])
        ):
            match.inside.append(op)
            match.split, name = full[:2], op.inputs[0]
            full = draft.shape(name)
            continue
        if (
            match.scale != 1.0
            or match.cap
            or match.factors
            or (match.added and op.op != "Add")
            or len(match.added) > 2
        ):
            # a mask under the scale or the cap, or one that replaces what is masked after something
            # was added
            return False
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
            if draft.shape(scores) == full and _reaches(find, scores):
                match.added.append((mask, bool(match.split) and len(full) == 3))
                return scores
    if op.op == "Where":
        for slot, attends in ((1, True), (2, False)):
            fill = draft.scalar(op.inputs[3 - slot])
            scores = op.inputs[slot]
            if (
                fill is not None
                and fill <= _LOWEST
                and draft.shape(scores) == full
                and _reaches(find, scores)
            ):
                if match.conditions and fill != match.fill:
                    return None
                match.fill = fill
                match.conditions.append((op.inputs[0], attends))
                return scores
    return None


def _reaches(find: Finder, name: str) -> bool:
    """True when a product of two tensors lies up the chain of scales, casts, a cap, what is added,
    and views."""
    full = find.draft.shape(name)
    stack = [(name, 0)]
    while stack:
        name, depth = stack.pop()
        op = find.maker(name, "MatMul", "Mul", "Div", "Tanh", "Cast", "Add", "Where", "Reshape")
        if op is None or depth > _BEHIND or math.prod(find.draft.shape(name)) != math.prod(full):
            continue
        if op.op == "MatMul":
            return True
        scaled = find.scaled(op)
        stack += [(i, depth + 1) for i in ([scaled[0]] if scaled else op.inputs)]
    return False


def _factor(find: Finder, op: Op, full: tuple[int, ...]) -> tuple[str, str] | None:
    """(scores, factor) of scores times one number a head, or one that is no constant."""
    if op.op != "Mul":
        return None
    for scores, factor in (op.inputs, op.inputs[::-1]):
        shape = find.draft.shape(factor)
        if (
            find.draft.shape(scores) == full
            and len(shape) <= len(full)
            and set(shape[-2:]) <= {1}
            and _reaches(find, scores)
        ):
            return scores, factor
    return None


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


def _mask_operand(
    find: Finder,
    masks: Masks,
    root: Op,
    match: _Match,
    attrs: dict[str, Any],
    shapes: list[tuple[int, ...]],
) -> str:
    """The operand for what was found: the additive mask itself, a boolean condition, or one made
    additive. Of several causal ones become an attribute."""
    draft = find.draft
    s, t = shapes[0][-2], shapes[1][-2]
    added = [_parted(find, root, match, name) if flat else name for name, flat in match.added]
    if len(added) + bool(match.conditions) > 1:
        added = without_positions(masks, attrs, added, s, t)
    bias = added[0] if added else ""
    for other in added[1:]:
        bias = find.insert(root, "Add", [bias, other])
    if not match.conditions:
        return bias
    conditions = [
        name if attends else find.insert(root, "Not", [name]) for name, attends in match.conditions
    ]
    trial = dict(attrs)  # each alone first: a comparison is known without making its square
    if not without_positions(masks, trial, conditions, s, t):
        attrs.update(trial)
        return bias
    condition, fill = conditions[0], match.fill
    for other in conditions[1:]:
        condition = find.insert(root, "And", [condition, other])
    if bias and not without_positions(masks, attrs, [condition], s, t):
        return bias
    if fill == -math.inf and not bias:
        return condition
    dtype = np.dtype("float32")
    if bias:
        dtype = (
            np.dtype(draft.dtype(bias)) if draft.dtype(bias) in ("float16", "float64") else dtype
        )
        if draft.dtype(bias) != dtype.name:
            bias = find.insert(root, "Cast", [bias], {"to": "float32"})
    low = draft.constant(
        f"{root.outputs[0]}/low", np.asarray(max(fill, float(np.finfo(dtype).min)), dtype)
    )
    return find.insert(
        root,
        "Where",
        [condition, bias or draft.constant(f"{root.outputs[0]}/zero", np.asarray(0.0, dtype)), low],
    )


def _parted(find: Finder, root: Op, match: _Match, name: str) -> str:
    """A mask of scores that hold batch and heads in one dim, for scores that do not."""
    shape = find.draft.shape(name)
    shape = (1,) * (3 - len(shape)) + shape
    apart = (*(match.split if shape[0] == math.prod(match.split) else (1, 1)), *shape[1:])
    array = find.draft.value(name)
    if array is None:
        return find.insert(root, "Reshape", [name], shape=apart)
    array = array.reshape(apart)
    same = bool((array == array[:1]).all())  # for every sample: slopes of heads
    return find.draft.constant(f"{name}/heads", np.ascontiguousarray(array[:1] if same else array))


def _simplify_mask(find: Finder, masks: Masks, op: Op, place: Op | None = None) -> None:
    """Constant masks become causal = 1 or vanish; -inf masks become boolean; conjunctions lose
    their constant parts."""
    draft = find.draft
    if len(op.inputs) < 4 or not op.inputs[3]:
        return
    s, t = draft.shape(op.inputs[0])[2], draft.shape(op.inputs[1])[2]
    mask, find.changed = op.inputs[3], True
    if op.attrs.get("segments"):
        return
    if segments := segments_of(find, masks, op, place or op):
        op.inputs[3] = segments
        op.attrs.pop("guard", None)
        find.readers.setdefault(segments, []).append(op)
        return
    if not without_positions(masks, op.attrs, [mask], s, t):
        del op.inputs[3:]
        op.attrs.pop("guard", None)
        return
    where = find.maker(mask, "Where")
    if draft.dtype(mask) != "bool" and where is not None:
        high, low = draft.scalar(where.inputs[1]), draft.scalar(where.inputs[2])
        if high == 0.0 and low is not None and low <= MASKED:
            if not without_positions(masks, op.attrs, [where.inputs[0]], s, t):
                del op.inputs[3:]
                op.attrs.pop("guard", None)
                return
            if low == -math.inf or (op.attrs.get("guard") and low <= _lowest(draft, mask)):
                mask = where.inputs[0]  # the guard says what a query that sees no key gets
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


def _lowest(draft: Draft, mask: str) -> float:
    """What hides a key for good in a mask of this type."""
    return LOWEST.get(draft.dtype(mask), -math.inf)


def _reduce_conjunction(
    find: Finder, masks: Masks, op: Op, mask: str, s: int, t: int, place: Op
) -> str:
    """And(causal, window, always, rest...) -> rest, with attributes for causal and window."""
    parts = conjunction(find, mask)
    rest = without_positions(masks, op.attrs, list(dict.fromkeys(parts)), s, t)
    if len(rest) == len(parts):
        return mask
    if not rest:
        return ""
    joined = rest[0]
    for part in rest[1:]:
        joined = find.insert(place, "And", [joined, part])
    return joined


def repeated_heads(find: Finder) -> None:
    """Keys and values that an exporter repeated over groups of heads enter Attention with their own
    heads; likewise the queries and keys of linear attention."""
    for op in list(find.draft.ops):
        if op.op == "Attention":
            _own_heads(find, op, slots=(1, 2), axis=1)
        elif op.op == "LinearAttention":
            _own_heads(find, op, slots=(0, 1), axis=2)


def _own_heads(find: Finder, op: Op, *, slots: tuple[int, int], axis: int) -> None:
    """Operands of four dims, heads in the one named."""
    unrepeated = [_unrepeated(find, _before_cast(find, op.inputs[slot]), axis) for slot in slots]
    if unrepeated[0] is None or unrepeated[1] is None or unrepeated[0][1] != unrepeated[1][1]:
        return
    heads = unrepeated[0][1]
    for slot, one in zip(slots, unrepeated, strict=True):
        assert one is not None
        shape = list(find.draft.shape(op.inputs[slot]))
        source, _, swapped = one
        shape[0], shape[axis] = find.draft.shape(op.inputs[0])[0], heads
        if swapped:
            shape[1], shape[2] = shape[2], shape[1]
        x = find.insert(op, "Reshape", [source], shape=tuple(shape))
        dtype = find.draft.dtype(op.inputs[slot])
        if find.draft.dtype(x) != dtype:
            x = find.insert(op, "Cast", [x], {"to": dtype})
        op.inputs[slot] = (
            find.insert(op, "Transpose", [x], {"perm": (0, 2, 1, 3)}) if swapped else x
        )


def _before_cast(find: Finder, name: str) -> str:
    """What a tensor was cast from, as under autocast, if it was: repeated numbers may be cast
    before they are repeated."""
    cast = find.maker(name, "Cast")
    return name if cast is None else cast.inputs[0]


def _unrepeated(find: Finder, name: str, axis: int) -> tuple[str, int, bool] | None:
    """(source, G, swapped) when `name` of four dims is a source of G heads with each repeated H/G
    times in a row.

    axis: of the heads. swapped: the source has dims 1 and 2 the other way round.
    """
    draft = find.draft
    shape = draft.shape(name)
    gather = find.maker(name, "Gather")
    if (
        gather is not None
        and gather.attrs["axis"] == axis
        and len(draft.shape(gather.inputs[0])) == 4
    ):
        g, h = draft.shape(gather.inputs[0])[axis], shape[axis]
        index = draft.value(gather.inputs[1])
        repeated = (
            index is not None
            and h % g == 0
            and bool((index == np.repeat(np.arange(g), h // g)).all())
        )
        return (gather.inputs[0], g, False) if repeated else None
    swap = find.maker(name, "Transpose")
    if swap is not None:
        if swap.attrs["perm"] != (0, 2, 1, 3):
            return None
        name, axis = swap.inputs[0], 3 - axis
        shape = (shape[0], shape[2], shape[1], shape[3])
    merge = find.maker(name, "Reshape")
    spread = find.maker(merge.inputs[0], "Expand") if merge is not None else None
    if spread is None:
        return None
    before, after = draft.shape(spread.inputs[0]), draft.shape(spread.outputs[0])
    times = axis + 1
    if (
        len(before) != 5
        or before[times] != 1
        or before[:times] + before[times + 1 :] != after[:times] + after[times + 1 :]
    ):
        return None
    g, r = after[axis], after[times]
    expected = (*shape[:axis], g, r, *shape[axis + 1 :])
    right = after == expected and g * r == shape[axis]
    return (spread.inputs[0], g, swap is not None) if right else None
