"""A Hugging Face config.json of a known family -> the same architecture as an ONNX graph without
weights.

Only what shapes the graph is read. A field that is absent takes the value the library itself takes
for that model type (saved files leave defaults out). Rotary rescaling and dropout change no shape
and are left out. What was left out or assumed is said in the model's metadata ("left_out" of layers
and parameters, "notes" of all else), and by plans of it. A field whose value the zoo cannot write
is an error, never ignored. Of a model that reads images or sound too (a `text_config` inside), the
text model is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodels.hardware.intake import read_text
from models_zoo.hf_decoders import DENSE, Read
from models_zoo.hf_deepseek import DEEPSEEKS
from models_zoo.hf_encoders import ENCODERS
from models_zoo.hf_fields import Fields
from models_zoo.hf_gemma4 import GEMMA4
from models_zoo.hf_hybrids import HYBRIDS
from models_zoo.hf_layernorms import LAYER_NORMS
from models_zoo.hf_mixtures import MIXTURES
from models_zoo.hf_others import OTHERS
from models_zoo.spec import Family, Preset, convert, make, parse_options, split_spec
from models_zoo.spec import options as zoo_options
from planner.errors import PlanError, did_you_mean

if TYPE_CHECKING:
    import onnx

SIZE_LIMIT_BYTES = 1 << 22
_TABLES = (DENSE, LAYER_NORMS, GEMMA4, HYBRIDS, MIXTURES, DEEPSEEKS, ENCODERS, OTHERS)
KNOWN: Mapping[str, Read] = dict(sorted(item for table in _TABLES for item in table.items()))
WRAPPERS: Mapping[str, str] = {
    "aya_vision": "cohere2",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "idefics3": "llama",
    "internvl": "qwen2",
    "kimi_k25": "kimi_k2",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "paligemma": "gemma",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "smolvlm": "llama",
}
"""Model types with a text model inside, and the type of that one where its part of the file names
none."""
_QWEN_VL = {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "max_window_layers": 80,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "rope_theta": 1e6,
    "vocab_size": 152064,
}
_GLM_4V = {"attention_bias": True, "vocab_size": 151424}
TEXTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "Glm4vMoe_text": ("glm4_moe", _GLM_4V),  # as saved up to transformers 4.57
    "glm4v_moe_text": ("glm4_moe", _GLM_4V),
    "glm4v_text": ("glm4", {}),
    "qwen2_5_vl_text": ("qwen2", _QWEN_VL),
    "qwen2_vl_text": ("qwen2", _QWEN_VL),
    "qwen3_vl_moe_text": (
        "qwen3_moe",
        {
            "intermediate_size": 5632,
            "moe_intermediate_size": 1408,
            "num_attention_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "num_key_value_heads": 16,
        },
    ),
    "qwen3_vl_text": ("qwen3", {}),
}
"""Text models that a wrapper's file names otherwise than the model type they are alike, and the
defaults in which they differ."""
_STATES = "layers whose state runs along the sequence and decays for each of its features apart"
_INDEXER = "attention to blocks of keys that an indexer picks"
_STREAMS = "streams that pass by the layers and are mixed (hyper-connections)"
_ALTUP = "per-layer embeddings and streams that are mixed (AltUp)"
UNWRITTEN: Mapping[str, str] = {
    "bailing_hybrid": _STATES,
    "deepseek_v4": f"{_STREAMS}, and {_INDEXER}",
    "falcon_mamba": _STATES,
    "gemma3n": _ALTUP,
    "gemma3n_text": _ALTUP,
    "glm5_next": f"{_STREAMS}, and {_STATES}",
    "glm5_next_text": f"{_STREAMS}, and {_STATES}",
    "jamba": _STATES,
    "kimi_linear": _STATES,
    "mamba": _STATES,
    "minimax_m3_vl": _INDEXER,
    "minimax_m3_vl_text": _INDEXER,
    "mistral_large4": f"latents that layers lend, and {_INDEXER}",
    "mistral_large4_text": f"latents that layers lend, and {_INDEXER}",
    "mllama": "layers that attend to an image",
    "phi3small": "attention to blocks of keys",
    "qwen4_exp": f"{_STREAMS}, embeddings of groups of tokens, and {_INDEXER}",
    "qwen4_exp_text": f"{_STREAMS}, embeddings of groups of tokens, and {_INDEXER}",
}
"""Model types that users have and the zoo does not write, and what it lacks for them."""
_NEXT = "or export the model to ONNX (docs/exporting.md, examples/export_hf.py)"


def from_config(path: str | Path, options: Mapping[str, str] | None = None) -> onnx.ModelProto:
    """The ONNX model of a config.json, with a symbolic batch; `options` are those of a zoo spec,
    e.g. {"seq": "8k"}.

    Raises PlanError: P074 for a file that cannot be read or a field with a bad value, P075 for a
    model type that is not known, and those of `models_zoo.build`.
    """
    family, config, kind, fields = _read(Path(path))
    chosen = parse_options(family, options or {})
    notes, left_out = tuple(fields.notes), tuple(fields.left_out)
    return make(family, kind, Preset(config, kind, notes=notes, left_out=left_out), chosen)


def _read(path: Path) -> tuple[Family, Any, str, Fields]:
    """Family, configuration, model type and fields of a file."""
    outer = _load(path)
    kind, data, left_out = _text_of(path, outer)
    if kind is None and "format_version" in data:
        raise PlanError(
            "P075",
            f"{path} is a plan, not a model",
            help=[f"plan show {path}, plan explain {path}, plan emit {path}"],
        )
    if not isinstance(kind, str) or kind not in KNOWN:
        raise _unknown(path, kind)
    fields = Fields(path, data)
    fields.left_out.extend(left_out)
    if isinstance(quantised := outer.get("quantization_config"), dict):
        method = str(quantised.get("quant_method", "another"))[:40]
        fields.left_out.append(
            f"Weights are not in the file's type ({method}), but as --precision and --quantize say."
        )
    family, config = KNOWN[kind](fields)
    return family, config, kind, fields


def _text_of(path: Path, data: dict[str, Any]) -> tuple[Any, dict[str, Any], tuple[str, ...]]:
    """(model type, fields, what is left out) of a file, or of the text model inside."""
    outer = data.get("model_type")
    if not isinstance(outer, str) or outer in KNOWN or outer in UNWRITTEN:
        return outer, data, ()
    inner = data.get("text_config")
    if inner is not None and not isinstance(inner, dict):
        raise Fields(path, data).bad("text_config", "an object")
    if inner is None and outer not in WRAPPERS:
        return outer, data, ()
    text = {**inner} if isinstance(inner, dict) else {**data, "model_type": None}
    kind = text.get("model_type") or WRAPPERS.get(outer)
    if isinstance(kind, str) and kind in TEXTS:
        kind, defaults = TEXTS[kind]
        text = {**defaults, **text}
    if "tie_word_embeddings" in data:
        text.setdefault("tie_word_embeddings", data["tie_word_embeddings"])
    left = f"Only the text model of {outer} is written: what reads images or sound is left out."
    return kind, text, (left,)


def text_kind(kind: str) -> str:
    """The model type that a file of a type is written as, where its text model names none."""
    inner = WRAPPERS.get(kind, kind)
    return TEXTS[inner][0] if inner in TEXTS else inner


def _unknown(path: Path, kind: object) -> PlanError:
    """P075 for a model type that is none, is not known, or lacks something."""
    if kind is None:
        what = f"{path} has no model_type"
    else:
        what = f"{path}: model_type {json.dumps(kind)[:80]} is not known"
    lacks = UNWRITTEN.get(kind) if isinstance(kind, str) else None
    if lacks:
        return PlanError("P075", f"{what}: the zoo does not write {lacks}", help=[_NEXT[3:]])
    hint = did_you_mean(kind, list(KNOWN)) if isinstance(kind, str) else ""
    return PlanError(
        "P075", what, help=[*([hint] if hint else []), "known: " + ", ".join(KNOWN), _NEXT]
    )


LENGTHS = ("seq", "target")
"""Options that are dims of a graph's inputs: --dim sets them."""
CACHE = "cache"
"""Option of decoders: keys and values of earlier tokens are inputs (models_zoo.cache)."""


