"""Weights of checkpoints that `plan weights` refuses, as the zoo's models have them: what the two
write otherwise is undone here, value by value."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]


def qwen_delta(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Qwen3-Next and Qwen3.5: norms multiply by 1 + weight, queries lie beside their gates, and
    heads of the delta rule's parts beside each other."""
    return {
        name: np.ascontiguousarray(value)
        for source, tensor in tensors.items()
        for name, value in _qwen(source, tensor, config)
    }


def _qwen(name: str, x: np.ndarray, c: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    stem, hidden = name.rsplit(".", 2)[0], c["hidden_size"]
    keys, width = c["linear_num_key_heads"], c["linear_key_head_dim"]
    values = c["linear_value_head_dim"] * c["linear_num_value_heads"]
    if name.endswith("self_attn.q_proj.weight"):
        q, gate = x.reshape(c["num_attention_heads"], 2, -1, hidden).transpose(1, 0, 2, 3)
        yield f"{stem}.q_proj.weight", q.reshape(-1, hidden).T
        yield f"{stem}.gate_proj.weight", gate.reshape(-1, hidden).T
    elif name.endswith("in_proj_qkvz.weight"):
        parts = np.split(
            x.reshape(keys, -1, hidden), np.cumsum([width, width, values // keys]), axis=1
        )
        names = ("in_proj_qkv.q", "in_proj_qkv.k", "in_proj_qkv.v", "in_proj_z")
        for own, part in zip(names, parts, strict=True):
            yield f"{stem}.{own}.weight", part.reshape(-1, hidden).T
    elif name.endswith("in_proj_ba.weight"):
        for own, part in zip("ba", np.split(x.reshape(keys, -1, hidden), 2, axis=1), strict=True):
            yield f"{stem}.in_proj_{own}.weight", part.reshape(-1, hidden).T
    elif name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        for own, part in zip("qkv", np.split(x, [keys * width, 2 * keys * width]), strict=True):
            turned = part if "conv1d" in name else part.T
            yield f"{name.removesuffix('weight')}{own}.weight", turned
    elif name.endswith("experts.gate_up_proj"):
        for own, part in zip(("gate", "up"), np.split(x, 2, axis=1), strict=True):
            yield f"{stem}.experts.{own}_proj.weight", part.swapaxes(1, 2)
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", x.swapaxes(1, 2)
    elif "norm" in name and "linear_attn" not in name:
        yield name, 1 + x
    else:
        turned = x.T if x.ndim == 2 and "embed_tokens" not in name else x
        yield name.replace("shared_expert.", "shared_experts."), turned


def latent(tensors: Tensors, c: dict[str, Any]) -> Tensors:
    """Latent attention whose rotary features lie side by side: here those half of them apart.
    Without indexers, which choose all keys of a short sequence."""
    tensors = {name: x for name, x in tensors.items() if ".indexer." not in name}
    turned = {
        name: _apart(x, c) if re.search(r"(q_b_proj|kv_a_proj_with_mqa)\.weight$", name) else x
        for name, x in tensors.items()
    }
    return pairs(turned, c)


def _apart(x: np.ndarray, c: dict[str, Any]) -> np.ndarray:
    """Rows of a projection, the last ones of each head in two halves."""
    rope, heads = c["qk_rope_head_dim"], c["num_attention_heads"]
    each = x.reshape(heads if x.shape[1] == c["q_lora_rank"] else 1, -1, x.shape[1])
    first, last = np.split(each, [each.shape[1] - rope], axis=1)
    last = last.reshape(len(each), rope // 2, 2, -1).swapaxes(1, 2).reshape(last.shape)
    return np.concatenate([first, last], axis=1).reshape(x.shape)


def gptj(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Names of LlamaConfig's modules, and the first `rotary_dim` features of a head in two
    halves."""
    words = (
        (r"^transformer\.wte", "model.embed_tokens"),
        (r"^transformer\.ln_f", "model.norm"),
        (r"^transformer\.h\.", "model.layers."),
        (r"\.attn\.out_proj", ".self_attn.o_proj"),
        (r"\.attn\.", ".self_attn."),
        (r"\.ln_1\.", ".input_layernorm."),
        (r"\.fc_in\.", ".up_proj."),
        (r"\.fc_out\.", ".down_proj."),
    )
    found: Tensors = {}
    for name, x in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads, turned = config["n_head"], config["rotary_dim"]
            first, last = np.split(x.reshape(heads, -1, x.shape[1]), [turned], axis=1)
            first = first.reshape(heads, turned // 2, 2, -1).swapaxes(1, 2).reshape(first.shape)
            x = np.concatenate([first, last], axis=1).reshape(x.shape)
        for pattern, word in words:
            name = re.sub(pattern, word, name)
        found[name] = np.ascontiguousarray(x.T if x.ndim == 2 and "embed" not in name else x)
    return found


def pairs(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Rotary positions turn features that lie side by side: here those half a head apart. Names as
    ERNIE 4.5 has them."""
    found: Tensors = {}
    for name, x in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            dim = config["hidden_size"] // config["num_attention_heads"]
            apart = x.reshape(-1, dim // 2, 2, x.shape[1]).swapaxes(1, 2)
            found[name] = np.ascontiguousarray(apart.reshape(x.shape).T)
        elif name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for own, part in zip(("gate", "up"), np.split(x, 2, axis=1), strict=True):
                found[f"{stem}{own}_proj.weight"] = np.ascontiguousarray(part.swapaxes(1, 2))
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = np.ascontiguousarray(x.swapaxes(1, 2))
        else:
            turned = x.T if x.ndim == 2 and "embed_tokens" not in name else x
            found[name.replace("moe_statics.", "")] = np.ascontiguousarray(turned)
    return found


BY_HAND: dict[str, Callable[[Tensors, dict[str, Any]], Tensors]] = {
    "deepseek_v32": latent,
    "ernie4_5_moe": pairs,
    "glm_moe_dsa": latent,
    "gptj": gptj,
    "mistral4": latent,
    "qwen3_5_moe_text": qwen_delta,
    "qwen3_5_text": qwen_delta,
    "qwen3_next": qwen_delta,
    "youtu": latent,
}
"""Model type -> its checkpoint as the zoo has it."""
