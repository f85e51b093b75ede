"""BERT: bidirectional post-norm encoder with an attention_mask input.

head=cls: pooler (first token, dense, tanh) and a classifier. head=mlm: dense, GELU, norm, and the
tied token table with a bias, no pooler. Token types are all 0, so their table gives one row to
every position; types=0 leaves it out. DistilBERT's classifier has a ReLU in place of tanh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from models_zoo.builder import Net, Scope
from models_zoo.layers import (
    Masking,
    embedding,
    layer_norm,
    linear,
    positions,
    self_attention,
    tied_head,
)
from models_zoo.spec import Family, Preset, require


@dataclass(frozen=True)
class BertConfig:
    """positions: rows of the position table; types: rows of the token type table; pool: the
    pooler's activation."""

    layers: int
    hidden: int
    heads: int
    ff: int
    vocab: int
    seq: int
    positions: int = 512
    types: int = 2
    head: Literal["cls", "mlm"] = "cls"
    classes: int = 2
    epsilon: float = 1e-12
    decomposed: bool = False
    pool: Literal["tanh", "relu"] = "tanh"


def build(c: BertConfig, net: Net) -> None:
    """input_ids, attention_mask [batch, seq] (1: a token) -> logits [batch, classes] or [batch,
    seq, vocab]."""
    require(
        c.hidden % c.heads == 0,
        f"{net.name}: hidden={c.hidden} is not a multiple of heads={c.heads}",
    )
    require(
        c.seq <= c.positions,
        f"{net.name}: seq={c.seq} is longer than the position table of {c.positions}",
        f"a seq of at most {c.positions}, or positions={c.seq} (in a config.json its own field)",
    )
    ids = net.input("input_ids", [net.batch, c.seq], "int64")
    present = net.input("attention_mask", [net.batch, c.seq], "int64")
    s = net.root.at("bert")
    e = s.at("embeddings")
    words, table = embedding(e.at("word_embeddings"), ids, c.vocab, c.hidden)
    if c.types:
        kinds, _ = embedding(e.at("token_type_embeddings"), e.ints(0), c.types, c.hidden)
        words = e.op("Add", words, kinds)
    where = e.at("position_embeddings")
    x = e.op("Add", words, embedding(where, positions(where, c.seq), c.positions, c.hidden)[0])
    x = layer_norm(e.at("LayerNorm"), x, c.hidden, c.epsilon)
    keys = s.op("Unsqueeze", s.op("Cast", present, to=9), s.ints(1, 2))
    if not c.decomposed:  # onnxruntime's Attention wants a row per query
        keys = s.op("Expand", keys, s.ints(1, 1, c.seq, 1))
    for i in range(c.layers):
        x = _layer(s.at(f"encoder/layer.{i}"), x, c, Masking(keys=keys))
    (_classify if c.head == "cls" else _predict)(net, x, table, c)


def _layer(s: Scope, x: str, c: BertConfig, mask: Masking) -> str:
    names = ("self/query", "self/key", "self/value", "output/dense")
    a, out = s.at("attention"), s.at("output")
    h = self_attention(
        a, x, c.seq, c.hidden, c.heads, names=names, mask=mask, decomposed=c.decomposed
    )
    x = layer_norm(a.at("output/LayerNorm"), a.at("output").op("Add", h, x), c.hidden, c.epsilon)
    h = s.at("intermediate").op("Gelu", linear(s.at("intermediate/dense"), x, c.hidden, c.ff))
    return layer_norm(
        out.at("LayerNorm"),
        out.op("Add", linear(out.at("dense"), h, c.ff, c.hidden), x),
        c.hidden,
        c.epsilon,
    )


def _classify(net: Net, x: str, table: str, c: BertConfig) -> None:
    pool = net.root.at("bert/pooler")
    first = pool.op(
        "Squeeze", pool.op("Slice", x, pool.ints(0), pool.ints(1), pool.ints(1)), pool.ints(1)
    )
    pooled = pool.op(
        {"tanh": "Tanh", "relu": "Relu"}[c.pool],
        linear(pool.at("dense"), first, c.hidden, c.hidden),
    )
    linear(net.root.at("classifier"), pooled, c.hidden, c.classes, out="logits")
    net.output("logits", [net.batch, c.classes])


def _predict(net: Net, x: str, table: str, c: BertConfig) -> None:
    head = net.root.at("cls/predictions")
    h = head.op("Gelu", linear(head.at("transform/dense"), x, c.hidden, c.hidden))
    h = tied_head(
        head.at("decoder"),
        layer_norm(head.at("transform/LayerNorm"), h, c.hidden, c.epsilon),
        table,
    )
    head.op("Add", h, head.weight("bias", c.vocab, std=0.1), out="logits")
    net.output("logits", [net.batch, c.seq, c.vocab])


FAMILY = Family(
    "bert",
    {
        "bert-tiny": Preset(
            BertConfig(2, 64, 4, 128, 512, 16, positions=16), "BERT for tests", batch=4
        ),
        "bert-base": Preset(
            BertConfig(12, 768, 12, 3072, 30522, 512), "BERT base uncased", batch=256
        ),
        "bert-large": Preset(
            BertConfig(24, 1024, 16, 4096, 30522, 512), "BERT large uncased", batch=256
        ),
    },
    build,
)
