"""Tokens that a loop over experts looks up by NonZero, as the tracing exporter writes it, with
sizes that are known.

For expert e of a router's choices index [T, K], the file takes the places where index = e, runs the
expert on those tokens, weighs each by its share and adds it back at the token's row. A router
chooses an expert at most once a token: so every token has at most one place, and the same sum is
had by running the expert on every token with a share of 0 where it was not chosen
(planner.reader.fuse.experts_one_by_one makes routed experts of it again).

    NonZero of a mask [K, T]            (choice, token) per token; tokens count 0 .. T - 1, and what
                                        is gathered by them is all rows
    share.flatten[choice + token * K]   the column sum over k of share * mask
    rows added back at `token`          rows that were weighed by that column; others are masked
                                        first
    NonZero of "was e chosen at all"    all experts: the file cuts it into as many parts, and so
                                        fails where one is missing
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from planner.reader.draft.draft import Draft
from planner.reader.lower.call import Call, Unsupported

_BEHIND = 8
_VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Cast", "Identity")


@dataclass(frozen=True)
class Selected:
    """What a tensor holds of the tokens of one expert. part: 'choice', 'token', 'token * K' or
    'place'; mask: [K, T]. 'expert': their numbers."""

    part: str
    mask: str
    choices: int
    tokens: int


def non_zero(call: Call) -> bool:
    """Lowers a NonZero of one expert's mask, or of which experts were chosen. Whether it was one of
    those."""
    draft, name = call.draft, call.arg(0)
    router = _router(draft, name)
    if router is None:
        return False
    index, experts = router
    shape = draft.shape(name)
    if len(shape) == 1 and shape[0] >= experts:
        which = call.constant(np.arange(experts)[None], "experts")
        call.lowering.selected[which] = Selected("expert", "", 0, experts)
        call.bind(which)
        return True
    if (
        len(shape) != 2
        or prod(shape) != prod(draft.shape(index))
        or shape[0] != draft.shape(index)[-1]
    ):
        return False
    choices, tokens = shape
    kind = call.emit("Cast", [name], {"to": "int32"})
    parts = (
        call.emit(
            "Reshape", [call.emit("ArgMax", [kind], {"axis": 0, "keepdims": 0})], shape=(tokens,)
        ),
        call.constant(np.arange(tokens), "tokens"),
    )
    pair = draft.fresh(f"{call.name(0)}/places")
    call.lowering.sequences[pair] = parts
    call.lowering.pairs.add(pair)
    for part, what in zip(parts, ("choice", "token"), strict=True):
        call.lowering.selected[part] = Selected(what, name, choices, tokens)
    call.bind(pair)
    return True


def _router(draft: Draft, name: str) -> tuple[str, int] | None:
    """(choices, experts) where a tensor says of each expert, or of one, where the router chose
    it."""
    for _ in range(_BEHIND):
        op = draft.maker.get(name)
        if op is None:
            return None
        if op.op == "OneHot":
            index = op.inputs[0]
            while (view := draft.maker.get(index)) is not None and view.op in ("Reshape", "Cast"):
                index = view.inputs[0]
            top = draft.maker.get(index)
            return (
                (index, draft.shape(top.inputs[0])[-1])
                if top is not None and top.op == "TopK" and top.outputs[1:] == [index]
                else None
            )
        if op.op not in (
            "Cast",
            "Gather",
            "Slice",
            "Transpose",
            "Reshape",
            "ReduceSum",
            "Greater",
        ) or (op.op == "Gather" and draft.value(op.inputs[1]) is None):
            return None
        name = op.inputs[0]
    return None


def of_pair(call: Call) -> bool:
    """Lowers what cuts a pair of (choice, token) in two. Whether it was that. Raises Unsupported
    where a trace did not see all experts."""
    selected = call.lowering.selected.get(call.arg(0))
    if (
        selected is not None
        and selected.part == "expert"
        and call.op == "Split"
        and len(call.node.output) != selected.tokens
    ):
        raise Unsupported(
            f"only {len(call.node.output)} of {selected.tokens} experts were chosen while the model"
            " was traced, and only those are in the file: trace it with more tokens, or with"
            " experts_implementation='batched_mm'"
        )
    if call.arg(0) not in call.lowering.pairs:
        return False
    if call.op == "Transpose":
        call.bind(call.arg(0))
        return True
    if call.op != "Split" or len(call.node.output) != 2 or call.attr("axis", 0) != 1:
        raise Unsupported("it works on the places that an expert was chosen at")
    for k, part in enumerate(call.lowering.sequences[call.arg(0)]):
        row = call.emit("Reshape", [part], shape=(*call.draft.shape(part), 1), out=call.name(k))
        call.lowering.selected[row] = call.lowering.selected[part]
        call.bind(row, k)
    return True


def follow(call: Call) -> None:
    """Remembers what the results of a node hold of the tokens of an expert."""
    selected, result = (
        call.lowering.selected,
        (call.frame.env.get(call.node.output[0]) if call.node.output else None),
    )
    parts = [selected.get(i) for i in call.inputs]
    first = parts[0] if parts else None
    if not result or not any(parts):
        return
    if (
        call.op in _VIEWS
        or (call.op == "Transpose" and first is not None and first.part == "expert")
    ) and first is not None:
        selected[result] = first
    elif call.op == "Mul" and len(parts) == 2:
        for k in (0, 1):
            part = parts[k]
            if (
                part is not None
                and part.part == "token"
                and call.draft.scalar(call.inputs[1 - k]) == part.choices
            ):
                selected[result] = Selected("token * K", part.mask, part.choices, part.tokens)
    elif call.op == "Add" and len(parts) == 2 and all(parts):
        a, b = sorted((p for p in parts if p is not None), key=lambda p: p.part)
        if (a.part, b.part) == ("choice", "token * K") and a.mask == b.mask:
            selected[result] = Selected("place", a.mask, a.choices, a.tokens)


def share_of(call: Call) -> bool:
    """Lowers the shares gathered at an expert's places to a column over all tokens. Whether it was
    that."""
    selected = call.lowering.selected.get(call.arg(1))
    if selected is None or selected.part in ("token", "token * K", "expert"):
        return False
    shape = call.shape()
    if (
        selected.part != "place"
        or call.attr("axis", 0) != 0
        or prod(shape) != selected.tokens * selected.choices
        or shape[0] != prod(shape)
    ):
        raise Unsupported(
            "it looks up something else than shares at the places that an expert was chosen at"
        )
    mask = call.emit(
        "Cast", [call.emit("Transpose", [selected.mask], {"perm": (1, 0)})], {"to": call.dtype()}
    )
    share = call.emit("Reshape", [call.arg(0)], shape=(selected.tokens, selected.choices))
    column = call.emit(
        "ReduceSum", [call.emit("Mul", [share, mask])], {"axes": (1,), "keepdims": 1}
    )
    call.bind(call.emit("Reshape", [column], shape=(*call.shape(1), *shape[1:]), out=call.name(0)))
    call.lowering.columns[column] = selected.mask
    return True


def added_back(call: Call) -> bool:
    """Lowers rows that are scattered back to their tokens. Whether it was that."""
    draft, selected = call.draft, call.lowering.selected.get(call.arg(1))
    if selected is None or selected.part == "expert":
        return False
    rows, base = call.arg(2), call.arg(0)
    nothing = draft.splat(base) == 0
    if (
        selected.part != "token"
        or call.attr("axis", 0) != 0
        or call.shape()[0] != selected.tokens
        or call.shape() != draft.shape(rows)
        or draft.shape(call.arg(1)) != call.shape()
        or (call.attr("reduction", "none") != "add" and not nothing)
    ):
        raise Unsupported("it writes to the rows of an expert's tokens in another way than adding")
    if not _weighed(call, rows, selected.mask):
        kind = call.emit(
            "ReduceMax",
            [call.emit("Cast", [selected.mask], {"to": draft.dtype(rows)})],
            {"axes": (0,), "keepdims": 0},
        )
        rows = call.emit(
            "Mul",
            [
                rows,
                call.emit(
                    "Reshape", [kind], shape=(selected.tokens, *[1] * (len(call.shape()) - 1))
                ),
            ],
        )
    call.bind(rows) if nothing else call.result("Add", [base, rows])
    return True


def _weighed(call: Call, name: str, mask: str) -> bool:
    """Whether rows are a product with the column of this expert's shares."""
    draft = call.draft
    for _ in range(_BEHIND):
        op = draft.maker.get(name)
        if op is None or op.op not in ("Cast", "Expand", "Reshape", "Mul"):
            return False
        if op.op == "Mul":
            return any(call.lowering.columns.get(_behind(draft, i)) == mask for i in op.inputs)
        name = op.inputs[0]
    return False


def _behind(draft: Draft, name: str) -> str:
    while (op := draft.maker.get(name)) is not None and op.op in ("Reshape", "Cast", "Expand"):
        name = op.inputs[0]
    return name
