"""Element-wise operators, reductions and matrix products to their canonical spelling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from planner.reader.draft.fold import numpy_dtype
from planner.reader.draft.shapes import ShapeError, broadcast, words
from planner.reader.lower.call import Call
from planner.reader.onnx.tensors import dtype_name

Rule = Callable[[Call], None]


def _unary(call: Call) -> None:
    call.result(call.op, [call.arg(0)])


def _with_floats(**defaults: float) -> Rule:
    def rule(call: Call) -> None:
        call.result(
            call.op, [call.arg(0)], {k: float(call.attr(k, v)) for k, v in defaults.items()}
        )

    return rule


def legacy_broadcast(call: Call) -> list[str]:
    """Operands of a binary operator; before opset 7 the second may be aligned to an axis by
    attributes."""
    a, b = call.arg(0), call.arg(1)
    if call.opset < 7 and call.attr("broadcast", 0) and "axis" in call.attrs:
        rank, shape = len(call.shape(0)), call.shape(1)
        axis = call.axis(call.attr("axis"), rank)
        b = call.emit("Reshape", [b], shape=(*shape, *(1,) * (rank - axis - len(shape))))
    return [a, b]


def _binary(call: Call) -> None:
    call.result(call.op, legacy_broadcast(call))


def _where(call: Call) -> None:
    condition = call.draft.value(call.arg(0))
    if condition is not None and condition.size and (condition.all() or not condition.any()):
        chosen = call.arg(1 if condition.all() else 2)
        whole = broadcast(condition.shape, call.shape(1), call.shape(2))
        if call.draft.shape(chosen) == whole:
            call.bind(chosen)  # a guard of what is known
            return
    call.result("Where", call.inputs)


def _pow(call: Call) -> None:
    a, b = legacy_broadcast(call)
    if call.draft.dtype(a) != call.draft.dtype(b):
        b = call.emit("Cast", [b], {"to": call.draft.dtype(a)})
    call.result("Pow", [a, b])


def _mod(call: Call) -> None:
    call.result("Mod", [call.arg(0), call.arg(1)], {"fmod": 1} if call.attr("fmod", 0) else {})


def chain(call: Call, op: str, operands: list[str]) -> str:
    """A variadic operator as a left-leaning chain of two-operand ones, the last named as the
    output."""
    x = operands[0]
    for k, other in enumerate(operands[1:], 1):
        x = call.emit(op, [x, other], out=call.name(0) if k == len(operands) - 1 else "")
    return x


def _variadic(op: str) -> Rule:
    def rule(call: Call) -> None:
        call.bind(chain(call, op, call.inputs))

    return rule


def _mean(call: Call) -> None:
    if len(call.inputs) == 1:
        call.bind(call.arg(0))
        return
    x = call.inputs[0]
    for other in call.inputs[1:]:
        x = call.emit("Add", [x, other])
    call.result("Div", [x, number(call, len(call.inputs), call.dtype())])


def number(call: Call, value: float, dtype: str) -> str:
    """A scalar constant operand."""
    return call.constant(np.asarray(value, numpy_dtype(dtype)), "number")


def _clip(call: Call) -> None:
    x, attrs = call.arg(0), {}
    bounds: list[tuple[str, str, Any]] = []
    for k, key, op in ((1, "min", "Max"), (2, "max", "Min")):
        if call.opset < 11:
            if key in call.attrs:
                attrs[key] = float(call.attr(key))
        elif call.has(k):
            value = call.draft.scalar(call.arg(k))
            if value is None:
                bounds.append((op, call.arg(k), None))
            else:
                attrs[key] = value
    if attrs:
        x = call.emit("Clip", [x], dict(attrs), out="" if bounds else call.name(0))
    for op, bound, _ in bounds:
        x = call.emit(op, [x, bound])
    call.bind(x)


def _cast(call: Call) -> None:
    call.result("Cast", [call.arg(0)], {"to": dtype_name(call.attr("to"))})


def _cast_like(call: Call) -> None:
    call.result("Cast", [call.arg(0)], {"to": call.dtype(1)})


def _identity(call: Call) -> None:
    x = call.arg(0)
    draft = call.draft
    if x in draft.refs and call.name() not in draft.types:
        # one initializer under several names: kept apart until it is known whether the tie is real
        name = draft.fresh(call.name())
        draft.refs[name], draft.types[name] = draft.refs[x], draft.types[x]
        draft.copy_of[name] = draft.copy_of.get(x, x)
        x = name
    call.bind(x)


def _gelu(call: Call) -> None:
    call.result("Gelu", [call.arg(0)], {"approximate": call.attr("approximate", "none")})


def _quick_gelu(call: Call) -> None:
    x = call.arg(0)
    scaled = call.emit("Mul", [x, number(call, call.attr("alpha", 1.702), call.dtype())])
    call.result("Mul", [x, call.emit("Sigmoid", [scaled])])


def _swish(call: Call) -> None:
    alpha, x = call.attr("alpha", 1.0), call.arg(0)
    if alpha == 1.0:
        call.result("Silu", [x])
    else:
        call.result(
            "Mul",
            [x, call.emit("Sigmoid", [call.emit("Mul", [x, number(call, alpha, call.dtype())])])],
        )


def _hard_swish(call: Call) -> None:
    x = call.arg(0)
    call.result("Mul", [x, call.emit("HardSigmoid", [x], {"alpha": 1 / 6, "beta": 0.5})])


def _prelu(call: Call) -> None:
    x, slope = call.arg(0), call.arg(1)
    if call.opset < 7 and len(call.shape(1)) == 1 and len(call.shape(0)) > 2:
        slope = call.emit(
            "Reshape", [slope], shape=(call.shape(1)[0], *(1,) * (len(call.shape(0)) - 2))
        )
    zero = number(call, 0, call.dtype())
    negative = call.emit("Mul", [slope, call.emit("Min", [x, zero])])
    call.result("Add", [call.emit("Relu", [x]), negative])


def _softmax(call: Call) -> None:
    x, shape = call.arg(0), call.shape()
    axis = call.axis(call.attr("axis", 1 if call.opset < 13 else -1), len(shape))
    if call.opset >= 13 or axis == len(shape) - 1:
        call.result(call.op, [x], {"axis": axis})
        return
    rows = int(
        np.prod(shape[:axis], dtype=object)
    )  # before opset 13 everything from the axis on is one dim
    flat = call.emit("Reshape", [x], shape=(rows, int(np.prod(shape[axis:], dtype=object))))
    call.result("Reshape", [call.emit(call.op, [flat], {"axis": 1})], shape=shape)


def reduce_axes(call: Call) -> tuple[int, ...] | None:
    """Normalised axes of a reduction; None when it is the identity."""
    rank = len(call.shape())
    if call.has(1):
        axes = call.ints(1, "the list of reduced axes")
    else:
        axes = list(call.attr("axes", []))
    if not axes:
        return None if call.attr("noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted({call.axis(a, rank) for a in axes}))


def _reduce(call: Call) -> None:
    axes = reduce_axes(call)
    if axes is None or not call.shape():
        call.bind(call.arg(0))
    else:
        call.result(
            call.op, [call.arg(0)], {"axes": axes, "keepdims": int(call.attr("keepdims", 1))}
        )


def _reduce_by_parts(call: Call) -> None:
    """ReduceL1, L2, SumSquare, LogSum and LogSumExp from the plain reductions."""
    axes = reduce_axes(call)
    x, op = call.arg(0), call.op
    keep: dict[str, Any] = {"axes": axes or (), "keepdims": int(call.attr("keepdims", 1))}
    if op == "ReduceLogSumExp":
        if axes is None:
            call.bind(x)
            return
        top = call.emit("ReduceMax", [x], {"axes": axes, "keepdims": 1})
        total = call.emit("ReduceSum", [call.emit("Exp", [call.emit("Sub", [x, top])])], dict(keep))
        if not keep["keepdims"]:
            top = call.emit("Reshape", [top], shape=call.draft.shape(total))
        call.result("Add", [call.emit("Log", [total]), top])
        return
    if op == "ReduceL1":
        x = call.emit("Abs", [x])
    elif op in ("ReduceL2", "ReduceSumSquare"):
        x = call.emit("Mul", [x, x])
    total = x if axes is None else call.emit("ReduceSum", [x], keep)
    if op in ("ReduceL2", "ReduceLogSum"):
        total = call.emit("Sqrt" if op == "ReduceL2" else "Log", [total])
    call.bind(total)


def matmul(call: Call, a: str, b: str, out: str = "") -> str:
    """numpy's matmul, vectors included, from the canonical one (ranks of at least two)."""
    sa, sb = call.draft.shape(a), call.draft.shape(b)
    if not sa or not sb:
        raise ShapeError(f"a matrix product of shapes {list(sa)} and {list(sb)}")
    if len(sa) > 1 and len(sb) > 1:
        return call.emit("MatMul", [a, b], out=out)
    if len(sa) == 1:
        a = call.emit("Reshape", [a], shape=(1, *sa))
    if len(sb) == 1:
        b = call.emit("Reshape", [b], shape=(*sb, 1))
    product = call.emit("MatMul", [a, b])
    shape = list(call.draft.shape(product))
    if len(sb) == 1:
        del shape[-1]
    if len(sa) == 1:
        del shape[-1 if len(sb) == 1 else -2]
    return call.emit("Reshape", [product], shape=tuple(shape), out=out)


