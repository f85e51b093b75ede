"""Operators of com.microsoft that onnxruntime's graph optimizations leave in a saved model: layers
with their activation, and quantised ones as ONNX's own operators in a row. Read as onnxruntime
1.32 computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from planner.reader.lower.call import Call, Unsupported
from planner.reader.lower.layers import NETS
from planner.reader.lower.math import MATH

Rule = Callable[[Call], None]

_ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "Relu": (),
    "Sigmoid": (),
    "Tanh": (),
    "LeakyRelu": ("alpha",),
    "Elu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "Clip": ("min", "max"),
}
"""Activations that are fused into layers, and their numbers in order."""


def _activated(layer: Rule) -> Rule:
    """A layer, what is added to its result (a Conv's), then its activation."""

    def rule(call: Call) -> None:
        kind = str(call.attr("activation", ""))
        if kind and kind not in _ACTIVATIONS:
            raise Unsupported(f"the activation {kind}")
        layer(call)
        result = call.frame.env[call.node.output[0]] or ""
        if call.op == "FusedConv" and call.has(3):
            result = call.emit("Add", [result, call.arg(3)])
        if kind:
            parameters = list(call.attr("activation_params", ()))
            parameters = parameters or [
                call.attr(f"activation_{k}")
                for k in ("alpha", "beta")
                if f"activation_{k}" in call.attrs
            ]
            attrs = {k: float(v) for k, v in zip(_ACTIVATIONS[kind], parameters, strict=False)}
            result = call.emit(kind, [result], attrs)
        call.bind(result)

    return rule


def _quantised(operands: str, text: str, bias: int = -1, result: int = -1) -> Rule:
    """ONNX nodes in a row, which make f: to it slot `bias` is added, and it is quantised by the
    scale and zero point from slot `result` on, where they are given."""

    def rule(call: Call) -> None:
        names = operands.split()
        tail = ""
        last = "f"
        if bias >= 0 and call.has(bias):
            tail, last = f" g = Add(f, {names[bias]})", "g"
        if result >= 0 and call.has(result):
            scale, zero = names[result : result + 2]
            tail += f" h = QuantizeLinear({last}, {scale}, {zero})"
            last = "h"
        call.lowering.enter(call, _function(f"{operands} -> {last} : {text}{tail}"))

    return rule


@lru_cache(maxsize=64)
def _function(text: str) -> Any:
    """A function of ONNX's operators from "operands -> result : nodes"."""
    from onnx import parser

    head, _, body = text.partition(" : ")
    operands, _, results = head.partition(" -> ")
    return parser.parse_function(
        '<opset_import: ["" : 21], domain: "com.microsoft">'
        f" f ({', '.join(operands.split())}) => ({results}) {{ {body} }}"
    )


def _q_gemm(call: Call) -> None:
    """A product of quantised matrices whose bias is in units of both scales."""
    if float(call.attr("alpha", 1.0)) != 1.0:
        raise Unsupported("QGemm with a factor")
    turned = [bool(call.attr(k, 0)) for k in ("transA", "transB")]
    a, b = (
        f"Transpose<perm = [1, 0]>({n})" if t else f"Identity({n})"
        for n, t in zip("AB", turned, strict=True)
    )
    bias = " t = Add(n, C)" if call.has(6) else " t = Identity(n)"
    _quantised(
        "A as az B bs bz C ys yz",
        f"l = {a} r = {b} n = MatMulInteger(l, r, az, bz){bias} c = Cast<to = 1>(t)"
        " s = Mul(as, bs) f = Mul(c, s)",
        result=7,
    )(call)


_DYNAMIC = (
    "q, as, az = DynamicQuantizeLinear(A) n = MatMulInteger(q, B, az, bz) c = Cast<to = 1>(n)"
    " s = Mul(as, bs) f = Mul(c, s)"
)
_FLOATING = "n = MatMulInteger(A, B, az, bz) c = Cast<to = 1>(n) s = Mul(as, bs) f = Mul(c, s)"


def integer_product(call: Call, operands: list[str]) -> None:
    """The first output is A B + bias of quantised A, B: these, their scales, zero points, bias."""
    names = "A B as bs az bz bias"
    tail, last = (" g = Add(f, bias)", "g") if operands[6] else ("", "f")
    inner = Call(call.lowering, call.node, call.frame, call.id, call.scope, operands)
    inner.lowering.enter(inner, _function(f"{names} -> {last} : {_FLOATING}{tail}"))


_BINARY = "A as az B bs bz cs cz"

CONTRIB_FUSED: dict[str, Rule] = {
    "FusedConv": _activated(NETS["Conv"]),
    "FusedGemm": _activated(MATH["Gemm"]),
    "DynamicQuantizeMatMul": _quantised("A B bs bz bias", _DYNAMIC, bias=4),
    "MatMulIntegerToFloat": _quantised("A B as bs az bz bias", _FLOATING, bias=6),
    "QGemm": _q_gemm,
    **{
        f"QLinear{op}": _quantised(
            _BINARY,
            f"a = DequantizeLinear(A, as, az) b = DequantizeLinear(B, bs, bz) f = {op}(a, b)",
            result=6,
        )
        for op in ("Add", "Mul")
    },
}
