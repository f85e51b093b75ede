"""Bags of one length that an unrolled loop reduced one by one (EmbeddingBag) are reduced together.

    Concat over k of Reduce(x[k L : (k + 1) L])   is   Reduce(Reshape(x, [bags, L, ..]))

where all pieces have one length and cover x in order. A piece may also be rows that a table gives
for such a piece of the numbers. The mean of one bag may be written as a sum divided by L.
"""

from __future__ import annotations

from planner.reader.draft.draft import Op
from planner.reader.fuse.matcher import Finder

_REDUCE = ("ReduceMean", "ReduceSum", "ReduceMax")


def bags(find: Finder) -> None:
    """Fuses every Concat of reduced pieces."""
    for root in list(find.draft.ops):
        if (
            root.op == "Concat"
            and root.attrs["axis"] == 0
            and len(root.inputs) > 1
            and id(root) not in find.gone
        ):
            _bags(find, root)


def _bags(find: Finder, root: Op) -> None:
    draft, inside = find.draft, list[Op]()
    count, sources, kinds, length = len(root.inputs), set[tuple[str, str]](), set[str](), 0
    for k, name in enumerate(root.inputs):
        reduced = _reduced(find, name, inside)
        if reduced is None:
            return
        kind, piece = reduced
        table = find.maker(piece, "Gather")
        if (
            table is not None
            and table.attrs["axis"] == 0
            and len(draft.shape(table.inputs[1])) == 1
        ):
            inside.append(table)
            piece = table.inputs[1]
        cut = find.maker(piece, "Slice")
        length = length or draft.shape(piece)[0]
        if cut is None or (
            cut.attrs["axes"],
            cut.attrs["starts"],
            cut.attrs["ends"],
            cut.attrs["steps"],
        ) != ((0,), (k * length,), ((k + 1) * length,), (1,)):
            return
        inside.append(cut)
        kinds.add(kind)
        sources.add((cut.inputs[0], table.inputs[0] if table is not None else ""))
    if len(sources) != 1 or len(kinds) != 1 or not find.closed(root, inside):
        return
    ((whole, of),) = sources
    if draft.shape(whole)[0] != count * length:
        return
    rows = find.insert(root, "Reshape", [whole], shape=(count, length, *draft.shape(whole)[1:]))
    rows = find.insert(root, "Gather", [of, rows], {"axis": 0}) if of else rows
    find.fuse(root, inside, kinds.pop(), [rows], {"axes": (1,), "keepdims": 0})


def _reduced(find: Finder, name: str, inside: list[Op]) -> tuple[str, str] | None:
    """(operation, operand) of a row [1, ..] that is a reduction over dim 0."""
    op = find.maker(name, "Reshape", "Div", *_REDUCE)
    if op is not None and op.op == "Reshape":
        inside.append(op)
        op = find.maker(op.inputs[0], "Div", *_REDUCE)
    kind, divisor = "", None
    if op is not None and op.op == "Div":
        inside.append(op)
        kind, divisor = "ReduceMean", find.draft.scalar(op.inputs[1])
        op = find.maker(op.inputs[0], "ReduceSum")
    if (
        op is None
        or tuple(op.attrs["axes"]) != (0,)
        or find.draft.shape(name)[0] != 1
        or (kind and divisor != find.draft.shape(op.inputs[0])[0])
    ):
        return None
    inside.append(op)
    return kind or op.op, op.inputs[0]
