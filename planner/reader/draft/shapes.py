"""Shapes and dtypes of canonical operators.

`infer(op, attrs, types, shape)` gives the outputs' (shape, dtype). `shape` carries what the inputs
do not determine: the target of Reshape, Expand, ConstantOfShape and Range, and the outputs of
Split. Attributes are those of `planner.graph.ir`, already normalised (axes non-negative). A
contradiction raises ShapeError with both shapes in its text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Type = tuple[tuple[int, ...], str]
Types = Sequence[Type | None]


class ShapeError(Exception):
    """Operand shapes contradict the operator; the caller adds node and file."""


def words(text: str) -> frozenset[str]:
    """Names separated by blanks."""
    return frozenset(text.split())


SAME = words(
    "Relu Sigmoid Tanh Erf Exp Log Sqrt Reciprocal Neg Abs Sin Cos Softplus Silu Floor Ceil Round"
    " Sign Elu LeakyRelu HardSigmoid Gelu Clip Softmax LogSoftmax LayerNormalization"
    " RMSNormalization InstanceNormalization GroupNormalization Hardmax Trilu CumSum CumProd"
    " ReverseSequence TensorScatter ScatterElements ScatterND Identity"
)
ARITHMETIC = words("Add Sub Mul Div Pow Max Min Mod")
COMPARE = words("Equal Less LessOrEqual Greater GreaterOrEqual")
LOGIC = words("And Or Xor")
REDUCE = words("ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd")


_TWO = (
    ARITHMETIC
    | COMPARE
    | LOGIC
    | words(
        "MatMul Gather GatherElements GatherND Conv ConvTranspose RMSNormalization"
        " LayerNormalization ReverseSequence TensorScatter GridSample MaxUnpool MaxRoiPool"
    )
)
_OPERANDS = {
    "Where": 3,
    "ScatterElements": 3,
    "ScatterND": 3,
    "InstanceNormalization": 3,
    "GroupNormalization": 3,
    "BatchNormalization": 5,
    "LSTM": 3,
    "GRU": 3,
    "RNN": 3,
    "Attention": 3,
    "RotaryEmbedding": 3,
    "RoutedExperts": 3,
    "RoiAlign": 3,
    "DeformConv": 3,
    "Range": 0,
    "ConstantOfShape": 0,
    "RandomUniform": 0,
    "RandomNormal": 0,
}


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """numpy broadcasting, with both shapes named when they do not fit."""
    rank = max(map(len, shapes))
    out = [1] * rank
    for shape in shapes:
        for k, n in enumerate(shape, rank - len(shape)):
            if out[k] == 1:
                out[k] = n
            elif n not in (1, out[k]):
                raise ShapeError(
                    "shapes " + " and ".join(str(list(s)) for s in shapes) + " do not broadcast"
                )
    return tuple(out)


def infer(op: str, attrs: Mapping[str, Any], types: Types, shape: Any = None) -> list[Type]:
    """Output types of one canonical operator (see the module docstring)."""
    needed = _OPERANDS.get(op, 2 if op in _TWO else 1)
    if len(types) < needed or any(t is None for t in types[:needed]):
        raise ShapeError(f"{op} needs {needed} operand(s)")
    if op in _VECTORS:
        _check_vectors(op, attrs, types)
    if op in SAME:
        return [_x(types)]
    if op in ARITHMETIC or op in LOGIC or op in COMPARE:
        (a, a_dtype), (b, b_dtype) = _two(types)
        if a_dtype != b_dtype:
            raise ShapeError(f"operands are {a_dtype} and {b_dtype}")
        return [(a if a == b else broadcast(a, b), "bool" if op in COMPARE else a_dtype)]
    rule = _RULES.get(op)
    if rule is None:
        raise KeyError(op)
    return rule(attrs, types, shape)


_VECTORS = words(
    "LayerNormalization RMSNormalization InstanceNormalization GroupNormalization"
    " BatchNormalization"
)


def _check_vectors(op: str, attrs: Mapping[str, Any], types: Types) -> None:
    """Scales and biases of norms: the normalised dims, or one entry per channel."""
    x = _x(types)[0]
    last = op in ("LayerNormalization", "RMSNormalization")
    if not last and len(x) < 2:
        raise ShapeError(f"{op} needs a channel dim: {list(x)}")
    expected = x[attrs["axis"] :] if last else (x[1],)
    groups = attrs.get("num_groups", 1)
    if not last and (groups < 1 or x[1] % groups):
        raise ShapeError(f"{groups} groups of {x[1]} channels")
    for t in types[1:]:
        if t is not None and t[0] != expected:
            raise ShapeError(
                f"{op} of {list(x)} with a scale, bias or statistic of {list(t[0])};"
                f" {list(expected)} expected"
            )


def _two(types: Types) -> tuple[Type, Type]:
    a, b = types[0], types[1]
    assert a is not None and b is not None
    return a, b


def _x(types: Types) -> Type:
    x = types[0]
    assert x is not None
    return x


def _boolean(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    return [(_x(types)[0], "bool")]


def _cast(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    return [(_x(types)[0], attrs["to"])]


def _dropout(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    return [_x(types), (_x(types)[0], "bool")]


def _where(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    c, a, b = types[0], types[1], types[2]
    assert c and a and b
    return [(broadcast(c[0], a[0], b[0]), a[1])]


def matmul_shape(
    a: tuple[int, ...], b: tuple[int, ...], trans_a: int = 0, trans_b: int = 0
) -> tuple[int, ...]:
    """[.., m, k] @ [.., k, n] with optional swaps of the last two dims."""
    m, k = (a[-1], a[-2]) if trans_a else (a[-2], a[-1])
    k2, n = (b[-1], b[-2]) if trans_b else (b[-2], b[-1])
    if k != k2:
        raise ShapeError(
            f"inner sizes differ: {list(a)}{'ᵀ' if trans_a else ''} times"
            f" {list(b)}{'ᵀ' if trans_b else ''}"
        )
    return (*broadcast(a[:-2], b[:-2]), m, n)


def _matmul(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    (a, dtype), (b, _) = _two(types)
    if len(a) < 2 or len(b) < 2:
        raise ShapeError(f"operands need two dims: {list(a)} and {list(b)}")
    return [(matmul_shape(a, b, attrs.get("trans_a", 0), attrs.get("trans_b", 0)), dtype)]


def _einsum(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    left, right = attrs["equation"].split("->")
    sizes: dict[str, int] = {}
    for term, t in zip(left.split(","), types, strict=True):
        assert t
        if len(term) != len(t[0]):
            raise ShapeError(f"einsum term {term!r} does not fit shape {list(t[0])}")
        for letter, n in zip(term, t[0], strict=True):
            if sizes.setdefault(letter, n) in (1, n):
                sizes[letter] = n
            elif n != 1:
                raise ShapeError(f"einsum letter {letter!r} is {sizes[letter]} and {n}")
    return [(tuple(sizes[c] for c in right), _x(types)[1])]


def _reduce(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    x, dtype = _x(types)
    axes = attrs["axes"]
    if attrs["keepdims"]:
        return [(tuple(1 if k in axes else n for k, n in enumerate(x)), dtype)]
    return [(tuple(n for k, n in enumerate(x) if k not in axes), dtype)]


def _reshape(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    x, dtype = _x(types)
    if math.prod(x) != math.prod(shape):
        raise ShapeError(f"cannot reshape {list(x)} to {list(shape)}")
    return [(tuple(shape), dtype)]


def _expand(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    x, dtype = _x(types)
    return [(broadcast(x, tuple(shape)), dtype)]


def _transpose(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    x, dtype = _x(types)
    if sorted(attrs["perm"]) != list(range(len(x))):
        raise ShapeError(
            f"perm {list(attrs['perm'])} is not a permutation of the dims of {list(x)}"
        )
    return [(tuple(x[k] for k in attrs["perm"]), dtype)]


def _concat(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    axis = attrs["axis"]
    x, dtype = _x(types)
    total = 0
    for t in types:
        assert t
        if len(t[0]) != len(x) or t[0][:axis] + t[0][axis + 1 :] != x[:axis] + x[axis + 1 :]:
            raise ShapeError(f"cannot concatenate {list(x)} and {list(t[0])} along dim {axis}")
        total += t[0][axis]
    return [((*x[:axis], total, *x[axis + 1 :]), dtype)]


def _split(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    x, dtype = _x(types)
    if sum(s[attrs["axis"]] for s in shape) != x[attrs["axis"]]:
        raise ShapeError(
            f"parts {[s[attrs['axis']] for s in shape]} do not add up to dim {attrs['axis']} of"
            f" {list(x)}"
        )
    return [(tuple(s), dtype) for s in shape]


def slice_length(n: int, start: int, end: int, step: int) -> int:
    """Elements of a slice with normalised bounds (end -1 with a negative step: before 0)."""
    return max(0, -(-(end - start) // step))


def _slice(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    x, dtype = _x(types)
    extents = list(x)
    for axis, start, end, step in zip(
        attrs["axes"], attrs["starts"], attrs["ends"], attrs["steps"], strict=True
    ):
        extents[axis] = slice_length(x[axis], start, end, step)
    return [(tuple(extents), dtype)]


def _pad(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    x, dtype = _x(types)
    pads = attrs["pads"]
    if len(pads) != 2 * len(x):
        raise ShapeError(f"{len(pads)} pads for shape {list(x)}")
    extents = tuple(n + pads[k] + pads[k + len(x)] for k, n in enumerate(x))
    if min(extents, default=0) < 0:
        raise ShapeError(f"pads {list(pads)} leave nothing of {list(x)}")
    return [(extents, dtype)]


def _tile(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    x, dtype = _x(types)
    if len(x) != len(attrs["repeats"]):
        raise ShapeError(f"repeats {list(attrs['repeats'])} do not fit {list(x)}")
    return [(tuple(n * r for n, r in zip(x, attrs["repeats"], strict=True)), dtype)]


def _gather(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    (x, dtype), (i, _) = _two(types)
    axis = attrs["axis"]
    return [((*x[:axis], *i, *x[axis + 1 :]), dtype)]


def _gather_elements(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    (x, dtype), (i, _) = _two(types)
    if len(x) != len(i):
        raise ShapeError(f"ranks differ: {list(x)} and {list(i)}")
    return [(i, dtype)]


def _gather_nd(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    (x, dtype), (i, _) = _two(types)
    b = attrs["batch_dims"]
    if not i or i[-1] > len(x) - b or x[:b] != i[:b]:
        raise ShapeError(f"indices {list(i)} do not fit data {list(x)} with {b} batch dims")
    return [((*i[:-1], *x[b + i[-1] :]), dtype)]


def _conv(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    (x, dtype), (w, _) = _two(types)
    n = len(x) - 2
    if len(w) != len(x) or x[1] != w[1] * attrs["group"]:
        raise ShapeError(
            f"input {list(x)} and filter {list(w)} with {attrs['group']} groups do not fit"
        )
    extents = []
    for k in range(n):
        extent = (
            x[2 + k]
            + attrs["pads"][k]
            + attrs["pads"][n + k]
            - attrs["dilations"][k] * (w[2 + k] - 1)
            - 1
        )
        extents.append(extent // attrs["strides"][k] + 1)
    if min(extents, default=1) < 1:
        raise ShapeError(f"filter {list(w)} is larger than the padded input {list(x)}")
    return [((x[0], w[0], *extents), dtype)]


def _conv_transpose(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    (x, dtype), (w, _) = _two(types)
    n = len(x) - 2
    if len(w) != len(x) or x[1] != w[0]:
        raise ShapeError(f"input {list(x)} and filter {list(w)} do not fit")
    extents = []
    for k in range(n):
        full = (
            attrs["strides"][k] * (x[2 + k] - 1)
            + attrs["output_padding"][k]
            + attrs["dilations"][k] * (w[2 + k] - 1)
            + 1
        )
        extents.append(full - attrs["pads"][k] - attrs["pads"][n + k])
    return [((x[0], w[1] * attrs["group"], *extents), dtype)]


def _pool(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    x, dtype = _x(types)
    n = len(x) - 2
    extents = []
    for k in range(n):
        before, after = attrs["pads"][k], attrs["pads"][n + k]
        stride = attrs["strides"][k]
        extent = (
            x[2 + k] + before + after - attrs["dilations"][k] * (attrs["kernel_shape"][k] - 1) - 1
        )
        size = extent // stride + 1
        if attrs["ceil_mode"] and extent % stride:
            size += (size * stride) < x[
                2 + k
            ] + before  # a window must start inside the input or its left padding
        extents.append(size)
    if min(extents, default=1) < 1:
        raise ShapeError(
            f"window {list(attrs['kernel_shape'])} is larger than the padded input {list(x)}"
        )
    return [((x[0], x[1], *extents), dtype)]


def _values_and_indices(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    return [(tuple(shape), _x(types)[1]), (tuple(shape), "int64")]


def _given(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    return [(tuple(shape), _x(types)[1])]


def _top_k(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    x, dtype = _x(types)
    axis, k = attrs["axis"], attrs["k"]
    if not 0 <= k <= x[axis]:
        raise ShapeError(f"k = {k} of {x[axis]} elements")
    extents = (*x[:axis], k, *x[axis + 1 :])
    return [(extents, dtype), (extents, "int64")]


def _one_hot(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    x = _x(types)[0]
    axis = attrs["axis"]
    return [((*x[:axis], attrs["depth"], *x[axis:]), attrs["dtype"])]


def _arg(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    x, axis = _x(types)[0], attrs["axis"]
    return [((*x[:axis], *((1,) if attrs["keepdims"] else ()), *x[axis + 1 :]), "int64")]


def _made(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    return [(tuple(shape), attrs["dtype"])]


def _batch_norm(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    x, dtype = _x(types)
    results: list[Type] = [(x, dtype)]
    if attrs["training_mode"]:
        mean = types[3]
        assert mean
        results += [mean, mean]
    return results


def _recurrent(gates: int) -> Callable[..., list[Type]]:
    def rule(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
        (x, dtype), (w, _) = _two(types)
        hidden, dirs = attrs["hidden_size"], w[0]
        if len(x) != 3 or w[1] != gates * hidden or w[2] != x[2]:
            raise ShapeError(
                f"input {list(x)} and weights {list(w)} do not fit {gates} gates of {hidden}"
            )
        state: Type = ((dirs, x[1], hidden), dtype)
        wanted = {
            2: (dirs, gates * hidden, hidden),
            3: (dirs, 2 * gates * hidden),
            4: (x[1],),
            5: state[0],
            6: state[0],
            7: (dirs, 3 * hidden),
        }
        for slot, expected in wanted.items():
            t = types[slot] if slot < len(types) else None
            single = (
                (dirs, 1, hidden) if slot in (5, 6) else expected
            )  # a state of one sample may still be repeated
            if t is not None and t[0] not in (expected, single):
                raise ShapeError(f"operand {slot} is {list(t[0])}; {list(expected)} expected")
        return [((x[0], dirs, x[1], hidden), dtype), state] + ([state] if gates == 4 else [])

    return rule


def _attention(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    q, k, v = types[0], types[1], types[2]
    assert q and k and v
    (b, h, s, d), (bk, g, t, dk), (bv, gv, tv, e) = q[0], k[0], v[0]
    if b != bk or b != bv or g != gv or t != tv or d != dk or g < 1 or h % g:
        raise ShapeError(f"attention operands {list(q[0])}, {list(k[0])}, {list(v[0])} do not fit")
    if len(types) > 3 and types[3] and broadcast(types[3][0], (b, h, s, t)) != (b, h, s, t):
        raise ShapeError(f"mask {list(types[3][0])} is larger than the scores {[b, h, s, t]}")
    return [((b, h, s, e), q[1])]


def _linear_attention(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    q, v = types[0], types[2]
    assert q and v
    b, t, h, p = v[0]
    return [((b, t, h, p), v[1]), ((b, h, q[0][-1], p), v[1])]


def _rotary(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    x, c, s = types[0], types[1], types[2]
    assert x and c and s
    if broadcast(x[0], c[0], s[0]) != x[0]:
        raise ShapeError(f"cos {list(c[0])} or sin {list(s[0])} is larger than {list(x[0])}")
    return [x]


def _experts(attrs: Mapping[str, Any], types: Types, shape: Any) -> list[Type]:
    x, index, share, up, down = types[0], types[1], types[2], types[4], types[5]
    assert x and index and share and up and down
    if index[0] != share[0] or index[0][:-1] != x[0][:-1]:
        raise ShapeError(
            f"tokens {list(x[0])}, choices {list(index[0])} and shares {list(share[0])} do not fit"
        )
    if up[0][0] != down[0][0] or x[0][-1] not in up[0][1:] or x[0][-1] not in down[0][1:]:
        raise ShapeError(
            f"tokens {list(x[0])} and experts {list(up[0])}, {list(down[0])} do not fit"
        )
    return [x]


_RULES: dict[str, Callable[[Mapping[str, Any], Types, Any], list[Type]]] = {
    "IsNaN": _boolean,
    "Not": _boolean,
    "Cast": _cast,
    "Dropout": _dropout,
    "Where": _where,
    "MatMul": _matmul,
    "Einsum": _einsum,
    **dict.fromkeys(REDUCE, _reduce),
    "Reshape": _reshape,
    "Expand": _expand,
    "Transpose": _transpose,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Pad": _pad,
    "Tile": _tile,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "MaxPool": _pool,
    "AveragePool": _pool,
    "Resize": _given,
    "TopK": _top_k,
    "OneHot": _one_hot,
    "ArgMax": _arg,
    "ArgMin": _arg,
    "Range": _made,
    "ConstantOfShape": _made,
    "RandomUniform": _made,
    "RandomNormal": _made,
    "BatchNormalization": _batch_norm,
    "LSTM": _recurrent(4),
    "GRU": _recurrent(3),
    "RNN": _recurrent(1),
    "Attention": _attention,
    "LinearAttention": _linear_attention,
    "RotaryEmbedding": _rotary,
    "MaxPoolIndices": _values_and_indices,
    **dict.fromkeys(
        words("LpPool MaxUnpool Col2Im GridSample RoiAlign MaxRoiPool DeformConv DFT Det"), _given
    ),
    "RoutedExperts": _experts,
}
CANONICAL = SAME | ARITHMETIC | COMPARE | LOGIC | frozenset(_RULES)
