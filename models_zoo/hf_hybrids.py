"""Decoders of a Hugging Face config.json whose layers differ in what mixes tokens:
`models_zoo.hybrid` with the fields of each model type. Defaults are those of transformers 5.24."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from models_zoo import delta, hybrid, mamba
from models_zoo.hf_decoders import Read, decoder, scaled
from models_zoo.hf_fields import Fields
from models_zoo.spec import LAYERS_LIMIT, Family

_EXPERTS = 4096
_LETTERS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "conv": "C",
    "mlp": "-",
    "moe": "E",
}
"""The library's words for a layer, and those of earlier files."""


def _listed(f: Fields, key: str, layers: int | None, letters: str) -> str | None:
    """A list of a word a layer as letters of `HybridConfig.kinds`, None where there is none."""
    words = f.data.get(key)
    if words is None:
        return None
    if isinstance(words, list) and "D" in letters:  # the library's word for both
        kinds = _LETTERS | {"linear_attention": "D"}
    else:
        kinds = _LETTERS
    known = [word for word, letter in kinds.items() if letter in letters]
    if (
        not isinstance(words, list)
        or not 1 <= len(words) <= LAYERS_LIMIT
        or (layers is not None and len(words) != layers)
        or any(not isinstance(word, str) or word not in known for word in words)
    ):
        count = f"1 to {LAYERS_LIMIT}" if layers is None else str(layers)
        raise f.bad(key, f"{count} words of " + ", ".join(known))
    return "".join(kinds[word] for word in words)


def _at_indices(f: Fields, key: str, layers: int, other: str, default: Sequence[int] = ()) -> str:
    """Attention in the layers that a list has the numbers of, `other` in the rest."""
    chosen = f.data.get(key)
    chosen = list(default) if chosen is None else chosen
    if not isinstance(chosen, list) or any(type(i) is not int for i in chosen):
        raise f.bad(key, "a list of numbers of layers")
    attending = set(chosen)
    return "".join("*" if i in attending else other for i in range(layers))


def _space(f: Fields, fields: Mapping[str, Any], *, inner: int, state: int = 256) -> dict[str, Any]:
    """Fields of Mamba2 that Bamba and those after it call alike. inner: its width where heads'
    width is left to that."""
    heads = f.whole("mamba_n_heads", 128)
    dim = f.data.get("mamba_d_head")
    dim = inner // heads if dim in (None, "auto") else f.whole("mamba_d_head", 64)
    if dim * heads != inner:
        raise f.bad("mamba_n_heads", f"heads of {dim} features that make up {inner}")
    _no_limit(f)
    return {
        "hidden": fields["hidden"],
        "seq": fields["seq"],
        "heads": heads,
        "head_dim": dim,
        "state": f.whole("mamba_d_state", state),
        "groups": f.whole("mamba_n_groups", 1),
        "taps": f.whole("mamba_d_conv", 4),
        "chunk": f.whole("mamba_chunk_size", 256),
        "epsilon": fields["epsilon"],
        "conv_bias": f.flag("mamba_conv_bias", True),
        "in_bias": f.flag("mamba_proj_bias", False),
        "out_bias": f.flag("mamba_proj_bias", False),
    }


def _no_limit(f: Fields) -> None:
    """Steps of any length alone are written."""
    limit = f.data.get("time_step_limit")
    if limit not in (None, [0.0, math.inf]):
        raise f.bad("time_step_limit", "[0.0, Infinity]")


def _made(fields: dict[str, Any], space: dict[str, Any] | None, **more: Any) -> tuple[Family, Any]:
    ssm = mamba.Mamba2(**space) if space else None
    return hybrid.FAMILY, hybrid.HybridConfig(**fields, ssm=ssm, **more)


def _bamba(f: Fields) -> tuple[Family, Any]:
    f.data = {**f.data, "partial_rotary_factor": 0.5}  # the library's, whatever the file says
    fields = decoder(f, ff=14336, kv_heads=8, vocab=128000, seq=262144, epsilon=1e-5)
    space = _space(f, fields, inner=f.whole("mamba_expand", 2) * fields["hidden"])
    kinds = _at_indices(f, "attn_layer_indices", fields["layers"], "M")
    return _made(fields, space, kinds=kinds)


