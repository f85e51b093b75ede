"""A Hugging Face config.json of a known family -> the same architecture as an ONNX graph without
weights.

Only what shapes the graph is read. A field that is absent takes the value the library itself takes
for that model type (saved files leave defaults out). Rotary rescaling and dropout change no shape
and are left out; a sliding window is left out too. What was left out or assumed is said in the
model's metadata ("notes"). A field whose value the zoo cannot write is an error, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodels.hardware.intake import read_text
from models_zoo import bert, deepseek, gpt, llama, moe, resnet, ssm, t5, vit
from models_zoo.hf_fields import Fields
from models_zoo.spec import LAYERS_LIMIT, Family, Preset, convert, make, parse_options, split_spec
from models_zoo.spec import options as zoo_options
from planner.errors import PlanError, did_you_mean

if TYPE_CHECKING:
    import onnx

SIZE_LIMIT_BYTES = 1 << 22
Read = Callable[[Fields], tuple[Family, Any]]
_EXPERTS = 4096


# Many parameters: each is the default of one field of a configuration, and a model type names at
# its call those that differ.
def _decoder(
    f: Fields,
    *,
    hidden: int = 4096,
    layers: int = 32,
    heads: int = 32,
    ff: int,
    kv_heads: int | None,
    vocab: int = 32000,
    window: int,
    epsilon: float = 1e-6,
    theta: float = 1e4,
    act: str = "silu",
    tied: bool = False,
) -> dict[str, Any]:
    """Fields of LlamaConfig; the arguments are the model type's defaults (kv_heads None: as many as
    heads)."""
    nested = f.data.get("rope_parameters")
    rope = Fields(f.path, nested) if isinstance(nested, dict) else f
    scaling = nested if isinstance(nested, dict) else f.data.get("rope_scaling")
    if (
        isinstance(scaling, dict)
        and scaling.get("rope_type", scaling.get("type", "default")) != "default"
    ):
        f.notes.append("Rotary rescaling is left out: it changes constants, not shapes.")
    f.one_of("hidden_act", act, {"silu": True, "swish": True} if act == "silu" else {act: True})
    if f.data.get("sliding_window") and f.flag("use_sliding_window", True):
        f.notes.append("The sliding attention window is left out.")
    heads = f.whole("num_attention_heads", heads)
    return {
        "layers": f.layers("num_hidden_layers", layers),
        "hidden": f.whole("hidden_size", hidden),
        "heads": heads,
        "kv_heads": f.whole("num_key_value_heads", kv_heads or heads),
        "ff": f.whole("intermediate_size", ff),
        "vocab": f.whole("vocab_size", vocab),
        "seq": f.length("max_position_embeddings", window),
        "theta": rope.number("rope_theta", theta),
        "epsilon": f.number("rms_norm_eps", epsilon),
        "head_dim": f.maybe("head_dim"),
        "tied": f.flag("tie_word_embeddings", tied),
        "attention_bias": f.flag("attention_bias", False),
        "mlp_bias": f.flag("mlp_bias", False),
    }


def _llama(f: Fields) -> tuple[Family, Any]:
    return llama.FAMILY, llama.LlamaConfig(**_decoder(f, ff=11008, kv_heads=None, window=2048))


def _mistral(f: Fields) -> tuple[Family, Any]:
    return llama.FAMILY, llama.LlamaConfig(**_decoder(f, ff=14336, kv_heads=8, window=131072))


def _qwen2(f: Fields) -> tuple[Family, Any]:
    return llama.FAMILY, llama.LlamaConfig(
        **_decoder(f, ff=22016, kv_heads=32, vocab=151936, window=32768), qkv_bias=True
    )


def _qwen3(f: Fields) -> tuple[Family, Any]:
    fields = _decoder(f, ff=22016, kv_heads=32, vocab=151936, window=32768)
    return llama.FAMILY, llama.LlamaConfig(
        **fields | {"head_dim": f.whole("head_dim", 128)}, qk_norm=True
    )


def _gemma(f: Fields) -> tuple[Family, Any]:
    f.only("hidden_activation", "gelu_pytorch_tanh")
    if (
        f.data.get("hidden_act") == "gelu"
    ):  # what early files of the family say; the library computes the tanh form all the same
        f.data = {**f.data, "hidden_act": "gelu_pytorch_tanh"}
    fields = _decoder(
        f,
        hidden=3072,
        layers=28,
        heads=16,
        ff=24576,
        kv_heads=16,
        vocab=256000,
        window=8192,
        act="gelu_pytorch_tanh",
        tied=True,
    )
    return llama.FAMILY, llama.LlamaConfig(
        **fields | {"head_dim": f.whole("head_dim", 256)}, act="gelu-tanh", scale_embedding=True
    )


def _mixtral(f: Fields) -> tuple[Family, Any]:
    fields = _decoder(f, ff=14336, kv_heads=8, window=131072, epsilon=1e-5, theta=1e6)
    return moe.FAMILY, moe.MoeConfig(
        **fields,
        experts=f.whole("num_local_experts", 8, limit=_EXPERTS),
        top=f.whole("num_experts_per_tok", 2),
    )


def _qwen_moe(
    f: Fields, fields: dict[str, Any], experts: int, top: int, width: int, **more: Any
) -> tuple[Family, Any]:
    f.only("decoder_sparse_step", 1)
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
    fields = _decoder(
        f, hidden=2048, layers=24, heads=16, ff=5632, kv_heads=16, vocab=151936, window=32768
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
        _decoder(f, hidden=2048, layers=24, ff=6144, kv_heads=4, vocab=151936, window=32768),
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
    if f.data.get("num_nextn_predict_layers"):
        f.notes.append("The layer that predicts a second token is left out.")
    each = f.whole("moe_intermediate_size", width)
    return fields | {
        "experts": f.whole("n_routed_experts", experts, limit=_EXPERTS),
        "top": f.whole("num_experts_per_tok", top),
        "expert_ff": each,
        "shared_ff": each * f.count("n_shared_experts", shared),
        "dense_layers": f.count("first_k_dense_replace", dense),
        "head_dim": None,
    }


def _latent(f: Fields) -> dict[str, Any]:
    rank = (
        f.whole("q_lora_rank", 1536) if f.data.get("q_lora_rank", 1536) is not None else None
    )  # null is a value: queries are not compressed
    return {
        "q_rank": rank,
        "kv_rank": f.whole("kv_lora_rank", 512),
        "nope": f.whole("qk_nope_head_dim", 128),
        "rope": f.whole("qk_rope_head_dim", 64),
        "v_dim": f.whole("v_head_dim", 128),
    }


def _deepseek(f: Fields) -> tuple[Family, Any]:
    fields = _decoder(f, hidden=4096, layers=30, ff=11008, kv_heads=None, vocab=102400, window=2048)
    f.only("scoring_func", "softmax")
    moe_fields = _deepseek_fields(f, fields, experts=64, top=6, width=1407, shared=2, dense=0)
    return deepseek.FAMILY, deepseek.DeepseekConfig(
        **moe_fields, normalise=f.flag("norm_topk_prob", False)
    )


def _deepseek_v2(f: Fields) -> tuple[Family, Any]:
    fields = _decoder(f, ff=11008, kv_heads=None, vocab=102400, window=2048)
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


def _deepseek_v3(f: Fields) -> tuple[Family, Any]:
    fields = _decoder(
        f, hidden=7168, layers=61, heads=128, ff=18432, kv_heads=128, vocab=129280, window=4096
    )
    f.only("scoring_func", "sigmoid")
    f.only("topk_method", "noaux_tc")
    moe_fields = _deepseek_fields(f, fields, experts=256, top=8, width=2048, shared=1, dense=3)
    return deepseek.FAMILY, deepseek.DeepseekConfig(
        **moe_fields,
        **_latent(f),
        groups=f.whole("n_group", 8),
        group_top=f.whole("topk_group", 4),
        scoring="sigmoid",
        normalise=f.flag("norm_topk_prob", True),
        scaling=f.number("routed_scaling_factor", 2.5),
    )


def _gpt2(f: Fields) -> tuple[Family, Any]:
    f.one_of(
        "activation_function",
        "gelu_new",
        {"gelu_new": True, "gelu_pytorch_tanh": True, "gelu_fast": True},
    )
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
    )


def _bert(f: Fields) -> tuple[Family, Any]:
    return _encoder(f, vocab=30522, first=0)


def _roberta(vocab: int) -> Read:
    """BERT's layers and heads; the first two rows of the position table belong to padding."""
    return lambda f: _encoder(f, vocab=vocab, first=2)


