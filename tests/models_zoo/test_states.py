"""Models that keep states of earlier tokens, written with these as inputs: a prompt and then one
token after the other give what the model without a cache gives for the whole sequence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import models_zoo
from models_zoo.hf_config import from_config

PROMPT, TOKENS = 5, 9
SHARED = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 4,
}
CONFIGS = {
    "bamba": {"attn_layer_indices": [1], **MAMBA},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        **MAMBA,
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_rms_norm": True, "head_dim": 8, **MAMBA},
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 3,
        "conv_bias": True,
        "block_auto_adjust_ff_dim": False,
    },
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*M-",
        "head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 4,
        "use_bias": True,
    },
}


def ran(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def empty(model: onnx.ModelProto, batch: int) -> dict[str, np.ndarray]:
    """What a model keeps before the first token."""
    shapes = {
        i.name: [d.dim_value for d in i.type.tensor_type.shape.dim][1:]
        for i in model.graph.input
        if i.name.startswith("past")
    }
    return {n: np.zeros((batch, *s), np.float32) for n, s in shapes.items()}


def generated(model: onnx.ModelProto, ids: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Logits of every token, the first PROMPT at once and then one at a time."""
    at = np.maximum(np.cumsum(real, 1) - 1, 0)
    given = {i.name for i in model.graph.input}
    session = onnxruntime.InferenceSession(model.SerializeToString())
    names = [o.name for o in session.get_outputs()]
    kept, logits, done = empty(model, len(ids)), [], 0
    for end in range(PROMPT, ids.shape[1] + 1):
        feeds = {
            "input_ids": ids[:, done:end],
            "attention_mask": real[:, :end],
            "position_ids": at[:, done:end],
        }
        feeds = {n: v for n, v in feeds.items() if n in given} | kept
        out = dict(zip(names, session.run(None, feeds), strict=True))
        logits.append(out["logits"])
        kept = {n: out[_present(n)] for n in kept}
        done = end
    return np.concatenate(logits, 1)


def _present(past: str) -> str:
    return past.replace("past_key_values", "present").replace("past_", "present_")


def whole_and_by_steps(name: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a model of a config.json without a cache, and with one."""
    fields = {"model_type": name, **SHARED, **CONFIGS[name]}
    file = folder / "config.json"
    file.write_text(json.dumps(fields))
    ids = np.random.default_rng(0).integers(0, 64, (2, TOKENS))
    plain = from_config(file, {"seq": str(TOKENS), "weights": "inline"})
    cached = from_config(file, {"cache": "1", "weights": "inline"})
    return ran(plain, {"input_ids": ids})["logits"], generated(cached, ids, np.ones_like(ids))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_hybrid_by_steps_is_the_whole_sequence(name: str, tmp_path: Path) -> None:
    whole, by_steps = whole_and_by_steps(name, tmp_path)
    np.testing.assert_allclose(by_steps, whole, rtol=2e-4, atol=2e-4)


def test_mamba_by_steps_is_the_whole_sequence() -> None:
    ids = np.random.default_rng(0).integers(0, 500, (2, TOKENS))
    whole = models_zoo.build(f"zoo:ssm-tiny,groups=2,seq={TOKENS},weights=inline")
    cached = models_zoo.build("zoo:ssm-tiny,groups=2,cache=1,weights=inline")
    by_steps = generated(cached, ids, np.ones_like(ids))
    np.testing.assert_allclose(
        by_steps, ran(whole, {"input_ids": ids})["logits"], rtol=2e-4, atol=2e-4
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["bamba", "lfm2", "nemotron_h", "qwen3_next"])
def test_tokens_that_are_not_real_change_nothing(name: str, tmp_path: Path) -> None:
    """A prompt that is padded on the left has the logits of the prompt alone."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": name, **SHARED, **CONFIGS[name]}))
    model = from_config(file, {"cache": "1", "weights": "inline"})
    ids = np.random.default_rng(0).integers(1, 64, (1, TOKENS))
    padding = np.full((1, 4), 3)
    alone = generated(model, ids, np.ones_like(ids))
    padded = np.concatenate([padding, ids], 1)
    real = np.concatenate([0 * padding, np.ones_like(ids)], 1)
    np.testing.assert_allclose(generated(model, padded, real)[:, 4:], alone, rtol=2e-4, atol=2e-4)


def test_states_have_the_names_and_shapes_of_exports(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen3_next", **SHARED, **CONFIGS["qwen3_next"]}))
    model = from_config(file, {"cache": "1"})
    kept = {n: s.shape[1:] for n, s in empty(model, 1).items()}
    assert kept["past_key_values.1.key"] == (2, 0, 8)
    assert kept["past_conv.0.q"] == (16, 3) and kept["past_conv.2.v"] == (48, 3)
    assert kept["past_recurrent.0"] == (4, 8, 12) and "past_conv.1.q" not in kept
    outputs = {o.name for o in model.graph.output}
    assert {_present(n) for n in kept} == outputs - {"logits"}
