"""Llama and decoders close to it: RMSNorm, rotary positions, grouped key heads, SwiGLU.

RMSNormalization and Attention are operators of opset 23; decomposed=1 spreads them out as older
exporters do. Rotary is `models_zoo.rotary`'s, rotary=op the operator. Rescaled rotary frequencies
(Llama 3.1 and later) change constants, not shapes, and are left out.

What other decoders of this kind choose is a field of the configuration: where norms stand, which
layers see a window of the last keys alone or have no positions, constants that scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from models_zoo.alibi import by_distance
from models_zoo.builder import Net, Scope
from models_zoo.cache import SEQUENCE, Cache, Memory, keys_and_values
from models_zoo.layers import (
    Extend,
    Masking,
    activation,
    attend,
    causal_mask,
    embedding,
    language_head,
    layer_norm,
    linear,
    merge_heads,
    positions,
    repeat_heads,
    rms_norm,
    split_heads,
    unit_layer,
    unit_rms,
    window_mask,
)
from models_zoo.rotary import Positions, Rotate, rotary, unturned
from models_zoo.spec import Family, Preset, require


@dataclass(frozen=True)
class LlamaConfig:
    """head_dim: by default hidden / heads. attention_bias, mlp_bias: biases on those projections;
    qkv_bias: on all but the output's (Qwen 2), head_bias: on the vocabulary's (Phi).

    qk_norm: queries and keys pass an RMSNorm of one head's width (Qwen 3), qk_norm_behind: behind
    rotary positions (Hunyuan), qk_norm_whole: of all heads' (OLMo 2), qk_norm_turned: of one head's
    width without a weight, behind rotary positions (Llama 4). act=gelu-tanh, scale_embedding (by
    the root of hidden): Gemma, whose norms multiply by 1 + weight, which is a matter of values.
    plain_mlp: no gate. cap: what scores stay below by a hyperbolic tangent (Gemma 2), head_cap:
    what logits do, 0 for none.

    norm: layer has a bias, layer-scale none, layer-plain no weight either (OLMo). norms: before a
    layer's two branches, after them (before their sum with what passes by: OLMo 2), around (Gemma
    2), around-glm the same under GLM-4's names. parallel: both branches read the same rows, by one
    norm or by two.

    rotary_dim: features of a head that turn, by default all. window: keys that a query sees, of
    those up to its own, in layers from window_from on but each full_every-th (full_shift: so many
    layers earlier), 0 for all; chunk: likewise, only keys of its own so many. local_theta: theta of
    these layers, 0 for the same. bare_every: each such layer has no positions, 0 for none.

    attention_scale: by default width^-1/2. residual_scale, embedding_scale, head_scale multiply
    what each branch adds, the embedded tokens and the logits (Granite).

    attention_gate: what attention gives is multiplied by the sigmoid of one more projection
    (Qwen3-Next). alibi: scores are lowered by distance, by slopes of a head of which the least is 2
    to the minus this; 0 for none; alibi_scaled: before they are scaled (Falcon). embedding_norm:
    embedded tokens pass a norm (BLOOM).

    packed: positions of a sequence have the number of theirs (segment_ids), and see
    those of the same alone. cache: keys and values of earlier tokens are inputs
    (models_zoo.cache).
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
    act: Literal["silu", "gelu-tanh", "gelu", "relu", "relu2", "xielu"] = "silu"
    scale_embedding: bool = False
    cap: float = 0.0
    packed: bool = False
    cache: bool = False
    qk_norm_whole: bool = False
    qk_norm_turned: bool = False
    plain_mlp: bool = False
    norm: Literal["rms", "layer", "layer-scale", "layer-plain"] = "rms"
    norms: Literal["before", "after", "around", "around-glm"] = "before"
    parallel: Literal["no", "one-norm", "two-norms"] = "no"
    head_bias: bool = False
    head_cap: float = 0.0
    rotary_dim: int | None = None
    window: int = 0
    chunk: int = 0
    full_every: int = 0
    full_shift: int = 0
    window_from: int = 0
    local_theta: float = 0.0
    bare_every: int = 0
    attention_scale: float | None = None
    residual_scale: float = 1.0
    embedding_scale: float = 1.0
    head_scale: float = 1.0
    attention_gate: bool = False
    qk_norm_behind: bool = False
    alibi: float = 0.0
    alibi_scaled: bool = False
    embedding_norm: bool = False

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
        """Features that the rotated part of a head has, those that pass by included."""
        return self.width

    @property
    def kept(self) -> Mapping[str, tuple[int, int]]:
        """`Cache.parts`."""
        return keys_and_values(self.kv_heads, self.width)

    @property
    def keeping(self) -> Sequence[int]:
        """The layers that keep keys and values."""
        return range(self.layers)

    @property
    def states(self) -> Mapping[str, tuple[int, ...]]:
        """What other layers keep (`Cache.states`)."""
        return {}

    @property
    def may_cache(self) -> bool:
        """Whether the model is also written with a cache."""
        return self.rotary == "spread" and not self.packed and not self.alibi

    def local(self, layer: int) -> bool:
        """Whether a layer's queries see a window or a chunk alone."""
        every = bool(self.full_every) and (layer + 1 + self.full_shift) % self.full_every == 0
        return bool(self.window or self.chunk) and layer >= self.window_from and not every

    def bare(self, layer: int) -> bool:
        """Whether a layer has no positions."""
        return bool(self.bare_every) and (layer + 1) % self.bare_every == 0


