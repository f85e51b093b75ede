"""Layer norms as Keras writes them, in the form that `planner.reader.fuse.norms` knows.

sum(x) / n                            mean(x), for n as many as are summed
x a + (bias - mean a), a = r scale    (x - mean) r scale + bias: r is one over the root
"""

from __future__ import annotations

import math

from planner.reader.draft.draft import Op
from planner.reader.fuse.matcher import Finder


def means(find: Finder) -> None:
    """Sums that are divided by how many were summed."""
    draft = find.draft
    for op in list(draft.ops):
        scaled = find.scaled(op) if id(op) not in find.gone else None
        if scaled is None:
            continue
        view = find.maker(scaled[0], "Reshape")
        total = find.maker(view.inputs[0] if view is not None else scaled[0], "ReduceSum")
        if total is None:
            continue
        before, axes = draft.shape(total.inputs[0]), tuple(total.attrs["axes"])
        kept = tuple(1 if k in axes else n for k, n in enumerate(before))
        count = math.prod(before[k] for k in axes)
        inside = [total, *([view] if view is not None else [])]
        if (
            draft.shape(op.outputs[0]) == kept
            and draft.is_float(op.outputs[0])
            and find.close(scaled[1] * count, 1.0, op.outputs[0])
            and find.closed(op, inside)
        ):
            attrs = {"axes": axes, "keepdims": 1}
            find.fuse(op, inside, "ReduceMean", [total.inputs[0]], attrs)


def affine_norms(find: Finder) -> None:
    """Norms as a product and a sum for each row."""
    for root in list(find.draft.ops):
        if root.op == "Add" and id(root) not in find.gone:
            for one, other in (root.inputs, root.inputs[::-1]):
                if _affine(find, root, one, other):
                    break


def _affine(find: Finder, root: Op, product: str, shift: str) -> bool:
    """Whether a sum was such a norm, and is (x - mean) r scale + bias now."""
    draft = find.draft
    scaled, moved = find.maker(product, "Mul"), _moved(find, shift)
    if scaled is None or moved is None:
        return False
    inside, bias, mean, factor = moved
    x, both = find.other(scaled, factor), find.maker(factor, "Mul")
    if x is None or both is None or not find.closed(root, [scaled, both, *inside]):
        return False
    reduced = (*draft.shape(x)[:-1], 1)
    rows = [i for i in both.inputs if find.maker(i, "Reciprocal", "Div") is not None]
    if (
        len(rows) != 1
        or draft.shape(x) != draft.shape(root.outputs[0])
        or {draft.shape(rows[0]), draft.shape(mean)} != {reduced}
    ):
        return False
    scale = find.other(both, rows[0])
    assert scale is not None
    normed = find.insert(root, "Sub", [x, mean])
    for multiplier in (rows[0], scale):
        normed = find.insert(root, "Mul", [normed, multiplier])
    find.fuse(root, [scaled, both, *inside], "Add", [normed, bias], {})
    return True


def _moved(find: Finder, name: str) -> tuple[list[Op], str, str, str] | None:
    """Operations, bias, mean and factor of bias - mean factor."""
    total = find.maker(name, "Add", "Sub")
    if total is None:
        return None
    for bias, part in (total.inputs, total.inputs[::-1])[: 2 if total.op == "Add" else 1]:
        product = find.maker(part, "Mul")
        for one, other in (product.inputs, product.inputs[::-1]) if product is not None else ():
            assert product is not None
            if total.op == "Sub":
                if find.draft.shape(one)[-1:] == (1,):
                    return [total, product], bias, one, other
                continue
            negated = find.maker(one, "Neg")
            if negated is not None:
                return [total, product, negated], bias, negated.inputs[0], other
    return None
