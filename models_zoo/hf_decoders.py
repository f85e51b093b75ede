"""Dense decoders of a Hugging Face config.json: `models_zoo.llama` with the fields of each model
type. Defaults are those of transformers 5.24."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from models_zoo import llama
from models_zoo.hf_fields import Fields
from models_zoo.hf_layers import turning, windowed
from models_zoo.spec import Family

Read = Callable[[Fields], tuple[Family, Any]]
_ACTS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_new": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
    "gelu": "gelu",
    "relu2": "relu2",
    "xielu": "xielu",
}
"""What the library calls activations, and what the zoo does."""
TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
GELU = ("gelu", *TANH)


# Many parameters: each is the default of one field of a configuration, and a model type names at
# its call those that differ.
def decoder(
    f: Fields,
    *,
    hidden: int = 4096,
    layers: int = 32,
    heads: int = 32,
    ff: int,
    kv_heads: int | None,
    vocab: int = 32000,
    seq: int,
    epsilon: float = 1e-6,
    epsilon_key: str = "rms_norm_eps",
    theta: float = 1e4,
    share: float = 1.0,
    local_theta: float | None = None,
    acts: tuple[str, ...] = ("silu", "swish"),
    act_key: str = "hidden_act",
    tied: bool = False,
    head_dim: int | None = None,
    attention_bias: bool = False,
) -> dict[str, Any]:
    """Fields of LlamaConfig that all model types have, but windows; the arguments are the model
    type's defaults (kv_heads None: as many as heads; acts: the first) and the names of some
    fields."""
    heads = f.whole("num_attention_heads", heads)
    width, own_head_dim = f.whole("hidden_size", hidden), f.maybe("head_dim") or head_dim
    turn = turning(f, theta=theta, share=share, local=local_theta)
    part = turn.pop("share", None)
    if part is not None:
        turn["rotary_dim"] = max(1, int((own_head_dim or width // heads) * part))
    return turn | {
        "layers": f.layers("num_hidden_layers", layers),
        "hidden": width,
        "heads": heads,
        "kv_heads": f.whole("num_key_value_heads", kv_heads or heads),
        "ff": f.whole("intermediate_size", ff),
        "vocab": f.whole("vocab_size", vocab),
        "seq": f.length("max_position_embeddings", seq),
        "epsilon": f.number(epsilon_key, epsilon),
        "head_dim": own_head_dim,
        "tied": f.flag("tie_word_embeddings", tied),
        "attention_bias": f.flag("attention_bias", attention_bias),
        "mlp_bias": f.flag("mlp_bias", False),
        "act": f.one_of(act_key, acts[0], {name: _ACTS[name] for name in acts}),
    }


def made(fields: dict[str, Any], **more: Any) -> tuple[Family, Any]:
    """What a reader gives of fields."""
    return llama.FAMILY, llama.LlamaConfig(**fields | more)


def _llama(f: Fields) -> tuple[Family, Any]:
    return made(decoder(f, ff=11008, kv_heads=None, seq=2048))


def _mistral(f: Fields) -> tuple[Family, Any]:
    fields = decoder(f, ff=14336, kv_heads=8, seq=131072)
    return made(fields, **windowed(f, fields["layers"], window=4096))


def _ministral3(f: Fields) -> tuple[Family, Any]:
    fields = decoder(
        f, layers=34, ff=14336, kv_heads=8, vocab=131072, seq=262144, epsilon=1e-5, theta=1e6,
        head_dim=128,
    )  # fmt: skip
    return made(fields, **windowed(f, fields["layers"]))


def qwen_windows(f: Fields, layers: int) -> dict[str, Any]:
    """Windows of Qwen's model types: off unless the file says otherwise, and then from a layer
    on."""
    if not f.flag("use_sliding_window", False):
        return {}
    return windowed(f, layers, window=4096, first=f.count("max_window_layers", 28))


def _qwen2(f: Fields) -> tuple[Family, Any]:
    fields = decoder(f, ff=22016, kv_heads=32, vocab=151936, seq=32768)
    return made(fields, qkv_bias=True, **qwen_windows(f, fields["layers"]))


def _qwen3(f: Fields) -> tuple[Family, Any]:
    fields = decoder(f, ff=22016, kv_heads=32, vocab=151936, seq=32768, head_dim=128)
    return made(fields, qk_norm=True, **qwen_windows(f, fields["layers"]))


def _gemma(f: Fields) -> tuple[Family, Any]:
    f.only("hidden_activation", "gelu_pytorch_tanh")
    if (
        f.data.get("hidden_act") == "gelu"
    ):  # what early files of the family say; the library computes the tanh form all the same
        f.data = {**f.data, "hidden_act": "gelu_pytorch_tanh"}
    fields = decoder(
        f, hidden=3072, layers=28, heads=16, ff=24576, kv_heads=16, vocab=256000, seq=8192,
        acts=TANH, tied=True, head_dim=256,
    )  # fmt: skip
    return made(fields, scale_embedding=True)


def _gemma_later(f: Fields, **defaults: Any) -> dict[str, Any]:
    """What Gemma 2 and 3 share; `defaults` as of `decoder`."""
    f.only("use_bidirectional_attention", False)
    fields = decoder(
        f, hidden=2304, layers=26, heads=8, ff=9216, kv_heads=4, acts=TANH,
        act_key="hidden_activation", tied=True, head_dim=256, **defaults,
    )  # fmt: skip
    caps = {
        name: f.number(key, 1.0) if f.data.get(key) is not None else 0.0
        for name, key in (
            ("cap", "attn_logit_softcapping"),
            ("head_cap", "final_logit_softcapping"),
        )
    }
    return (
        fields
        | caps
        | {
            "scale_embedding": True,
            "norms": "around",
            "attention_scale": f.number("query_pre_attn_scalar", 256) ** -0.5,
        }
    )


def _gemma2(f: Fields) -> tuple[Family, Any]:
    f.data = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **f.data}
    fields = _gemma_later(f, vocab=256000, seq=8192)
    return made(fields, **windowed(f, fields["layers"], window=4096, every=2))


def _gemma3(f: Fields) -> tuple[Family, Any]:
    fields = _gemma_later(f, vocab=262208, seq=131072, theta=1e6, local_theta=1e4)
    every = f.whole("sliding_window_pattern", 6)
    return made(fields, qk_norm=True, **windowed(f, fields["layers"], window=4096, every=every))


def _phi3(f: Fields) -> tuple[Family, Any]:
    fields = decoder(f, hidden=3072, ff=8192, kv_heads=None, vocab=32064, seq=4096, epsilon=1e-5)
    return made(fields, **windowed(f, fields["layers"]))


def _olmo2(f: Fields) -> tuple[Family, Any]:
    fields = decoder(f, ff=11008, kv_heads=None, vocab=50304, seq=2048, epsilon=1e-5)
    return made(fields, qk_norm_whole=True, norms="after")


def _olmo3(f: Fields) -> tuple[Family, Any]:
    fields = decoder(f, ff=11008, kv_heads=None, vocab=50304, seq=2048, epsilon=1e-5, theta=5e5)
    near = windowed(f, fields["layers"], window=4096, every=4)
    return made(fields, qk_norm_whole=True, norms="after", **near)


def _smollm3(f: Fields) -> tuple[Family, Any]:
    fields = decoder(
        f, hidden=2048, layers=36, heads=16, ff=11008, kv_heads=4, vocab=128256, seq=32768,
        theta=2e6, tied=True,
    )  # fmt: skip
    f.only("use_sliding_window", False)
    return made(fields, bare_every=bare_layers(f, fields["layers"]))


def bare_layers(f: Fields, layers: int) -> int:
    """Each so-manieth layer has no positions (no_rope_layers: 1 where a layer has them), 0: none
    is without."""
    every = f.whole("no_rope_layer_interval", 4)
    listed = f.data.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(layers)]
    if not isinstance(listed, list) or any(n not in (0, 1) for n in listed):
        raise f.bad("no_rope_layers", "a list of 0 and 1")
    turned = [bool(n) for n in listed[:layers]]
    if all(turned):
        return 0
    every = turned.index(False) + 1
    if turned != [(i + 1) % every != 0 for i in range(layers)]:
        raise f.bad("no_rope_layers", "0 at each n-th layer")
    return every


def scaled(f: Fields) -> dict[str, Any]:
    """Granite's four constants."""
    return {
        "embedding_scale": f.number("embedding_multiplier", 1.0),
        "residual_scale": f.number("residual_multiplier", 1.0),
        "attention_scale": f.number("attention_multiplier", 1.0),
        "head_scale": 1.0 / f.number("logits_scaling", 1.0),
    }


