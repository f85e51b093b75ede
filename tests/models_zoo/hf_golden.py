"""Logits of transformers' own models of small configurations, whose weights are drawn by name.

`python -m tests.models_zoo.hf_golden` (with torch and transformers, in an environment of their own)
writes hf_golden.json: of each configuration the names and shapes of the library's checkpoint, and
some logits. test_hf_golden.py converts the same checkpoint and holds the zoo's model to them.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_suffix(".json")
TOKENS = 16
_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
_SPACE: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "mamba_n_groups": 2,
}
_BLOCKS = ["mamba", "attention", "mamba"]
_DELTA: dict[str, Any] = {
    **_SMALL,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
_TURNED = {"rope_type": "default", "rope_theta": 10000.0}
_ROUTED: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "apertus": {**_SMALL, "model_type": "apertus", "rope_parameters": _TURNED},
    "cwm": {
        **_SMALL,
        "model_type": "cwm",
        "rope_parameters": _TURNED,
        "head_dim": 16,
        "num_hidden_layers": 5,
        "sliding_window": 5,
    },
    "deepseek_v32": {
        **_SMALL,
        **_LATENT,
        **_ROUTED,
        "model_type": "deepseek_v32",
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "exaone": {
        **{k: v for k, v in _SMALL.items() if k != "num_hidden_layers"},
        "model_type": "exaone",
        "num_layers": 2,
    },
    "exaone_moe": {
        **_SMALL,
        **{k: v for k, v in _ROUTED.items() if k[0] == "m"},
        "model_type": "exaone_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "sliding_window_pattern": 3,
    },
    "falcon-alibi": {
        "model_type": "falcon",
        "hidden_size": 64,
        "num_attention_heads": 4,  # a power of two: the library rounds slopes to two bytes
        "num_hidden_layers": 2,
        "vocab_size": 96,
        "alibi": True,
        "bias": True,
        "multi_query": False,
        "parallel_attn": False,
    },
    "glm_moe_dsa": {
        **_SMALL,
        **_LATENT,
        **_ROUTED,
        "model_type": "glm_moe_dsa",
        "first_k_dense_replace": 1,
        "index_n_heads": 4,
    },
    "gptj": {
        "model_type": "gptj",
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 32,
        "rotary_dim": 8,
        "vocab_size": 96,
    },
    "granitemoeshared": {
        **_SMALL,
        "model_type": "granitemoeshared",
        "num_local_experts": 4,
        "shared_intermediate_size": 32,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.5,
    },
    "hy_v3": {
        **_SMALL,
        "model_type": "hy_v3",
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "jais2": {**_SMALL, "model_type": "jais2"},
    "minicpm3": {**_SMALL, **_LATENT, "model_type": "minicpm3", "dim_model_base": 32},
    "mistral4": {
        **_SMALL,
        **_LATENT,
        **_ROUTED,
        "model_type": "mistral4",
        "architectures": ["Mistral4ForCausalLM"],
        "first_k_dense_replace": 1,
        "rope_parameters": {
            "rope_type": "linear",
            "factor": 1.0,
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "partial_rotary_factor": 0.4,
            "original_max_position_embeddings": 8192,
        },
    },
    "solar_open": {**_SMALL, **_ROUTED, "model_type": "solar_open", "head_dim": 16},
    "youtu": {**_SMALL, **_LATENT, "model_type": "youtu"},
    "bamba": {**_SMALL, **_SPACE, "model_type": "bamba", "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_SMALL,
        **_SPACE,
        "model_type": "granitemoehybrid",
        "mamba_n_groups": 1,
        "layer_types": _BLOCKS,
        "num_local_experts": 4,
        "shared_intermediate_size": 32,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
        "logits_scaling": 4.0,
        "position_embedding_type": "nope",
        "tie_word_embeddings": True,
    },
    "granitemoehybrid-dense": {
        **_SMALL,
        **_SPACE,
        "model_type": "granitemoehybrid",
        "layer_types": _BLOCKS,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 32,
        "position_embedding_type": "rope",
    },
    "falcon_h1": {
        **_SMALL,
        **_SPACE,
        "model_type": "falcon_h1",
        "num_hidden_layers": 2,
        "mamba_d_ssm": 128,
        "ssm_multipliers": [0.35, 0.25, 0.17, 0.5, 0.35],
        "mlp_multipliers": [0.88, 0.25],
        "key_multiplier": 0.39,
        "embedding_multiplier": 5.65,
        "lm_head_multiplier": 0.2,
        "ssm_in_multiplier": 0.7,
        "ssm_out_multiplier": 0.6,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 0.8,
    },
    "falcon_h1-norm": {
        **_SMALL,
        **_SPACE,
        "model_type": "falcon_h1",
        "num_hidden_layers": 1,
        "mamba_d_ssm": 128,
        "mamba_rms_norm": True,
    },
    "bloom": {
        "model_type": "bloom",
        "hidden_size": 48,
        "n_layer": 2,
        "n_head": 6,
        "vocab_size": 96,
    },
    "dots1": {
        **_SMALL,
        "model_type": "dots1",
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 2,
        "topk_group": 1,
    },
    "ernie4_5_moe": {
        **_SMALL,
        "model_type": "ernie4_5_moe",
        "moe_intermediate_size": 24,
        "moe_num_experts": 4,
        "moe_k": 2,
    },
    "gemma4": {
        **_SMALL,
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 2.0,
    },
    "gemma4-experts": {
        **_SMALL,
        "model_type": "gemma4_text",
        "num_key_value_heads": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "sliding_window": 5,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    "gpt_bigcode": {
        "model_type": "gpt_bigcode",
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 2,
        "n_inner": 48,
        "n_positions": 32,
        "vocab_size": 96,
    },
    "hunyuan_v1_moe": {
        **_SMALL,
        "model_type": "hunyuan_v1_moe",
        "head_dim": 16,
        "num_experts": 4,
        "moe_topk": [2, 2, 2],
        "tie_word_embeddings": True,
    },
    "lfm2": {
        **_SMALL,
        "model_type": "lfm2",
        "block_multiple_of": 8,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "lfm2_moe": {
        **_SMALL,
        "model_type": "lfm2_moe",
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.5,
    },
    "mpt": {
        "model_type": "mpt",
        "d_model": 48,
        "n_heads": 6,
        "n_layers": 2,
        "max_seq_len": 32,
        "vocab_size": 96,
    },
    "nemotron_h": {
        **{k: v for k, v in _SMALL.items() if k != "num_hidden_layers"},
        "model_type": "nemotron_h",
        "head_dim": 16,
        "hybrid_override_pattern": "M-*M",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "nemotron_h-experts": {
        **{k: v for k, v in _SMALL.items() if k != "num_hidden_layers"},
        "model_type": "nemotron_h",
        "head_dim": 16,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "routed_scaling_factor": 2.5,
    },
    "olmo": {**_SMALL, "model_type": "olmo"},
    "opt": {
        "model_type": "opt",
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 48,
        "vocab_size": 96,
        "max_position_embeddings": 40,
    },
    "phimoe": {
        **_SMALL,
        "model_type": "phimoe",
        "num_local_experts": 6,
        "router_jitter_noise": 0.3,
        "attention_bias": True,
        "lm_head_bias": True,
    },
    "qwen3_5_moe": {**_DELTA, **_EXPERTS, "model_type": "qwen3_5_moe_text"},
    "qwen3_5": {**_DELTA, "model_type": "qwen3_5_text"},
    "stablelm": {**_SMALL, "model_type": "stablelm", "use_qkv_bias": True},
    "stablelm-parallel": {**_SMALL, "model_type": "stablelm", "use_parallel_residual": True},
    "qwen3_next": {**_DELTA, **_EXPERTS, "model_type": "qwen3_next"},
}
"""Decoders."""
ENCODERS: dict[str, dict[str, Any]] = {
    "distilbert": {
        "model_type": "distilbert",
        "architectures": ["DistilBertForMaskedLM"],
        "dim": 64,
        "hidden_dim": 48,
        "n_heads": 4,
        "n_layers": 2,
        "max_position_embeddings": 16,
        "vocab_size": 96,
    },
    "modernbert": {
        **_SMALL,
        "model_type": "modernbert",
        "architectures": ["ModernBertForMaskedLM"],
        "num_hidden_layers": 4,
        "local_attention": 6,
        "pad_token_id": 0,
    },
    "whisper": {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 80,
        "num_mel_bins": 8,
        "max_source_positions": 16,
        "max_target_positions": 16,
        "vocab_size": 96,
        "pad_token_id": 0,
    },
}
ALL = CONFIGS | ENCODERS
HEADS = ("lm_head.weight", "decoder.weight", "proj_out.weight", "vocab_projector.weight")
"""What a checkpoint of tied tables lacks."""
CONSTANTS = (".act_fn.beta", ".act_fn.eps")
"""Of a checkpoint, what is the same in every model (Apertus)."""


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The weight of a name: scales of norms near one, matrices that keep what they multiply at its
    size."""
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) > 1:
        values *= shape[-1] ** -0.5
    else:
        values = 0.3 * values + ("norm" in name)
    return np.asarray(values, np.float32)