def _encoder(f: Fields, *, vocab: int, first: int) -> tuple[Family, Any]:
    f.one_of("hidden_act", "gelu", {"gelu": True})
    names = f.data.get("architectures")
    predicts = isinstance(names, list) and any(
        isinstance(n, str) and n.endswith(("ForMaskedLM", "ForPreTraining")) for n in names
    )
    window = f.whole("max_position_embeddings", 512)
    return bert.FAMILY, bert.BertConfig(
        layers=f.layers("num_hidden_layers", 12),
        hidden=f.whole("hidden_size", 768),
        heads=f.whole("num_attention_heads", 12),
        ff=f.whole("intermediate_size", 3072),
        vocab=f.whole("vocab_size", vocab),
        seq=max(1, f.length("max_position_embeddings", 512) - first),
        positions=window,
        types=f.whole("type_vocab_size", 2),
        classes=f.labels(2),
        epsilon=f.number("layer_norm_eps", 1e-12),
        head="mlm" if predicts else "cls",
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


KNOWN: Mapping[str, Read] = {
    "bert": _bert,
    "camembert": _roberta(32005),
    "deepseek": _deepseek,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "gemma": _gemma,
    "gpt2": _gpt2,
    "llama": _llama,
    "mamba2": _mamba2,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "mt5": _mt5,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "resnet": _resnet,
    "roberta": _roberta(50265),
    "t5": _t5,
    "vit": _vit,
    "xlm-roberta": _roberta(250002),
}


def from_config(path: str | Path, options: Mapping[str, str] | None = None) -> onnx.ModelProto:
    """The ONNX model of a config.json, with a symbolic batch; `options` are those of a zoo spec,
    e.g. {"seq": "8k"}.

    Raises PlanError: P074 for a file that cannot be read or a field with a bad value, P075 for a
    model type that is not known, and those of `models_zoo.build`.
    """
    family, config, kind, notes = _read(Path(path))
    return make(family, kind, Preset(config, kind), parse_options(family, options or {}), notes)


def _read(path: Path) -> tuple[Family, Any, str, tuple[str, ...]]:
    """Family, configuration, model type and notes of a file."""
    data = _load(path)
    kind = data.get("model_type")
    if kind is None and "format_version" in data:
        raise PlanError(
            "P075",
            f"{path} is a plan, not a model",
            help=[f"plan show {path}, plan explain {path}, plan emit {path}"],
        )
    if not isinstance(kind, str) or kind not in KNOWN:
        hint = did_you_mean(kind, list(KNOWN)) if isinstance(kind, str) else ""
        what = (
            f"{path}: model_type {json.dumps(kind)[:80]} is not known"
            if kind is not None
            else f"{path} has no model_type"
        )
        raise PlanError(
            "P075",
            what,
            help=[
                *([hint] if hint else []),
                "known: " + ", ".join(KNOWN),
                "or export the model to ONNX",
            ],
        )
    fields = Fields(path, data)
    family, config = KNOWN[kind](fields)
    return family, config, kind, tuple(fields.notes)


LENGTHS = ("seq", "target")
"""Options that are dims of a graph's inputs: --dim sets them."""


def split_config(text: str) -> tuple[str, dict[str, int]]:
    """`config.json,seq=8k` -> the file and the lengths. Raises PlanError P071 for anything else
    behind the name."""
    file, comma, rest = text.rpartition(".json,")
    if not comma:
        return text, {}
    _, given = split_spec(f"config,{rest}")
    for option in given:
        if option not in LENGTHS:
            raise PlanError(
                "P071",
                f"{text!r}: of a config.json {' and '.join(LENGTHS)} can be set here, not"
                f" {option!r}",
                help=["change the field in the file"],
            )
    return f"{file}.json", {
        option: int(convert(option, value, int)) for option, value in given.items()
    }


def with_lengths(
    path: str | Path, dims: Mapping[str, int]
) -> tuple[onnx.ModelProto, dict[str, int], dict[str, int]]:
    """(the model of a config.json with its lengths set by `dims`, those that were taken, those that
    are the file's or the default)."""
    family, config = _read(Path(path))[:2]
    own = [option for option in LENGTHS if option in zoo_options(family.config_type)]
    taken = {option: dims[option] for option in own if option in dims}
    left = {
        option: int(getattr(config, option))
        for option in own
        if option not in dims and getattr(config, option, None)
    }
    return from_config(path, {option: str(n) for option, n in taken.items()}), taken, left


def _load(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(read_text(path, SIZE_LIMIT_BYTES))
    except OSError as error:
        raise PlanError("P074", f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError("P074", f"{path}: not a JSON file: {error}") from error
    if not isinstance(data, dict):
        raise PlanError("P074", f"{path}: a JSON object expected")
    return data
