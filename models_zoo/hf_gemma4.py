"""Gemma 4's text models of a Hugging Face config.json. Defaults are those of transformers 5.24."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models_zoo import gemma4
from models_zoo.hf_decoders import TANH, Read, decoder
from models_zoo.hf_fields import Fields
from models_zoo.hf_layers import rescaled
from models_zoo.hf_mixtures import EXPERTS
from models_zoo.spec import Family

_KINDS = {"sliding_attention": "L", "full_attention": "G"}
_WORDS = tuple(_KINDS)


def _gemma4(f: Fields) -> tuple[Family, Any]:
    f.only("use_bidirectional_attention", None, "vision")
    rotary = _rotary(f)
    f.data = {**f.data, "rope_parameters": None, "rope_theta": rotary["theta"]}
    fields = decoder(
        f, hidden=2304, layers=30, heads=8, ff=9216, kv_heads=4, vocab=262144, seq=131072,
        acts=TANH, act_key="hidden_activation", tied=True, head_dim=256,
    )  # fmt: skip
    kinds = _letters(f, fields["layers"])
    same = f.flag("attention_k_eq_v", False)
    capped = f.data.get("final_logit_softcapping")
    return gemma4.FAMILY, gemma4.Gemma4Config(
        **fields | rotary | _global_heads(f, kinds, same=same),
        kinds=kinds,
        window=f.whole("sliding_window", 512),
        values_of_keys=same,
        shared=f.count("num_kv_shared_layers", 0),
        wide=f.flag("use_double_wide_mlp", False),
        per_layer=f.count("hidden_size_per_layer_input", 256),
        per_layer_vocab=f.whole("vocab_size_per_layer_input", 262144),
        head_cap=0.0 if capped is None else f.number("final_logit_softcapping", 30.0),
        **_experts(f),
    )


def _experts(f: Fields) -> dict[str, Any]:
    if not f.flag("enable_moe_block", False):
        return {}
    for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        if f.data.get(key) is None:
            raise f.bad(key, "a whole number")
    return {
        "mixed": True,
        "experts": f.whole("num_experts", 1, limit=EXPERTS),
        "top": f.whole("top_k_experts", 1),
        "expert_ff": f.whole("moe_intermediate_size", 1),
    }


def _letters(f: Fields, layers: int) -> str:
    """A letter of `Gemma4Config.kinds` a layer."""
    words = f.data.get("layer_types")
    if words is None:
        words = [_WORDS[(i + 1) % 6 == 0 or i == layers - 1] for i in range(layers)]
    if (
        not isinstance(words, list)
        or len(words) != layers
        or any(not isinstance(word, str) or word not in _KINDS for word in words)
    ):
        raise f.bad("layer_types", f"{layers} words of " + ", ".join(_KINDS))
    return "".join(_KINDS[word] for word in words)[:-1] + "G"  # the library's, whatever is listed


def _global_heads(f: Fields, kinds: str, *, same: bool) -> dict[str, Any]:
    """Heads of layers that see everything: two fields, or of late a table of these layers."""
    table = f.data.get("per_layer_config")
    if table is None:
        return {
            "global_dim": f.whole("global_head_dim", 512),
            "global_kv": f.maybe("num_global_key_value_heads") if same else None,
        }
    wanted = {str(i) for i, letter in enumerate(kinds) if letter == "G"}
    owns = list(table.values()) if isinstance(table, dict) else []
    if (
        not owns
        or {key.lstrip("0") or "0" for key in table} != wanted  # as saved: "05" beside "11"
        or any(not isinstance(own, dict) or own != owns[0] for own in owns)
        or set(owns[0]) - {"head_dim", "num_key_value_heads"}
    ):
        raise f.bad("per_layer_config", "one head_dim and num_key_value_heads of full_attention")
    own = Fields(f.path, owns[0])
    return {"global_dim": own.maybe("head_dim"), "global_kv": own.maybe("num_key_value_heads")}


def _rotary(f: Fields) -> dict[str, Any]:
    """Rotary positions of both kinds of layers."""
    by_layer_type = f.data.get("rope_parameters")
    if by_layer_type is not None and not isinstance(by_layer_type, dict):
        raise f.bad("rope_parameters", "an object")
    by_kind = {}
    for kind in _KINDS:
        table = (by_layer_type or {}).get(kind)
        if table is not None and not isinstance(table, dict):
            raise f.bad("rope_parameters", f"an object in which {kind} is one")
        by_kind[kind] = Fields(f.path, table or {})
        if by_kind[kind].data.get("rope_type") != "proportional":
            rescaled(f, by_kind[kind].data)
    full_attention = by_kind["full_attention"]
    share = full_attention.number("partial_rotary_factor", 1.0 if by_layer_type else 0.25)
    if share > 1:
        raise full_attention.bad("partial_rotary_factor", "a number up to 1")
    return {
        "theta": full_attention.number("rope_theta", 1e6),
        "global_share": share,
        "local_theta": by_kind["sliding_attention"].number("rope_theta", 1e4),
    }


GEMMA4: Mapping[str, Read] = {"gemma4_text": _gemma4}
