"""Layers that several families share. Activations are [batch, rows, features]; B, S, H, G, D as in
planner.graph.ir.

`linear` is x W + b with W stored [in, out]. `attend` is softmax(scale * q k^T + bias, where
allowed) v, either as the Attention operator of opset 23 or spread over MatMul, Mul, Where, Softmax,
MatMul as exporters without it write.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from models_zoo.builder import Scope

MASKED = float(np.finfo(np.float32).min)
Extend = Callable[[Scope, str, str], tuple[str, str]]
"""(module, keys, values of the new tokens) -> all keys and values so far."""


def linear(
    s: Scope, x: str, size_in: int, size_out: int, *, bias: bool = True, out: str = ""
) -> str:
    """[.., size_in] -> [.., size_out]."""
    w = s.weight("weight", size_in, size_out, std=size_in**-0.5)
    if not bias:
        return s.op("MatMul", x, w, out=out)
    return s.op("Add", s.op("MatMul", x, w), s.weight("bias", size_out, std=0.1), out=out)


def embedding(s: Scope, ids: str, rows: int, width: int) -> tuple[str, str]:
    """Rows of a table, and the table's name (for a tied head)."""
    table = s.weight("weight", rows, width, std=width**-0.5)
    return s.op("Gather", table, ids, axis=0), table


def tied_head(s: Scope, x: str, table: str, *, out: str = "") -> str:
    """Logits x E^T of the embedding table E [vocab, hidden]."""
    return s.op("MatMul", x, s.op("Transpose", table, perm=[1, 0]), out=out)


# Many parameters: what models choose about their last layer, named at the call.
def language_head(
    s: Scope,
    x: str,
    width: int,
    vocab: int,
    table: str = "",
    *,
    bias: bool = False,
    scale: float = 1.0,
    cap: float = 0.0,
) -> None:
    """The model's logits: by the embedding table where one is given, else by a matrix of their
    own; multiplied by `scale`, then kept below `cap` by a hyperbolic tangent (0: not)."""
    last = "" if scale != 1.0 or cap else "logits"
    if not table:
        y = linear(s, x, width, vocab, bias=bias, out=last)
    elif not bias:
        y = tied_head(s, x, table, out=last)
    else:
        y = s.op("Add", tied_head(s, x, table), s.weight("bias", vocab, std=0.1), out=last)
    if scale != 1.0:
        y = s.op("Mul", y, s.f32(scale), out="" if cap else "logits")
    if cap:
        s.op("Mul", s.op("Tanh", s.op("Div", y, s.f32(cap))), s.f32(cap), out="logits")


def layer_norm(s: Scope, x: str, width: int, epsilon: float = 1e-5, *, bias: bool = True) -> str:
    """Over the last dim."""
    weights = [s.weight("weight", width, std=0.1, mean=1.0)]
    weights += [s.weight("bias", width, std=0.1)] if bias else []
    return s.op("LayerNormalization", x, *weights, axis=-1, epsilon=epsilon)


def unit_layer(s: Scope, x: str, *, epsilon: float) -> str:
    """(x - mean(x)) / sqrt(variance(x) + epsilon) over the last dim, spread out: ONNX's operator
    wants a scale."""
    away = s.op("Sub", x, s.op("ReduceMean", x, s.ints(-1), keepdims=1))
    variance = s.op("ReduceMean", s.op("Mul", away, away), s.ints(-1), keepdims=1)
    return s.op("Div", away, s.op("Sqrt", s.op("Add", variance, s.f32(epsilon))))


def rms_norm(
    s: Scope, x: str, width: int, *, epsilon: float = 1e-5, decomposed: bool = False
) -> str:
    """x / sqrt(mean(x^2) + epsilon) * scale over the last dim."""
    scale = s.weight("weight", width, std=0.1, mean=1.0)
    if not decomposed:
        return s.op("RMSNormalization", x, scale, axis=-1, epsilon=epsilon)
    return s.op("Mul", unit_rms(s, x, epsilon=epsilon), scale)


