"""Llama: RMSNorm, rotary positions, grouped key heads, SwiGLU.

RMSNormalization and Attention are operators of opset 23; decomposed=1 spreads them out as older
exporters do. Rotary is spread out by default, x*cos + rotate_half(x)*sin with cos, sin [1, 1, S,
D], as exporters of opset 23 write it too; rotary=op writes the RotaryEmbedding operator, whose
positions [batch, seq] follow the batch. Rescaled rotary frequencies (Llama 3.1 and later) change
constants, not shapes, and are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from models_zoo.builder import Net, Scope
from models_zoo.cache import SEQUENCE, Cache
from models_zoo.layers import (
    Extend,
    Masking,
    angles,
    attend,
    causal_mask,
    embedding,
    language_head,
    linear,
    merge_heads,
    positions,
    repeat_heads,
    rms_norm,
    silu,
    split_heads,
)
from models_zoo.spec import Family, Preset, require


@dataclass(frozen=True)
class LlamaConfig:
    """head_dim: by default hidden / heads. attention_bias, mlp_bias: biases on those projections;
    qkv_bias: on all but the output's (Qwen 2).

    qk_norm: queries and keys pass an RMSNorm of one head's width (Qwen 3). act=gelu-tanh,
    scale_embedding (by the root of hidden): Gemma, whose norms multiply by 1 + weight, which is a
    matter of values. cap: what scores stay below by a hyperbolic tangent (Gemma
    2), 0 for none. packed: positions of a sequence have the number of theirs (segment_ids), and see
    those of the same alone. cache: keys and values of earlier tokens are inputs (models_zoo.cache).
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ff: int
    vocab: int
    seq: int
    theta: float = 10000.0
    epsilon: float = 1e-5
    head_dim: int | None = None
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    decomposed: bool = False
    rotary: Literal["spread", "op"] = "spread"
    qkv_bias: bool = False
    qk_norm: bool = False
    act: Literal["silu", "gelu-tanh"] = "silu"
    scale_embedding: bool = False
    cap: float = 0.0
    packed: bool = False
    cache: bool = False

    @property
    def rows(self) -> int:
        """Tokens of a sequence as reshapes spell them: with a cache the extent is the input's."""
        return -1 if self.cache else self.seq

    @property
    def width(self) -> int:
        """Features of one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def rotary_width(self) -> int:
        """Features of a head that rotate."""
        return self.width


Rotate = Callable[[Scope, str], str]
"""(module, x [B, H, S, rotary_width]) -> x with its positions turned in."""


def build(c: LlamaConfig, net: Net) -> None:
    """input_ids [batch, seq] -> logits [batch, seq, vocab]."""
    decoder(c, net, feed=lambda _, s, x: gated(s.at("mlp"), x, c, c.ff))


def gated(s: Scope, x: str, c: LlamaConfig, width: int) -> str:
    """down(act(gate(x)) * up(x)), `width` wide inside."""
    gate, up = (
        linear(s.at(n), x, c.hidden, width, bias=c.mlp_bias) for n in ("gate_proj", "up_proj")
    )
    a = s.at("act_fn")
    gate = silu(a, gate) if c.act == "silu" else a.op("Gelu", gate, approximate="tanh")
    return linear(s.at("down_proj"), s.op("Mul", gate, up), width, c.hidden, bias=c.mlp_bias)


Feed = Callable[[int, Scope, str], str]
"""(layer, its module, x [batch, seq, hidden]) -> the feed-forward's result, same shape."""


def decoder(
    c: LlamaConfig,
    net: Net,
    *,
    feed: Feed,
    attention: Callable[[Scope, str, Rotate, Masking], str] | None = None,
) -> None:
    """The whole model around a feed-forward, and an attention in place of Llama's
    (mixture-of-experts models pass theirs)."""
    _check(c, net.name, attention is not None)
    s = net.root.at("model")
    cache = Cache(net, c.layers, c.kv_heads, c.width) if c.cache else None
    ids = cache.ids if cache else net.input("input_ids", [net.batch, c.seq], "int64")
    x, table = embedding(s.at("embed_tokens"), ids, c.vocab, c.hidden)
    if c.scale_embedding:
        x = s.at("embed_tokens").op("Mul", x, s.f32(c.hidden**0.5))
    rotate = _rotary(s.at("rotary_emb"), ids, c, cache)
    mask = (
        Masking(keys=cache.allowed)
        if cache
        else Masking(
            causal=True,
            causal_mask=causal_mask(s.at("mask"), c.seq) if c.decomposed or c.cap else "",
            keys=_segments(s.at("mask"), net, c) if c.packed else "",
        )
    )
    for i in range(c.layers):
        layer = s.at(f"layers.{i}")
        h = _norm(layer.at("input_layernorm"), x, c)
        own = layer.at("self_attn")
        x = layer.op(
            "Add",
            x,
            (
                attention(own, h, rotate, mask)
                if attention
                else _attention(
                    own, h, c, rotate, mask, partial(cache.extend, layer=i) if cache else None
                )
            ),
        )
        h = _norm(layer.at("post_attention_layernorm"), x, c)
        x = layer.op("Add", x, feed(i, layer, h))
    x = _norm(s.at("norm"), x, c)
    language_head(net.root.at("lm_head"), x, c.hidden, c.vocab, table if c.tied else "")
    net.output("logits", [net.batch, SEQUENCE if cache else c.seq, c.vocab])
    if cache:
        cache.outputs()


