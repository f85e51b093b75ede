"""Primitives of JAX as ONNX operators: name -> function (trace, params, operands, avals of the
results) -> results, None where a form has no translation.

Softmax and its logarithm, which jaxprs spell out, are put together again; so are products, as
MatMul with the contracted dims innermost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from planner.reader.jax.trace import DOMAIN, FUSED, Trace, Value

Write = Callable[[Trace, Any, list[Value], list[Any]], "list[Value] | None"]
PRIMITIVES: dict[str, Write] = {}
RANGE = 65_536
"""Largest table of counted numbers that is written as a constant."""


def _same(op: str) -> Write:
    """An element-wise operator of the same meaning."""
    return lambda t, p, x, out: [t.node(op, t.bare(x, out[0].shape), out[0].shape, out[0].dtype)]


for _jax, _onnx in {
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "max": "Max",
    "min": "Min",
    "neg": "Neg",
    "exp": "Exp",
    "log": "Log",
    "tanh": "Tanh",
    "logistic": "Sigmoid",
    "sqrt": "Sqrt",
    "erf": "Erf",
    "abs": "Abs",
    "sin": "Sin",
    "cos": "Cos",
    "floor": "Floor",
    "ceil": "Ceil",
    "sign": "Sign",
    "pow": "Pow",
    "tan": "Tan",
    "asin": "Asin",
    "acos": "Acos",
    "atan": "Atan",
    "sinh": "Sinh",
    "cosh": "Cosh",
    "round": "Round",
    "eq": "Equal",
    "lt": "Less",
    "le": "LessOrEqual",
    "gt": "Greater",
    "ge": "GreaterOrEqual",
    "add_any": "Add",
}.items():
    PRIMITIVES[_jax] = _same(_onnx)
for _jax in (
    "stop_gradient",
    "copy",
    "copy_p",
    "optimization_barrier",
    "sharding_constraint",
    "name",
    "reduce_precision",
    "pvary",
):
    PRIMITIVES[_jax] = lambda t, p, x, out: list(x)


def primitive(*names: str) -> Callable[[Write], Write]:
    """Registers a translation."""

    def register(f: Write) -> Write:
        PRIMITIVES.update(dict.fromkeys(names, f))
        return f

    return register


def _scalar(t: Trace, value: float, like: Value) -> Value:
    return t.constant(np.asarray(value, like.dtype))


@primitive("div")
def _div(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value] | None:
    soft = _softmax(t, x[0], x[1])
    if soft is not None:
        return [t.node("Softmax", [soft[0]], out[0].shape, out[0].dtype, axis=soft[1])]
    mean = _mean(t, x[0], x[1])
    return [mean or t.node("Div", t.bare(x, out[0].shape), out[0].shape, out[0].dtype)]


def _mean(t: Trace, total: Value, count: Value) -> Value | None:
    """The mean, where a sum over dims is divided by their size."""
    from onnx import numpy_helper

    summed = t.makers.get(_through(t, total.name, ("Reshape",)))
    if (
        summed is None
        or summed.op_type != "ReduceSum"
        or summed.input[0] not in t.types
        or count.name not in t.initializers
        or count.shape
    ):
        return None
    source, axes = t.types[summed.input[0]], _axes(t, summed)
    kept_shape = tuple(1 if d in axes else n for d, n in enumerate(source.shape))
    reduced_shape = tuple(n for d, n in enumerate(source.shape) if d not in axes)
    if float(numpy_helper.to_array(t.initializers[count.name])) != prod(
        source.shape[d] for d in axes
    ) or total.shape not in (kept_shape, reduced_shape):
        return None
    return t.node(
        "ReduceMean",
        [source, t.constant(np.array(axes, np.int64))],
        total.shape,
        total.dtype,
        keepdims=int(total.shape == kept_shape and kept_shape != reduced_shape),
    )


@primitive("sub")
def _sub(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value] | None:
    """x - m - log(sum(exp(x - m))) is the logarithm of softmax."""
    log = t.makers.get(x[1].name)
    shifted = t.makers.get(x[0].name)
    if (
        log is not None
        and log.op_type == "Log"
        and shifted is not None
        and shifted.op_type == "Sub"
    ):
        total = _through(t, log.input[0], ("Reshape",))
        summed = t.makers.get(total)
        if summed is not None and summed.op_type == "ReduceSum":
            maker = t.makers.get(summed.input[0])
            if maker is not None and maker.op_type == "Exp" and maker.input[0] == x[0].name:
                soft = _softmax(t, t.types[summed.input[0]], t.types[log.input[0]])
                if soft is not None:
                    return [
                        t.node("LogSoftmax", [soft[0]], out[0].shape, out[0].dtype, axis=soft[1])
                    ]
    return [t.node("Sub", t.bare(x, out[0].shape), out[0].shape, out[0].dtype)]


def _softmax(t: Trace, top: Value, bottom: Value) -> tuple[Value, int] | None:
    """(x, axis) where top is exp(x - max(x)) and bottom its sum over the axis."""
    exp, total = t.makers.get(top.name), t.makers.get(_through(t, bottom.name, ("Reshape",)))
    if (
        exp is None
        or exp.op_type != "Exp"
        or total is None
        or total.op_type != "ReduceSum"
        or total.input[0] != top.name
    ):
        return None
    axes = _axes(t, total)
    minus = t.makers.get(exp.input[0])
    if minus is None or minus.op_type != "Sub" or len(axes) != 1:
        return None
    most = t.makers.get(_through(t, minus.input[1], ("Reshape", "Max")))
    if (
        most is None
        or most.op_type != "ReduceMax"
        or most.input[0] != minus.input[0]
        or _axes(t, most) != axes
        or minus.input[0] not in t.types
    ):
        return None
    return t.types[minus.input[0]], axes[0]


def _through(t: Trace, name: str, ops: Sequence[str]) -> str:
    """What a tensor is made of, behind operators that change nothing here (the maximum with -inf
    among them)."""
    while (node := t.makers.get(name)) is not None and node.op_type in ops:
        name = next((n for n in node.input if n in t.makers), "")
    return name


def _axes(t: Trace, node: Any) -> list[int]:
    from onnx import numpy_helper

    return [int(k) for k in numpy_helper.to_array(t.initializers[node.input[1]])]


@primitive("integer_pow")
def _integer_pow(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    if p["y"] == 2:
        return [t.node("Mul", [x[0], x[0]], out[0].shape, out[0].dtype)]
    return [t.node("Pow", [x[0], _scalar(t, p["y"], x[0])], out[0].shape, out[0].dtype)]


@primitive("square")
def _square(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    return [t.node("Mul", [x[0], x[0]], out[0].shape, out[0].dtype)]


@primitive("rsqrt")
def _rsqrt(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    return [
        t.node(
            "Reciprocal", [t.node("Sqrt", x, x[0].shape, x[0].dtype)], out[0].shape, out[0].dtype
        )
    ]


@primitive("log1p")
def _log1p(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    return [
        t.node(
            "Log",
            [t.node("Add", [x[0], _scalar(t, 1, x[0])], x[0].shape, x[0].dtype)],
            out[0].shape,
            out[0].dtype,
        )
    ]


def _logic(op: str) -> Write:
    """A logical operator, of truth values, or of the bits of numbers."""
    return lambda t, p, x, out: [
        t.node(
            op if x[0].dtype == np.bool_ else f"Bitwise{op}",
            t.bare(x, out[0].shape),
            out[0].shape,
            out[0].dtype,
        )
    ]


PRIMITIVES.update(
    {"and": _logic("And"), "or": _logic("Or"), "not": _logic("Not"), "xor": _logic("Xor")}
)


@primitive("erfc")
def _erfc(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    return [
        t.node(
            "Sub",
            [_scalar(t, 1, x[0]), t.node("Erf", x, x[0].shape, x[0].dtype)],
            out[0].shape,
            out[0].dtype,
        )
    ]


@primitive("ne")
def _unequal(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    return [t.node("Not", [t.node("Equal", x, out[0].shape, np.bool_)], out[0].shape, np.bool_)]


@primitive("is_finite")
def _finite(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    """A number less itself is 0 where it is finite, else not a number."""
    return [
        t.node(
            "Equal",
            [t.node("Sub", [x[0], x[0]], x[0].shape, x[0].dtype), _scalar(t, 0, x[0])],
            out[0].shape,
            np.bool_,
        )
    ]


@primitive("select_n")
def _select(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value] | None:
    if len(x) != 3 or x[0].dtype != np.bool_:
        return None
    if x[1].dtype == np.bool_:
        shape = out[0].shape
        chosen = [
            t.node("And", [t.node("Not", [x[0]], x[0].shape, np.bool_), x[1]], shape, np.bool_),
            t.node("And", [x[0], x[2]], shape, np.bool_),
        ]
        return [t.node("Or", chosen, shape, np.bool_)]
    return [t.node("Where", t.bare([x[0], x[2], x[1]], out[0].shape), out[0].shape, out[0].dtype)]


@primitive("clamp")
def _clamp(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    return [
        t.node(
            "Min",
            [t.node("Max", [x[1], x[0]], out[0].shape, out[0].dtype), x[2]],
            out[0].shape,
            out[0].dtype,
        )
    ]


@primitive("convert_element_type")
def _cast(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    from onnx import helper

    if x[0].dtype == np.dtype(out[0].dtype):
        return x
    return [
        t.node(
            "Cast",
            x,
            out[0].shape,
            out[0].dtype,
            to=helper.np_dtype_to_tensor_dtype(np.dtype(out[0].dtype)),
        )
    ]


@primitive("broadcast_in_dim")
def _broadcast(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    shape, sizes = out[0].shape, dict(zip(p["broadcast_dimensions"], x[0].shape, strict=True))
    reshaped = t.reshape(x[0], [sizes.get(d, 1) for d in range(len(shape))])
    if reshaped.shape == tuple(shape):
        return [reshaped]
    return [t.node("Expand", [reshaped, t.constant(np.array(shape, np.int64))], shape, x[0].dtype)]


@primitive("reshape", "squeeze", "expand_dims")
def _reshape(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    return [t.reshape(x[0], out[0].shape)]


def _transposed(t: Trace, x: Value, perm: Sequence[int]) -> Value:
    if tuple(perm) == tuple(range(len(x.shape))):
        return x
    return t.node(
        "Transpose", [x], [x.shape[d] for d in perm], x.dtype, perm=[int(d) for d in perm]
    )


@primitive("transpose")
def _transpose(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    return [_transposed(t, x[0], p["permutation"])]


def _reduce(op: str) -> Write:
    return lambda t, p, x, out: [
        t.node(
            op,
            [x[0], t.constant(np.array(p["axes"], np.int64))],
            out[0].shape,
            out[0].dtype,
            keepdims=0,
        )
    ]


for _jax, _onnx in {
    "reduce_sum": "ReduceSum",
    "reduce_max": "ReduceMax",
    "reduce_min": "ReduceMin",
    "reduce_prod": "ReduceProd",
}.items():
    PRIMITIVES[_jax] = _reduce(_onnx)


@primitive("argmax")
def _argmax(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    from onnx import TensorProto

    index = t.node("ArgMax", x, out[0].shape, np.int64, axis=int(p["axes"][0]), keepdims=0)
    return [
        (
            index
            if np.dtype(out[0].dtype) == np.int64
            else t.node("Cast", [index], out[0].shape, out[0].dtype, to=TensorProto.INT32)
        )
    ]


@primitive("dot_general")
def _dot(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    """MatMul of [batch, rows, contracted] and [batch, contracted, columns]; a product with a matrix
    of weights keeps its rows apart."""
    (left_contracted, right_contracted), (left_batch, right_batch) = p["dimension_numbers"]
    rows = [d for d in range(len(x[0].shape)) if d not in (*left_contracted, *left_batch)]
    columns = [d for d in range(len(x[1].shape)) if d not in (*right_contracted, *right_batch)]
    a, b = (
        _transposed(t, x[0], [*left_batch, *rows, *left_contracted]),
        _transposed(t, x[1], [*right_batch, *right_contracted, *columns]),
    )
    batch = [x[0].shape[d] for d in left_batch]
    m, n, k = (
        [x[0].shape[d] for d in rows],
        [x[1].shape[d] for d in columns],
        prod(x[0].shape[d] for d in left_contracted),
    )
    a, b = (
        as_type(t, v, np.promote_types(x[0].dtype, x[1].dtype)) if x[0].dtype != x[1].dtype else v
        for v in (a, b)
    )
    apart = (
        m if not batch and m else [prod(m)]
    )  # the rows of a product without batch dims may have any rank
    product = t.node(
        "MatMul",
        [t.reshape(a, [*batch, *apart, k]), t.reshape(b, [*batch, k, prod(n)])],
        [*batch, *apart, prod(n)],
        a.dtype,
    )
    return [as_type(t, t.reshape(product, out[0].shape), out[0].dtype)]


def as_type(t: Trace, x: Value, dtype: Any) -> Value:
    """The same numbers in another type."""
    from onnx import helper

    return (
        x
        if x.dtype == np.dtype(dtype)
        else t.node(
            "Cast", [x], x.shape, dtype, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        )
    )


@primitive("conv_general_dilated")
def _conv(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value] | None:
    spec = p["dimension_numbers"]
    if p["batch_group_count"] != 1 or any(n != 1 for n in p["lhs_dilation"]):
        return None
    a, w = _transposed(t, x[0], spec.lhs_spec), _transposed(t, x[1], spec.rhs_spec)
    pads = [int(n) for side in (0, 1) for n in (pair[side] for pair in p["padding"])]
    shape = [out[0].shape[d] for d in spec.out_spec]
    result = t.node(
        "Conv",
        [a, w],
        shape,
        out[0].dtype,
        strides=[int(n) for n in p["window_strides"]],
        dilations=[int(n) for n in p["rhs_dilation"]],
        pads=pads,
        group=int(p["feature_group_count"]),
        kernel_shape=list(w.shape[2:]),
    )
    return [_transposed(t, result, [list(spec.out_spec).index(d) for d in range(len(shape))])]


@primitive("iota")
def _iota(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    shape, d, dtype = p["shape"], p["dimension"], np.dtype(p["dtype"])
    if prod(shape) <= RANGE:
        along_d = [1] * len(shape)
        along_d[d] = shape[d]
        return [
            t.constant(np.broadcast_to(np.arange(shape[d], dtype=dtype).reshape(along_d), shape))
        ]
    line = t.constant(
        np.arange(shape[d], dtype=dtype).reshape(
            [shape[d] if k == d else 1 for k in range(len(shape))]
        )
    )
    return [t.node("Expand", [line, t.constant(np.array(shape, np.int64))], shape, dtype)]


@primitive("concatenate")
def _concat(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    return [t.node("Concat", x, out[0].shape, out[0].dtype, axis=int(p["dimension"]))]


@primitive("split")
def _split(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    return t.several(
        "Split",
        [x[0], t.constant(np.array(p["sizes"], np.int64))],
        [(a.shape, a.dtype) for a in out],
        axis=int(p["axis"]),
    )


@primitive("slice")
def _slice(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    steps = p["strides"] or (1,) * len(x[0].shape)
    tables = (p["start_indices"], p["limit_indices"], range(len(x[0].shape)), steps)
    return [
        t.node(
            "Slice",
            [x[0], *(t.constant(np.array(list(v), np.int64)) for v in tables)],
            out[0].shape,
            out[0].dtype,
        )
    ]


@primitive("pad")
def _pad(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value] | None:
    config = p["padding_config"]
    if any(low < 0 or high < 0 or inner for low, high, inner in config):
        return None
    pads = t.constant(np.array([c[0] for c in config] + [c[1] for c in config], np.int64))
    return [t.node("Pad", [x[0], pads, x[1]], out[0].shape, out[0].dtype)]


@primitive("cumsum")
def _cumsum(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    return [
        t.node(
            "CumSum",
            [x[0], t.constant(np.asarray(p["axis"], np.int64))],
            out[0].shape,
            out[0].dtype,
            reverse=int(p["reverse"]),
        )
    ]


@primitive("gather")
def _gather(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value] | None:
    """Rows of a table by index (Gather), and one element of each row (GatherElements)."""
    d, sizes, (data, index) = p["dimension_numbers"], p["slice_sizes"], x
    if (
        len(d.start_index_map) != 1
        or tuple(d.collapsed_slice_dims) != tuple(d.start_index_map)
        or index.shape[-1:] != (1,)
    ):
        return None
    axis, rank = d.start_index_map[0], len(data.shape)
    places = t.reshape(index, index.shape[:-1])
    if not d.operand_batching_dims:
        rest = [k for k in range(rank) if k != axis]
        where = [k if k < axis else k - 1 + len(places.shape) for k in rest]
        if any(sizes[k] != data.shape[k] for k in rest) or list(d.offset_dims) != where:
            return None
        return [t.node("Gather", [data, places], out[0].shape, out[0].dtype, axis=axis)]
    batch = tuple(range(rank - 1))
    if (
        tuple(d.operand_batching_dims) != batch
        or tuple(d.start_indices_batching_dims) != batch
        or axis != rank - 1
        or d.offset_dims
        or len(places.shape) not in (rank - 1, rank)
    ):
        return None
    wide = t.reshape(places, (*data.shape[:-1], prod(places.shape[rank - 1 :])))
    return [
        t.reshape(
            t.node("GatherElements", [data, wide], wide.shape, out[0].dtype, axis=axis),
            out[0].shape,
        )
    ]


@primitive("dot_product_attention_fwd_wrapper")
def _cudnn_attention(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value] | None:
    """`jax.nn.dot_product_attention(implementation="cudnn")`. Padded and packed sequences have no
    translation."""
    queries, keys, values, bias, *lengths = x
    if len(out) != 1 or any(0 not in v.shape for v in lengths):
        return None
    by_heads = [0, 2, 1, 3]  # of [batch, positions, heads, elements] (layout 0)
    operands = [queries, keys, values]
    if not p["layout"]:
        operands = [_transposed(t, v, by_heads) for v in operands]
    if p["variadic_args"][0]:
        operands.append(bias)
    shape = (*operands[0].shape[:3], operands[2].shape[3])
    result = t.node(
        FUSED,
        operands,
        shape,
        out[0].dtype,
        DOMAIN,
        scale=float(p["scale"]),
        causal=int(p["mask_type"].name == "CAUSAL"),
        window=int(p["sliding_window_length"] or 0),
        kernel="cudnn",
    )
    return [result if p["layout"] else _transposed(t, result, by_heads)]


@primitive("top_k")
def _top_k(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    axis = int(p.get("axis", len(x[0].shape) - 1))
    values, places = _sorted(t, x[0], int(p["k"]), axis, largest=True)
    return [values, as_type(t, places, out[1].dtype)]


@primitive("sort")
def _sort(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value] | None:
    """By one key; other operands follow it (argsort's places)."""
    axis = int(p["dimension"])
    if p["num_keys"] != 1 or np.dtype(x[0].dtype).kind == "b":
        return None
    values, places = _sorted(t, x[0], x[0].shape[axis], axis, largest=False)
    others = [
        t.node("GatherElements", [other, places], other.shape, other.dtype, axis=axis)
        for other in x[1:]
    ]
    return [values, *others]


def _sorted(t: Trace, x: Value, k: int, axis: int, largest: bool) -> list[Value]:
    """The first k values and their places (int64)."""
    shape = tuple(k if d == axis else n for d, n in enumerate(x.shape))
    return t.several(
        "TopK",
        [x, t.constant(np.array([k], np.int64))],
        [(shape, x.dtype), (shape, np.int64)],
        axis=axis,
        largest=int(largest),
        sorted=1,
    )


@primitive("expm1")
def _expm1(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    grown = t.node("Exp", x, x[0].shape, x[0].dtype)
    return [t.node("Sub", [grown, _scalar(t, 1, x[0])], out[0].shape, out[0].dtype)]


@primitive("rev")
def _rev(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    axes, lowest = list(p["dimensions"]), np.iinfo(np.int64).min
    tables = ([-1] * len(axes), [lowest] * len(axes), axes, [-1] * len(axes))
    cut = [t.constant(np.array(v, np.int64)) for v in tables]
    return [t.node("Slice", [x[0], *cut], out[0].shape, out[0].dtype)]


@primitive("stack")
def _stack(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    axis = int(p["axis"])
    rows = [t.reshape(v, (*v.shape[:axis], 1, *v.shape[axis:])) for v in x]
    return [t.node("Concat", rows, out[0].shape, out[0].dtype, axis=axis)]


@primitive("unstack")
def _unstack(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    axis, n = int(p["axis"]), len(out)
    one = (*x[0].shape[:axis], 1, *x[0].shape[axis + 1 :])
    sizes = t.constant(np.array([1] * n, np.int64))
    parts = t.several("Split", [x[0], sizes], [(one, x[0].dtype)] * n, axis=axis)
    return [t.reshape(part, a.shape) for part, a in zip(parts, out, strict=True)]


@primitive("tile")
def _tile(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    times = t.constant(np.array(p["reps"], np.int64))
    return [t.node("Tile", [x[0], times], out[0].shape, out[0].dtype)]


@primitive("rem")
def _rem(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    return [t.node("Mod", t.bare(x, out[0].shape), out[0].shape, out[0].dtype, fmod=1)]


@primitive("dynamic_slice")
def _dynamic_slice(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value] | None:
    """From places that are known: others are read by index."""
    from onnx import numpy_helper

    if any(v.name not in t.initializers or v.parameter for v in x[1:]):
        return None
    sizes = p["slice_sizes"]
    starts = [
        min(max(int(numpy_helper.to_array(t.initializers[v.name])), 0), n - size)
        for v, n, size in zip(x[1:], x[0].shape, sizes, strict=True)
    ]
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    tables = (starts, ends, range(len(starts)), [1] * len(starts))
    cut = [t.constant(np.array(list(v), np.int64)) for v in tables]
    return [t.node("Slice", [x[0], *cut], out[0].shape, out[0].dtype)]