def build(c: LlamaConfig, net: Net) -> None:
    """input_ids [batch, seq] -> logits [batch, seq, vocab]."""
    decoder(c, net, feed=lambda _, s, x: mlp(s.at("mlp"), x, c, c.ff))


def mlp(s: Scope, x: str, c: LlamaConfig, width: int) -> str:
    """A feed-forward, `width` wide inside."""
    return plain(s, x, c, width) if c.plain_mlp else gated(s, x, c, width)


def gated(s: Scope, x: str, c: LlamaConfig, width: int, *, scale: float = 1.0) -> str:
    """down(act(scale * gate(x)) * up(x)), `width` wide inside."""
    gate, up = (
        linear(s.at(n), x, c.hidden, width, bias=c.mlp_bias) for n in ("gate_proj", "up_proj")
    )
    gate = s.op("Mul", gate, s.f32(scale)) if scale != 1.0 else gate
    gate = activation(s.at("act_fn"), gate, c.act)
    return linear(s.at("down_proj"), s.op("Mul", gate, up), width, c.hidden, bias=c.mlp_bias)


def plain(s: Scope, x: str, c: LlamaConfig, width: int) -> str:
    """down(act(up(x))), `width` wide inside."""
    h = linear(s.at("up_proj"), x, c.hidden, width, bias=c.mlp_bias)
    h = activation(s.at("act_fn"), h, c.act)
    return linear(s.at("down_proj"), h, width, c.hidden, bias=c.mlp_bias)


