"""Model types written of late: published sizes, what is refused, and emitted programs of the kinds
of layer that are theirs alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planner
from models_zoo.hf_config import _read, from_config
from planner.cli import main
from planner.errors import PlanError
from planner.reader import read_model
from planner.verify import worker
from tests.interop.test_pretrained import load, save

from .hf_golden import ALL, CONFIGS, drawn
from .test_hf import notes, write
from .test_run import close, first, inputs
from .test_zoo import parameters

HUNYUAN: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128167,
    "tie_word_embeddings": True,
}
GEMMA_4_31B: dict[str, Any] = {
    "model_type": "gemma4_text",
    "attention_k_eq_v": True,
    "final_logit_softcapping": 30.0,
    "hidden_size": 5376,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 21504,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 16,
    "sliding_window": 1024,
    "use_bidirectional_attention": "vision",
}
LING_MINI: dict[str, Any] = {
    "model_type": "bailing_moe",
    "architectures": ["BailingMoeV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True,
    "n_group": 8,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 20,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "partial_rotary_factor": 0.5,
    "topk_group": 4,
    "use_bias": False,
    "use_qk_norm": True,
    "vocab_size": 157184,
}
PUBLISHED: list[tuple[str, dict[str, Any], int]] = [
    (
        "apertus-8b",
        {"model_type": "apertus", "intermediate_size": 21504, "num_key_value_heads": 8},
        8_053_338_176,
    ),
    (
        "apertus-70b",
        {"model_type": "apertus", "hidden_size": 8192, "intermediate_size": 43008,
         "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8},
        70_599_864_480,
    ),
    (
        "bloom",
        {"model_type": "bloom", "hidden_size": 14336, "n_layer": 70, "num_attention_heads": 112},
        176_247_271_424,
    ),
    ("bloom-7b1", {"model_type": "bloom", "n_embed": 4096, "n_layer": 30, "n_head": 32},
     7_069_016_064),
    ("cwm", {"model_type": "cwm"}, 32_581_097_472),
    ("deepseek-v3.2", {"model_type": "deepseek_v32"}, 671_877_944_064 - 61 * 13_959_424),
    (
        "dots.llm1",
        {"model_type": "dots1", "hidden_size": 4096, "head_dim": 128, "n_shared_experts": 2,
         "n_routed_experts": 128, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
         "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        142_774_373_888 + 61 * 128,
    ),
    ("ernie-4.5-21b-a3b", {"model_type": "ernie4_5_moe"}, 21_825_437_888),
    (
        "ernie-4.5-300b-a47b",
        {"model_type": "ernie4_5_moe", "hidden_size": 8192, "num_hidden_layers": 54,
         "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672,
         "moe_intermediate_size": 3584, "moe_k": 8, "moe_num_shared_experts": 0,
         "moe_layer_start_index": 3, "tie_word_embeddings": False},
        299_484_163_264,
    ),
    ("exaone-3.0-7.8b", {"model_type": "exaone"}, 7_818_448_896),
    (
        "k-exaone-236b-a23b",
        {"model_type": "exaone_moe", "hidden_size": 6144, "intermediate_size": 18432,
         "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 8,
         "head_dim": 128, "vocab_size": 153600, "num_experts": 128, "moe_intermediate_size": 2048,
         "sliding_window": 128, "sliding_window_pattern": "LLLG"},
        236_571_156_352,
    ),
    (
        "falcon-rw-1b",
        {"model_type": "falcon", "alibi": True, "vocab_size": 50304, "hidden_size": 2048,
         "num_hidden_layers": 24, "num_attention_heads": 32, "bias": True,
         "parallel_attn": False, "multi_query": False},
        1_311_625_216,
    ),
    ("gemma-4-31b", GEMMA_4_31B, 30_697_345_280 + 60),
    (
        "gemma-4-26b-a4b",
        {**GEMMA_4_31B, "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30,
         "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2,
         "enable_moe_block": True, "num_experts": 128, "moe_intermediate_size": 704,
         "top_k_experts": 8},
        25_233_141_760 + 30,
    ),
    (
        "gemma-4-e2b",
        {"model_type": "gemma4",
         "text_config": {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
                         "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
                         "num_key_value_heads": 1, "num_kv_shared_layers": 20,
                         "use_double_wide_mlp": True, "final_logit_softcapping": 30.0}},
        4_628_569_344 + 35,
    ),
    ("glm-5", {"model_type": "glm_moe_dsa"}, 743_911_218_432 - 78 * 9_371_904),
    ("gpt-j-6b", {"model_type": "gptj"}, 6_050_882_784),
    ("hy3", {"model_type": "hy_v3"}, 295_033_543_488),
    (
        "hunyuan-7b",
        {"model_type": "hunyuan_v1_dense", "intermediate_size": 14336, **HUNYUAN},
        7_504_568_320,
    ),
    (
        "hunyuan-a13b",
        {"model_type": "hunyuan_v1_moe", "intermediate_size": 3072, **HUNYUAN, "num_experts": 64,
         "moe_topk": [8] * 32, "moe_intermediate_size": [3072] * 32,
         "num_shared_expert": [1] * 32},
        80_393_183_232,
    ),
    (
        "internlm2-7b",
        {"model_type": "internlm2", "vocab_size": 92544, "hidden_size": 4096, "bias": False,
         "intermediate_size": 14336, "num_key_value_heads": 8},
        7_737_708_544,
    ),
    ("internlm3-8b", {"model_type": "internlm3", "bias": False, "qkv_bias": False}, 8_804_241_408),
    ("jais-2-8b", {"model_type": "jais2"}, 8_090_401_280),
    ("ling-mini-2.0", LING_MINI, 16_255_643_392),
    ("minicpm3-4b", {"model_type": "minicpm3"}, 4_073_875_968),
    ("mistral-small-4", {"model_type": "mistral4"}, 118_972_826_624),
    (
        "mpt-30b",
        {"model_type": "mpt", "d_model": 7168, "n_heads": 64, "n_layers": 48, "vocab_size": 50432,
         "max_seq_len": 8192, "attn_config": {"alibi": True}},
        29_957_200_896,
    ),
    (
        "distilbert-base-uncased",
        {"model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"]},
        66_985_530,
    ),
    ("distilbert-sst-2", {"model_type": "distilbert"}, 66_955_010),
    (
        "modernbert-base",
        {"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"],
         "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
         "global_attn_every_n_layers": 3},
        149_655_232,
    ),
    (
        "modernbert-large",
        {"model_type": "modernbert", "hidden_size": 1024, "intermediate_size": 2624,
         "num_hidden_layers": 28, "num_attention_heads": 16, "classifier_pooling": "mean",
         "layer_types": (["full_attention"] + ["sliding_attention"] * 2) * 9 + ["full_attention"]},
        395833346,
    ),
    ("olmo-7b", {"model_type": "olmo"}, 6_888_095_744),
    (
        "phi-3.5-moe",
        {"model_type": "phimoe", "attention_bias": True, "lm_head_bias": True},
        41_873_153_344,
    ),
    ("solar-open-100b", {"model_type": "solar_open"}, 102_651_799_552),
    ("stablelm-3b-4e1t", {"model_type": "stablelm"}, 2_795_443_200),
    (
        "stablelm-2-12b",
        {"model_type": "stablelm", "hidden_size": 5120, "intermediate_size": 13824,
         "num_hidden_layers": 40, "num_key_value_heads": 8, "use_parallel_residual": True,
         "vocab_size": 100352},
        12_142_929_920,
    ),
    (
        "starcoder",
        {"model_type": "gpt_bigcode", "n_embd": 6144, "n_inner": 24576, "n_head": 48,
         "n_layer": 40, "n_positions": 8192, "vocab_size": 49152},
        15_517_456_384,
    ),
    ("whisper-tiny", {"model_type": "whisper"}, 37_760_640),
    (
        "whisper-large-v3-turbo",
        {"model_type": "whisper", "d_model": 1280, "encoder_layers": 32, "decoder_layers": 4,
         "encoder_attention_heads": 20, "decoder_attention_heads": 20, "encoder_ffn_dim": 5120,
         "decoder_ffn_dim": 5120, "vocab_size": 51866, "num_mel_bins": 128},
        808_878_080,
    ),
    ("youtu-llm-2b", {"model_type": "youtu"}, 1_961_560_064),
]  # fmt: skip
"""Name, fields as published, parameters of transformers 5.24's own model of them (of InternLM 2 as
its checkpoint has them; of Ling, whose card says 16.26 billion, as its own code has them), buffers
of routers, and Gemma 4's factor a layer, counted; less the indexers of each layer of DeepSeek V3.2
and GLM-5."""


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row[0])
def test_a_published_config_has_the_published_parameters(
    row: tuple[str, dict[str, Any], int], tmp_path: Path
) -> None:
    assert parameters(from_config(write(tmp_path, row[1]))) == row[2]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "apertus", "hidden_act": "silu"}, "one of xielu"),
    ({"model_type": "bailing_moe", "use_bias": True}, "use_bias"),
    ({"model_type": "deepseek_v32", "q_lora_rank": None}, "q_lora_rank"),
    (
        {"model_type": "exaone_moe", "num_hidden_layers": 4, "sliding_window": 8,
         "layer_types": ["full_attention", "sliding_attention"] * 2},
        "each n-th layer",
    ),
    ({"model_type": "glm_moe_dsa", "index_topk_pattern": "FSX"}, "78 letters of F and S"),
    ({"model_type": "hy_v3", "mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types"),
    ({"model_type": "mistral4", "n_group": 2}, "n_group"),
    ({"model_type": "bloom", "apply_residual_connection_post_layernorm": True}, "post_layernorm"),
    ({"model_type": "bloom", "n_head": 0}, "n_head"),
    ({"model_type": "distilbert", "sinusoidal_pos_embds": True}, "sinusoidal_pos_embds"),
    ({"model_type": "modernbert", "layer_types": ["full_attention"] * 3}, "22 words"),
    (
        {"model_type": "modernbert", "num_hidden_layers": 3,
         "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        "full_attention first",
    ),
    ({"model_type": "modernbert", "classifier_pooling": "max"}, "classifier_pooling"),
    ({"model_type": "whisper", "scale_embedding": True}, "scale_embedding"),
    ({"model_type": "dots1"}, "n_routed_experts"),
    ({"model_type": "ernie4_5_moe", "moe_layer_end_index": 3}, "moe_layer_end_index"),
    ({"model_type": "gemma4_text", "use_bidirectional_attention": "all"}, "bidirectional"),
    ({"model_type": "gemma4_text", "layer_types": ["full_attention"]}, "30 words"),
    ({"model_type": "gemma4_text", "enable_moe_block": True}, "num_experts"),
    ({"model_type": "gemma4_text", "rope_parameters": 7}, "rope_parameters"),
    ({"model_type": "gemma4_text", "rope_parameters": {"full_attention": 7}}, "rope_parameters"),
    (
        {"model_type": "gemma4_text",
         "rope_parameters": {"full_attention": {"partial_rotary_factor": 2}}},
        "up to 1",
    ),
    ({"model_type": "gemma4_text", "per_layer_config": {"0": {}}}, "per_layer_config"),
    ({"model_type": "gemma4_text", "per_layer_config": []}, "per_layer_config"),
    ({"model_type": "gpt_bigcode", "multi_query": False}, "multi_query"),
    ({"model_type": "hunyuan_v1_moe", "moe_topk": [1, 2]}, "the same number for each layer"),
    ({"model_type": "hunyuan_v1_moe", "num_experts": []}, "the same number for each layer"),
    ({"model_type": "internlm3", "qkv_bias": True}, "attention_bias"),
    ({"model_type": "mpt", "attn_config": "alibi"}, "an object"),
    ({"model_type": "mpt", "attn_config": {"alibi": False}}, "alibi"),
    ({"model_type": "mpt", "expansion_ratio": 8}, "expansion_ratio"),
    ({"model_type": "olmo", "clip_qkv": 8.0}, "clip_qkv"),
    ({"model_type": "phimoe", "num_experts_per_tok": 3}, "num_experts_per_tok"),
    ({"model_type": "stablelm", "qk_layernorm": True}, "qk_layernorm"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "what"), REFUSED)
def test_what_the_zoo_cannot_write_is_refused(
    data: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError) as caught:
        from_config(write(tmp_path, data))
    assert caught.value.code == "P074" and what in str(caught.value)


@pytest.mark.parametrize(
    "kind", ["dots1", "ernie4_5_moe", "gemma4-experts", "hunyuan_v1_moe", "phimoe"]
)
def test_experts_are_read_as_routed_ones(kind: str, tmp_path: Path) -> None:
    for form in ("dense", "gathered"):
        model = from_config(write(tmp_path, CONFIGS[kind]), {"form": form})
        found = [n for n in read_model(model, batch=2).nodes if n.op == "RoutedExperts"]
        assert len(found) == (2 if kind in ("dots1", "ernie4_5_moe") else 3)


def test_slopes_are_of_heads_and_no_parameters(tmp_path: Path) -> None:
    graph = read_model(from_config(write(tmp_path, CONFIGS["bloom"]), {"seq": "16"}), batch=2)
    masks = {node.inputs[3] for node in graph.nodes if node.op == "Attention"}
    assert [graph.tensors[name].shape for name in masks] == [(1, 6, 1, 16)]
    assert not masks & graph.trainable


def test_what_bends_an_activation_is_trained(tmp_path: Path) -> None:
    graph = read_model(from_config(write(tmp_path, CONFIGS["apertus"]), {"seq": "16"}), batch=2)
    own = {n for n in graph.weights if ".act_fn.alpha_" in graph.labels[n]}
    assert len(own) == 6 and set(graph.weights) == graph.trainable


def test_an_encoder_sees_no_padding(tmp_path: Path) -> None:
    model = from_config(write(tmp_path, ALL["modernbert"]), {"weights": "inline", "seq": "16"})
    feeds = inputs(model, 1)
    feeds["attention_mask"][:] = np.arange(16) < 12
    before = first(model, feeds)[:, :12]
    feeds["input_ids"][:, 12:] ^= 1
    close(first(model, feeds)[:, :12], before)


def test_heads_of_two_widths_are_said_in_two_ways(tmp_path: Path) -> None:
    older = {**CONFIGS["gemma4-experts"], "num_hidden_layers": 6}
    newer = {k: v for k, v in older.items() if "global" not in k}
    for place in ("5", "05"):  # transformers pads numbers of a model of ten layers and more
        newer["per_layer_config"] = {place: {"head_dim": 32, "num_key_value_heads": 2}}
        assert _read(write(tmp_path, older))[1] == _read(write(tmp_path, newer))[1]


def test_keys_are_lent_to_layers_of_the_kind(tmp_path: Path) -> None:
    graph = read_model(from_config(write(tmp_path, CONFIGS["gemma4"]), {"seq": "16"}), batch=2)
    keys = [node.inputs[1] for node in graph.nodes if node.op == "Attention"]
    assert keys[4] == keys[3] and keys[5] == keys[2] and len(set(keys)) == 4
    frozen = {graph.labels[name] for name in graph.weights if name not in graph.trainable}
    assert frozen == {f"model.layers.{i}.layer_scalar" for i in range(6)}


def test_that_training_draws_experts_is_said(tmp_path: Path) -> None:
    assert "training would draw them" in notes(from_config(write(tmp_path, CONFIGS["phimoe"])))


def test_a_checkpoint_of_ling_is_read(tmp_path: Path) -> None:
    small = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16,
             "num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 24,
             "num_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
             "vocab_size": 96}  # fmt: skip
    config = write(tmp_path, {**LING_MINI, **small})
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (64,),
        "post_attention_layernorm.weight": (64,),
        "attention.query_key_value.weight": (128, 64),
        "attention.query_layernorm.weight": (16,),
        "attention.key_layernorm.weight": (16,),
        "attention.dense.weight": (64, 64),
    }
    dense = {"gate_proj": (48, 64), "up_proj": (48, 64), "down_proj": (64, 48)}
    sparse = {"gate_proj": (24, 64), "up_proj": (24, 64), "down_proj": (64, 24)}
    shapes = {
        "model.word_embeddings.weight": (96, 64),
        "model.norm.weight": (64,),
        "lm_head.weight": (96, 64),
        **{f"model.layers.{i}.{name}": shape for i in (0, 1) for name, shape in layer.items()},
        **{f"model.layers.0.mlp.{name}.weight": shape for name, shape in dense.items()},
        "model.layers.1.mlp.gate.weight": (4, 64),
        "model.layers.1.mlp.gate.expert_bias": (4,),
        **{
            f"model.layers.1.mlp.{expert}.{name}.weight": shape
            for expert in ("shared_experts", *(f"experts.{e}" for e in range(4)))
            for name, shape in sparse.items()
        },
    }
    tensors = {name: drawn(name, shape) for name, shape in shapes.items()}
    save(tmp_path / "model.safetensors", tensors)
    out = tmp_path / "w.safetensors"
    assert main(["weights", str(config), "--from", str(tmp_path), "-o", str(out)]) == 0
    read = load(out)
    assert sum(x.size for x in read.values()) == parameters(from_config(config))
    fused = tensors["model.layers.1.attention.query_key_value.weight"]
    close(read["model.layers.1.self_attn.k_proj.weight"], fused[64:96].T)


PROGRAMS = [
    ("apertus", "tp=2,dp=4", "shard_map"),
    ("bloom", "tp=2,dp=4", "shard_map"),
    ("bloom", "tp=2,dp=4", "jit"),
    ("falcon-alibi", "tp=2,dp=4", "shard_map"),
    ("gemma4", "tp=2,dp=4", "shard_map"),
    ("gemma4-experts", "expert=2,tp=2,dp=2", "shard_map"),
    ("gpt_bigcode", "tp=2,dp=4", "shard_map"),
    ("hunyuan_v1_moe", "expert=2,tp=2,dp=2", "shard_map"),
    ("hunyuan_v1_moe", "expert=2,tp=2,dp=2", "jit"),
    ("modernbert", "tp=2,dp=4", "shard_map"),
    ("mpt", "tp=2,dp=4", "jit"),
    ("olmo", "tp=2,dp=4", "shard_map"),
    ("phimoe", "expert=2,dp=4", "shard_map"),
    ("whisper", "tp=2,dp=4", "shard_map"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pins", "backend"), PROGRAMS)
def test_programs_cut_by_heads_and_experts_are_exact(
    name: str, pins: str, backend: Any, tmp_path: Path
) -> None:
    path = f"{write(tmp_path, ALL[name])},seq=16"
    made = planner.plan(
        path, devices=8, batch=8, precision="fp32", hardware="cpu", baselines=False, pins=pins
    )
    report = worker.verify(made, path, backend=backend)
    assert report.ok, report.text()