def _granite(f: Fields) -> tuple[Family, Any]:
    return made(decoder(f, ff=11008, kv_heads=None, seq=2048), **scaled(f))


def _glm(norms: str) -> Read:
    def read(f: Fields) -> tuple[Family, Any]:
        fields = decoder(
            f, layers=40, ff=13696, kv_heads=2, vocab=151552, seq=131072, epsilon=1.5625e-07,
            head_dim=128, share=0.5, attention_bias=True,
        )  # fmt: skip
        bias = fields["attention_bias"]
        return made(fields, attention_bias=False, qkv_bias=bias, norms=norms)

    return read


def _arcee(f: Fields) -> tuple[Family, Any]:
    fields = decoder(
        f, hidden=2560, ff=18432, kv_heads=None, seq=4096, epsilon=1e-5, acts=("relu2",)
    )
    return made(fields, plain_mlp=True)


def _seed_oss(f: Fields) -> tuple[Family, Any]:
    fields = decoder(
        f, layers=64, heads=80, ff=27648, kv_heads=8, vocab=155136, seq=524288, head_dim=128,
        attention_bias=True,
    )  # fmt: skip
    if f.flag("attention_out_bias", False) and not fields["attention_bias"]:
        raise f.bad("attention_out_bias", "false")
    if fields["attention_bias"] and not f.flag("attention_out_bias", False):
        fields |= {"attention_bias": False, "qkv_bias": True}
    return made(fields)


