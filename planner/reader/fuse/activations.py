"""Silu, Gelu and rotary embeddings from their parts.

Silu    x * sigmoid(x)
Gelu    0.5 x (1 + erf(x / sqrt 2)), or 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
Rotary  x * cos + concat(-x[h:], x[:h]) * sin, h half of the last dim
"""

from __future__ import annotations

import math

from planner.reader.draft.draft import Op
from planner.reader.fuse.matcher import Finder


def silus(find: Finder) -> None:
    """Mul(x, Sigmoid(x)) -> Silu(x)."""
    for op in list(find.draft.ops):
        if op.op != "Mul" or id(op) in find.gone:
            continue
        for x, s in (op.inputs, op.inputs[::-1]):
            gate = find.maker(s, "Sigmoid")
            if gate is not None and gate.inputs[0] == x and find.closed(op, [gate]):
                find.fuse(op, [gate], "Silu", [x], {})
                break


Polynomial = dict[int, float]


def polynomial(
    find: Finder, name: str, x: str, inside: list[Op], depth: int = 0
) -> Polynomial | None:
    """`name` as a polynomial in x (power -> coefficient), the operations it is made of added to
    `inside`; None when it is none."""
    if name == x:
        return {1: 1.0}
    c = find.draft.scalar(name)
    if c is not None:
        return {0: c}
    op = find.maker(name, "Add", "Sub", "Mul", "Div", "Pow", "Neg")
    if op is None or depth > 8 or find.draft.types[name] != find.draft.types[x]:
        return None
    inside.append(op)
    a = polynomial(find, op.inputs[0], x, inside, depth + 1)
    if a is None:
        return None
    if op.op == "Neg":
        return {p: -v for p, v in a.items()}
    b = polynomial(find, op.inputs[1], x, inside, depth + 1)
    if b is None:
        return None
    if op.op in ("Add", "Sub"):
        sign = 1 if op.op == "Add" else -1
        return {p: a.get(p, 0.0) + sign * b.get(p, 0.0) for p in sorted(a.keys() | b.keys())}
    if op.op == "Mul":
        product: Polynomial = {}
        for p, v in a.items():
            for q, w in b.items():
                product[p + q] = product.get(p + q, 0.0) + v * w
        return product
    if set(b) != {0}:
        return None
    if op.op == "Div":
        return {p: v / b[0] for p, v in a.items()} if b[0] else None
    power = b[0]
    if len(a) != 1 or power != int(power) or not 0 < power <= 4:
        return None
    ((p, v),) = a.items()
    return {p * int(power): v ** int(power)}


def gelus(find: Finder) -> None:
    """The erf and tanh forms of Gelu, however their products are nested."""
    for curve in list(find.draft.ops):
        if curve.op not in ("Erf", "Tanh") or id(curve) in find.gone:
            continue
        plus = find.only(curve.outputs[0], "Add")
        if plus is None or not find.close(
            find.draft.scalar(find.other(plus, curve.outputs[0]) or ""), 1.0, curve.outputs[0]
        ):
            continue
        for root, x, product in _products(find, plus):
            inside = [curve, plus, *product]
            outer: list[Op] = []
            factor = _outer(find, root, plus.outputs[0], x, outer)
            inner = polynomial(find, curve.inputs[0], x, inside)
            if (
                factor is None
                or inner is None
                or not _matches(find, inner, curve.op, x)
                or not find.close(factor, 0.5, x)
            ):
                continue
            inside += outer
            if find.closed(root, inside):
                find.fuse(
                    root,
                    inside,
                    "Gelu",
                    [x],
                    {"approximate": "none" if curve.op == "Erf" else "tanh"},
                )
                break


def _products(find: Finder, plus: Op) -> list[tuple[Op, str, list[Op]]]:
    """Candidate roots: the products that (1 + curve) enters, with the x each would be a Gelu of."""
    candidates = []
    op = plus
    path: list[Op] = []
    names: list[str] = []
    for _ in range(3):
        up = find.only(op.outputs[0], "Mul", "Div")
        if up is None:
            break
        names += _leaves(find, up, op.outputs[0])
        candidates += [(up, name, list(path)) for name in names]
        path.append(up)
        op = up
    return candidates


def _leaves(find: Finder, op: Op, skip: str) -> list[str]:
    names: list[str] = []
    stack = [i for i in op.inputs if i != skip]
    while stack:
        name = stack.pop()
        if find.draft.scalar(name) is not None:
            continue
        names.append(name)
        maker = find.maker(name, "Mul", "Div")
        if maker is not None and len(names) < 6:
            stack.extend(maker.inputs)
    return names


