"""Models of a Hugging Face config.json that are neither Llama's kind, nor mixtures
of experts, nor encoders alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from models_zoo import gpt, resnet, ssm, t5, vit
from models_zoo.hf_decoders import TANH, Read
from models_zoo.hf_fields import Fields
from models_zoo.spec import LAYERS_LIMIT, Family


def _gpt2(f: Fields) -> tuple[Family, Any]:
    return _gpt(f, act="gelu_new")


def _gpt_bigcode(f: Fields) -> tuple[Family, Any]:
    f.only("multi_query", True)
    f.only("scale_attn_weights", True)
    f.only("add_cross_attention", False)
    return _gpt(f, act="gelu_pytorch_tanh", kv_heads=1)


def _gpt(f: Fields, *, act: str, kv_heads: int | None = None) -> tuple[Family, Any]:
    f.one_of("activation_function", act, dict.fromkeys(TANH, True))
    window = f.whole("n_positions", 1024)
    return gpt.FAMILY, gpt.GptConfig(
        layers=f.layers("n_layer", 12),
        hidden=f.whole("n_embd", 768),
        heads=f.whole("n_head", 12),
        vocab=f.whole("vocab_size", 50257),
        seq=f.length("n_positions", 1024),
        ff=f.maybe("n_inner"),
        positions=window,
        epsilon=f.number("layer_norm_epsilon", 1e-5),
        tied=f.flag("tie_word_embeddings", True),
        kv_heads=kv_heads,
    )


def _opt(f: Fields) -> tuple[Family, Any]:
    for key in ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"):
        f.only(key, True)
    f.only("_remove_final_layer_norm", False)
    width, window = f.whole("hidden_size", 768), f.whole("max_position_embeddings", 2048)
    f.only("word_embed_proj_dim", width)
    return gpt.FAMILY, gpt.GptConfig(
        layers=f.layers("num_hidden_layers", 12),
        hidden=width,
        heads=f.whole("num_attention_heads", 12),
        vocab=f.whole("vocab_size", 50272),
        seq=f.length("max_position_embeddings", 2048),
        ff=f.whole("ffn_dim", 3072),
        positions=window + 2,
        first=2,
        act=f.one_of("activation_function", "relu", {"relu": "relu", "gelu": "gelu"}),
        tied=f.flag("tie_word_embeddings", True),
    )


def _t5(f: Fields) -> tuple[Family, Any]:
    return _t5_fields(f, ff=2048, layers=6, heads=8, vocab=32128, form="relu", tied=True)


def _mt5(f: Fields) -> tuple[Family, Any]:
    return _t5_fields(f, ff=1024, layers=8, heads=6, vocab=250112, form="gated-gelu", tied=False)


def _t5_fields(
    f: Fields, *, ff: int, layers: int, heads: int, vocab: int, form: str, tied: bool
) -> tuple[Family, Any]:
    length = f.length("n_positions", 512)
    return t5.FAMILY, t5.T5Config(
        layers=f.layers("num_layers", layers),
        decoder_layers=f.maybe("num_decoder_layers", limit=LAYERS_LIMIT),
        hidden=f.whole("d_model", 512),
        heads=f.whole("num_heads", heads),
        head_dim=f.whole("d_kv", 64),
        ff=f.whole("d_ff", ff),
        vocab=f.whole("vocab_size", vocab),
        seq=length,
        target=length,
        buckets=f.whole("relative_attention_num_buckets", 32),
        max_distance=f.whole("relative_attention_max_distance", 128),
        ff_form=f.one_of("feed_forward_proj", form, {"relu": "relu", "gated-gelu": "gated-gelu"}),
        tied=f.flag("tie_word_embeddings", tied),
        epsilon=f.number("layer_norm_epsilon", 1e-6),
    )


def _vit(f: Fields) -> tuple[Family, Any]:
    f.one_of("hidden_act", "gelu", {"gelu": True})
    f.only("qkv_bias", True)
    return vit.FAMILY, vit.VitConfig(
        layers=f.layers("num_hidden_layers", 12),
        hidden=f.whole("hidden_size", 768),
        heads=f.whole("num_attention_heads", 12),
        ff=f.whole("intermediate_size", 3072),
        image=f.whole("image_size", 224),
        patch=f.whole("patch_size", 16),
        channels=f.whole("num_channels", 3),
        classes=f.labels(2),
        epsilon=f.number("layer_norm_eps", 1e-12),
    )


def _resnet(f: Fields) -> tuple[Family, Any]:
    f.one_of("hidden_act", "relu", {"relu": True})
    for key, value in (
        ("num_channels", 3),
        ("downsample_in_first_stage", False),
        ("downsample_in_bottleneck", False),
    ):
        f.only(key, value)
    block = f.one_of("layer_type", "bottleneck", {"basic": "basic", "bottleneck": "bottleneck"})
    width, depths = f.whole("embedding_size", 64), f.wholes("depths", [3, 4, 6, 3])
    sizes = [width * (4 if block == "bottleneck" else 1) * 2**i for i in range(len(depths))]
    if f.wholes("hidden_sizes", [256, 512, 1024, 2048]) != sizes:
        raise f.bad("hidden_sizes", json.dumps(sizes))
    f.notes.append("The image is 224 x 224 (option image); the config does not say.")
    return resnet.FAMILY, resnet.ResnetConfig(
        "-".join(map(str, depths)), block, width=width, classes=f.labels(2)
    )


def _mamba2(f: Fields) -> tuple[Family, Any]:
    for key, value in (
        ("expand", 2),
        ("use_bias", False),
        ("use_conv_bias", True),
        ("hidden_act", "silu"),
    ):
        f.only(key, value)
    if f.whole("n_groups", 8) != 1:  # absent means 8
        raise f.bad("n_groups", "1")
    width, dim = f.whole("hidden_size", 4096), f.whole("head_dim", 64)
    f.only("num_heads", 2 * width // dim)
    return ssm.FAMILY, ssm.SsmConfig(
        layers=f.layers("num_hidden_layers", 64),
        hidden=width,
        vocab=f.whole("vocab_size", 32768),
        seq=2048,
        state=f.whole("state_size", 128),
        head_dim=dim,
        chunk=f.whole("chunk_size", 256),
        taps=f.whole("conv_kernel", 4),
        epsilon=f.number("layer_norm_epsilon", 1e-5),
        tied=f.flag("tie_word_embeddings", False),
    )


OTHERS: Mapping[str, Read] = {
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "mamba2": _mamba2,
    "mt5": _mt5,
    "opt": _opt,
    "resnet": _resnet,
    "t5": _t5,
    "vit": _vit,
}