def _ernie(f: Fields) -> tuple[Family, Any]:
    fields = decoder(
        f, hidden=1024, layers=18, heads=16, ff=3072, kv_heads=2, vocab=103424, seq=131072,
        epsilon=1e-5, theta=5e5, tied=True, head_dim=128,
    )  # fmt: skip
    bias = f.flag("use_bias", False)
    return made(fields, attention_bias=bias, mlp_bias=bias)


def _exaone4(f: Fields) -> tuple[Family, Any]:
    f.data = {"sliding_window": 4096, **f.data}
    fields = decoder(f, ff=16384, kv_heads=32, vocab=102400, seq=2048, epsilon=1e-5)
    every = f.data.get("sliding_window_pattern", 4)
    if isinstance(every, str):  # "LLLG": three layers with a window, then one without
        f.data = {**f.data, "sliding_window_pattern": len(every)}
    near = windowed(f, fields["layers"], every=f.count("sliding_window_pattern", 4))
    # Layers that attend to everything have no positions, where others have a window.
    return made(fields, qk_norm=True, norms="after", bare_every=bare_where_full(f, near), **near)


def bare_where_full(f: Fields, near: dict[str, Any]) -> int:
    """LlamaConfig.bare_every where layers that attend to everything have no positions. near: of
    `windowed`."""
    if near.get("full_shift"):
        raise f.bad("layer_types", "each n-th layer attending to everything")
    return int(near.get("full_every", 0))


def _hunyuan(f: Fields) -> tuple[Family, Any]:
    fields = decoder(f, ff=11008, kv_heads=None, vocab=290943, seq=2048, epsilon=1e-5)
    return made(fields, qk_norm_behind=True)


def _internlm2(f: Fields) -> tuple[Family, Any]:
    fields = decoder(f, ff=11008, kv_heads=None, vocab=103168, seq=2048)
    return made(fields, attention_bias=f.flag("bias", True))


def _internlm3(f: Fields) -> tuple[Family, Any]:
    names = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}  # the library's
    f.data = {names.get(key, key): value for key, value in f.data.items()}
    fields = decoder(
        f, layers=48, ff=10240, kv_heads=2, vocab=128512, seq=32768, epsilon=1e-5, head_dim=128
    )
    if fields["attention_bias"] != fields["mlp_bias"]:
        raise f.bad("mlp_bias", "what attention_bias (qkv_bias) says")
    return made(fields)


def _apertus(f: Fields) -> tuple[Family, Any]:
    fields = decoder(
        f, ff=14336, kv_heads=None, vocab=131072, seq=65536, epsilon=1e-5, theta=1.2e7,
        acts=("xielu",),
    )  # fmt: skip
    return made(fields, qk_norm=True, plain_mlp=True)


def _cwm(f: Fields) -> tuple[Family, Any]:
    layers = f.layers("num_hidden_layers", 64)
    usual = ["sliding_attention" if i % 4 else "full_attention" for i in range(layers)]
    f.data = {"layer_types": usual, **f.data}
    fields = decoder(
        f, hidden=6144, layers=64, heads=48, ff=21504, kv_heads=8, vocab=128256, seq=131072,
        epsilon=1e-5, theta=1e6, head_dim=128,
    )  # fmt: skip
    return made(fields, **windowed(f, layers, window=8192))


def _exaone(f: Fields) -> tuple[Family, Any]:
    names = {
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
        "activation_function": "hidden_act",
    }
    f.data = {names.get(key, key): value for key, value in f.data.items()}
    return made(decoder(f, ff=14336, kv_heads=8, vocab=102400, seq=4096, epsilon=1e-5, theta=5e5))


DENSE: Mapping[str, Read] = {
    "apertus": _apertus,
    "arcee": _arcee,
    "cwm": _cwm,
    "ernie4_5": _ernie,
    "exaone": _exaone,
    "exaone4": _exaone4,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm": _glm("before"),
    "glm4": _glm("around-glm"),
    "granite": _granite,
    "hunyuan_v1_dense": _hunyuan,
    "internlm2": _internlm2,
    "internlm3": _internlm3,
    "llama": _llama,
    "ministral3": _ministral3,
    "ministral": _mistral,
    "mistral": _mistral,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
}
