"""GPT: learned positions, pre-norm blocks, GELU (tanh form), tied or separate head. Counts follow
the published models.

embedding=0 is the net of the MindSpore comparison, operator for operator: input [batch*seq, hidden]
(already embedded, so the batch is static), attention without a mask and spread out, an untied head
without a bias, and a second output "mean", the mean of the logits. The keys are transposed straight
to [B, H, D, S], where MindSpore's batched product has a flag.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from models_zoo.builder import Net, Scope
from models_zoo.cache import SEQUENCE, Cache, keys_and_values
from models_zoo.layers import (
    Extend,
    Masking,
    activation,
    causal_mask,
    embedding,
    language_head,
    layer_norm,
    linear,
    positions,
    self_attention,
)
from models_zoo.spec import Family, Preset, require


@dataclass(frozen=True)
class GptConfig:
    """ff: width of the feed-forward, by default 4 hidden. positions: rows of the position table, by
    default seq, of which a sequence begins at row `first` (OPT: 2). act: of the feed-forward.
    kv_heads: of keys and values, by default all (StarCoder: 1).

    causal: by default as embedding. decomposed: attention spread out; by default not, but always
    with embedding=0. cache: keys and values of earlier tokens are inputs (models_zoo.cache).
    """

    layers: int = 24
    hidden: int = 4096
    heads: int = 32
    seq: int = 1024
    vocab: int = 51200
    ff: int | None = None
    positions: int | None = None
    epsilon: float = 1e-5
    tied: bool = True
    embedding: bool = True
    causal: bool | None = None
    decomposed: bool | None = None
    cache: bool = False
    first: int = 0
    kv_heads: int | None = None
    act: Literal["gelu-tanh", "gelu", "relu"] = "gelu-tanh"

    @property
    def may_cache(self) -> bool:
        """Whether the model is also written with a cache."""
        return bool(self.embedding) and self.causal is not False

    @property
    def rows(self) -> int:
        """Tokens of a sequence as reshapes spell them: with a cache the extent is the input's."""
        return -1 if self.cache else self.seq