def ids(vocab: int) -> np.ndarray:
    """Tokens of two samples."""
    return np.random.default_rng(7).integers(0, vocab, (2, TOKENS))


def sound(config: dict[str, Any]) -> np.ndarray:
    """Features of two samples of sound."""
    shape = (2, config["num_mel_bins"], 2 * config["max_source_positions"])
    return np.random.default_rng(8).standard_normal(shape).astype(np.float32)


def some(logits: np.ndarray) -> np.ndarray:
    """Those that are kept."""
    return np.asarray(logits[:, ::5, ::19])


def _golden(config: dict[str, Any]) -> dict[str, Any]:
    """Names and shapes of the library's checkpoint, and some logits."""
    import torch  # type: ignore[import-not-found]
    import transformers  # type: ignore[import-not-found]

    fields = {k: v for k, v in config.items() if k != "model_type"}
    made = transformers.AutoConfig.for_model(config["model_type"], **fields)
    # Falcon's plain attention adds what lowers scores to a mask that has it already.
    made._attn_implementation = "sdpa" if config.get("alibi") else "eager"
    names = config.get("architectures")
    model = (
        getattr(transformers, names[0])(made)
        if names
        else transformers.AutoModelForCausalLM.from_config(made)
    )
    model = model.float().eval()
    tied = getattr(made, "tie_word_embeddings", False)
    state = {k: v for k, v in model.state_dict().items() if not (tied and k in HEADS)}
    state = {k: v for k, v in state.items() if not k.endswith(CONSTANTS)}
    with torch.no_grad():
        for name, value in state.items():
            value.copy_(torch.from_numpy(drawn(name, tuple(value.shape))))
        tokens = torch.from_numpy(ids(made.vocab_size))
        given = {"input_ids": tokens}
        if "num_mel_bins" in config:
            heard = torch.from_numpy(sound(config))
            given = {"input_features": heard, "decoder_input_ids": tokens}
        logits = model(**given).logits.numpy()
    return {
        "shapes": {name: list(value.shape) for name, value in state.items()},
        "logits": [round(float(x), 5) for x in some(logits).ravel()],
    }


if __name__ == "__main__":
    before = json.loads(FILE.read_text()) if FILE.exists() else {}
    wanted = sys.argv[1:] or list(ALL)
    made = {name: _golden(ALL[name]) if name in wanted else before[name] for name in ALL}
    rows = (f"{json.dumps(name)}: {json.dumps(made[name])}" for name in sorted(made))
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