def _granitemoehybrid(f: Fields) -> tuple[Family, Any]:
    fields = decoder(f, ff=11008, kv_heads=None, seq=2048)
    turned = f.data.get("position_embedding_type")
    if turned not in (None, "rope", "nope"):
        raise f.bad("position_embedding_type", '"rope" or "nope"')
    space = _space(f, fields, inner=f.whole("mamba_expand", 2) * fields["hidden"])
    layers, experts = fields["layers"], f.count("num_local_experts", 8)
    shared = f.whole("shared_intermediate_size", 1024)
    feeds: dict[str, Any] = {"dense_ff": shared}
    if experts:
        feeds = {
            "sparse_layers": True,
            "experts": f.whole("num_local_experts", 8, limit=_EXPERTS),
            "top": f.whole("num_experts_per_tok", 2),
            "expert_ff": fields["ff"],
            "shared_ff": shared,
        }
    return _made(
        fields,
        space,
        **scaled(f),
        **feeds,
        kinds=_listed(f, "layer_types", layers, "M*") or "M" * layers,
        bare_every=0 if turned == "rope" else 1,
    )


def _falcon_h1(f: Fields) -> tuple[Family, Any]:
    fields = decoder(f, ff=14336, kv_heads=8, vocab=128000, seq=8192, epsilon=1e-5)
    wide = f.whole("mamba_expand", 2) * fields["hidden"]
    inner = f.data.get("mamba_d_ssm", 1024)
    space = _space(f, fields, inner=wide if inner is None else f.whole("mamba_d_ssm", 1024))
    behind = "before" if f.flag("mamba_norm_before_gate", True) else "after"
    scales = (
        f.number("ssm_in_multiplier", 1.0),
        *_numbers(f, "ssm_multipliers", 5),
        f.number("ssm_out_multiplier", 1.0),
    )
    space |= {
        "out_bias": f.flag("projectors_bias", False),
        "norm": behind if f.flag("mamba_rms_norm", False) else "none",
        "scales": scales,
    }
    gate, down = _numbers(f, "mlp_multipliers", 2)
    key, width = f.number("key_multiplier", 1.0), fields["head_dim"]
    return _made(
        fields,
        space,
        kinds="H",
        attention_scale=key * (width or fields["hidden"] // fields["heads"]) ** -0.5,
        attention_in=f.number("attention_in_multiplier", 1.0),
        attention_out=f.number("attention_out_multiplier", 1.0),
        gate_scale=gate,
        down_scale=down,
        embedding_scale=f.number("embedding_multiplier", 1.0),
        head_scale=f.number("lm_head_multiplier", 1.0),
    )


def _lfm2(f: Fields) -> tuple[Family, Any]:
    renamed = {"intermediate_size": f.data.get("block_ff_dim"), "norm_eps": 1e-5}
    f.data = {k: v for k, v in renamed.items() if v is not None} | {**f.data}
    if "tie_embedding" in f.data:
        f.data["tie_word_embeddings"] = f.data["tie_embedding"]
    fields = decoder(
        f, hidden=2560, ff=12288, kv_heads=8, vocab=65536, seq=128000, epsilon=1e-5,
        epsilon_key="norm_eps", theta=1e6, tied=True,
    )  # fmt: skip
    layers, ff = fields["layers"], fields["ff"]
    if f.flag("block_auto_adjust_ff_dim", True):
        ff = int(2 * ff / 3)
        if f.data.get("block_ffn_dim_multiplier", 1.0) is not None:
            ff = int(f.number("block_ffn_dim_multiplier", 1.0) * ff)
            step = f.whole("block_multiple_of", 256)
            ff = -(-ff // step) * step
    kinds = _listed(f, "layer_types", layers, "C*")
    return _made(
        fields | {"ff": max(1, ff)},
        None,
        kinds=kinds or _at_indices(f, "full_attn_idxs", layers, "C", range(layers)),
        conv_taps=f.whole("conv_L_cache", 3),
        conv_bias=f.flag("conv_bias", False),
        qk_norm=True,
    )


def _lfm2_moe(f: Fields) -> tuple[Family, Any]:
    f.data = {**f.data}
    if "tie_embedding" in f.data:
        f.data["tie_word_embeddings"] = f.data["tie_embedding"]
    fields = decoder(
        f, hidden=2048, ff=7168, kv_heads=8, vocab=65536, seq=128000, epsilon=1e-5,
        epsilon_key="norm_eps", theta=1e6, tied=True,
    )  # fmt: skip
    kinds = _listed(f, "layer_types", fields["layers"], "C*")
    if kinds is None:
        raise f.bad("layer_types", "a word a layer")
    return _made(
        fields,
        None,
        kinds=kinds,
        conv_taps=f.whole("conv_L_cache", 3),
        conv_bias=f.flag("conv_bias", False),
        qk_norm=True,
        sparse_layers=True,
        dense_layers=f.count("num_dense_layers", 2),
        experts=f.whole("num_experts", 32, limit=_EXPERTS),
        top=f.whole("num_experts_per_tok", 4),
        expert_ff=f.whole("moe_intermediate_size", 1792),
        scoring="sigmoid" if f.flag("use_expert_bias", True) else "sigmoid-plain",
        normalise=f.flag("norm_topk_prob", True),
        scaling=f.number("routed_scaling_factor", 1.0),
    )


def _qwen_delta(f: Fields, fields: dict[str, Any], **more: Any) -> tuple[Family, Any]:
    """Qwen3-Next and Qwen3.5: the gated delta rule, and gated attention in each fourth layer."""
    if any(f.data.get(key) for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers")):
        f.left_out.append("The layer that predicts a second token is left out.")
    layers, every = fields["layers"], f.whole("full_attention_interval", 4)
    usual = "".join("D" if (i + 1) % every else "*" for i in range(layers))
    rule = delta.Delta(
        fields["hidden"],
        fields["seq"],
        key_heads=f.whole("linear_num_key_heads", 16),
        value_heads=f.whole("linear_num_value_heads", 32),
        key_dim=f.whole("linear_key_head_dim", 128),
        value_dim=f.whole("linear_value_head_dim", 128),
        taps=f.whole("linear_conv_kernel_dim", 4),
        epsilon=fields["epsilon"],
    )
    kinds = _listed(f, "layer_types", layers, "D*") or usual
    return _made(
        fields, None, delta_rule=rule, kinds=kinds, qk_norm=True, attention_gate=True, **more
    )


def _qwen_experts(f: Fields, *, experts: int, top: int) -> dict[str, Any]:
    return {
        "sparse_layers": True,
        "experts": f.whole("num_experts", experts, limit=_EXPERTS),
        "top": f.whole("num_experts_per_tok", top),
        "expert_ff": f.whole("moe_intermediate_size", 512),
        "shared_ff": f.whole("shared_expert_intermediate_size", 512),
        "shared_gate": True,
    }


def _qwen3_next(f: Fields) -> tuple[Family, Any]:
    f.only("decoder_sparse_step", 1)
    f.only("mlp_only_layers", [])
    fields = decoder(
        f, hidden=2048, layers=48, heads=16, ff=5632, kv_heads=2, vocab=151936, seq=32768,
        share=0.25, head_dim=256,
    )  # fmt: skip
    experts = _qwen_experts(f, experts=512, top=10)
    return _qwen_delta(f, fields, **experts, normalise=f.flag("norm_topk_prob", True))


def _qwen3_5(f: Fields) -> tuple[Family, Any]:
    fields = decoder(
        f, heads=16, ff=12288, kv_heads=4, vocab=248320, seq=32768, share=0.25, head_dim=256
    )
    return _qwen_delta(f, fields)


def _qwen3_5_moe(f: Fields) -> tuple[Family, Any]:
    fields = decoder(
        f, hidden=2048, layers=40, heads=16, ff=512, kv_heads=2, vocab=248320, seq=32768,
        share=0.25, head_dim=256,
    )  # fmt: skip
    return _qwen_delta(f, fields, **_qwen_experts(f, experts=256, top=8))


def _nemotron_h(f: Fields) -> tuple[Family, Any]:
    kinds = _listed(f, "layers_block_type", None, "M*-E") or _pattern(f)
    if f.data.get("num_nextn_predict_layers"):
        f.left_out.append("The layers that predict a second token are left out.")
    f.data = {**f.data, "head_dim": f.whole("head_dim", 128), "num_hidden_layers": len(kinds)}
    f.only("attention_head_dim", f.data["head_dim"])
    f.only("attention_bias", False)
    f.only("mamba_hidden_act", "silu")
    fields = decoder(
        f, ff=21504, kv_heads=8, vocab=131072, seq=4096, epsilon=1e-5,
        epsilon_key="layer_norm_epsilon", acts=("relu2",), act_key="mlp_hidden_act",
    )  # fmt: skip
    bias = f.flag("use_bias", False)
    space = {
        "hidden": fields["hidden"],
        "seq": fields["seq"],
        "heads": f.whole("mamba_num_heads", 128),
        "head_dim": f.whole("mamba_head_dim", 64),
        "state": f.whole("ssm_state_size", 128),
        "groups": f.whole("n_groups", 8),
        "taps": f.whole("conv_kernel", 4),
        "chunk": f.whole("chunk_size", 128),
        "epsilon": fields["epsilon"],
        "conv_bias": f.flag("use_conv_bias", True),
        "in_bias": bias,
        "out_bias": bias,
        "step_least": f.number("time_step_min", 0.001),
    }
    experts = _nemotron_experts(f) if "E" in kinds else {}
    return _made(fields, space, **experts, kinds=kinds, alone=True, plain_mlp=True, bare_every=1)


def _nemotron_experts(f: Fields) -> dict[str, Any]:
    """Experts without gates, routed as DeepSeek V3's."""
    f.only("moe_latent_size", None)
    f.only("n_shared_experts", 1)
    return {
        "experts": f.whole("n_routed_experts", 8, limit=_EXPERTS),
        "top": f.whole("num_experts_per_tok", 2),
        "expert_ff": f.whole("moe_intermediate_size", 7688),
        "shared_ff": f.whole("moe_shared_expert_intermediate_size", 7688),
        "groups": f.whole("n_group", 1),
        "group_top": f.whole("topk_group", 1),
        "scoring": "sigmoid",
        "normalise": f.flag("norm_topk_prob", True),
        "scaling": f.number("routed_scaling_factor", 1.0),
    }


def _pattern(f: Fields) -> str:
    """Layers as Nemotron-H's earlier files have them: a letter each."""
    pattern = f.data.get("hybrid_override_pattern")
    if pattern is None:
        return "ME*-"
    if not isinstance(pattern, str) or not pattern or set(pattern) - set("ME*-"):
        raise f.bad("hybrid_override_pattern", "letters of M, *, - and E")
    if len(pattern) > LAYERS_LIMIT:
        raise f.bad("hybrid_override_pattern", f"up to {LAYERS_LIMIT} layers")
    return pattern


def _numbers(f: Fields, key: str, count: int) -> tuple[float, ...]:
    """So many positive numbers, 1 where the file has none."""
    numbers = f.data.get(key)
    if numbers is None:
        return (1.0,) * count
    if not isinstance(numbers, list) or len(numbers) != count:
        raise f.bad(key, f"{count} positive numbers")
    return tuple(
        Fields(f.path, {f"{key}[{i}]": n}).number(f"{key}[{i}]", 1.0) for i, n in enumerate(numbers)
    )


HYBRIDS: Mapping[str, Read] = {
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granitemoehybrid,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "nemotron_h": _nemotron_h,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "qwen3_5_text": _qwen3_5,
    "qwen3_next": _qwen3_next,
}
