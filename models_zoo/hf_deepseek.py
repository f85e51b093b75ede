"""DeepSeek, and mixtures of experts that route or attend as it does, of a Hugging Face config.json:
`models_zoo.deepseek` with the fields of each model type. Defaults are those of transformers
5.24."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models_zoo import deepseek
from models_zoo.hf_decoders import Read, bare_where_full, decoder
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
    expert_width = f.whole("moe_intermediate_size", width)
    return fields | {
        "experts": f.whole("n_routed_experts", experts, limit=EXPERTS),
        "top": f.whole("num_experts_per_tok", top),
        "expert_ff": expert_width,
        "shared_ff": expert_width * f.count("n_shared_experts", shared),
        "dense_layers": f.count("first_k_dense_replace", dense),
        "head_dim": None,
    }


# Many parameters: the defaults of one model type each.
def _latent(
    f: Fields,
    *,
    q_rank: int = 1536,
    kv_rank: int = 512,
    nope: int = 128,
    rope: int = 64,
    v_dim: int = 128,
) -> dict[str, Any]:
    rank = (
        f.whole("q_lora_rank", q_rank) if f.data.get("q_lora_rank", q_rank) is not None else None
    )  # null is a value: queries are not compressed
    return {
        "q_rank": rank,
        "kv_rank": f.whole("kv_lora_rank", kv_rank),
        "nope": f.whole("qk_nope_head_dim", nope),
        "rope": f.whole("qk_rope_head_dim", rope),
        "v_dim": f.whole("v_head_dim", v_dim),
    }


def _dense_first(f: Fields, layers: int) -> None:
    """Layers without experts as a number, of a file that has a word a layer."""
    kinds = f.data.get("mlp_layer_types")
    if kinds is None:
        return
    dense = kinds.count("dense") if isinstance(kinds, list) else 0
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise f.bad("mlp_layer_types", f"of {layers} layers the first dense, the others sparse")
    f.data = {**f.data, "first_k_dense_replace": dense}


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


def _deepseek_v32(f: Fields) -> tuple[Family, Any]:
    _dense_first(f, f.layers("num_hidden_layers", 61))
    fields = decoder(
        f, hidden=7168, layers=61, heads=128, ff=18432, kv_heads=128, vocab=129280, seq=163840
    )
    moe_fields = _deepseek_fields(f, fields, experts=256, top=8, width=2048, shared=1, dense=3)
    latent = _latent(f)
    _no_indexers(f, fields, latent, heads=64, indexed=fields["layers"])
    return deepseek.FAMILY, deepseek.DeepseekConfig(
        **moe_fields, **latent, **_by_sigmoid(f, groups=8, group_top=4, scaling=2.5)
    )


def _glm_moe_dsa(f: Fields) -> tuple[Family, Any]:
    _dense_first(f, f.layers("num_hidden_layers", 78))
    fields = decoder(
        f, hidden=6144, layers=78, heads=64, ff=12288, kv_heads=64, vocab=154880, seq=202752,
        epsilon=1e-5,
    )  # fmt: skip
    moe_fields = _deepseek_fields(f, fields, experts=256, top=8, width=2048, shared=1, dense=3)
    latent = _latent(f, q_rank=2048, nope=192, v_dim=256)
    _no_indexers(f, fields, latent, heads=32, indexed=_with_indexer(f, fields["layers"]))
    return deepseek.FAMILY, deepseek.DeepseekConfig(
        **moe_fields, **latent, **_by_sigmoid(f, groups=1, group_top=1, scaling=2.5)
    )


def _with_indexer(f: Fields, layers: int) -> int:
    """How many layers have an indexer of their own; others take the keys that the one before
    chose."""
    own = f.data.get("indexer_types")
    pattern = f.data.get("index_topk_pattern") if own is None else own
    if pattern is not None:
        words = {"F": True, "S": False, "full": True, "shared": False}
        if (
            not isinstance(pattern, str | list)
            or len(pattern) < layers
            or any(word not in words for word in map(str, pattern))
        ):
            raise f.bad(
                "index_topk_pattern" if own is None else "indexer_types",
                f"{layers} letters of F and S, or words of full and shared",
            )
        return sum(words[str(word)] for word in pattern[:layers])
    every, first = f.whole("index_topk_freq", 1), f.count("index_skip_topk_offset", 2)
    return sum(max(i - first + 1, 0) % every == 0 for i in range(layers))


def _no_indexers(
    f: Fields, fields: Mapping[str, Any], latent: Mapping[str, Any], *, heads: int, indexed: int
) -> None:
    """Say what a model whose attention is to chosen keys is written without. heads: the model
    type's default; indexed: layers with an indexer."""
    heads, width = f.whole("index_n_heads", heads), f.whole("index_head_dim", 128)
    if latent["q_rank"] is None:
        raise f.bad("q_lora_rank", "a whole number, which indexers read from,")
    each = latent["q_rank"] * heads * width + fields["hidden"] * (width + heads) + 2 * width
    top = f.whole("index_topk", 2048)
    f.left_out.append(
        f"The indexers are left out ({indexed * each / 1e9:.2f} billion parameters), which choose"
        f" {top} keys for each query: attention is to all keys, the same up to {top} tokens, and"
        " dearer beyond."
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
    _dense_first(f, f.layers("num_hidden_layers", 47))
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


def _named(f: Fields, names: Mapping[str, str]) -> None:
    """Take fields by the names that DeepSeek's model types have."""
    f.data = {names.get(key, key): value for key, value in f.data.items()}


def _exaone_moe(f: Fields) -> tuple[Family, Any]:
    _named(f, {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"})
    f.data = {"sliding_window": 4096, **f.data}
    _dense_first(f, f.layers("num_hidden_layers", 32))
    fields = decoder(f, ff=16384, kv_heads=32, vocab=102400, seq=2048, epsilon=1e-5)
    own = _deepseek_fields(f, fields, experts=64, top=8, width=1024, shared=1, dense=1)
    pattern = f.data.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):  # "LLLG": three layers with a window, then one without
        f.data = {**f.data, "sliding_window_pattern": len(pattern)}
    near = windowed(f, fields["layers"], every=f.count("sliding_window_pattern", 4))
    return deepseek.FAMILY, deepseek.DeepseekConfig(
        **own | {"head_dim": fields["head_dim"]},
        **_by_sigmoid(f, groups=1, group_top=1, scaling=2.5),
        **near,
        qk_norm=True,
        bare_every=bare_where_full(f, near),
    )


def _solar_open(f: Fields) -> tuple[Family, Any]:
    # No layer is without experts, whatever width a file has for one.
    f.data = {key: value for key, value in f.data.items() if key != "intermediate_size"}
    fields = decoder(
        f, layers=48, heads=64, ff=1, kv_heads=8, vocab=196608, seq=131072, epsilon=1e-5,
        theta=1e6, head_dim=128,
    )  # fmt: skip
    own = _deepseek_fields(f, fields, experts=128, top=8, width=1280, shared=1, dense=0) | {
        "dense_layers": 0,
        "head_dim": fields["head_dim"],
        "qkv_bias": fields["attention_bias"],
        "attention_bias": False,
    }
    return deepseek.FAMILY, deepseek.DeepseekConfig(
        **own, **_by_sigmoid(f, groups=1, group_top=1, scaling=1.0)
    )


def _hy_v3(f: Fields) -> tuple[Family, Any]:
    _named(
        f,
        {
            "num_experts": "n_routed_experts",
            "num_shared_experts": "n_shared_experts",
            "router_scaling_factor": "routed_scaling_factor",
        },
    )
    f.only("mlp_bias", False)
    _dense_first(f, f.layers("num_hidden_layers", 80))
    fields = decoder(
        f, layers=80, heads=64, ff=13312, kv_heads=8, vocab=120832, seq=131072, epsilon=1e-5,
        theta=11_158_840.0, head_dim=128,
    )  # fmt: skip
    own = _deepseek_fields(f, fields, experts=192, top=8, width=1536, shared=1, dense=1)
    return deepseek.FAMILY, deepseek.DeepseekConfig(
        **own | {"head_dim": fields["head_dim"]},
        **_by_sigmoid(f, groups=1, group_top=1, scaling=2.826),
        qk_norm=True,
    )


def _mistral4(f: Fields) -> tuple[Family, Any]:
    for key in ("n_group", "topk_group"):
        f.only(key, 1)
    fields = decoder(f, layers=36, ff=12288, kv_heads=32, vocab=131072, seq=1048576)
    # What of a head turns is qk_rope_head_dim, whatever part of it the file says that is.
    fields.pop("rotary_dim", None)
    own = _deepseek_fields(f, fields, experts=128, top=4, width=2048, shared=1, dense=0)
    f.notes.append("Queries' temperature by position is left out: it changes constants.")
    return deepseek.FAMILY, deepseek.DeepseekConfig(
        **own,
        **_latent(f, q_rank=1024, kv_rank=256, nope=64),
        normalise=f.flag("norm_topk_prob", True),
        scaling=f.number("routed_scaling_factor", 1.0),
    )


def _without_experts(f: Fields, fields: dict[str, Any], **latent: Any) -> dict[str, Any]:
    """Fields of a model with latent attention and no experts; `latent` as of `_latent`."""
    dense = {"head_dim": None, "dense_layers": fields["layers"]}
    return fields | dense | _latent(f, **latent)


def _youtu(f: Fields) -> tuple[Family, Any]:
    fields = decoder(
        f, hidden=2048, heads=16, ff=6144, kv_heads=16, vocab=128256, seq=131072, tied=True
    )
    return deepseek.FAMILY, deepseek.DeepseekConfig(**_without_experts(f, fields))


def _minicpm3(f: Fields) -> tuple[Family, Any]:
    fields = decoder(
        f, hidden=2560, layers=62, heads=40, ff=6400, kv_heads=40, vocab=73448, seq=32768,
        epsilon=1e-5, tied=True,
    )  # fmt: skip
    hidden, layers = fields["hidden"], fields["layers"]
    deep, base = f.data.get("scale_depth", 1.4), f.data.get("dim_model_base", 256)
    latent = {"q_rank": 768, "kv_rank": 256, "nope": 64, "rope": 32}
    return deepseek.FAMILY, deepseek.DeepseekConfig(
        **_without_experts(f, fields, **latent, v_dim=hidden // fields["heads"]),
        embedding_scale=f.number("scale_emb", 12),
        residual_scale=1.0 if deep is None else f.number("scale_depth", 1.4) * layers**-0.5,
        head_scale=1.0 if base is None else f.whole("dim_model_base", 256) / hidden,
    )


def _bailing_moe(f: Fields) -> tuple[Family, Any]:
    """Ling. Of its two versions, which both say this model type, only the second has a bias of
    each expert that picks it."""
    for key, value in (("norm_head", False), ("use_sliding_window", False)):
        f.only(key, value)
    _named(
        f,
        {
            "num_experts": "n_routed_experts",
            "num_shared_experts": "n_shared_experts",
            "use_bias": "attention_bias",
        },
    )
    if f.flag("attention_bias", False) or f.flag("use_qkv_bias", False):
        raise f.bad("attention_bias", "false (use_bias and use_qkv_bias)")
    width = f.whole("head_dim", f.whole("hidden_size", 1024) // f.whole("num_attention_heads", 16))
    fields = decoder(
        f, hidden=1024, layers=24, heads=16, ff=4096, kv_heads=16, vocab=30592, seq=16384,
        epsilon=1e-5, share=1.0, head_dim=width,
    )  # fmt: skip
    later = f.data.get("moe_router_enable_expert_bias") or f.data.get("model_type") != "bailing_moe"
    own = _deepseek_fields(f, fields, experts=16, top=2, width=fields["ff"], shared=0, dense=0)
    routing: dict[str, Any] = {"normalise": f.flag("norm_topk_prob", True)}
    if later or f.data.get("score_function") == "sigmoid":
        routing = _by_sigmoid(f, groups=8, group_top=4, scaling=2.5)
    return deepseek.FAMILY, deepseek.DeepseekConfig(
        **own | {"head_dim": width}, **routing, qk_norm=f.flag("use_qk_norm", False)
    )


DEEPSEEKS: Mapping[str, Read] = {
    "bailing_moe": _bailing_moe,
    "bailing_moe_v2": _bailing_moe,
    "deepseek": _deepseek,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v32,
    "dots1": _dots1,
    "exaone_moe": _exaone_moe,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "glm_moe_dsa": _glm_moe_dsa,
    "hy_v3": _hy_v3,
    "kimi_k2": _deepseek_v3,
    "minicpm3": _minicpm3,
    "mistral4": _mistral4,
    "solar_open": _solar_open,
    "youtu": _youtu,
}
