"""Gemma 4's text models: layers that see a window and layers that see everything, which have wider
heads and turn a part of them alone; norms around each branch, queries and keys normed, values
without a weight.

The last layers may take keys and values of the last layer of their kind that has its own (E2B,
E4B). per_layer: beside the stream each layer is given a vector of the token's own and of the
embedded token's, through a gate (E2B, E4B); what checkpoints hold as one table and one projection
of all layers is written in its parts, a layer's in its own module. With experts (26B A4B) they run
beside the feed-forward, on the same rows but norms of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from models_zoo import llama, moe
from models_zoo.builder import Net, Scope
from models_zoo.layers import (
    Masking,
    activation,
    attend,
    causal_mask,
    embedding,
    language_head,
    linear,
    merge_heads,
    positions,
    repeat_heads,
    rms_norm,
    split_heads,
    unit_rms,
    window_mask,
)
from models_zoo.rotary import Positions, Rotate, proportional, rotary
from models_zoo.spec import Family, Preset, require


@dataclass(frozen=True)
class Gemma4Config(moe.MoeConfig):
    """kinds: a letter a layer, begun anew where there are more layers: L sees a window, G
    everything. global_dim, global_kv: width of a head and heads of keys in layers G (by default as
    in L); global_share: the part of a head there that turns, by theta; local_theta: in L.
    values_of_keys: in G values are the keys before their norm. shared: so many last layers have no
    keys and values of their own, and with wide=1 feed-forwards twice as wide. per_layer: width of a
    layer's own embedding, 0 for none, of a table of so many rows. mixed: layers have experts."""

    kinds: str = "LLLLLG"
    global_dim: int | None = None
    global_kv: int | None = None
    global_share: float = 0.25
    values_of_keys: bool = False
    shared: int = 0
    wide: bool = False
    per_layer: int = 0
    per_layer_vocab: int = 262144
    mixed: bool = False

    @property
    def may_cache(self) -> bool:
        """None is written: layers' heads differ, and some keep nothing."""
        return False

    @property
    def period(self) -> int:
        """After how many layers they are alike again."""
        return self.layers if self.shared else len(self.kinds)

    def sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.mixed

    def whole(self, layer: int) -> bool:
        """Whether a layer sees everything."""
        return self.kinds[layer % len(self.kinds)] == "G"

    def borrows(self, layer: int) -> bool:
        """Whether a layer has no keys and values of its own."""
        return layer >= self.layers - self.shared

    def heads_of(self, whole: bool) -> tuple[int, int]:
        """Width of a head and heads of keys in layers of a kind."""
        if not whole:
            return self.width, self.kv_heads
        return self.global_dim or self.width, self.global_kv or self.kv_heads


@dataclass(frozen=True)
class _Kind:
    """What layers of a kind share."""

    dim: int
    kv_heads: int
    rotate: Rotate
    mask: Masking
    whole: bool


@dataclass(frozen=True)
class _Token:
    """What layers' own vectors are made of: tokens, their rows of the table (which the library
    multiplies by hidden^1/2 and divides by it again), and the one norm of all: its module, in which
    each layer's node must stand to be of one norm, and its scale."""

    ids: str
    rows: str
    norm: Scope
    scale: str


def build(c: Gemma4Config, net: Net) -> None:
    """input_ids [batch, seq] -> logits [batch, seq, vocab]."""
    _check(c, net)
    s = net.root.at("model")
    ids = net.input("input_ids", [net.batch, c.seq], "int64")
    rows, table = embedding(s.at("embed_tokens"), ids, c.vocab, c.hidden)
    x = s.at("embed_tokens").op("Mul", rows, s.f32(c.hidden**0.5))
    kinds = _kinds(s, ids, c)
    token = _token(s.at("per_layer_projection_norm"), ids, rows, c) if c.per_layer else None
    kept: dict[bool, tuple[str, str]] = {}
    for i in range(c.layers):
        layer, kind = s.at(f"layers.{i}"), kinds[c.whole(i)]
        h = _norm(layer.at("input_layernorm"), x, c)
        h = _attention(layer.at("self_attn"), h, c, kind, kept, own=not c.borrows(i))
        x = s.op("Add", x, _norm(layer.at("post_attention_layernorm"), h, c))
        x = layer.op("Add", x, _feed(layer, x, c, (2 if c.wide and c.borrows(i) else 1) * c.ff))
        if token:
            x = layer.op("Add", x, _own(layer, x, token, c))
        x = layer.op("Mul", x, layer.weight("layer_scalar", 1, std=0.0, mean=1.0))
    x = _norm(s.at("norm"), x, c)
    head = net.root.at("lm_head")
    language_head(head, x, c.hidden, c.vocab, table if c.tied else "", cap=c.head_cap)
    net.output("logits", [net.batch, c.seq, c.vocab])