def split_config(text: str) -> tuple[str, dict[str, int]]:
    """`config.json,seq=8k` -> the file, and lengths and CACHE as given. Raises PlanError P071 for
    anything else behind the name."""
    file, comma, rest = text.rpartition(".json,")
    if not comma:
        return text, {}
    _, given = split_spec(f"config,{rest}")
    for option in given:
        if option not in (*LENGTHS, CACHE):
            raise PlanError(
                "P071",
                f"{text!r}: of a config.json {', '.join(LENGTHS)} and {CACHE} can be set here, not"
                f" {option!r}",
                help=["change the field in the file"],
            )
    return f"{file}.json", {
        option: int(convert(option, value, bool if option == CACHE else int))
        for option, value in given.items()
    }


def with_cache(text: str) -> str:
    """`config.json,seq=8k` with a cache of keys and values, as it is where that is said already or
    the model is written without. Raises PlanError P071, P074, P075."""
    file, given = split_config(text)
    has = getattr(_read(Path(file))[1], "may_cache", False) and CACHE not in given
    return f"{text},{CACHE}=1" if has else text


def with_lengths(
    path: str | Path, dims: Mapping[str, int], cache: bool = False
) -> tuple[onnx.ModelProto, dict[str, int], dict[str, int]]:
    """(the model of a config.json with its lengths set by `dims`, those that were taken, those that
    are the file's or the default). cache: with a cache of keys and values, whose lengths are those
    of its inputs."""
    family, config = _read(Path(path))[:2]
    if cache:
        return from_config(path, {CACHE: "1"}), {}, {}
    own = [option for option in LENGTHS if option in zoo_options(family.config_type)]
    taken = {option: dims[option] for option in own if option in dims}
    assumed = {
        option: int(getattr(config, option))
        for option in own
        if option not in dims and getattr(config, option, None)
    }
    return from_config(path, {option: str(n) for option, n in taken.items()}), taken, assumed


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
