"""ModernBERT: a bidirectional pre-norm encoder with rotary positions and gated feed-forwards, most
of whose layers see the tokens near their own alone.

The first layer has no norm before its attention: the embedded tokens have passed one. A window of
both sides is a mask, and attention there is computed and priced with all keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from models_zoo.builder import Net, Scope
from models_zoo.layers import (
    Masking,
    attend,
    embedding,
    language_head,
    layer_norm,
    linear,
    merge_heads,
    positions,
    split_heads,
)
from models_zoo.rotary import Positions, Rotate, rotary
from models_zoo.spec import Family, Preset, require


@dataclass(frozen=True)
class ModernBertConfig:
    """reach: how far to either side a token sees, but in the first and each full_every-th layer
    behind it. theta, local_theta: rotary bases of these layers and of the others. head=mlm: logits
    of each token, by the token table where tied; head=cls: of a sequence, whose first token or
    mean is read (pool). head_bias, out_bias: of the head's first and, with mlm, last layer."""

    layers: int
    hidden: int
    heads: int
    ff: int
    vocab: int
    seq: int
    epsilon: float = 1e-5
    theta: float = 160_000.0
    local_theta: float = 10_000.0
    reach: int = 64
    full_every: int = 3
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    head: Literal["mlm", "cls"] = "mlm"
    head_bias: bool = False
    out_bias: bool = True
    classes: int = 2
    pool: Literal["cls", "mean"] = "cls"
    tied: bool = True
    decomposed: bool = False

    @property
    def width(self) -> int:
        """Features of one head."""
        return self.hidden // self.heads

    def local(self, layer: int) -> bool:
        """Whether a layer sees near tokens alone."""
        return layer % self.full_every != 0


def build(c: ModernBertConfig, net: Net) -> None:
    """input_ids, attention_mask [batch, seq] (1: a token) -> logits [batch, seq, vocab] or [batch,
    classes]."""
    require(
        c.hidden % c.heads == 0 and c.width % 2 == 0,
        f"{net.name}: hidden={c.hidden} in {c.heads} heads leaves no even number of features each",
    )
    ids = net.input("input_ids", [net.batch, c.seq], "int64")
    present = net.input("attention_mask", [net.batch, c.seq], "int64")
    s = net.root.at("model")
    e = s.at("embeddings")
    x, table = embedding(e.at("tok_embeddings"), ids, c.vocab, c.hidden)
    x = _norm(e.at("norm"), x, c)
    masks, turns = _masks(s.at("mask"), present, c), _turns(s.at("rotary_emb"), ids, c)
    for i in range(c.layers):
        near = c.local(i)
        x = _layer(s.at(f"layers.{i}"), x, c, first=i == 0, rotate=turns[near], mask=masks[near])
    x = _norm(s.at("final_norm"), x, c)
    (_predict if c.head == "mlm" else _classify)(net, x, table, present, c)


def _norm(s: Scope, x: str, c: ModernBertConfig) -> str:
    return layer_norm(s, x, c.hidden, c.epsilon, bias=c.norm_bias)


def _masks(s: Scope, present: str, c: ModernBertConfig) -> dict[bool, Masking]:
    """Who sees whom; under True in layers that see near tokens alone."""
    keys = s.op("Unsqueeze", s.op("Cast", present, to=9), s.ints(1, 2))  # [B, 1, 1, S]
    everything = keys
    if not c.decomposed:  # onnxruntime's Attention wants a row per query
        everything = s.op("Expand", keys, s.ints(1, 1, c.seq, 1))
    index = positions(s, c.seq)
    rows, columns = (s.op("Unsqueeze", index, s.ints(axis)) for axis in (1, 0))
    away = s.op("Abs", s.op("Sub", columns, rows))
    near = s.op("And", keys, s.op("LessOrEqual", away, s.i64(c.reach)))
    return {False: Masking(keys=everything), True: Masking(keys=near)}


def _turns(s: Scope, ids: str, c: ModernBertConfig) -> dict[bool, Rotate]:
    """What turns queries and keys; under True of layers that see near tokens alone."""
    places = Positions(ids, positions(s, c.seq), False)
    return {
        near: rotary(s, places, theta, width=c.width, turned=c.width, operator=False)
        for near, theta in ((False, c.theta), (True, c.local_theta))
    }


# Many parameters: a layer's place, its configuration, and what all layers of its kind share.
def _layer(
    s: Scope, x: str, c: ModernBertConfig, *, first: bool, rotate: Rotate, mask: Masking
) -> str:
    a, m = s.at("attn"), s.at("mlp")
    h = x if first else _norm(s.at("attn_norm"), x, c)
    q, k, v = (
        split_heads(
            a.at(n),
            linear(a.at(n), h, c.hidden, c.hidden, bias=c.attention_bias),
            c.seq,
            c.heads,
            c.width,
        )
        for n in ("q_proj", "k_proj", "v_proj")
    )
    q, k = rotate(a, q), rotate(a, k)
    h = attend(a, q, k, v, scale=c.width**-0.5, mask=mask, decomposed=c.decomposed)
    h = merge_heads(a, h, c.seq, c.hidden)
    x = s.op("Add", x, linear(a.at("Wo"), h, c.hidden, c.hidden, bias=c.attention_bias))
    h = _norm(s.at("mlp_norm"), x, c)
    gate, up = (
        linear(m.at(n), h, c.hidden, c.ff, bias=c.mlp_bias) for n in ("gate_proj", "up_proj")
    )
    h = m.op("Mul", m.op("Gelu", gate), up)
    return s.op("Add", x, linear(m.at("Wo"), h, c.ff, c.hidden, bias=c.mlp_bias))


def _dense(net: Net, x: str, c: ModernBertConfig) -> str:
    head = net.root.at("head")
    h = head.op("Gelu", linear(head.at("dense"), x, c.hidden, c.hidden, bias=c.head_bias))
    return _norm(head.at("norm"), h, c)


def _predict(net: Net, x: str, table: str, present: str, c: ModernBertConfig) -> None:
    decoder = net.root.at("decoder")
    h = _dense(net, x, c)
    language_head(decoder, h, c.hidden, c.vocab, table if c.tied else "", bias=c.out_bias)
    net.output("logits", [net.batch, c.seq, c.vocab])


def _classify(net: Net, x: str, table: str, present: str, c: ModernBertConfig) -> None:
    s = net.root.at("pool")
    if c.pool == "cls":
        x = s.op("Squeeze", s.op("Slice", x, s.ints(0), s.ints(1), s.ints(1)), s.ints(1))
    else:
        real = s.op("Unsqueeze", s.op("Cast", present, to=1), s.ints(2))
        total = s.op("ReduceSum", s.op("Mul", x, real), s.ints(1), keepdims=0)
        x = s.op("Div", total, s.op("ReduceSum", real, s.ints(1), keepdims=0))
    linear(net.root.at("classifier"), _dense(net, x, c), c.hidden, c.classes, out="logits")
    net.output("logits", [net.batch, c.classes])


FAMILY = Family(
    "modernbert",
    {
        "modernbert-tiny": Preset(
            ModernBertConfig(4, 64, 4, 96, 512, 16, reach=3), "ModernBERT for tests", batch=4
        ),
        "modernbert-base": Preset(
            ModernBertConfig(22, 768, 12, 1152, 50368, 1024), "ModernBERT base", batch=256
        ),
        "modernbert-large": Preset(
            ModernBertConfig(28, 1024, 16, 2624, 50368, 1024), "ModernBERT large", batch=256
        ),
    },
    build,
)