def _check(c: Gemma4Config, net: Net) -> None:
    """Raises PlanError P073 for sizes that do not go together."""
    if c.mixed:
        moe.checked(c, net)
    odd = sorted(set(c.kinds) - set("LG"))
    require(bool(c.kinds) and not odd, f"{net.name}: kinds={c.kinds[:40]}", "letters L and G")
    require(not c.cache, f"{net.name}: no cache is written of these models", "leave out cache")
    first = c.layers - c.shared
    lenders = {c.whole(i) for i in range(max(0, first))}
    require(
        {c.whole(i) for i in range(max(0, first), c.layers)} <= lenders or not c.shared,
        f"{net.name}: the last {c.shared} of {c.layers} layers have nobody to take keys from",
        "a smaller shared",
    )
    for whole in (False, True):
        dim, kv = c.heads_of(whole)
        require(
            c.heads % kv == 0, f"{net.name}: heads={c.heads} is not a multiple of kv_heads={kv}"
        )
        require(dim % 2 == 0, f"{net.name}: rotary positions need an even head width, {dim} given")
    require(
        int(c.global_share * c.heads_of(True)[0] / 2) >= 1,
        f"{net.name}: global_share={c.global_share} leaves no feature that turns",
    )


def _kinds(s: Scope, ids: str, c: Gemma4Config) -> dict[bool, _Kind]:
    """By whether a layer sees everything."""
    turns, mask = s.at("rotary_emb"), s.at("mask")
    places = Positions(ids, positions(turns, c.seq), False)
    causal = causal_mask(mask, c.seq) if c.decomposed else ""
    near = window_mask(mask, c.seq, c.window) if 0 < c.window < c.seq else ""
    kinds = {}
    for whole in (False, True):
        dim, kv = c.heads_of(whole)
        turned = 2 * int(c.global_share * dim / 2)
        rotate = (
            proportional(turns, places, c.theta, width=dim, turned=turned)
            if whole and turned < dim
            else rotary(
                turns,
                places,
                c.theta if whole else c.local_theta or c.theta,
                width=dim,
                turned=dim,
                operator=False,
            )
        )
        masking = Masking(True, causal_mask=causal, keys="" if whole else near)
        kinds[whole] = _Kind(dim, kv, rotate, masking, whole)
    return kinds


def _norm(s: Scope, x: str, c: Gemma4Config, width: int = 0) -> str:
    return rms_norm(s, x, width or c.hidden, epsilon=c.epsilon, decomposed=c.decomposed)


# Many parameters: an attention's place, what it reads, and keys and values that layers lend.
def _attention(
    s: Scope, x: str, c: Gemma4Config, kind: _Kind, kept: dict[bool, tuple[str, str]], *, own: bool
) -> str:
    """[B, S, hidden] -> [B, S, hidden]; kept: keys and values of the last layer of each kind that
    has its own."""

    def project(name: str, heads: int) -> str:
        y = linear(s.at(name), x, c.hidden, heads * kind.dim, bias=c.attention_bias)
        return split_heads(s.at(name), y, c.seq, heads, kind.dim)

    q = kind.rotate(s, _norm(s.at("q_norm"), project("q_proj", c.heads), c, kind.dim))
    if own:
        k = project("k_proj", kind.kv_heads)
        same = c.values_of_keys and kind.whole
        v = unit_rms(s, k if same else project("v_proj", kind.kv_heads), epsilon=c.epsilon)
        k = kind.rotate(s, _norm(s.at("k_norm"), k, c, kind.dim))
        kept[kind.whole] = k, v
    k, v = kept[kind.whole]
    groups = c.heads // kind.kv_heads
    if c.decomposed:
        k, v = (repeat_heads(s, y, kind.kv_heads, groups, c.seq, kind.dim) for y in (k, v))
        groups = 1
    y = attend(s, q, k, v, groups=groups, scale=1.0, mask=kind.mask, decomposed=c.decomposed)
    width = c.heads * kind.dim
    y = merge_heads(s, y, c.seq, width)
    return linear(s.at("o_proj"), y, width, c.hidden, bias=c.attention_bias)


