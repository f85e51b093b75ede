"""T5: encoder and decoder with relative position biases, RMSNorm, no biases, no scaling of the
scores.

The bias of the first layer's table [buckets, heads] is shared by all layers of its stack. The
buckets of the distance d = key - query are computed in the graph, as exporters write it: exact for
|d| < half, then logarithmic up to `max_distance`; the encoder gives each sign half of the buckets,
the decoder knows d <= 0 only. A tied head scales its input by hidden^-1/2 (T5 1.0);
ff_form=gated-gelu, tied=0 is T5 1.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from models_zoo.builder import Net, Scope
from models_zoo.layers import (
    Masking,
    attend,
    causal_mask,
    embedding,
    language_head,
    linear,
    merge_heads,
    positions,
    rms_norm,
    split_heads,
)
from models_zoo.spec import Family, Preset, require


@dataclass(frozen=True)
class T5Config:
    """layers: of each stack (decoder_layers overrides). seq, target: lengths of the two inputs."""

    layers: int
    hidden: int
    heads: int
    head_dim: int
    ff: int
    vocab: int = 32128
    seq: int = 512
    target: int = 512
    decoder_layers: int | None = None
    buckets: int = 32
    max_distance: int = 128
    ff_form: Literal["relu", "gated-gelu"] = "relu"
    tied: bool = True
    epsilon: float = 1e-6
    decomposed: bool = False


def build(c: T5Config, net: Net) -> None:
    """input_ids [batch, seq], decoder_input_ids [batch, target] -> logits [batch, target,
    vocab]."""
    require(
        c.buckets >= 4 and c.buckets % 4 == 0,
        f"{net.name}: buckets={c.buckets} is not a multiple of 4",
    )
    require(
        c.max_distance > c.buckets // 2,
        f"{net.name}: max_distance={c.max_distance} must pass buckets/2 = {c.buckets // 2}",
    )
    ids = net.input("input_ids", [net.batch, c.seq], "int64")
    decoder_ids = net.input("decoder_input_ids", [net.batch, c.target], "int64")
    x, table = embedding(net.root.at("shared"), ids, c.vocab, c.hidden)
    e, d = net.root.at("encoder"), net.root.at("decoder")
    mask = Masking(bias=_relative_bias(e.at("block.0/layer.0/SelfAttention"), c, c.seq, both=True))
    for i in range(c.layers):
        block = e.at(f"block.{i}")
        x = _attention(block.at("layer.0"), "SelfAttention", x, x, c, (c.seq, c.seq), mask)
        x = _feed(block.at("layer.1"), x, c)
    encoded = _norm(e.at("final_layer_norm"), x, c)
    x = d.at("embed_tokens").op("Gather", table, decoder_ids, axis=0)
    bias = _relative_bias(d.at("block.0/layer.0/SelfAttention"), c, c.target, both=False)
    mask = Masking(
        causal=True,
        causal_mask=causal_mask(d.at("mask"), c.target) if c.decomposed else "",
        bias=bias,
    )
    for i in range(c.decoder_layers or c.layers):
        block = d.at(f"block.{i}")
        x = _attention(block.at("layer.0"), "SelfAttention", x, "", c, (c.target, c.target), mask)
        x = _attention(
            block.at("layer.1"), "EncDecAttention", x, encoded, c, (c.target, c.seq), Masking()
        )
        x = _feed(block.at("layer.2"), x, c)
    _head(net.root.at("lm_head"), _norm(d.at("final_layer_norm"), x, c), table, c)
    net.output("logits", [net.batch, c.target, c.vocab])


def _head(s: Scope, x: str, table: str, c: T5Config) -> None:
    x = s.op("Mul", x, s.f32(c.hidden**-0.5)) if c.tied else x
    language_head(s, x, c.hidden, c.vocab, table if c.tied else "")


def _norm(s: Scope, x: str, c: T5Config) -> str:
    return rms_norm(s, x, c.hidden, epsilon=c.epsilon, decomposed=c.decomposed)


def _attention(
    s: Scope, name: str, x: str, memory: str, c: T5Config, rows: tuple[int, int], mask: Masking
) -> str:
    """x + attention of norm(x) over the memory (its own rows when rows are of the same stack)."""
    a, inner = s.at(name), c.heads * c.head_dim
    h = _norm(s.at("layer_norm"), x, c)
    seen = memory if name == "EncDecAttention" else h
    q, k, v = (
        split_heads(
            a.at(n),
            linear(a.at(n), source, c.hidden, inner, bias=False),
            length,
            c.heads,
            c.head_dim,
        )
        for n, source, length in (("q", h, rows[0]), ("k", seen, rows[1]), ("v", seen, rows[1]))
    )
    context = attend(a, q, k, v, scale=1.0, mask=mask, decomposed=c.decomposed)
    return s.op(
        "Add",
        x,
        linear(a.at("o"), merge_heads(a, context, rows[0], inner), inner, c.hidden, bias=False),
    )


def _feed(s: Scope, x: str, c: T5Config) -> str:
    h, f = _norm(s.at("layer_norm"), x, c), s.at("DenseReluDense")
    if c.ff_form == "relu":
        h = f.op("Relu", linear(f.at("wi"), h, c.hidden, c.ff, bias=False))
    else:
        gate = f.op("Gelu", linear(f.at("wi_0"), h, c.hidden, c.ff, bias=False), approximate="tanh")
        h = f.op("Mul", gate, linear(f.at("wi_1"), h, c.hidden, c.ff, bias=False))
    return s.op("Add", x, linear(f.at("wo"), h, c.ff, c.hidden, bias=False))


def _relative_bias(s: Scope, c: T5Config, length: int, *, both: bool) -> str:
    """Float bias [1, heads, length, length] from the table of the stack."""
    s = s.at("relative_attention_bias")
    index = positions(s, length)
    distance = s.op(
        "Sub", s.op("Unsqueeze", index, s.ints(0)), s.op("Unsqueeze", index, s.ints(1))
    )  # key - query
    buckets = c.buckets
    offset = ""
    if both:
        buckets //= 2
        offset = s.op(
            "Mul", s.op("Cast", s.op("Greater", distance, s.i64(0)), to=7), s.i64(buckets)
        )
        steps_away = s.op("Abs", distance)
    else:
        steps_away = s.op("Neg", s.op("Min", distance, s.i64(0)))
    exact = buckets // 2
    ratio = s.op(
        "Div", s.op("Cast", s.op("Max", steps_away, s.i64(1)), to=1), s.f32(exact)
    )  # at least 1: log 0 is never used
    grown = s.op(
        "Mul", s.op("Log", ratio), s.f32((buckets - exact) / math.log(c.max_distance / exact))
    )
    large = s.op("Min", s.op("Add", s.op("Cast", grown, to=7), s.i64(exact)), s.i64(buckets - 1))
    bucket = s.op("Where", s.op("Less", steps_away, s.i64(exact)), steps_away, large)
    bucket = s.op("Add", bucket, offset) if offset else bucket
    bias, _ = embedding(s, bucket, c.buckets, c.heads)  # [length, length, heads]
    return s.op("Unsqueeze", s.op("Transpose", bias, perm=[2, 0, 1]), s.ints(0))


FAMILY = Family(
    "t5",
    {
        "t5-tiny": Preset(
            T5Config(2, 64, 4, 16, 128, 512, 16, 12, buckets=8, max_distance=16),
            "T5 for tests",
            batch=4,
        ),
        "t5-small": Preset(T5Config(6, 512, 8, 64, 2048), "T5 small", batch=128),
        "t5-base": Preset(T5Config(12, 768, 12, 64, 3072), "T5 base", batch=128),
        "t5-large": Preset(T5Config(24, 1024, 16, 64, 4096), "T5 large", batch=128),
        "t5-3b": Preset(T5Config(24, 1024, 32, 128, 16384), "T5 3B", batch=128),
        "t5-11b": Preset(T5Config(24, 1024, 128, 128, 65536), "T5 11B", batch=128),
    },
    build,
)
