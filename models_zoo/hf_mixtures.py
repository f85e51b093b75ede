"""Mixtures of experts of a Hugging Face config.json: `models_zoo.moe` and `models_zoo.deepseek`
with the fields of each model type. Defaults are those of transformers 5.24."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models_zoo import deepseek, moe
from models_zoo.hf_decoders import Read, bare_layers, decoder, scaled
from models_zoo.hf_fields import Fields
from models_zoo.hf_layers import near_layers, windowed
from models_zoo.spec import Family

_EXPERTS = 4096


def _mixtral(f: Fields) -> tuple[Family, Any]:
    fields = decoder(f, ff=14336, kv_heads=8, seq=131072, epsilon=1e-5, theta=1e6)
    return moe.FAMILY, moe.MoeConfig(
        **fields,
        experts=f.whole("num_local_experts", 8, limit=_EXPERTS),
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
        experts=f.whole("num_local_experts", 128, limit=_EXPERTS),
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
        experts=f.whole("num_experts", 64, limit=_EXPERTS),
        top=f.whole("num_experts_per_tok", 8),
        expert_ff=fields["ff"],
        normalise=f.flag("norm_topk_prob", False),
    )


def _granitemoe(f: Fields) -> tuple[Family, Any]:
    fields = decoder(f, ff=11008, kv_heads=None, seq=2048)
    return moe.FAMILY, moe.MoeConfig(
        **fields,
        **scaled(f),
        experts=f.whole("num_local_experts", 8, limit=_EXPERTS),
        top=f.whole("num_experts_per_tok", 2),
        expert_ff=fields["ff"],
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
        experts=f.whole("num_local_experts", 256, limit=_EXPERTS),
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
        experts=f.whole("num_local_experts", 16, limit=_EXPERTS),
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
        "num_local_experts", f.whole("num_experts", experts, limit=_EXPERTS), limit=_EXPERTS
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


def _deepseek_fields(
    f: Fields,
    fields: dict[str, Any],
    *,
    experts: int,
    top: int,
    width: int,
    shared: int,
    dense: int,
) -> dict[str, Any]:
    """Fields of DeepseekConfig that all versions have; the arguments are the version's defaults."""
    f.only("moe_layer_freq", 1)
    if f.data.get("num_nextn_predict_layers") or f.data.get("num_mtp_layers"):
        f.left_out.append("The layer that predicts a second token is left out.")
    each = f.whole("moe_intermediate_size", width)
    return fields | {
        "experts": f.whole("n_routed_experts", experts, limit=_EXPERTS),
        "top": f.whole("num_experts_per_tok", top),
        "expert_ff": each,
        "shared_ff": each * f.count("n_shared_experts", shared),
        "dense_layers": f.count("first_k_dense_replace", dense),
        "head_dim": None,
    }


def _latent(f: Fields, *, q_rank: int = 1536, nope: int = 128, v_dim: int = 128) -> dict[str, Any]:
    rank = (
        f.whole("q_lora_rank", q_rank) if f.data.get("q_lora_rank", q_rank) is not None else None
    )  # null is a value: queries are not compressed
    return {
        "q_rank": rank,
        "kv_rank": f.whole("kv_lora_rank", 512),
        "nope": f.whole("qk_nope_head_dim", nope),
        "rope": f.whole("qk_rope_head_dim", 64),
        "v_dim": f.whole("v_head_dim", v_dim),
    }


def _deepseek(f: Fields) -> tuple[Family, Any]:
    fields = decoder(f, hidden=4096, layers=30, ff=11008, kv_heads=None, vocab=102400, seq=2048)
    f.only("scoring_func", "softmax")
    moe_fields = _deepseek_fields(f, fields, experts=64, top=6, width=1407, shared=2, dense=0)
    return deepseek.FAMILY, deepseek.DeepseekConfig(
        **moe_fields, normalise=f.flag("norm_topk_prob", False)
    )


