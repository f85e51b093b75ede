"""Decoders of a Hugging Face config.json whose norms are LayerNorms: `models_zoo.llama` with the
fields of each model type. Defaults are those of transformers 5.24."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models_zoo import llama
from models_zoo.hf_decoders import GELU, TANH, Read, bare_where_full, decoder, made
from models_zoo.hf_fields import Fields
from models_zoo.hf_layers import windowed
from models_zoo.spec import Family


def _phi(f: Fields) -> tuple[Family, Any]:
    f.only("qk_layernorm", False)
    fields = decoder(
        f, hidden=2048, layers=24, ff=8192, kv_heads=None, vocab=51200, seq=2048, epsilon=1e-5,
        epsilon_key="layer_norm_eps", acts=TANH, share=0.5,
    )  # fmt: skip
    return made(
        fields,
        attention_bias=True,
        mlp_bias=True,
        head_bias=True,
        plain_mlp=True,
        norm="layer",
        parallel="one-norm",
    )


def _starcoder2(f: Fields) -> tuple[Family, Any]:
    fields = decoder(
        f, hidden=3072, layers=30, heads=24, ff=12288, kv_heads=2, vocab=49152, seq=4096,
        epsilon=1e-5, epsilon_key="norm_epsilon", acts=TANH, tied=True,
    )  # fmt: skip
    bias = f.flag("use_bias", True)
    return made(
        fields,
        attention_bias=bias,
        mlp_bias=bias,
        plain_mlp=True,
        norm="layer",
        **windowed(f, fields["layers"]),
    )


def _cohere_fields(f: Fields) -> dict[str, Any]:
    f.only("use_qk_norm", False)
    fields = decoder(
        f, hidden=8192, layers=40, heads=64, ff=22528, kv_heads=None, vocab=256000, seq=8192,
        epsilon=1e-5, epsilon_key="layer_norm_eps", tied=True,
    )  # fmt: skip
    scale = f.number("logit_scale", 0.0625)
    return fields | {"norm": "layer-scale", "parallel": "one-norm", "head_scale": scale}


def _cohere(f: Fields) -> tuple[Family, Any]:
    return made(_cohere_fields(f))


def _cohere2(f: Fields) -> tuple[Family, Any]:
    fields = _cohere_fields(f)
    near = windowed(f, fields["layers"], window=4096, every=f.whole("sliding_window_pattern", 4))
    if near.get("window_from"):
        raise f.bad("layer_types", "each n-th layer attending to everything")
    return made(fields, bare_every=bare_where_full(f, near) if near else 1, **near)


def _gpt_neox(f: Fields) -> tuple[Family, Any]:
    turned = {"partial_rotary_factor": f.data.get("rotary_pct", 0.25)}
    f.data = {**turned, "rope_theta": f.data.get("rotary_emb_base", 1e4), **f.data}
    f.data["num_key_value_heads"] = None  # the library reads none of this model type
    fields = decoder(
        f, hidden=6144, layers=44, heads=64, ff=24576, kv_heads=None, vocab=50432, seq=2048,
        epsilon=1e-5, epsilon_key="layer_norm_eps", acts=GELU, attention_bias=True,
    )  # fmt: skip
    both = f.flag("use_parallel_residual", True)
    return made(
        fields, mlp_bias=True, plain_mlp=True, norm="layer", parallel="two-norms" if both else "no"
    )


def _falcon(f: Fields) -> tuple[Family, Any]:
    newer = f.flag("new_decoder_architecture", False)
    heads = f.whole("num_attention_heads", 71)
    groups = (
        f.whole("num_kv_heads", heads) if newer else 1 if f.flag("multi_query", True) else heads
    )
    hidden = f.whole("hidden_size", 4544)
    wide = f.whole("ffn_hidden_size", 4 * hidden)
    f.data = {**f.data, "num_key_value_heads": groups, "intermediate_size": wide}
    fields = decoder(
        f, hidden=4544, heads=71, ff=wide, kv_heads=groups, vocab=65024, seq=2048, epsilon=1e-5,
        epsilon_key="layer_norm_epsilon", acts=GELU, act_key="activation", tied=True,
    )  # fmt: skip
    if f.flag("alibi", False):
        fields |= {"bare_every": 1, "alibi": 8.0, "alibi_scaled": True}
    bias, norms = f.flag("bias", False), f.whole("num_ln_in_parallel_attn", 2 if newer else 1)
    both = newer or f.flag("parallel_attn", True)
    return made(
        fields,
        attention_bias=bias,
        mlp_bias=bias,
        plain_mlp=True,
        norm="layer",
        parallel="no" if not both else "two-norms" if newer and norms == 2 else "one-norm",
    )


def _gptj(f: Fields) -> tuple[Family, Any]:
    width = f.whole("n_embd", 4096)
    heads = f.whole("n_head", 16)
    each = width // heads
    turned = f.whole("rotary_dim", min(64, each)) if f.data.get("rotary_dim", 1) else each
    act = f.one_of("activation_function", "gelu_new", dict.fromkeys(TANH, "gelu-tanh"))
    return llama.FAMILY, llama.LlamaConfig(
        layers=f.layers("n_layer", 28),
        hidden=width,
        heads=heads,
        kv_heads=heads,
        ff=f.whole("n_inner", 4 * width) if f.data.get("n_inner") is not None else 4 * width,
        vocab=f.whole("vocab_size", 50400),
        seq=f.length("n_positions", 2048),
        epsilon=f.number("layer_norm_epsilon", 1e-5),
        rotary_dim=turned if turned != each else None,
        tied=f.flag("tie_word_embeddings", False),
        mlp_bias=True,
        head_bias=True,
        act=act,
        plain_mlp=True,
        norm="layer",
        parallel="one-norm",
    )


def _jais2(f: Fields) -> tuple[Family, Any]:
    fields = decoder(
        f, hidden=3328, heads=26, ff=26624, kv_heads=None, vocab=150272, seq=8192, epsilon=1e-5,
        epsilon_key="layer_norm_eps", acts=("relu2",), attention_bias=True,
    )  # fmt: skip
    return made(fields, mlp_bias=f.flag("mlp_bias", True), plain_mlp=True, norm="layer")


def _nemotron(f: Fields) -> tuple[Family, Any]:
    fields = decoder(
        f, hidden=6144, heads=48, ff=24576, kv_heads=None, vocab=256000, seq=4096, epsilon=1e-5,
        epsilon_key="norm_eps", acts=("relu2",), share=0.5,
    )  # fmt: skip
    return made(fields, plain_mlp=True, norm="layer")


def _stablelm(f: Fields) -> tuple[Family, Any]:
    f.only("qk_layernorm", False)
    fields = decoder(
        f, hidden=2560, ff=6912, kv_heads=32, vocab=50304, seq=4096, epsilon=1e-5,
        epsilon_key="layer_norm_eps", share=0.25,
    )  # fmt: skip
    return made(
        fields,
        attention_bias=False,
        qkv_bias=f.flag("use_qkv_bias", False),
        norm="layer",
        parallel="one-norm" if f.flag("use_parallel_residual", False) else "no",
    )


def _olmo(f: Fields) -> tuple[Family, Any]:
    f.only("clip_qkv", None)
    fields = decoder(f, ff=11008, kv_heads=None, vocab=50304, seq=2048)
    return made(fields, norm="layer-plain", epsilon=1e-5)


def _bloom(f: Fields) -> tuple[Family, Any]:
    f.only("apply_residual_connection_post_layernorm", False)
    heads = f.whole("num_attention_heads", f.whole("n_head", 8))
    hidden = f.whole("n_embed", f.whole("hidden_size", 64))
    return llama.FAMILY, llama.LlamaConfig(
        layers=f.layers("num_hidden_layers", f.layers("n_layer", 2)),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ff=4 * hidden,
        vocab=f.whole("vocab_size", 250880),
        seq=f.length("seq_length", 2048),
        epsilon=f.number("layer_norm_epsilon", 1e-5),
        tied=f.flag("tie_word_embeddings", True),
        attention_bias=True,
        mlp_bias=True,
        act="gelu-tanh",
        plain_mlp=True,
        norm="layer",
        bare_every=1,
        alibi=8.0,
        embedding_norm=True,
    )


def _mpt(f: Fields) -> tuple[Family, Any]:
    own = f.data.get("attn_config")
    if own is not None and not isinstance(own, dict):
        raise f.bad("attn_config", "an object")
    inner = Fields(f.path, own or {})
    for key, value in (
        ("alibi", True),
        ("attn_type", "multihead_attention"),
        ("clip_qkv", None),
        ("prefix_lm", False),
        ("qk_ln", False),
    ):
        inner.only(key, value)
    f.only("no_bias", True)
    f.only("expansion_ratio", 4)
    hidden, heads = f.whole("d_model", 2048), f.whole("n_heads", 16)
    scale = inner.data.get("softmax_scale")
    return llama.FAMILY, llama.LlamaConfig(
        layers=f.layers("n_layers", 24),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ff=4 * hidden,
        vocab=f.whole("vocab_size", 50368),
        seq=f.length("max_seq_len", 2048),
        epsilon=f.number("layer_norm_epsilon", 1e-5),
        tied=f.flag("tie_word_embeddings", True),
        act="gelu",
        plain_mlp=True,
        norm="layer-scale",
        bare_every=1,
        alibi=inner.number("alibi_bias_max", 8),
        attention_scale=None if scale is None else inner.number("softmax_scale", 1.0),
    )


LAYER_NORMS: Mapping[str, Read] = {
    "bloom": _bloom,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "falcon": _falcon,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "jais2": _jais2,
    "nemotron": _nemotron,
    "mpt": _mpt,
    "olmo": _olmo,
    "phi": _phi,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}