def unit_rms(s: Scope, x: str, *, epsilon: float) -> str:
    """x / sqrt(mean(x^2) + epsilon) over the last dim."""
    mean = s.op("ReduceMean", s.op("Pow", x, s.f32(2.0)), s.ints(-1), keepdims=1)
    root = s.op("Reciprocal", s.op("Sqrt", s.op("Add", mean, s.f32(epsilon))))
    return s.op("Mul", x, root)


def silu(s: Scope, x: str) -> str:
    """x * sigmoid(x)."""
    return s.op("Mul", x, s.op("Sigmoid", x))


def activation(s: Scope, x: str, name: str) -> str:
    """silu, gelu, gelu-tanh, relu, relu2: its square, or xielu, which has two parameters."""
    if name == "silu":
        return silu(s, x)
    if name == "xielu":
        return _xielu(s, x)
    if name in ("gelu", "gelu-tanh"):
        return s.op("Gelu", x, approximate="tanh") if name == "gelu-tanh" else s.op("Gelu", x)
    y = s.op("Relu", x)
    return s.op("Mul", y, y) if name == "relu2" else y


def _xielu(s: Scope, x: str) -> str:
    """b x + p x^2 where x > 0, else b x + n (exp(min(x, e)) - 1 - x), with b = 1/2, e = -1e-6, p
    and n - b softplus of a weight each (Huang and Schlag 2024, arXiv:2411.13010)."""
    p = s.op("Softplus", s.weight("alpha_p", 1, std=0.1, mean=0.2))
    n = s.op("Add", s.op("Softplus", s.weight("alpha_n", 1, std=0.1, mean=-1.0)), s.f32(0.5))
    low = s.op("Sub", s.op("Exp", s.op("Min", x, s.f32(-1e-6))), s.f32(1.0))
    bent = s.op("Mul", s.op("Sub", low, x), n)
    curved = s.op("Mul", s.op("Mul", x, x), p)
    own = s.op("Where", s.op("Greater", x, s.f32(0.0)), curved, bent)
    return s.op("Add", own, s.op("Mul", x, s.f32(0.5)))


def positions(s: Scope, length: int) -> str:
    """0 .. length-1, int64 [length]."""
    return s.op("Range", s.i64(0), s.i64(length), s.i64(1))


def positions_from(s: Scope, start: str, end: str) -> str:
    """start .. end-1 of int64 scalars."""
    return s.op("Range", start, end, s.i64(1))


def angles(s: Scope, x: str, count: int, base: float) -> str:
    """x * base^(-i / count) for i = 0 .. count-1: [.., n] -> [.., n, count].

    The wave lengths are computed, so that nothing looks like a parameter, and divide: the data
    propagation of onnx's shape inference takes a product of vectors [n, 1] and [count] for an
    element-wise one and fails.
    """
    index = s.op("Cast", positions(s, count), to=1)
    length = s.op("Exp", s.op("Mul", index, s.f32(math.log(base) / count)))
    return s.op("Div", s.op("Unsqueeze", x, s.ints(-1)), length)


def causal_mask(s: Scope, length: int) -> str:
    """bool [length, length], True where a query (row) may see a key (column)."""
    index = positions(s, length)
    return s.op(
        "LessOrEqual", s.op("Unsqueeze", index, s.ints(0)), s.op("Unsqueeze", index, s.ints(1))
    )


def window_mask(s: Scope, length: int, window: int) -> str:
    """bool [length, length], True where a key (column) is one of the last `window` up to a query
    (row), or lies behind it."""
    index = positions(s, length)
    first = s.op("Sub", index, s.i64(window - 1))
    return s.op(
        "GreaterOrEqual", s.op("Unsqueeze", index, s.ints(0)), s.op("Unsqueeze", first, s.ints(1))
    )


def split_heads(s: Scope, x: str, rows: int, heads: int, head_dim: int) -> str:
    """[B, S, H*D] -> [B, H, S, D]."""
    return s.op(
        "Transpose", s.op("Reshape", x, s.ints(0, rows, heads, head_dim)), perm=[0, 2, 1, 3]
    )