def _matmul(call: Call) -> None:
    call.bind(matmul(call, call.arg(0), call.arg(1), call.name(0)))


def _fused_matmul(call: Call) -> None:
    """A product of com.microsoft with its factor; batch dims may lie behind the rows."""
    flags: dict[str, Any] = {}
    sides = []
    for slot, side in enumerate("AB"):
        x, rank = call.arg(slot), len(call.shape(slot))
        if call.attr(f"transBatch{side}", 0):
            x = call.emit("Transpose", [x], {"perm": (*range(1, rank - 1), 0, rank - 1)})
        sides.append(x)
        flags[f"trans_{side.lower()}"] = int(call.attr(f"trans{side}", 0))
    call.bind(scaled(call, call.emit("MatMul", sides, flags), call.attr("alpha", 1.0)))


def scaled(call: Call, x: str, factor: float) -> str:
    """x * factor, or x when the factor is 1."""
    return x if factor == 1.0 else call.emit("Mul", [x, number(call, factor, call.draft.dtype(x))])


def _gemm(call: Call) -> None:
    alpha, beta = call.attr("alpha", 1.0), call.attr("beta", 1.0)
    flags: dict[str, Any] = {
        k: 1
        for k, onnx_name in (("trans_a", "transA"), ("trans_b", "transB"))
        if call.attr(onnx_name, 0)
    }
    plain = alpha == 1.0 and not call.has(2)
    x = scaled(
        call,
        call.emit("MatMul", [call.arg(0), call.arg(1)], flags, out=call.name(0) if plain else ""),
        alpha,
    )
    if call.has(2) and beta != 0.0:
        x = call.emit("Add", [x, scaled(call, call.arg(2), beta)], out=call.name(0))
    call.bind(x)


