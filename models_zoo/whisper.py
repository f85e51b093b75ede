"""Whisper: an encoder of sound, whose first layers are two convolutions over time, and a decoder of
text that attends to it.

Blocks are pre-norm with GELU; keys' projections have no bias. The encoder's positions are a table
of sinusoids that does not train in the library; here it is a weight like others.
"""

from __future__ import annotations

from dataclasses import dataclass

from models_zoo.builder import Net, Scope
from models_zoo.layers import (
    Masking,
    attend,
    causal_mask,
    embedding,
    language_head,
    layer_norm,
    linear,
    merge_heads,
    positions,
    split_heads,
)
from models_zoo.spec import Family, Preset, require


@dataclass(frozen=True)
class WhisperConfig:
    """seq: positions of the encoder, of two frames of `bins` features each; target: tokens of the
    decoder, of a table of so many `positions`. decoder_layers, decoder_heads, decoder_ff: by
    default the encoder's."""

    layers: int
    hidden: int
    heads: int
    ff: int
    vocab: int = 51865
    bins: int = 80
    seq: int = 1500
    target: int = 448
    positions: int = 448
    decoder_layers: int | None = None
    decoder_heads: int | None = None
    decoder_ff: int | None = None
    epsilon: float = 1e-5
    tied: bool = True
    decomposed: bool = False


@dataclass(frozen=True)
class _Rows:
    """Of an attention: queries and keys of a sequence, heads."""

    queries: int
    keys: int
    heads: int


def build(c: WhisperConfig, net: Net) -> None:
    """input_features [batch, bins, 2 seq], decoder_input_ids [batch, target] -> logits [batch,
    target, vocab]."""
    decoder_heads = c.decoder_heads or c.heads
    for heads in (c.heads, decoder_heads):
        require(
            c.hidden % heads == 0,
            f"{net.name}: hidden={c.hidden} is not a multiple of heads={heads}",
        )
    require(
        c.target <= c.positions,
        f"{net.name}: target={c.target} is longer than the position table of {c.positions}",
        f"a target of at most {c.positions}",
    )
    encoded = _encode(net, c)
    s = net.root.at("model/decoder")
    ids = net.input("decoder_input_ids", [net.batch, c.target], "int64")
    x, table = embedding(s.at("embed_tokens"), ids, c.vocab, c.hidden)
    where = s.at("embed_positions")
    x = s.op("Add", x, embedding(where, positions(where, c.target), c.positions, c.hidden)[0])
    masking = Masking(True, causal_mask=causal_mask(s.at("mask"), c.target) if c.decomposed else "")
    rows, ff = c.target, c.decoder_ff or c.ff
    for i in range(c.decoder_layers or c.layers):
        layer = s.at(f"layers.{i}")
        x = _attention(layer, "self_attn", x, "", c, _Rows(rows, rows, decoder_heads), masking)
        x = _attention(
            layer, "encoder_attn", x, encoded, c, _Rows(rows, c.seq, decoder_heads), Masking()
        )
        x = _feed(layer, x, c, ff)
    x = layer_norm(s.at("layer_norm"), x, c.hidden, c.epsilon)
    language_head(net.root.at("proj_out"), x, c.hidden, c.vocab, table if c.tied else "")
    net.output("logits", [net.batch, c.target, c.vocab])


def _encode(net: Net, c: WhisperConfig) -> str:
    """[batch, seq, hidden] of the sound."""
    s = net.root.at("model/encoder")
    x = net.input("input_features", [net.batch, c.bins, 2 * c.seq])
    for name, width, stride in (("conv1", c.bins, 1), ("conv2", c.hidden, 2)):
        layer = s.at(name)
        weights = layer.weight("weight", c.hidden, width, 3, std=(3 * width) ** -0.5)
        bias = layer.weight("bias", c.hidden, std=0.1)
        x = layer.op("Conv", x, weights, bias, kernel_shape=[3], pads=[1, 1], strides=[stride])
        x = layer.op("Gelu", x)
    where = s.at("embed_positions")
    table, _ = embedding(where, positions(where, c.seq), c.seq, c.hidden)
    x = s.op("Add", s.op("Transpose", x, perm=[0, 2, 1]), table)
    for i in range(c.layers):
        layer = s.at(f"layers.{i}")
        x = _attention(layer, "self_attn", x, "", c, _Rows(c.seq, c.seq, c.heads), Masking())
        x = _feed(layer, x, c, c.ff)
    return layer_norm(s.at("layer_norm"), x, c.hidden, c.epsilon)


# Many parameters: an attention's place, what it reads, and its sizes.
def _attention(
    s: Scope, name: str, x: str, memory: str, c: WhisperConfig, rows: _Rows, mask: Masking
) -> str:
    """x + attention of norm(x) over the memory, or over its own rows."""
    a, head_dim = s.at(name), c.hidden // rows.heads
    h = layer_norm(s.at(f"{name}_layer_norm"), x, c.hidden, c.epsilon)
    q, k, v = (
        split_heads(
            a.at(n),
            linear(a.at(n), source, c.hidden, c.hidden, bias=n != "k_proj"),
            length,
            rows.heads,
            head_dim,
        )
        for n, source, length in (
            ("q_proj", h, rows.queries),
            ("k_proj", memory or h, rows.keys),
            ("v_proj", memory or h, rows.keys),
        )
    )
    h = attend(a, q, k, v, scale=head_dim**-0.5, mask=mask, decomposed=c.decomposed)
    h = merge_heads(a, h, rows.queries, c.hidden)
    return s.op("Add", x, linear(a.at("out_proj"), h, c.hidden, c.hidden))


def _feed(s: Scope, x: str, c: WhisperConfig, width: int) -> str:
    h = layer_norm(s.at("final_layer_norm"), x, c.hidden, c.epsilon)
    h = s.op("Gelu", linear(s.at("fc1"), h, c.hidden, width))
    return s.op("Add", x, linear(s.at("fc2"), h, width, c.hidden))


FAMILY = Family(
    "whisper",
    {
        "tiny-whisper": Preset(
            WhisperConfig(
                2, 64, 4, 96, 512, bins=8, seq=16, target=12, positions=16, decoder_layers=3
            ),
            "Whisper for tests",
            batch=4,
        ),
        "whisper-small": Preset(WhisperConfig(12, 768, 12, 3072), "Whisper small", batch=64),
        "whisper-large-v3": Preset(
            WhisperConfig(32, 1280, 20, 5120, 51866, bins=128), "Whisper large v3", batch=64
        ),
    },
    build,
)