def _feed(s: Scope, x: str, c: Gemma4Config, width: int) -> str:
    """The feed-forward's branch, experts in it where there are any."""
    h = llama.gated(s.at("mlp"), _norm(s.at("pre_feedforward_layernorm"), x, c), c, width)
    if c.mixed:
        rows = _norm(s.at("pre_feedforward_layernorm_2"), x, c)
        y = moe.experts(s, rows, c, _route(s.at("router"), x, c))
        y = _norm(s.at("post_feedforward_layernorm_2"), y, c)
        h = s.op("Add", _norm(s.at("post_feedforward_layernorm_1"), h, c), y)
    return _norm(s.at("post_feedforward_layernorm"), h, c)


def _route(s: Scope, x: str, c: Gemma4Config) -> moe.Chosen:
    """The experts of each token, by its normed rows; an expert has a factor of its own."""
    scale = s.weight("scale", c.hidden, std=0.1, mean=1.0)
    h = s.op("Mul", s.op("Mul", unit_rms(s, x, epsilon=c.epsilon), scale), s.f32(c.hidden**-0.5))
    logits = linear(s.at("proj"), h, c.hidden, c.experts, bias=False)
    value, index = s.ops(2, "TopK", s.op("Softmax", logits, axis=-1), s.ints(c.top), axis=-1)
    value = s.op("Div", value, s.op("ReduceSum", value, s.ints(-1), keepdims=1))
    factors = s.weight("per_expert_scale", c.experts, std=0.1, mean=1.0)
    return s.op("Mul", value, s.op("Gather", factors, index, axis=0)), index


def _token(norm: Scope, ids: str, rows: str, c: Gemma4Config) -> _Token:
    return _Token(ids, rows, norm, norm.weight("weight", c.per_layer, std=0.1, mean=1.0))


def _own(s: Scope, x: str, token: _Token, c: Gemma4Config) -> str:
    """What a layer adds of its own vector of each token."""
    width = c.per_layer
    embedded, _ = embedding(s.at("embed_tokens_per_layer"), token.ids, c.per_layer_vocab, width)
    embedded = s.op("Mul", embedded, s.f32(width**0.5))
    seen = linear(s.at("per_layer_model_projection"), token.rows, c.hidden, width, bias=False)
    if c.decomposed:
        seen = token.norm.op("Mul", unit_rms(token.norm, seen, epsilon=c.epsilon), token.scale)
    else:
        norm = token.norm
        seen = norm.op("RMSNormalization", seen, token.scale, axis=-1, epsilon=c.epsilon)
    both = s.op("Mul", s.op("Add", seen, embedded), s.f32(2**-0.5))
    gate = linear(s.at("per_layer_input_gate"), x, c.hidden, width, bias=False)
    h = s.op("Mul", activation(s, gate, c.act), both)
    h = linear(s.at("per_layer_projection"), h, width, c.hidden, bias=False)
    return _norm(s.at("post_per_layer_input_norm"), h, c)


_TINY = Gemma4Config(
    6,
    64,
    4,
    2,
    96,
    512,
    16,
    1e6,
    epsilon=1e-6,
    head_dim=16,
    tied=True,
    act="gelu-tanh",
    window=4,
    local_theta=1e4,
    kinds="LLG",
    global_dim=32,
    global_kv=1,
    shared=3,
    per_layer=8,
    per_layer_vocab=512,
)
_31B = Gemma4Config(
    60,
    5376,
    32,
    16,
    21504,
    262144,
    4096,
    1e6,
    epsilon=1e-6,
    head_dim=256,
    tied=True,
    act="gelu-tanh",
    head_cap=30.0,
    window=1024,
    local_theta=1e4,
    global_dim=512,
    global_kv=4,
    values_of_keys=True,
)
_26B = replace(
    _31B,
    layers=30,
    hidden=2816,
    heads=16,
    kv_heads=8,
    ff=2112,
    global_kv=2,
    mixed=True,
    experts=128,
    top=8,
    expert_ff=704,
)

FAMILY = Family(
    "gemma4",
    {
        "gemma4-tiny": Preset(_TINY, "Gemma 4 for tests", batch=4),
        "gemma-4-31b": Preset(_31B, "Gemma 4 31B, text"),
        "gemma-4-26b-a4b": Preset(_26B, "Gemma 4 26B A4B, text"),
    },
    build,
)