def merge_heads(s: Scope, x: str, rows: int, width: int) -> str:
    """[B, H, S, D] -> [B, S, H*D]."""
    return s.op("Reshape", s.op("Transpose", x, perm=[0, 2, 1, 3]), s.ints(0, rows, width))


@dataclass(frozen=True)
class Masking:
    """Who sees whom. causal: fused operators use their attribute, spread ones `causal_mask` (bool
    [S, S], made once).

    keys: bool, broadcast to [B, H, S, T], True = attend. bias: float, broadcast likewise, added to
    the scores.
    """

    causal: bool = False
    causal_mask: str = ""
    keys: str = ""
    bias: str = ""


# Many parameters: what models choose about an attention, named at the call.
def attend(
    s: Scope,
    q: str,
    k: str,
    v: str,
    *,
    groups: int = 1,
    scale: float,
    mask: Masking,
    decomposed: bool,
    cap: float = 0.0,
) -> str:
    """Attention of q [B, H, S, D] over k, v [B, H/groups, T, D] -> [B, H, S, D]. cap: what scores
    stay below by a hyperbolic tangent, 0 for none (only spread out).

    A mask may have `keys` or `bias`, not both. Spread out, shared key heads are repeated by
    Unsqueeze, Expand, Reshape (the caller's concern: `repeat_heads`), so there groups must be 1.
    """
    assert not (mask.keys and mask.bias)
    if not decomposed:
        extra = [mask.keys or mask.bias] if mask.keys or mask.bias else []
        return s.op("Attention", q, k, v, *extra, scale=scale, is_causal=int(mask.causal))
    assert groups == 1
    scores = s.op("MatMul", q, s.op("Transpose", k, perm=[0, 1, 3, 2]))
    if scale != 1.0:
        scores = s.op("Mul", scores, s.f32(scale))
    if cap:
        scores = s.op("Mul", s.op("Tanh", s.op("Div", scores, s.f32(cap))), s.f32(cap))
    if mask.bias:
        scores = s.op("Add", scores, mask.bias)
    for allowed in (mask.keys, mask.causal_mask if mask.causal else ""):
        if allowed:
            scores = s.op("Where", allowed, scores, s.f32(MASKED))
    return s.op("MatMul", s.op("Softmax", scores, axis=-1), v)


def repeat_heads(s: Scope, x: str, kv_heads: int, times: int, rows: int, head_dim: int) -> str:
    """[B, G, T, D] -> [B, G*times, T, D], each head repeated in place."""
    if times == 1:
        return x
    spread = s.op("Expand", s.op("Unsqueeze", x, s.ints(2)), s.ints(1, 1, times, 1, 1))
    return s.op("Reshape", spread, s.ints(0, kv_heads * times, rows, head_dim))


# Many parameters: they are the sizes and variants of one layer, and the models that share it name
# them at the call; a record of them would be built there for that call alone.
def self_attention(
    s: Scope,
    x: str,
    rows: int,
    width: int,
    heads: int,
    *,
    names: tuple[str, str, str, str],
    mask: Masking,
    decomposed: bool,
    extend: Extend | None = None,
    kv_heads: int | None = None,
) -> str:
    """Multi-head attention with biases (GPT, BERT, ViT). names: the q, k, v and output projections'
    modules; extend: puts keys and values behind earlier ones; kv_heads: theirs, by default as
    many."""
    head_dim, shared = width // heads, kv_heads or heads
    q, k, v = (
        split_heads(s.at(n), linear(s.at(n), x, width, own * head_dim), rows, own, head_dim)
        for n, own in zip(names[:3], (heads, shared, shared), strict=True)
    )
    if extend:
        k, v = extend(s, k, v)
    groups = heads // shared
    if decomposed:
        k, v = (repeat_heads(s, y, shared, groups, rows, head_dim) for y in (k, v))
        groups = 1
    context = attend(
        s, q, k, v, groups=groups, scale=head_dim**-0.5, mask=mask, decomposed=decomposed
    )
    return linear(s.at(names[3]), merge_heads(s, context, rows, width), width, width)
