"""RMSNormalization, LayerNormalization and GroupNormalization from their parts.

The centre of each pattern is the root of a mean square: s = sqrt(mean(d^2) + epsilon) over the last
dims.

    RMS     d = x;             x / s * scale
    Layer   d = x - mean(x);   d / s * scale [+ bias]     (also with mean(x^2) - mean(x)^2, clamped
            at 0, under the root)
    Group   InstanceNormalization of [N, groups, rest] with unit scale between two Reshapes, then *
            scale[C] + bias[C]

Division by s may be a product with its reciprocal. Casts to float32 before and back after are part
of the definition of both operators (they compute in float32), so they are absorbed.
"""

from __future__ import annotations

import math

import numpy as np

from planner.reader.draft.draft import Op
from planner.reader.draft.fold import numpy_dtype
from planner.reader.fuse.matcher import Finder


def norms(find: Finder) -> None:
    """Fuses every decomposed RMS or layer norm."""
    for op in list(find.draft.ops):
        if op.op in ("Sqrt", "Pow") and id(op) not in find.gone:
            _norm(find, op)


def _norm(find: Finder, root: Op) -> None:
    draft = find.draft
    inside: list[Op] = [root]
    power = 0.5 if root.op == "Sqrt" else draft.scalar(root.inputs[1])
    plus = find.maker(root.inputs[0], "Add")
    if power not in (0.5, -0.5) or plus is None:
        return
    constant = [k for k in (0, 1) if draft.scalar(plus.inputs[k]) is not None]
    if len(constant) != 1:
        return
    epsilon, v = draft.scalar(plus.inputs[constant[0]]), plus.inputs[1 - constant[0]]
    if epsilon is None or epsilon < 0:
        return
    inside.append(plus)
    quotient = _quotient(find, root, power, inside)
    if quotient is None:
        return
    normed, d = quotient
    inside.append(normed)
    variance = _variance(find, v, d, inside)
    if variance is None:
        return
    kind, x, axes = variance
    rank = len(draft.shape(x))
    if axes != tuple(range(axes[0], rank)) or draft.shape(normed.outputs[0]) != draft.shape(x):
        return
    _finish(find, kind, x, axes[0], epsilon, normed, inside)


def _quotient(find: Finder, root: Op, power: float, inside: list[Op]) -> tuple[Op, str] | None:
    """(operation, d): the d / s or d * (1 / s) that reads the root."""
    s = root.outputs[0]
    if power == 0.5:
        up = find.only(s, "Reciprocal", "Div")
        if up is None:
            return None
        if up.op == "Div" and up.inputs[1] == s and find.draft.scalar(up.inputs[0]) != 1.0:
            return (up, up.inputs[0]) if up.inputs[0] != s else None
        if up.op == "Div" and up.inputs[1] != s:
            return None
        inside.append(up)
        s = up.outputs[0]
    product = find.only(s, "Mul")
    if product is None:
        return None
    d = find.other(product, s)
    return (product, d) if d is not None and d != s else None


def _square(find: Finder, name: str) -> tuple[Op, str] | None:
    op = find.maker(name, "Mul", "Pow")
    if op is None:
        return None
    if op.op == "Mul":
        return (op, op.inputs[0]) if op.inputs[0] == op.inputs[1] else None
    return (op, op.inputs[0]) if find.draft.scalar(op.inputs[1]) == 2.0 else None


def _mean(find: Finder, name: str) -> tuple[Op, str, tuple[int, ...]] | None:
    op = find.maker(name, "ReduceMean")
    if op is None or not op.attrs["keepdims"]:
        return None
    return op, op.inputs[0], tuple(op.attrs["axes"])


def _variance(
    find: Finder, v: str, d: str, inside: list[Op]
) -> tuple[str, str, tuple[int, ...]] | None:
    """(kind, x, axes) when v is the mean square that normalises d."""
    clamp = find.maker(v, "Max", "Relu")
    if clamp is not None:
        zero = (
            0.0
            if clamp.op == "Relu"
            else next((c for c in map(find.draft.scalar, clamp.inputs) if c is not None), None)
        )
        if zero != 0.0:
            return None
        inside.append(clamp)
        v = next(i for i in clamp.inputs if find.draft.scalar(i) is None)
    centred = find.maker(d, "Sub")
    spread = find.maker(v, "Sub")
    if spread is not None and centred is not None:  # mean(x^2) - mean(x)^2
        second, square_mean = _mean(find, spread.inputs[0]), _square(find, spread.inputs[1])
        if second is None or square_mean is None:
            return None
        square, mean = _square(find, second[1]), _mean(find, square_mean[1])
        if (
            square is None
            or mean is None
            or centred.inputs != [mean[1], square_mean[1]]
            or square[1] != mean[1]
            or second[2] != mean[2]
        ):
            return None
        inside += [spread, second[0], square_mean[0], square[0], mean[0], centred]
        return "LayerNormalization", mean[1], mean[2]
    second = _mean(find, v)
    square = _square(find, second[1]) if second is not None else None
    if second is None or square is None:
        return None
    base = square[1]
    if clamp is not None or not _same_source(find, base, d, inside):
        return None
    inside += [second[0], square[0]]
    if centred is not None:
        mean = _mean(find, centred.inputs[1])
        if mean is not None and mean[1] == centred.inputs[0] and mean[2] == second[2]:
            inside += [mean[0], centred]
            return "LayerNormalization", mean[1], mean[2]
    return "RMSNormalization", d, second[2]