def _arg_reduce(call: Call) -> None:
    axis = call.axis(call.attr("axis", 0), len(call.shape()))
    attrs: dict[str, Any] = {"axis": axis, "keepdims": int(call.attr("keepdims", 1))}
    if not call.attr("select_last_index", 0):
        call.result(call.op, [call.arg(0)], attrs)
        return
    last = call.shape()[axis] - 1  # the last of equal elements is the first from the other end
    back = call.emit(
        "Slice", [call.arg(0)], {"axes": (axis,), "starts": (last,), "ends": (-1,), "steps": (-1,)}
    )
    position = call.emit(call.op, [back], attrs)
    call.result("Sub", [number(call, last, call.draft.dtype(position)), position])


def _cumsum(call: Call) -> None:
    axis = call.axis(call.ints(1, "the axis")[0], len(call.shape()))
    flags: dict[str, Any] = {
        "exclusive": int(call.attr("exclusive", 0)),
        "reverse": int(call.attr("reverse", 0)),
    }
    call.result("CumSum", [call.arg(0)], {"axis": axis, **flags})


_PLAIN = words(
    "Relu Sigmoid Tanh Erf Exp Log Sqrt Reciprocal Neg Abs Sin Cos Softplus IsNaN Not Floor Ceil"
    " Round Sign"
)
MATH: dict[str, Rule] = {
    **dict.fromkeys(_PLAIN, _unary),
    "Elu": _with_floats(alpha=1.0),
    "LeakyRelu": _with_floats(alpha=0.01),
    "HardSigmoid": _with_floats(alpha=0.2, beta=0.5),
    **dict.fromkeys(
        words("Add Sub Mul Div Equal Less LessOrEqual Greater GreaterOrEqual And Or Xor"), _binary
    ),
    "Where": _where,
    "Pow": _pow,
    "Mod": _mod,
    "Max": _variadic("Max"),
    "Min": _variadic("Min"),
    "Sum": _variadic("Add"),
    "Mean": _mean,
    "Clip": _clip,
    "Cast": _cast,
    "CastLike": _cast_like,
    "Identity": _identity,
    "Gelu": _gelu,
    "QuickGelu": _quick_gelu,
    "Swish": _swish,
    "HardSwish": _hard_swish,
    "PRelu": _prelu,
    "Softmax": _softmax,
    "LogSoftmax": _softmax,
    "Hardmax": _softmax,
    **dict.fromkeys(words("ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd"), _reduce),
    **dict.fromkeys(
        words("ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSum ReduceLogSumExp"), _reduce_by_parts
    ),
    "MatMul": _matmul,
    "FusedMatMul": _fused_matmul,
    "Gemm": _gemm,
    "ArgMax": _arg_reduce,
    "ArgMin": _arg_reduce,
    "CumSum": _cumsum,
}
