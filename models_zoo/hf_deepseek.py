"""DeepSeek, and mixtures of experts that route or attend as it does, of a Hugging Face config.json:
`models_zoo.deepseek` with the fields of each model type. Defaults are those of transformers
5.24."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models_zoo import deepseek
from models_zoo.hf_decoders import Read, decoder
from models_zoo.hf_fields import Fields
from models_zoo.hf_layers import windowed
from models_zoo.hf_mixtures import EXPERTS
from models_zoo.spec import Family


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
        "experts": f.whole("n_routed_experts", experts, limit=EXPERTS),
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


def _by_sigmoid(
    f: Fields, *, groups: int, group_top: int, scaling: float, normalise: bool = True
) -> dict[str, Any]:
    """Routing of DeepSeek V3 and of those that took it over; the arguments are defaults."""
    f.only("scoring_func", "sigmoid")
    f.only("topk_method", "noaux_tc")
    return {
        "groups": f.whole("n_group", groups),
        "group_top": f.whole("topk_group", group_top),
        "scoring": "sigmoid",
        "normalise": f.flag("norm_topk_prob", normalise),
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


def _dots1(f: Fields) -> tuple[Family, Any]:
    fields = decoder(f, hidden=4608, layers=62, ff=10944, kv_heads=32, vocab=152064, seq=2048)
    for key in ("n_routed_experts", "num_experts_per_tok"):
        if f.data.get(key) is None:
            raise f.bad(key, "a whole number")
    own = _deepseek_fields(f, fields, experts=1, top=1, width=1408, shared=0, dense=0)
    first = f.count("max_window_layers", 62)
    return deepseek.FAMILY, deepseek.DeepseekConfig(
        **own | {"head_dim": fields["head_dim"]},
        **_by_sigmoid(f, groups=1, group_top=1, scaling=1.0, normalise=False),
        **windowed(f, fields["layers"], window=4096, first=first),
        qk_norm=True,
    )


DEEPSEEKS: Mapping[str, Read] = {
    "deepseek": _deepseek,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "dots1": _dots1,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "kimi_k2": _deepseek_v3,
}