def _deepseek_v2(f: Fields) -> tuple[Family, Any]:
    fields = decoder(f, ff=11008, kv_heads=None, vocab=102400, seq=2048)
    f.only("scoring_func", "softmax")
    grouped = f.one_of("topk_method", "greedy", {"greedy": False, "group_limited_greedy": True})
    groups: dict[str, Any] = (
        {"groups": f.whole("n_group", 1), "group_top": f.whole("topk_group", 1)} if grouped else {}
    )
    moe_fields = _deepseek_fields(f, fields, experts=64, top=6, width=1407, shared=2, dense=0)
    return deepseek.FAMILY, deepseek.DeepseekConfig(
        **moe_fields,
        **_latent(f),
        **groups,
        normalise=f.flag("norm_topk_prob", False),
        scaling=f.number("routed_scaling_factor", 1.0),
    )


def _by_sigmoid(f: Fields, *, groups: int, group_top: int, scaling: float) -> dict[str, Any]:
    """Routing of DeepSeek V3 and of those that took it over; the arguments are defaults."""
    f.only("scoring_func", "sigmoid")
    f.only("topk_method", "noaux_tc")
    return {
        "groups": f.whole("n_group", groups),
        "group_top": f.whole("topk_group", group_top),
        "scoring": "sigmoid",
        "normalise": f.flag("norm_topk_prob", True),
        "scaling": f.number("routed_scaling_factor", scaling),
    }


def _deepseek_v3(f: Fields) -> tuple[Family, Any]:
    fields = decoder(
        f, hidden=7168, layers=61, heads=128, ff=18432, kv_heads=128, vocab=129280, seq=4096
    )
    moe_fields = _deepseek_fields(f, fields, experts=256, top=8, width=2048, shared=1, dense=3)
    return deepseek.FAMILY, deepseek.DeepseekConfig(
        **moe_fields, **_latent(f), **_by_sigmoid(f, groups=8, group_top=4, scaling=2.5)
    )


def _glm4_moe(f: Fields) -> tuple[Family, Any]:
    fields = decoder(
        f, layers=46, heads=96, ff=10944, kv_heads=8, vocab=151552, seq=131072, epsilon=1e-5,
        share=0.5,
    )  # fmt: skip
    own = _deepseek_fields(f, fields, experts=128, top=8, width=1408, shared=1, dense=1) | {
        "head_dim": fields["head_dim"],
        "qkv_bias": fields["attention_bias"],
        "attention_bias": False,
        "qk_norm": f.flag("use_qk_norm", False),
    }
    return deepseek.FAMILY, deepseek.DeepseekConfig(
        **own, **_by_sigmoid(f, groups=1, group_top=1, scaling=1.0)
    )


def _glm4_moe_lite(f: Fields) -> tuple[Family, Any]:
    layers = f.layers("num_hidden_layers", 47)
    kinds = f.data.get("mlp_layer_types")
    if kinds is not None:
        dense = kinds.count("dense") if isinstance(kinds, list) else 0
        if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
            raise f.bad("mlp_layer_types", f"of {layers} layers the first dense, the others sparse")
        f.data = {**f.data, "first_k_dense_replace": dense}
    fields = decoder(
        f, hidden=2048, layers=47, heads=20, ff=10240, kv_heads=20, vocab=154880, seq=202752,
        epsilon=1e-5,
    )  # fmt: skip
    own = _deepseek_fields(f, fields, experts=64, top=4, width=1536, shared=1, dense=1)
    return deepseek.FAMILY, deepseek.DeepseekConfig(
        **own,
        **_latent(f, q_rank=768, nope=192, v_dim=256),
        **_by_sigmoid(f, groups=1, group_top=1, scaling=1.8),
    )


MIXTURES: Mapping[str, Read] = {
    "deepseek": _deepseek,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "gpt_oss": _gpt_oss,
    "granitemoe": _granitemoe,
    "kimi_k2": _deepseek_v3,
    "llama4_text": _llama4,
    "minimax_m2": _minimax_m2,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
}