Feed = Callable[[int, Scope, str], str]
"""(layer, its module, x [batch, seq, hidden]) -> the feed-forward's result, same shape."""
Attend = Callable[[Scope, str], str]
"""(module, x [batch, seq, hidden]) -> the attention's result, same shape."""
Layer = Callable[[int, Scope, str, Attend, Attend, Memory | None], str]
"""(layer, its module, x [batch, seq, hidden], its attention, its feed-forward, what it keeps beside
keys and values) -> its result."""
_NORMS = {
    "before": ("input_layernorm", "", "post_attention_layernorm", ""),
    "after": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "around-glm": (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
}
"""Modules of the norms before and after the attention, before and after the feed-forward."""


def decoder(
    c: LlamaConfig,
    net: Net,
    *,
    feed: Feed,
    attention: Callable[[Scope, str, Rotate, Masking, Extend | None], str] | None = None,
    layer: Layer | None = None,
) -> None:
    """The whole model around a feed-forward, and an attention in place of Llama's
    (mixture-of-experts models pass theirs); layer: in place of `block`, what a layer is made
    of."""
    _check(c, net.name, attention is not None)
    s = net.root.at("model")
    cache = Cache(net, c.keeping, c.kept, c.states) if c.cache else None
    ids = cache.ids if cache else net.input("input_ids", [net.batch, c.seq], "int64")
    x, table = embedding(s.at("embed_tokens"), ids, c.vocab, c.hidden)
    scale = c.hidden**0.5 if c.scale_embedding else c.embedding_scale
    if scale != 1.0:
        x = s.at("embed_tokens").op("Mul", x, s.f32(scale))
    if c.embedding_norm:
        x = norm(s.at("embed_layernorm"), x, c)
    turns, masks = _turns(s.at("rotary_emb"), ids, c, cache), _masks(s.at("mask"), net, c, cache)
    run = attention or partial(_attention, c=c)  # type: ignore[call-arg]
    for i in range(c.layers):
        rotate = unturned if c.bare(i) else turns[c.local(i) and bool(c.local_theta)]
        mask = masks[c.local(i)]
        attend: Attend = partial(
            run,  # type: ignore[call-arg]
            rotate=rotate,
            mask=mask,
            extend=partial(cache.extend, layer=i) if cache else None,
        )
        layer_scope, own_feed = s.at(f"layers.{i}"), partial(feed, i)
        if layer:
            x = layer(i, layer_scope, x, attend, own_feed, Memory(cache, i) if cache else None)
        else:
            x = block(layer_scope, x, c, within("self_attn", attend), own_feed)
    x = norm(s.at("norm"), x, c)
    language_head(
        net.root.at("lm_head"),
        x,
        c.hidden,
        c.vocab,
        table if c.tied else "",
        bias=c.head_bias,
        scale=c.head_scale,
        cap=c.head_cap,
    )
    net.output("logits", [net.batch, SEQUENCE if cache else c.seq, c.vocab])
    if cache:
        cache.outputs()


def within(name: str, branch: Attend) -> Attend:
    """`branch` in a module of the layer whose module it is given."""
    return lambda s, x: branch(s.at(name), x)


def block(s: Scope, x: str, c: LlamaConfig, attention: Attend, feed: Attend) -> str:
    """A layer: x and what its attention and its feed-forward add, each given the layer's module."""
    names = _NORMS[c.norms]

    def branch(x: str, run: Attend, before: str, after: str) -> str:
        h = run(s, norm(s.at(before), x, c) if before else x)
        h = norm(s.at(after), h, c) if after else h
        return s.op("Mul", h, s.f32(c.residual_scale)) if c.residual_scale != 1.0 else h

    if c.parallel == "no":
        x = s.op("Add", x, branch(x, attention, *names[:2]))
        return s.op("Add", x, branch(x, feed, *names[2:]))
    h = norm(s.at(names[0]), x, c)
    other = h if c.parallel == "one-norm" else norm(s.at(names[2]), x, c)
    return s.op("Add", s.op("Add", x, attention(s, h)), feed(s, other))


def _turns(s: Scope, ids: str, c: LlamaConfig, cache: Cache | None) -> dict[bool, Rotate]:
    """What turns queries and keys; under True that of layers which have a theta of their own."""
    if cache and not c.keeping:
        return {False: unturned, True: unturned}
    places = Positions(ids, cache.position if cache else positions(s, c.seq), cache is not None)
    width = c.rotary_width
    rotation = partial(
        rotary, s, places, width=width, turned=c.rotary_dim or width, operator=c.rotary == "op"
    )
    turns = {False: rotation(c.theta)}
    return turns | ({True: rotation(c.local_theta)} if c.local_theta else {})


def _masks(s: Scope, net: Net, c: LlamaConfig, cache: Cache | None) -> dict[bool, Masking]:
    """Who sees whom; under True in layers with a window or chunks."""
    if cache:
        local = cache.within(c.window) if c.window else cache.allowed
        local = cache.in_chunk(c.chunk) if c.chunk else local
        return {False: Masking(keys=cache.allowed), True: Masking(keys=local)}
    causal = causal_mask(s, c.seq) if c.decomposed or c.cap else ""
    if c.alibi:
        bias = by_distance(s, c.heads, c.alibi, c.seq, _scale(c) if c.alibi_scaled else 1.0)
        return dict.fromkeys((False, True), Masking(True, causal_mask=causal, bias=bias))
    segments = _segments(s, net, c) if c.packed else ""
    masks = {False: Masking(causal=True, causal_mask=causal, keys=segments)}
    local = ""
    if c.chunk and c.chunk < c.seq:
        number = s.op("Div", positions(s, c.seq), s.i64(c.chunk))
        local = s.op("Equal", s.op("Unsqueeze", number, s.ints(0)), _column(s, number))
    elif c.window and c.window < c.seq:
        local = window_mask(s, c.seq, c.window)
    joined = s.op("And", segments, local) if local and segments else local or segments
    return masks | {True: Masking(causal=True, causal_mask=causal, keys=joined)}


def _column(s: Scope, row: str) -> str:
    return s.op("Unsqueeze", row, s.ints(1))


def _segments(s: Scope, net: Net, c: LlamaConfig) -> str:
    """bool [batch, 1, seq, seq], True where two positions are of the same sequence."""
    ids = net.input("segment_ids", [net.batch, c.seq], "int64")
    rows, keys = (s.op("Unsqueeze", ids, s.ints(*dims)) for dims in ((1, 3), (1, 2)))
    return s.op("Equal", rows, keys)


def _check(c: LlamaConfig, name: str, replaced: bool) -> None:
    """Refuses sizes that do not fit together. replaced: another attention stands in place of
    Llama's."""
    require(
        replaced or c.head_dim is not None or c.hidden % c.heads == 0,
        f"{name}: hidden={c.hidden} is not a multiple of heads={c.heads}",
    )
    require(
        c.heads % c.kv_heads == 0,
        f"{name}: heads={c.heads} is not a multiple of kv_heads={c.kv_heads}",
    )
    turned = c.rotary_dim or c.rotary_width
    require(turned % 2 == 0, f"{name}: rotary positions need an even head width, {turned} given")
    require(
        turned <= c.rotary_width,
        f"{name}: rotary_dim={turned} is more than a head's width of {c.rotary_width}",
    )
    require(
        not (c.window and c.chunk), f"{name}: window and chunk are two patterns", "leave out one"
    )
    require(
        c.parallel == "no" or (c.norms == "before" and c.residual_scale == 1.0),
        f"{name}: parallel branches have norms before them and no scale",
    )
    require(
        not (c.cache and c.rotary == "op"),
        f"{name}: a cache is written for rotary=spread",
        "leave out cache",
    )
    require(
        not c.alibi or c.bare_every == 1,
        f"{name}: scores lowered by distance take the place of positions",
        "bare_every=1",
    )
    require(
        not (c.alibi and (c.cache or c.packed or c.window or c.chunk or c.cap)),
        f"{name}: scores lowered by distance go with neither a cache nor masks but the causal one",
        "leave out alibi",
    )
    require(not (c.cache and c.packed), f"{name}: sequences are packed for training alone")


def norm(s: Scope, x: str, c: LlamaConfig) -> str:
    """The norm of a config over the last dim of x [.., hidden]."""
    if c.norm == "rms":
        return rms_norm(s, x, c.hidden, epsilon=c.epsilon, decomposed=c.decomposed)
    if c.norm == "layer-plain":
        return unit_layer(s, x, epsilon=c.epsilon)
    return layer_norm(s, x, c.hidden, c.epsilon, bias=c.norm == "layer")


def _attention(
    s: Scope, x: str, c: LlamaConfig, rotate: Rotate, mask: Masking, extend: Extend | None
) -> str:
    bias = c.attention_bias or c.qkv_bias

    def project(name: str, norm: str, heads: int) -> str:
        """[B, heads, S, D] of the rows."""
        y = linear(s.at(name), x, c.hidden, heads * c.width, bias=bias)
        if norm and c.qk_norm_whole:
            y = _rms(s.at(norm), y, c, heads * c.width)
        return split_heads(s.at(name), y, c.rows, heads, c.width)

    q, k, v = (
        project(*sizes)
        for sizes in (
            ("q_proj", "q_norm", c.heads),
            ("k_proj", "k_norm", c.kv_heads),
            ("v_proj", "", c.kv_heads),
        )
    )
    if c.qk_norm:
        q, k = (_rms(s.at(n), y, c, c.width) for n, y in (("q_norm", q), ("k_norm", k)))
    q, k, groups = rotate(s, q), rotate(s, k), c.heads // c.kv_heads
    if c.qk_norm_behind:
        q, k = (_rms(s.at(n), y, c, c.width) for n, y in (("q_norm", q), ("k_norm", k)))
    if c.qk_norm_turned and rotate is not unturned:
        q, k = (unit_rms(s, y, epsilon=c.epsilon) for y in (q, k))
    if extend:
        k, v = extend(s, k, v)
    spread = c.decomposed or c.cap > 0
    if spread:
        k, v = (repeat_heads(s, x, c.kv_heads, groups, c.rows, c.width) for x in (k, v))
        groups = 1
    context = attend(
        s, q, k, v, groups=groups, scale=_scale(c), mask=mask, decomposed=spread, cap=c.cap
    )
    context = merge_heads(s, context, c.rows, c.heads * c.width)
    if c.attention_gate:
        gate = linear(s.at("gate_proj"), x, c.hidden, c.heads * c.width, bias=bias)
        context = s.op("Mul", context, s.op("Sigmoid", gate))
    return linear(s.at("o_proj"), context, c.heads * c.width, c.hidden, bias=c.attention_bias)


def _scale(c: LlamaConfig) -> float:
    """What scores are multiplied by."""
    return c.width**-0.5 if c.attention_scale is None else c.attention_scale


def _rms(s: Scope, x: str, c: LlamaConfig, width: int) -> str:
    return rms_norm(s, x, width, epsilon=c.epsilon, decomposed=c.decomposed)


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