def _outer(find: Finder, root: Op, special: str, x: str, inside: list[Op]) -> float | None:
    """c when root = c * x * special, special appearing once; operations used are added to
    `inside`."""
    coefficient, xs, specials = 1.0, 0, 0
    stack = [(root, 1)]
    while stack:
        op, sign = stack.pop()
        if op is not root:
            inside.append(op)
        for k, name in enumerate(op.inputs):
            direction = -sign if op.op == "Div" and k == 1 else sign
            c = find.draft.scalar(name)
            maker = find.maker(name, "Mul", "Div")
            if name == special:
                specials += direction
            elif name == x:
                xs += direction
            elif c is not None and c != 0:
                coefficient *= c if direction > 0 else 1 / c
            elif maker is not None and len(inside) < 8:
                stack.append((maker, direction))
            else:
                return None
    return coefficient if xs == 1 and specials == 1 else None


def _matches(find: Finder, inner: Polynomial, kind: str, x: str) -> bool:
    inner = {p: v for p, v in inner.items() if v}
    if kind == "Erf":
        return set(inner) == {1} and find.close(inner[1], math.sqrt(0.5), x)
    k = math.sqrt(2 / math.pi)
    return (
        set(inner) == {1, 3}
        and find.close(inner[1], k, x)
        and find.close(inner[3], k * 0.044715, x)
    )


def rotaries(find: Finder) -> None:
    """x * cos + rotate_half(x) * sin -> RotaryEmbedding(x, cos, sin)."""
    for root in list(find.draft.ops):
        if root.op != "Add":
            continue
        left, right = find.maker(root.inputs[0], "Mul"), find.maker(root.inputs[1], "Mul")
        if left is None or right is None:
            continue
        for plain, turned in ((left, right), (right, left)):
            if _rotary(find, root, plain, turned):
                break


def _rotary(find: Finder, root: Op, plain: Op, turned: Op) -> bool:
    for t, sin in (turned.inputs, turned.inputs[::-1]):
        half = _rotated(find, t) or _rotated_before_cast(find, t, plain)
        if half is None:
            continue
        x, inside = half
        cos = find.other(plain, x)
        if cos is None or find.draft.types[root.outputs[0]] != find.draft.types[x]:
            continue
        inside += [plain, turned]
        if find.closed(root, inside):
            find.fuse(root, inside, "RotaryEmbedding", [x, cos, sin], {})
            return True
    return False


def _rotated_before_cast(find: Finder, name: str, plain: Op) -> tuple[str, list[Op]] | None:
    """The operand and the operations of a rotated half, as `_rotated`, where x was rotated first
    and both were cast then, as under autocast: the cast of x that the other product reads stands
    for x."""
    cast = find.maker(name, "Cast")
    half = _rotated(find, cast.inputs[0]) if cast is not None else None
    if cast is None or half is None:
        return None
    for x in plain.inputs:
        own_cast = find.maker(x, "Cast")
        if own_cast is not None and own_cast.inputs[0] == half[0] and own_cast.attrs == cast.attrs:
            return x, [*half[1], cast]
    return None


def _rotated(find: Finder, name: str) -> tuple[str, list[Op]] | None:
    """(x, operations) when `name` is concat(-x[h:], x[:h]) along the last dim."""
    draft = find.draft
    join = find.maker(name, "Concat")
    last = len(draft.shape(name)) - 1
    if join is None or len(join.inputs) != 2 or join.attrs["axis"] != last:
        return None
    neg = find.maker(join.inputs[0], "Neg")
    if neg is None:
        return None
    high, low = (
        find.maker(neg.inputs[0], "Slice", "Split"),
        find.maker(join.inputs[1], "Slice", "Split"),
    )
    if high is None or low is None or high.inputs[0] != low.inputs[0]:
        return None
    x = high.inputs[0]
    n = draft.shape(x)[-1]
    if high.op == "Split":
        if (
            high is not low
            or high.attrs["axis"] != last
            or high.outputs != [join.inputs[1], neg.inputs[0]]
        ):
            return None
        parts = [high]
    else:
        parts = [high, low]
        if not _cut(high, last, n // 2, n) or not _cut(low, last, 0, n // 2):
            return None
    if n % 2 or draft.shape(join.inputs[1])[-1] * 2 != n:
        return None
    return x, [join, neg, *parts]


def _cut(op: Op, axis: int, start: int, end: int) -> bool:
    return op.op == "Slice" and op.attrs == {
        "axes": (axis,),
        "starts": (start,),
        "ends": (end,),
        "steps": (1,),
    }
