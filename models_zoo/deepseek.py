"""DeepSeek: many small routed experts and a shared one (`models_zoo.moe`), behind latent attention
from V2 on.

Latent attention (kv_rank given): keys and values of all heads come from one vector of kv_rank
features a token, queries (q_rank given) from one of q_rank; a head's query and key are `nope`
features from there and `rope` features that rotate, the key's shared by all heads:

    q_h = [W_q c_q ; R(W_qr c_q)]      k_h = [W_k c_kv ; R(W_kr x)]      v_h = W_v c_kv      c_q =
                                       norm(W_dq x)      c_kv = norm(W_dkv x)

Written as training computes it, keys and values spread out; which features rotate together (halves
here, neighbours in the original) is a matter of the order of columns. Without kv_rank it is Llama's
attention (DeepSeek MoE). The multi-token prediction layer of V3 is left out, as its published count
does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from models_zoo import llama, moe
from models_zoo.builder import Net, Scope
from models_zoo.layers import Extend, Masking, attend, linear, merge_heads, rms_norm, split_heads
from models_zoo.rotary import Rotate
from models_zoo.spec import Family, Preset


@dataclass(frozen=True)
class DeepseekConfig(moe.MoeConfig):
    """See the module. nope, rope, v_dim: features of a head in latent attention."""

    kv_rank: int | None = None
    q_rank: int | None = None
    nope: int = 128
    rope: int = 64
    v_dim: int = 128

    @property
    def rotary_width(self) -> int:
        """Features of a head that rotate."""
        return self.rope if self.kv_rank else self.width

    @property
    def kept(self) -> Mapping[str, tuple[int, int]]:
        """Of latent attention what keys and values of all heads are made of, and the part of keys
        that rotates."""
        if not self.kv_rank:
            return super().kept
        return {"latent": (1, self.kv_rank), "rotary_key": (1, self.rope)}


def build(c: DeepseekConfig, net: Net) -> None:
    """input_ids [batch, seq] -> logits [batch, seq, vocab]."""
    moe.checked(c, net)
    latent = partial(_latent, c=c, kv_rank=c.kv_rank) if c.kv_rank else None
    llama.decoder(c, net, feed=lambda i, s, x: moe.feed(i, s, x, c), attention=latent)


# Many parameters: those of an attention that takes Llama's place, and its own configuration.
def _latent(
    s: Scope,
    x: str,
    rotate: Rotate,
    mask: Masking,
    extend: Extend | None,
    *,
    c: DeepseekConfig,
    kv_rank: int,
) -> str:
    """[B, S, hidden] -> [B, S, hidden]."""
    heads, wide, rows = c.heads, c.nope + c.rope, c.rows
    if c.q_rank:
        low = _norm(
            s.at("q_a_layernorm"),
            linear(s.at("q_a_proj"), x, c.hidden, c.q_rank, bias=c.attention_bias),
            c.q_rank,
            c,
        )
        q = linear(s.at("q_b_proj"), low, c.q_rank, heads * wide, bias=False)
    else:
        q = linear(s.at("q_proj"), x, c.hidden, heads * wide, bias=False)
    q, q_turned = s.ops(
        2, "Split", split_heads(s, q, rows, heads, wide), s.ints(c.nope, c.rope), axis=-1
    )
    packed = linear(
        s.at("kv_a_proj_with_mqa"), x, c.hidden, kv_rank + c.rope, bias=c.attention_bias
    )
    low, k_turned = s.ops(2, "Split", packed, s.ints(kv_rank, c.rope), axis=-1)
    low = _norm(s.at("kv_a_layernorm"), low, kv_rank, c)

    def shared_key() -> str:
        """The part of keys that rotates [B, 1, S, rope], written where it is read first."""
        return rotate(s, s.op("Unsqueeze", k_turned, s.ints(1)))

    key = ""
    if extend:
        low, key = extend(s, s.op("Unsqueeze", low, s.ints(1)), shared_key())
        low = s.op("Squeeze", low, s.ints(1))
    both = linear(s.at("kv_b_proj"), low, kv_rank, heads * (c.nope + c.v_dim), bias=False)
    k, v = s.ops(
        2,
        "Split",
        split_heads(s, both, rows, heads, c.nope + c.v_dim),
        s.ints(c.nope, c.v_dim),
        axis=-1,
    )
    shared = s.op("Expand", key or shared_key(), s.ints(1, heads, 1, 1))
    q, k = s.op("Concat", q, rotate(s, q_turned), axis=-1), s.op("Concat", k, shared, axis=-1)
    context = attend(s, q, k, v, scale=wide**-0.5, mask=mask, decomposed=c.decomposed)
    return linear(
        s.at("o_proj"),
        merge_heads(s, context, rows, heads * c.v_dim),
        heads * c.v_dim,
        c.hidden,
        bias=c.attention_bias,
    )


def _norm(s: Scope, x: str, width: int, c: DeepseekConfig) -> str:
    return rms_norm(s, x, width, epsilon=c.epsilon, decomposed=c.decomposed)


_TINY = DeepseekConfig(
    2,
    64,
    4,
    4,
    96,
    512,
    16,
    experts=8,
    top=3,
    expert_ff=32,
    shared_ff=64,
    dense_layers=1,
    normalise=True,
    scaling=2.5,
    scoring="sigmoid",
    groups=4,
    group_top=2,
    kv_rank=32,
    q_rank=48,
    nope=16,
    rope=8,
    v_dim=16,
)
_MOE_16B = DeepseekConfig(
    28,
    2048,
    16,
    16,
    10944,
    102400,
    4096,
    epsilon=1e-6,
    experts=64,
    top=6,
    expert_ff=1408,
    shared_ff=2816,
    dense_layers=1,
    normalise=False,
)
_LITE = replace(_MOE_16B, layers=27, kv_rank=512)
_V2 = DeepseekConfig(
    60,
    5120,
    128,
    128,
    12288,
    102400,
    4096,
    epsilon=1e-6,
    experts=160,
    top=6,
    expert_ff=1536,
    shared_ff=3072,
    dense_layers=1,
    normalise=False,
    scaling=16.0,
    groups=8,
    group_top=3,
    kv_rank=512,
    q_rank=1536,
)
_V3 = DeepseekConfig(
    61,
    7168,
    128,
    128,
    18432,
    129280,
    4096,
    epsilon=1e-6,
    experts=256,
    top=8,
    expert_ff=2048,
    shared_ff=2048,
    dense_layers=3,
    scaling=2.5,
    scoring="sigmoid",
    groups=8,
    group_top=4,
    kv_rank=512,
    q_rank=1536,
)

FAMILY = Family(
    "deepseek",
    {
        "deepseek-tiny": Preset(
            _TINY, "shared and routed experts, latent attention, for tests", batch=4
        ),
        "deepseek-moe-16b": Preset(
            _MOE_16B, "DeepSeekMoE 16B, 64 routed experts, Llama's attention"
        ),
        "deepseek-v2-lite": Preset(_LITE, "DeepSeek V2 Lite, 64 routed experts, latent attention"),
        "deepseek-v2": Preset(_V2, "DeepSeek V2, 160 routed experts, latent attention"),
        "deepseek-v3": Preset(_V3, "DeepSeek V3 and R1, 256 routed experts, latent attention"),
    },
    build,
)