def _segments(s: Scope, net: Net, c: LlamaConfig) -> str:
    """bool [batch, 1, seq, seq], True where two positions are of the same sequence."""
    ids = net.input("segment_ids", [net.batch, c.seq], "int64")
    rows, keys = (s.op("Unsqueeze", ids, s.ints(*dims)) for dims in ((1, 3), (1, 2)))
    return s.op("Equal", rows, keys)


def _check(c: LlamaConfig, name: str, replaced: bool) -> None:
    """Refuses sizes that do not fit together. replaced: another attention stands in place of
    Llama's."""
    require(
        c.head_dim is not None or c.hidden % c.heads == 0,
        f"{name}: hidden={c.hidden} is not a multiple of heads={c.heads}",
    )
    require(
        c.heads % c.kv_heads == 0,
        f"{name}: heads={c.heads} is not a multiple of kv_heads={c.kv_heads}",
    )
    require(
        c.rotary_width % 2 == 0,
        f"{name}: rotary positions need an even head width, {c.rotary_width} given",
    )
    require(
        not (c.cache and (replaced or c.rotary == "op")),
        f"{name}: a cache is written for grouped heads and rotary=spread",
        "leave out cache",
    )
    require(not (c.cache and c.packed), f"{name}: sequences are packed for training alone")


def _norm(s: Scope, x: str, c: LlamaConfig) -> str:
    return rms_norm(s, x, c.hidden, epsilon=c.epsilon, decomposed=c.decomposed)


def _attention(
    s: Scope, x: str, c: LlamaConfig, rotate: Rotate, mask: Masking, extend: Extend | None
) -> str:
    sizes = (("q_proj", c.heads), ("k_proj", c.kv_heads), ("v_proj", c.kv_heads))
    bias = c.attention_bias or c.qkv_bias
    q, k, v = (
        split_heads(
            s.at(n),
            linear(s.at(n), x, c.hidden, heads * c.width, bias=bias),
            c.rows,
            heads,
            c.width,
        )
        for n, heads in sizes
    )
    if c.qk_norm:
        q, k = (
            rms_norm(s.at(n), y, c.width, epsilon=c.epsilon, decomposed=c.decomposed)
            for n, y in (("q_norm", q), ("k_norm", k))
        )
    q, k, groups = rotate(s, q), rotate(s, k), c.heads // c.kv_heads
    if extend:
        k, v = extend(s, k, v)
    spread = c.decomposed or c.cap > 0
    if spread:
        k, v = (repeat_heads(s, x, c.kv_heads, groups, c.rows, c.width) for x in (k, v))
        groups = 1
    context = attend(
        s, q, k, v, groups=groups, scale=c.width**-0.5, mask=mask, decomposed=spread, cap=c.cap
    )
    return linear(
        s.at("o_proj"),
        merge_heads(s, context, c.rows, c.heads * c.width),
        c.heads * c.width,
        c.hidden,
        bias=c.attention_bias,
    )


def _rotary(s: Scope, ids: str, c: LlamaConfig, cache: Cache | None) -> Rotate:
    """Write the tables cos, sin of position * theta^(-2i/D) once; return what rotates x [B, H, S,
    D]."""
    half = c.rotary_width // 2
    index = cache.position if cache else positions(s, c.seq)
    angle = angles(s, s.op("Cast", index, to=1), half, c.theta)
    if c.rotary == "op":
        cos, sin = s.op("Cos", angle), s.op("Sin", angle)
        where = s.op("Expand", s.op("Unsqueeze", index, s.ints(0)), s.op("Shape", ids))
        return lambda at, x: at.op("RotaryEmbedding", x, cos, sin, where)
    both = s.op(
        "Unsqueeze", s.op("Concat", angle, angle, axis=-1), s.ints(1) if cache else s.ints(0, 1)
    )  # [batch or 1, 1, S, D]
    cos, sin = s.op("Cos", both), s.op("Sin", both)

    def rotate(at: Scope, x: str) -> str:
        low, high = (
            at.op("Slice", x, at.ints(a), at.ints(b), at.ints(-1))
            for a, b in ((0, half), (half, c.rotary_width))
        )
        turned = at.op("Concat", at.op("Neg", high), low, axis=-1)
        return at.op("Add", at.op("Mul", x, cos), at.op("Mul", turned, sin))

    return rotate


FAMILY = Family(
    "llama",
    {
        "llama-tiny": Preset(LlamaConfig(2, 64, 4, 2, 176, 512, 16), "Llama for tests", batch=4),
        "llama2-7b": Preset(LlamaConfig(32, 4096, 32, 32, 11008, 32000, 4096), "Llama 2"),
        "llama2-13b": Preset(LlamaConfig(40, 5120, 40, 40, 13824, 32000, 4096), "Llama 2"),
        "llama2-70b": Preset(LlamaConfig(80, 8192, 64, 8, 28672, 32000, 4096), "Llama 2"),
        "mistral-7b": Preset(LlamaConfig(32, 4096, 32, 8, 14336, 32000, 4096), "Mistral 7B"),
        "llama3-8b": Preset(LlamaConfig(32, 4096, 32, 8, 14336, 128256, 8192, 500000.0), "Llama 3"),
        "llama3-70b": Preset(
            LlamaConfig(80, 8192, 64, 8, 28672, 128256, 8192, 500000.0), "Llama 3"
        ),
        "llama3-405b": Preset(
            LlamaConfig(126, 16384, 128, 8, 53248, 128256, 8192, 500000.0), "Llama 3.1"
        ),
    },
    build,
)
