"""Operators of onnxruntime's own domain, com.microsoft, written in those of ONNX: what its
optimizer, its quantisers and its exporters of language models make of layers. Attention is in
`contrib_attention`, experts are in `experts`.

Read as onnxruntime 1.32 computes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from planner.reader.draft.fold import numpy_dtype
from planner.reader.draft.shapes import ShapeError
from planner.reader.lower.attention import counted
from planner.reader.lower.call import Call, Unsupported
from planner.reader.lower.math import number
from planner.reader.onnx.records import BUFFER

Rule = Callable[[Call], None]


def _skip_norm(call: Call) -> None:
    """The norm of x + skip (+ bias); the sum is the fourth output."""
    if call.wants(1) or call.wants(2):
        raise Unsupported("the mean and deviation of the norm are asked for")
    simple = call.op == "SkipSimplifiedLayerNormalization"
    bias = call.arg(3 if simple else 4)
    total = call.emit("Add", call.inputs[:2], out="" if bias else call.name(3))
    if bias:
        total = call.emit("Add", [total, bias], out=call.name(3))
    scales = [call.arg(2), *([call.arg(3)] if not simple and call.has(3) else [])]
    _norm(call, total, scales, simple)
    call.bind(total, 3)


def _norm(call: Call, x: str, scales: list[str], simple: bool = False) -> None:
    """The first output: x, normalised along its last dim."""
    attrs = {"axis": len(call.draft.shape(x)) - 1, "epsilon": float(call.attr("epsilon", 1e-12))}
    op = "RMSNormalization" if simple else "LayerNormalization"
    call.result(op, [x, *scales], attrs)


def _embed_norm(call: Call) -> None:
    """The norm of the sum of the rows of words, positions and segments; the number of tokens that a
    mask leaves; the sum."""
    ids, segments, words, places, kinds, scale, shift = call.inputs[:7]
    row = (1, *call.shape()[1:])
    where = call.arg(8) or counted(call, row)
    parts = [
        call.emit("Gather", [table, index], {"axis": 0})
        for table, index in ((words, ids), (places, where), (kinds, segments))
        if table
    ]
    total = parts[0]
    for part in parts[1:]:
        total = call.emit("Add", [total, part])
    _norm(call, total, [scale, shift])
    if call.wants(1):
        if call.has(7):
            count = call.emit("ReduceSum", [call.arg(7)], {"axes": (1,), "keepdims": 0})
        else:
            count = call.constant(np.zeros(call.shape()[:1], np.int32), "unmasked")
        call.bind(count, 1)
    call.bind(total, 2)


def _biased(call: Call) -> str:
    """x + bias, where one is given."""
    return call.emit("Add", call.inputs[:2]) if call.has(1) else call.arg(0)


def _bias_gelu(call: Call) -> None:
    kind = "tanh" if call.op == "FastGelu" else "none"
    call.result("Gelu", [_biased(call)], {"approximate": kind})


def _bias_add(call: Call) -> None:
    call.result("Add", [_biased(call), call.arg(2)])


def _bias_split_gelu(call: Call) -> None:
    x = _biased(call)
    axis, half = len(call.shape()) - 1, call.shape()[-1] // 2
    a, b = (cut(call, x, axis, begin, begin + half) for begin in (0, half))
    call.result("Mul", [a, call.emit("Gelu", [b], {"approximate": "none"})])


def cut(call: Call, x: str, axis: int, start: int, end: int, step: int = 1) -> str:
    """A slice of one axis."""
    attrs = {"axes": (axis,), "starts": (start,), "ends": (end,), "steps": (step,)}
    return call.emit("Slice", [x], attrs)


def _matmul_n_bits(call: Call) -> None:
    """x times a matrix [N, K] of packed whole numbers, a scale and a zero point for each block of a
    row."""
    n, k = int(call.attr("N")), int(call.attr("K"))
    if call.has(4):
        raise Unsupported("columns of the matrix in another order (g_idx)")
    weight = _unpacked(call, call.arg(1), call.arg(2), call.arg(3), (n,))
    weight = cut(call, weight, 1, 0, k)
    if call.draft.shape(weight) != (n, k):
        raise ShapeError(f"{list(call.draft.shape(weight))} for a matrix of {n} rows of {k}")
    product = call.emit(
        "MatMul", [call.arg(0), weight], {"trans_b": 1}, out="" if call.has(5) else call.name(0)
    )
    call.bind(
        call.emit("Add", [product, call.arg(5)], out=call.name(0)) if call.has(5) else product
    )


def _gather_blocks(call: Call) -> None:
    """Rows of a table of packed whole numbers."""
    data, ids, scales, zeros = (call.arg(k) for k in range(4))
    shape = call.shape()
    last = len(shape) - 1
    if int(call.attr("gather_axis", 0)) or int(call.attr("quantize_axis", 1)) != last:
        raise Unsupported("rows that are no rows, or blocks along another axis")
    if call.dtype() != "uint8":
        raise Unsupported(f"a table of {call.dtype()}")
    for stored in (scales, zeros):
        call.draft.records.kinds.setdefault(stored, BUFFER)
    packed, scale, zero = (
        call.emit("Gather", [x, ids], {"axis": 0}) if x else "" for x in (data, scales, zeros)
    )
    call.bind(_unpacked(call, packed, scale, zero, (*call.shape(1), *shape[1:-1])))


def _unpacked(call: Call, packed: str, scales: str, zeros: str, lead: tuple[int, ...]) -> str:
    """(packed - zeros) * scales, in the type of the scales: [*lead, K], K rounded up to a block."""
    bits, block = int(call.attr("bits", 4)), int(call.attr("block_size", 128))
    for stored in (scales, zeros):
        call.draft.records.kinds.setdefault(stored, BUFFER)
    if bits not in (2, 4, 8):
        raise Unsupported(f"numbers of {bits} bits")
    draft = call.draft
    dtype = draft.dtype(scales)
    count = _rest(draft.shape(scales), lead)
    scales = call.emit("Reshape", [scales], shape=(*lead, count, 1))
    values = call.emit(
        "Reshape", [_numbers(call, packed, bits, dtype)], shape=(*lead, count, block)
    )
    zero = zeros
    if not zeros:
        zero = number(call, 1 << (bits - 1), dtype)
    elif draft.dtype(zeros) == "uint8":
        stored_zeros = _rest(draft.shape(zeros), lead) * 8 // bits
        zero = call.emit(
            "Reshape", [_numbers(call, zeros, bits, dtype)], shape=(*lead, stored_zeros)
        )
        zero = cut(call, zero, len(lead), 0, count)
    if zeros:
        zero = call.emit("Reshape", [zero], shape=(*lead, count, 1))
    scaled = call.emit("Mul", [call.emit("Sub", [values, zero]), scales])
    return call.emit("Reshape", [scaled], shape=(*lead, count * block))


def _rest(shape: tuple[int, ...], lead: tuple[int, ...]) -> int:
    """Elements behind the leading dims of a tensor, which may have been stored flat."""
    return math.prod(shape) // max(1, math.prod(lead))


def _numbers(call: Call, packed: str, bits: int, dtype: str) -> str:
    """Bytes as the whole numbers packed in them, the lowest bits first: exact in floats, as bytes
    are multiplied by powers of two."""
    values = call.emit("Cast", [packed], {"to": dtype})
    if bits == 8:
        return values
    values = call.emit("Reshape", [values], shape=(*call.draft.shape(packed), 1))
    below = 2.0 ** -np.arange(0, 8, bits)  # down to the number's own lowest bit, and to the next's
    parts = []
    for what, factors in (("own", below), ("next", below / 2**bits)):
        factor = call.constant(factors.astype(numpy_dtype(dtype)), what)
        parts.append(call.emit("Floor", [call.emit("Mul", [values, factor])]))
    above = call.emit("Mul", [parts[1], number(call, 2**bits, dtype)])
    return call.emit("Sub", [parts[0], above])


CONTRIB: dict[str, Rule] = {
    "SkipLayerNormalization": _skip_norm,
    "SkipSimplifiedLayerNormalization": _skip_norm,
    "EmbedLayerNormalization": _embed_norm,
    "BiasGelu": _bias_gelu,
    "FastGelu": _bias_gelu,
    "BiasAdd": _bias_add,
    "BiasSplitGelu": _bias_split_gelu,
    "MatMulNBits": _matmul_n_bits,
    "GatherBlockQuantized": _gather_blocks,
}