def build(c: GptConfig, net: Net) -> None:
    """input_ids [batch, seq] -> logits [batch, seq, vocab]; or, embedding=0, x [batch*seq, hidden]
    -> logits, mean."""
    require(c.hidden % c.heads == 0, f"gpt: hidden={c.hidden} is not a multiple of heads={c.heads}")
    require(
        c.kv_heads is None or c.heads % c.kv_heads == 0,
        f"gpt: heads={c.heads} is not a multiple of kv_heads={c.kv_heads}",
    )
    require(
        c.may_cache or not c.cache,
        f"{net.name}: a cache is of a causal decoder of tokens",
        "leave out cache",
    )
    if not c.embedding:
        return _build_embedded(c, net)
    rows, decomposed = c.positions or c.seq + c.first, bool(c.decomposed)
    require(
        c.seq + c.first <= rows,
        f"gpt: seq={c.seq} is longer than the position table of {rows - c.first}",
        f"a seq of at most {rows - c.first}, or positions={c.seq + c.first} (in a config.json its"
        " own field)",
    )
    s = net.root.at("transformer")
    kept = keys_and_values(c.kv_heads or c.heads, c.hidden // c.heads)
    cache = Cache(net, range(c.layers), kept) if c.cache else None
    ids = cache.ids if cache else net.input("input_ids", [net.batch, c.seq], "int64")
    tokens, table = embedding(s.at("wte"), ids, c.vocab, c.hidden)
    index = cache.position if cache else positions(s.at("wpe"), c.seq)
    index = s.at("wpe").op("Add", index, s.i64(c.first)) if c.first else index
    x = s.op("Add", tokens, embedding(s.at("wpe"), index, rows, c.hidden)[0])
    causal = c.causal is not False
    mask = (
        Masking(keys=cache.allowed)
        if cache
        else Masking(
            causal=causal,
            causal_mask=causal_mask(s.at("mask"), c.seq) if causal and decomposed else "",
        )
    )
    for i in range(c.layers):
        x = _block(s.at(f"h.{i}"), x, c, mask, partial(cache.extend, layer=i) if cache else None)
    x = layer_norm(s.at("ln_f"), x, c.hidden, c.epsilon)
    language_head(net.root.at("lm_head"), x, c.hidden, c.vocab, table if c.tied else "")
    net.output("logits", [net.batch, SEQUENCE if cache else c.seq, c.vocab])
    if cache:
        cache.outputs()


def _block(s: Scope, x: str, c: GptConfig, mask: Masking, extend: Extend | None) -> str:
    """x + attention(norm(x)), then x + mlp(norm(x)); x [batch, seq, hidden]."""
    a, names = s.at("attn"), ("q_proj", "k_proj", "v_proj", "out_proj")
    h = layer_norm(s.at("ln_1"), x, c.hidden, c.epsilon)
    x = s.op(
        "Add",
        x,
        self_attention(
            a,
            h,
            c.rows,
            c.hidden,
            c.heads,
            names=names,
            mask=mask,
            decomposed=bool(c.decomposed),
            extend=extend,
            kv_heads=c.kv_heads,
        ),
    )
    return _feed_forward(s, x, c)


def _feed_forward(s: Scope, x: str, c: GptConfig) -> str:
    m, ff = s.at("mlp"), c.ff or 4 * c.hidden
    h = linear(m.at("c_fc"), layer_norm(s.at("ln_2"), x, c.hidden, c.epsilon), c.hidden, ff)
    return s.op("Add", x, linear(m.at("c_proj"), activation(m, h, c.act), ff, c.hidden))


def _build_embedded(c: GptConfig, net: Net) -> None:
    """The MindSpore net on rows [batch*seq, hidden]."""
    require(
        c.kv_heads in (None, c.heads),
        f"{net.name}: with embedding=0 each head has keys of its own",
        "leave out kv_heads",
    )
    require(
        not c.tied,
        f"{net.name}: with embedding=0 there is no table to tie the head to",
        "add tied=0",
    )
    require(
        not c.causal and c.decomposed is not False,
        f"{net.name}: embedding=0 is written without a mask and spread out",
    )
    batch = net.fix_batch()
    s, x = net.root.at("transformer"), net.input("x", [batch * c.seq, c.hidden])
    for i in range(c.layers):
        block = s.at(f"h.{i}")
        a, dim = block.at("attn"), c.hidden // c.heads
        h = layer_norm(block.at("ln_1"), x, c.hidden, c.epsilon)
        heads = [
            _rows_to_heads(a.at(n), h, c, batch, perm)
            for n, perm in (("q_proj", "bhsd"), ("k_proj", "bhds"), ("v_proj", "bhsd"))
        ]
        scores = a.op("Mul", a.op("MatMul", heads[0], heads[1]), a.f32(dim**-0.5))
        context = a.op(
            "Transpose",
            a.op("MatMul", a.op("Softmax", scores, axis=-1), heads[2]),
            perm=[0, 2, 1, 3],
        )
        o = linear(
            a.at("out_proj"),
            a.op("Reshape", context, a.ints(batch * c.seq, c.hidden)),
            c.hidden,
            c.hidden,
        )
        x = _feed_forward(block, block.op("Add", x, o), c)
    x = layer_norm(s.at("ln_f"), x, c.hidden, c.epsilon)
    linear(net.root.at("lm_head"), x, c.hidden, c.vocab, bias=False, out="logits")
    net.output("logits", [batch * c.seq, c.vocab])
    net.root.op("ReduceMean", "logits", s.ints(0, 1), keepdims=0, out="mean")
    net.output("mean", [])


def _rows_to_heads(s: Scope, h: str, c: GptConfig, batch: int, perm: str) -> str:
    y = s.op(
        "Reshape",
        linear(s, h, c.hidden, c.hidden),
        s.ints(batch, c.seq, c.heads, c.hidden // c.heads),
    )
    return s.op("Transpose", y, perm=["bshd".index(axis) for axis in perm])


def _gpt2(layers: int, hidden: int, heads: int) -> Preset:
    return Preset(GptConfig(layers, hidden, heads, 1024, 50257, positions=1024), "GPT-2", batch=8)


FAMILY = Family(
    "gpt",
    {
        "gpt": Preset(
            GptConfig(tied=False),
            "MindSpore comparison: hidden 4096, 32 heads, untied head",
            batch=64,
        ),
        "gpt-tiny": Preset(GptConfig(2, 64, 4, 16, 512), "GPT for tests", batch=4),
        "gpt2-small": _gpt2(12, 768, 12),
        "gpt2-medium": _gpt2(24, 1024, 16),
        "gpt2-large": _gpt2(36, 1280, 20),
        "gpt2-xl": _gpt2(48, 1600, 25),
        "gpt3-175b": Preset(GptConfig(96, 12288, 96, 2048, 50257), "GPT-3", batch=1536),
        "megatron-530b": Preset(
            GptConfig(105, 20480, 128, 2048, 51200), "Megatron-Turing NLG", batch=2520
        ),
        "gpt-1t": Preset(
            GptConfig(128, 25600, 160, 2048, 51200),
            "the largest GPT of the Megatron papers",
            batch=3072,
        ),
    },
    build,
)