def _same_source(find: Finder, a: str, b: str, inside: list[Op]) -> bool:
    """True when a and b are one tensor, or two equal Sub of the same operands (exporters centre
    twice)."""
    if a == b:
        return True
    one, two = find.maker(a, "Sub"), find.maker(b, "Sub")
    if one is None or two is None or one.inputs[0] != two.inputs[0]:
        return False
    means = [_mean(find, op.inputs[1]) for op in (one, two)]
    if means[0] is None or means[1] is None or means[0][1:] != means[1][1:]:
        return False
    inside += [one, means[0][0]]
    return True


def _finish(
    find: Finder, kind: str, x: str, axis: int, epsilon: float, normed: Op, inside: list[Op]
) -> None:
    """Takes in the casts, the scale and the bias, then fuses."""
    draft = find.draft
    normal = draft.shape(x)[axis:]
    last, dtype = normed, draft.dtype(x)
    before = find.maker(x, "Cast")
    after = find.only(normed.outputs[0], "Cast")
    if (
        before is not None
        and after is not None
        and dtype == "float32"
        and draft.dtype(after.outputs[0]) == draft.dtype(before.inputs[0])
    ):
        x, dtype, last = before.inputs[0], draft.dtype(before.inputs[0]), after
        if all(id(u) in {id(o) for o in inside} for u in find.uses(before.outputs[0])):
            inside.append(before)
        inside.append(after)
    scale, bias = "", ""
    product = find.only(last.outputs[0], "Mul")
    if product is not None:
        other = find.other(product, last.outputs[0])
        if (
            other
            and _is_vector(find, other, normal, dtype)
            and draft.types[product.outputs[0]] == draft.types[last.outputs[0]]
        ):
            scale, last = other, product
            inside.append(product)
    if kind == "LayerNormalization" and scale:
        total = find.only(last.outputs[0], "Add")
        other = find.other(total, last.outputs[0]) if total is not None else None
        if (
            total is not None
            and other
            and _is_vector(find, other, normal, dtype)
            and draft.types[total.outputs[0]] == draft.types[last.outputs[0]]
        ):
            bias, last = other, total
            inside.append(total)
    if not find.closed(last, inside):
        return
    operands = [_vector(find, last, p, normal) for p in (scale, bias) if p]
    if not scale:
        operands = [draft.constant(f"{last.outputs[0]}/ones", np.ones(normal, numpy_dtype(dtype)))]
    find.fuse(last, inside, kind, [x, *operands], {"axis": axis, "epsilon": epsilon})


def _is_vector(find: Finder, name: str, normal: tuple[int, ...], dtype: str) -> bool:
    shape = find.draft.shape(name)
    lead = len(shape) - len(normal)
    return (
        lead >= 0
        and shape[lead:] == normal
        and math.prod(shape[:lead]) == 1
        and find.draft.dtype(name) == dtype
    )


def _vector(find: Finder, root: Op, name: str, normal: tuple[int, ...]) -> str:
    return (
        name
        if find.draft.shape(name) == normal
        else find.insert(root, "Reshape", [name], shape=normal)
    )


def group_norms(find: Finder) -> None:
    """Reshape, InstanceNormalization with unit scale, Reshape, Mul, Add -> GroupNormalization; with
    a group for each channel there are no views, and it stays InstanceNormalization."""
    draft = find.draft
    for norm in list(draft.ops):
        if (
            norm.op != "InstanceNormalization"
            or id(norm) in find.gone
            or draft.splat(norm.inputs[1]) != 1.0
            or draft.splat(norm.inputs[2]) != 0.0
        ):
            continue
        first, second = find.maker(norm.inputs[0], "Reshape"), find.only(norm.outputs[0], "Reshape")
        if first is None or second is None:
            if (affine := _affine(find, norm)) is not None:
                inside, operands = affine
                find.fuse(
                    inside[-1], [norm, *inside], norm.op, [norm.inputs[0], *operands], norm.attrs
                )
            continue
        x, shape = first.inputs[0], draft.shape(second.outputs[0])
        groups = draft.shape(norm.outputs[0])[1]
        if (
            draft.shape(x)[:2] != shape[:2]  # behind them it may be seen otherwise
            or len(shape) < 3
            or draft.shape(norm.outputs[0])[0] != shape[0]
            or shape[1] % groups
            or (affine := _affine(find, second)) is None
        ):
            continue
        inside, operands = affine
        last = inside[-1]
        if draft.shape(x) != shape:
            x = find.insert(last, "Reshape", [x], shape=shape)
        attrs = {"num_groups": groups, "epsilon": norm.attrs["epsilon"]}
        parts = [first, norm, second, *inside]
        find.fuse(last, parts, "GroupNormalization", [x, *operands], attrs)


def _affine(find: Finder, norm: Op) -> tuple[list[Op], list[str]] | None:
    """The Mul and Add for each channel behind what a normalization ends in, and their operands, a
    vector each."""
    draft, last = find.draft, norm
    shape = draft.shape(norm.outputs[0])
    inside, operands = list[Op](), list[str]()
    for op in ("Mul", "Add"):
        up = find.only(last.outputs[0], op)
        other = find.other(up, last.outputs[0]) if up is not None else None
        if (
            up is None
            or not other
            or len(shape) < 3
            or math.prod(draft.shape(other)) != shape[1]
            or not _per_channel(draft.shape(other), len(shape))
        ):
            return None
        operands.append(other)
        inside.append(up)
        last = up
    return inside, [find.insert(last, "Reshape", [p], shape=(shape[1],)) for p in operands]


def _per_channel(shape: tuple[int, ...], rank: int) -> bool:
    """True for [C, 1, ..] or [1, C, 1, ..] aligned to the channel dim of a tensor of this rank."""
    padded = (1,) * (rank - len(shape)) + shape
    return len(padded) == rank and all(n == 1 for k, n in enumerate(padded) if k != 1)
