"""Mixtures of experts of a Hugging Face config.json: `models_zoo.moe` with the fields of
each model type. Defaults are those of transformers 5.24."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models_zoo import moe
from models_zoo.hf_decoders import Read, bare_layers, decoder, scaled
from models_zoo.hf_fields import Fields
from models_zoo.hf_layers import near_layers, windowed
from models_zoo.spec import Family

EXPERTS = 4096
"""The most experts that a layer may have: beyond is a slip of the keyboard."""


def _mixtral(f: Fields) -> tuple[Family, Any]:
    fields = decoder(f, ff=14336, kv_heads=8, seq=131072, epsilon=1e-5, theta=1e6)
    return moe.FAMILY, moe.MoeConfig(
        **fields,
        experts=f.whole("num_local_experts", 8, limit=EXPERTS),
        top=f.whole("num_experts_per_tok", 2),
        **windowed(f, fields["layers"]),
    )


def _gpt_oss(f: Fields) -> tuple[Family, Any]:
    f.data = {"head_dim": 64, **f.data}
    f.left_out.append("The sinks of attention are left out: a number a head in each softmax.")
    fields = decoder(
        f, hidden=2880, layers=36, heads=64, ff=2880, kv_heads=8, vocab=201088, seq=131072,
        epsilon=1e-5, theta=1.5e5, attention_bias=True,
    )  # fmt: skip
    return moe.FAMILY, moe.MoeConfig(
        **fields,
        **windowed(f, fields["layers"], window=128, every=2),
        experts=f.whole("num_local_experts", 128, limit=EXPERTS),
        top=f.whole("num_experts_per_tok", 4),
        expert_ff=fields["ff"],
        router_bias=True,
        expert_bias=True,
        limit=f.number("swiglu_limit", 7.0),
        alpha=f.number("swiglu_alpha", 1.702),
    )


def _olmoe(f: Fields) -> tuple[Family, Any]:
    f.only("clip_qkv", None)
    fields = decoder(
        f, hidden=2048, layers=16, heads=16, ff=2048, kv_heads=None, vocab=50304, seq=4096,
        epsilon=1e-5,
    )  # fmt: skip
    return moe.FAMILY, moe.MoeConfig(
        **fields,
        qk_norm_whole=True,
        experts=f.whole("num_experts", 64, limit=EXPERTS),
        top=f.whole("num_experts_per_tok", 8),
        expert_ff=fields["ff"],
        normalise=f.flag("norm_topk_prob", False),
    )


def _granitemoe(f: Fields) -> tuple[Family, Any]:
    return _granite_experts(f, 0)


def _granitemoeshared(f: Fields) -> tuple[Family, Any]:
    return _granite_experts(f, f.count("shared_intermediate_size", 0))


def _granite_experts(f: Fields, shared: int) -> tuple[Family, Any]:
    fields = decoder(f, ff=11008, kv_heads=None, seq=2048)
    return moe.FAMILY, moe.MoeConfig(
        **fields,
        **scaled(f),
        experts=f.whole("num_local_experts", 8, limit=EXPERTS),
        top=f.whole("num_experts_per_tok", 2),
        expert_ff=fields["ff"],
        shared_ff=shared,
    )


def _minimax_m2(f: Fields) -> tuple[Family, Any]:
    width = f.whole("head_dim", 128)
    turned = {"partial_rotary_factor": f.whole("rotary_dim", width) / width}
    f.data = {"head_dim": width, **turned, **f.data}
    f.only("scoring_func", "sigmoid")
    fields = decoder(
        f, hidden=3072, layers=62, heads=48, ff=1536, kv_heads=8, vocab=200064, seq=196608,
        theta=5e6,
    )  # fmt: skip
    return moe.FAMILY, moe.MoeConfig(
        **fields,
        qk_norm_whole=True,
        experts=f.whole("num_local_experts", 256, limit=EXPERTS),
        top=f.whole("num_experts_per_tok", 8),
        expert_ff=fields["ff"],
        scoring="sigmoid",
    )


def _llama4(f: Fields) -> tuple[Family, Any]:
    fields = decoder(
        f, hidden=5120, layers=48, heads=40, ff=8192, kv_heads=8, vocab=202048, seq=131072,
        epsilon=1e-5, theta=5e5, head_dim=128,
    )  # fmt: skip
    layers, chunk = fields["layers"], f.whole("attention_chunk_size", 8192)
    bare, every = bare_layers(f, layers), f.whole("interleave_moe_layer_step", 1)
    if f.data.get("moe_layers") not in (None, [], list(range(every - 1, layers, every))):
        raise f.bad("moe_layers", "each interleave_moe_layer_step-th layer")
    near = near_layers(f, layers, every=bare) or {}
    if f.data.get("attention_chunk_size", chunk) is None:
        near = {}
    if f.flag("attn_temperature_tuning", True):
        f.notes.append("Queries' temperature by position is left out: it changes constants.")
    return moe.FAMILY, moe.MoeConfig(
        **fields,
        **({"chunk": chunk, **near} if near else {}),
        bare_every=bare,
        qk_norm_turned=f.flag("use_qk_norm", True),
        experts=f.whole("num_local_experts", 16, limit=EXPERTS),
        top=f.whole("num_experts_per_tok", 1),
        expert_ff=fields["ff"],
        dense_ff=f.whole("intermediate_size_mlp", 16384),
        shared_ff=fields["ff"],
        sparse_every=every,
        scoring="sigmoid-plain",
        normalise=False,
    )


def _qwen_moe(
    f: Fields, fields: dict[str, Any], experts: int, top: int, width: int, **more: Any
) -> tuple[Family, Any]:
    f.only("decoder_sparse_step", 1)
    if f.flag("use_sliding_window", False):
        fields = fields | windowed(f, fields["layers"], window=4096)
    f.only("mlp_only_layers", [])
    count = f.whole(
        "num_local_experts", f.whole("num_experts", experts, limit=EXPERTS), limit=EXPERTS
    )
    return moe.FAMILY, moe.MoeConfig(
        **fields,
        experts=count,
        top=f.whole("num_experts_per_tok", top),
        expert_ff=f.whole("moe_intermediate_size", width),
        normalise=f.flag("norm_topk_prob", False),
        **more,
    )


def _qwen2_moe(f: Fields) -> tuple[Family, Any]:
    fields = decoder(
        f, hidden=2048, layers=24, heads=16, ff=5632, kv_heads=16, vocab=151936, seq=32768
    )
    shared = f.whole("shared_expert_intermediate_size", 5632)
    return _qwen_moe(
        f,
        fields,
        60,
        4,
        1408,
        shared_ff=shared,
        shared_gate=True,
        qkv_bias=f.flag("qkv_bias", True),
    )


def _qwen3_moe(f: Fields) -> tuple[Family, Any]:
    return _qwen_moe(
        f,
        decoder(f, hidden=2048, layers=24, ff=6144, kv_heads=4, vocab=151936, seq=32768),
        128,
        8,
        768,
        qk_norm=True,
    )


def _hunyuan_moe(f: Fields) -> tuple[Family, Any]:
    for key in ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert"):
        f.data = {**f.data, key: _alike(f, key)}
    fields = decoder(f, ff=11008, kv_heads=None, vocab=290943, seq=2048, epsilon=1e-5)
    width = fields["ff"]
    f.only("moe_intermediate_size", width)
    f.only("num_shared_expert", 1)
    return moe.FAMILY, moe.MoeConfig(
        **fields,
        qk_norm_behind=True,
        experts=f.whole("num_experts", 1, limit=EXPERTS),
        top=f.whole("moe_topk", 1),
        expert_ff=width,
        shared_ff=width,
    )


def _alike(f: Fields, key: str) -> Any:
    """A field that may be a list of a number a layer, where all of these are the same."""
    value = f.data.get(key)
    if not isinstance(value, list):
        return value
    if not value or any(other != value[0] for other in value):
        raise f.bad(key, "the same number for each layer")
    return value[0]


def _ernie_moe(f: Fields) -> tuple[Family, Any]:
    fields = decoder(
        f, hidden=2560, layers=28, heads=20, ff=12288, kv_heads=4, vocab=103424, seq=131072,
        epsilon=1e-5, theta=5e5, tied=True,
    )  # fmt: skip
    f.only("use_bias", False)
    f.only("moe_layer_end_index", -1, fields["layers"] - 1)
    width = f.whole("moe_intermediate_size", 1536)
    return moe.FAMILY, moe.MoeConfig(
        **fields,
        experts=f.whole("moe_num_experts", 64, limit=EXPERTS),
        top=f.whole("moe_k", 6),
        expert_ff=width,
        shared_ff=width * f.count("moe_num_shared_experts", 2),
        dense_layers=f.count("moe_layer_start_index", 1),
        sparse_every=f.whole("moe_layer_interval", 1),
        scoring="softmax-biased",
    )


def _phimoe(f: Fields) -> tuple[Family, Any]:
    fields = decoder(f, ff=6400, kv_heads=8, vocab=32064, seq=131072, epsilon=1e-5, theta=1e6)
    f.only("num_experts_per_tok", 2)
    f.notes.append("Experts are chosen as in evaluation: training would draw them.")
    return moe.FAMILY, moe.MoeConfig(
        **fields,
        **windowed(f, fields["layers"]),
        norm="layer",
        head_bias=f.flag("lm_head_bias", False),
        experts=f.whole("num_local_experts", 16, limit=EXPERTS),
        top=2,
        normalise=False,
        scoring="sparse-mixer",
        near=2 * f.number("router_jitter_noise", 0.01),
    )


MIXTURES: Mapping[str, Read] = {
    "ernie4_5_moe": _ernie_moe,
    "gpt_oss": _gpt_oss,
    "granitemoe": _granitemoe,
    "granitemoeshared": _granitemoeshared,
    "hunyuan_v1_moe": _hunyuan_moe,
    "llama4_text": _llama4,
    "minimax_m2": _minimax_m2,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "phimoe": _phimoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
}
