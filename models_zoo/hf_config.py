"""A Hugging Face config.json of a known family -> the same architecture as an ONNX graph without weights.

Only what shapes the graph is read. A field that is absent takes the value the library itself takes for that model type
(saved files leave defaults out). Rotary rescaling and dropout change no shape and are left out; a sliding window is left
out too. What was left out or assumed is said in the model's metadata ("notes").
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models_zoo import bert, gpt, llama, moe, t5, vit
from models_zoo.spec import LAYERS_LIMIT, WHOLE_LIMIT, Family, Preset, make, parse_options
from planner.errors import PlanError, did_you_mean

if TYPE_CHECKING:
    import onnx

SIZE_LIMIT_BYTES = 1 << 22
LONGEST_DEFAULT = 4096  # a context window of 128 k is what a model can read, not what it is trained on


class _Fields:
    """Typed access to a config's fields, with errors that name file and field."""

    def __init__(self, path: Path, data: Mapping[str, Any]) -> None:
        self.path, self.data = path, data
        self.notes: list[str] = []

    def whole(self, key: str, default: int, *, limit: int = WHOLE_LIMIT) -> int:
        value = self.data.get(key)
        if value is None:
            return default
        if type(value) is not int or not 1 <= value <= limit:
            raise self.bad(key, f"a whole number from 1 to {limit}")
        return value

    def maybe(self, key: str, *, limit: int = WHOLE_LIMIT) -> int | None:
        return None if self.data.get(key) is None else self.whole(key, 1, limit=limit)

    def layers(self, key: str, default: int) -> int:
        return self.whole(key, default, limit=LAYERS_LIMIT)

    def number(self, key: str, default: float) -> float:
        value = self.data.get(key)
        if value is None:
            return default
        if type(value) not in (int, float) or not 0 < value < 1e30:
            raise self.bad(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.bad(key, "true or false")
        return value

    def one_of(self, key: str, default: str, allowed: Mapping[str, Any]) -> Any:
        value = self.data.get(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise self.bad(key, "one of " + ", ".join(allowed))
        return allowed[value]

    def bad(self, key: str, wanted: str) -> PlanError:
        return PlanError("P074", f"{self.path}: {key} = {json.dumps(self.data.get(key))[:80]}: {wanted} expected")

    def labels(self, default: int) -> int:
        """Number of classes, from id2label or num_labels."""
        table = self.data.get("id2label")
        return len(table) if isinstance(table, dict) and table else self.whole("num_labels", default)

    def length(self, key: str, default: int) -> int:
        """Sequence length to plan for: the context window, up to `LONGEST_DEFAULT`."""
        window = self.whole(key, default)
        if window > LONGEST_DEFAULT:
            self.notes.append(f"The context window is {window}; the graph has sequence length {LONGEST_DEFAULT} (option seq).")
        return min(window, LONGEST_DEFAULT)


def _decoder(f: _Fields, *, ff: int, kv_heads: int | None, window: int, epsilon: float, theta: float) -> dict[str, Any]:
    """Fields of LlamaConfig; the arguments are the model type's defaults (kv_heads None: as many as heads)."""
    nested = f.data.get("rope_parameters")
    rope = _Fields(f.path, nested) if isinstance(nested, dict) else f
    scaling = nested if isinstance(nested, dict) else f.data.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type", "default")) != "default":
        f.notes.append("Rotary rescaling is left out: it changes constants, not shapes.")
    f.one_of("hidden_act", "silu", {"silu": True, "swish": True})
    heads = f.whole("num_attention_heads", 32)
    return {
        "layers": f.layers("num_hidden_layers", 32),
        "hidden": f.whole("hidden_size", 4096),
        "heads": heads,
        "kv_heads": f.whole("num_key_value_heads", kv_heads or heads),
        "ff": f.whole("intermediate_size", ff),
        "vocab": f.whole("vocab_size", 32000),
        "seq": f.length("max_position_embeddings", window),
        "theta": rope.number("rope_theta", theta),
        "epsilon": f.number("rms_norm_eps", epsilon),
        "head_dim": f.maybe("head_dim"),
        "tied": f.flag("tie_word_embeddings", False),
        "attention_bias": f.flag("attention_bias", False),
        "mlp_bias": f.flag("mlp_bias", False),
    }


def _llama(f: _Fields) -> tuple[Family, Any]:
    fields = _decoder(f, ff=11008, kv_heads=None, window=2048, epsilon=1e-6, theta=1e4)
    return llama.FAMILY, llama.LlamaConfig(**fields)


def _mixtral(f: _Fields) -> tuple[Family, Any]:
    fields = _decoder(f, ff=14336, kv_heads=8, window=131072, epsilon=1e-5, theta=1e6)
    if f.data.get("sliding_window") is not None:
        f.notes.append("The sliding attention window is left out.")
    experts, top = f.whole("num_local_experts", 8), f.whole("num_experts_per_tok", 2)
    return moe.FAMILY, moe.MoeConfig(**fields, experts=experts, top=top)


def _gpt2(f: _Fields) -> tuple[Family, Any]:
    f.one_of("activation_function", "gelu_new", {"gelu_new": True, "gelu_pytorch_tanh": True, "gelu_fast": True})
    window = f.whole("n_positions", 1024)
    return gpt.FAMILY, gpt.GptConfig(
        layers=f.layers("n_layer", 12), hidden=f.whole("n_embd", 768), heads=f.whole("n_head", 12), vocab=f.whole("vocab_size", 50257),
        seq=f.length("n_positions", 1024), ff=f.maybe("n_inner"), positions=window,
        epsilon=f.number("layer_norm_epsilon", 1e-5), tied=f.flag("tie_word_embeddings", True),
    )  # fmt: skip


def _bert(f: _Fields) -> tuple[Family, Any]:
    f.one_of("hidden_act", "gelu", {"gelu": True})
    names = f.data.get("architectures")
    predicts = isinstance(names, list) and any(n in ("BertForMaskedLM", "BertForPreTraining") for n in names)
    window = f.whole("max_position_embeddings", 512)
    return bert.FAMILY, bert.BertConfig(
        layers=f.layers("num_hidden_layers", 12), hidden=f.whole("hidden_size", 768), heads=f.whole("num_attention_heads", 12),
        ff=f.whole("intermediate_size", 3072), vocab=f.whole("vocab_size", 30522), seq=f.length("max_position_embeddings", 512),
        positions=window, types=f.whole("type_vocab_size", 2), classes=f.labels(2), epsilon=f.number("layer_norm_eps", 1e-12),
        head="mlm" if predicts else "cls",
    )  # fmt: skip


def _t5(f: _Fields) -> tuple[Family, Any]:
    forms = {"relu": "relu", "gated-gelu": "gated-gelu"}
    length = f.length("n_positions", 512)
    return t5.FAMILY, t5.T5Config(
        layers=f.layers("num_layers", 6), decoder_layers=f.maybe("num_decoder_layers", limit=LAYERS_LIMIT),
        hidden=f.whole("d_model", 512), heads=f.whole("num_heads", 8),
        head_dim=f.whole("d_kv", 64), ff=f.whole("d_ff", 2048), vocab=f.whole("vocab_size", 32128), seq=length, target=length,
        buckets=f.whole("relative_attention_num_buckets", 32), max_distance=f.whole("relative_attention_max_distance", 128),
        ff_form=f.one_of("feed_forward_proj", "relu", forms), tied=f.flag("tie_word_embeddings", True),
        epsilon=f.number("layer_norm_epsilon", 1e-6),
    )  # fmt: skip


def _vit(f: _Fields) -> tuple[Family, Any]:
    f.one_of("hidden_act", "gelu", {"gelu": True})
    if not f.flag("qkv_bias", True):
        raise f.bad("qkv_bias", "true")
    return vit.FAMILY, vit.VitConfig(
        layers=f.layers("num_hidden_layers", 12), hidden=f.whole("hidden_size", 768), heads=f.whole("num_attention_heads", 12),
        ff=f.whole("intermediate_size", 3072), image=f.whole("image_size", 224), patch=f.whole("patch_size", 16),
        channels=f.whole("num_channels", 3), classes=f.labels(2), epsilon=f.number("layer_norm_eps", 1e-12),
    )  # fmt: skip


_KNOWN: Mapping[str, Callable[[_Fields], tuple[Family, Any]]] = {
    "bert": _bert, "gpt2": _gpt2, "llama": _llama, "mixtral": _mixtral, "t5": _t5, "vit": _vit,
}  # fmt: skip


def model_types() -> tuple[str, ...]:
    """The values of "model_type" that can be read."""
    return tuple(_KNOWN)


def from_config(path: str | Path, options: Mapping[str, str] | None = None) -> onnx.ModelProto:
    """The ONNX model of a config.json, with a symbolic batch; `options` are those of a zoo spec, e.g. {"seq": "8k"}.

    Raises PlanError: P074 for a file that cannot be read or a field with a bad value, P075 for a model type that is not
    known, and those of `models_zoo.build`.
    """
    path = Path(path)
    data = _load(path)
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in _KNOWN:
        hint = did_you_mean(kind, list(_KNOWN)) if isinstance(kind, str) else ""
        what = f"{path}: model_type {json.dumps(kind)[:80]} is not known" if kind is not None else f"{path} has no model_type"
        raise PlanError("P075", what, help=[*([hint] if hint else []), "known: " + ", ".join(_KNOWN), "or export the model to ONNX"])
    fields = _Fields(path, data)
    family, config = _KNOWN[kind](fields)
    return make(family, kind, Preset(config, kind), parse_options(family, options or {}), tuple(fields.notes))


def _load(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file():
            raise PlanError("P074", f"{path}: not a file")
        if path.stat().st_size > SIZE_LIMIT_BYTES:
            raise PlanError("P074", f"{path}: more than {SIZE_LIMIT_BYTES} bytes, too large for a config.json")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError("P074", f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError("P074", f"{path}: not a JSON file: {error}") from error
    if not isinstance(data, dict):
        raise PlanError("P074", f"{path}: a JSON object expected")
    return data
