"""Decoders whose layers differ in what mixes tokens: published sizes, what is refused, and emitted
programs that are cut by heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planner
from models_zoo.hf_config import from_config
from planner.errors import PlanError
from planner.reader import read_model
from planner.verify import worker

from .hf_golden import CONFIGS
from .test_hf import write
from .test_run import close, first, inputs
from .test_zoo import parameters

GRANITE_4: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "hidden_size": 4096,
    "intermediate_size": 768,
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "num_attention_heads": 32,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "num_local_experts": 72,
    "position_embedding_type": "nope",
    "shared_intermediate_size": 1536,
    "tie_word_embeddings": True,
    "vocab_size": 100352,
}
NEMOTRON_H: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-",
    "num_hidden_layers": 52,
    "attention_head_dim": 128,
}
PUBLISHED: list[tuple[str, dict[str, Any], int]] = [
    (
        "bamba-9b-v2",
        {"model_type": "bamba", "attn_layer_indices": [9, 18, 27], "mamba_d_state": 128,
         "vocab_size": 128256},
        9_780_235_392,
    ),
    ("granite-4.0-h-small", GRANITE_4, 32_207_337_984),
    (
        "granite-4.0-h-micro",
        {**GRANITE_4, "hidden_size": 2048, "intermediate_size": 8192, "num_local_experts": 0,
         "num_experts_per_tok": 0, "mamba_n_heads": 64, "shared_intermediate_size": 8192},
        3_191_396_096,
    ),
    (
        "falcon-h1-34b",
        {"model_type": "falcon_h1", "hidden_size": 5120, "intermediate_size": 21504,
         "num_hidden_layers": 72, "num_attention_heads": 20, "num_key_value_heads": 4,
         "head_dim": 128, "mamba_d_ssm": 4096, "mamba_n_heads": 32, "mamba_d_head": 128,
         "mamba_d_state": 256, "mamba_n_groups": 2, "vocab_size": 261120},
        33_642_221_312,
    ),
    ("nemotron-h-8b", NEMOTRON_H, 8_100_852_736),
    (
        "nemotron-3-nano-30b-a3b",
        {"model_type": "nemotron_h", "hidden_size": 2688, "num_key_value_heads": 2,
         "hybrid_override_pattern": "MEMEM*" + "EMEMEM*" * 4 + "EMEMEMEM*EMEMEMEME",
         "mamba_num_heads": 64, "n_routed_experts": 128, "num_experts_per_tok": 6,
         "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712},
        31_577_937_344 + 23 * 128,
    ),
    (
        "lfm2-1.2b",
        {"model_type": "lfm2", "hidden_size": 2048, "block_ff_dim": 12288,
         "full_attn_idxs": [2, 5, 8, 10, 12, 14], "num_hidden_layers": 16},
        1_170_340_608,
    ),
    (
        "lfm2-8b-a1b",
        {"model_type": "lfm2_moe", "num_hidden_layers": 24,
         "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv"
                         for i in range(24)]},
        8_339_929_856 + 22 * 32,
    ),
    ("qwen3-next-80b-a3b", {"model_type": "qwen3_next"}, 79_674_391_296),
    (
        "qwen3.5-27b",
        {"model_type": "qwen3_5",
         "text_config": {"model_type": "qwen3_5_text", "hidden_size": 5120,
                         "intermediate_size": 17408, "num_hidden_layers": 64,
                         "num_attention_heads": 24, "linear_num_value_heads": 48}},
        26_895_998_464,
    ),
    ("qwen3.5-35b-a3b", {"model_type": "qwen3_5_moe", "text_config": {}}, 34_660_610_688),
]  # fmt: skip
"""Name, fields as published, parameters of transformers 5.24's own model of them, buffers of
routers counted."""


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row[0])
def test_a_published_config_has_the_published_parameters(
    row: tuple[str, dict[str, Any], int], tmp_path: Path
) -> None:
    assert parameters(from_config(write(tmp_path, row[1]))) == row[2]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_no_token_sees_later_ones(name: str, tmp_path: Path) -> None:
    options = {"weights": "inline", "seq": "16"}
    model = from_config(write(tmp_path, CONFIGS[name]), options)
    feeds = inputs(model, 2)
    feeds["input_ids"] %= CONFIGS[name]["vocab_size"]
    before = first(model, feeds)
    feeds["input_ids"][:, 9] ^= 1
    after = first(model, feeds)
    close(after[:, :9], before[:, :9])
    assert np.abs(after[:, 9:] - before[:, 9:]).max() > 1e-4


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "bamba", "attn_layer_indices": "9"}, "numbers of layers"),
    ({"model_type": "bamba", "mamba_d_head": 63}, "make up 8192"),
    ({"model_type": "bamba", "time_step_limit": [0.1, 1.0]}, "time_step_limit"),
    ({"model_type": "granitemoehybrid", "layer_types": ["mamba"]}, "32 words of"),
    ({"model_type": "granitemoehybrid", "position_embedding_type": "alibi"}, "nope"),
    ({"model_type": "falcon_h1", "ssm_multipliers": [1.0, -1.0]}, "5 positive numbers"),
    ({"model_type": "falcon_h1", "mlp_multipliers": [1.0, "x"]}, "a positive number"),
    ({"model_type": "lfm2", "layer_types": ["conv"] * 31 + ["mamba"]}, "32 words of"),
    ({"model_type": "qwen3_next", "decoder_sparse_step": 2}, "decoder_sparse_step"),
    ({"model_type": "qwen3_next", "layer_types": ["mamba"] * 48}, "48 words of"),
    ({"model_type": "qwen3_5_text", "linear_num_key_heads": 0}, "linear_num_key_heads"),
    ({"model_type": "lfm2_moe"}, "a word a layer"),
    ({"model_type": "nemotron_h", "moe_latent_size": 1024}, "moe_latent_size"),
    ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-x"}, "letters of"),
    ({"model_type": "nemotron_h", "hybrid_override_pattern": "M" * 10_001}, "up to 10000"),
]


@pytest.mark.parametrize(("data", "what"), REFUSED)
def test_what_the_zoo_cannot_write_is_refused(
    data: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError) as caught:
        from_config(write(tmp_path, data))
    assert caught.value.code == "P074" and what in str(caught.value)


def test_experts_beside_a_state_space_are_routed_ones(tmp_path: Path) -> None:
    graph = read_model(from_config(write(tmp_path, CONFIGS["granitemoehybrid"])), batch=2)
    assert sum(node.op == "RoutedExperts" for node in graph.nodes) == 3


def test_experts_without_gates_are_routed_ones(tmp_path: Path) -> None:
    for form in ("dense", "gathered"):
        model = from_config(write(tmp_path, CONFIGS["nemotron_h-experts"]), {"form": form})
        found = [n for n in read_model(model, batch=2).nodes if n.op == "RoutedExperts"]
        assert [(n.attrs["activation"], n.inputs[3]) for n in found] == [("relu2", "")] * 2


# In jit programs the gradient of a depthwise convolution's filters is the compiler's where it cuts
# the batch alone (planner.ops.linear).
PROGRAMS = [
    ("bamba", "tp=2,dp=4", "shard_map"),
    ("bamba", "tp=2,dp=4", "jit"),
    ("granitemoehybrid", "expert=2,dp=4", "shard_map"),
    ("falcon_h1", "tp=2,dp=4,zero=3", "shard_map"),
    ("nemotron_h", "tp=4,dp=2", "shard_map"),
    ("nemotron_h-experts", "expert=2,dp=4", "shard_map"),
    ("lfm2", "tp=4,dp=2", "jit"),
    ("lfm2", "dp=8", "jit"),
    ("qwen3_5", "tp=2,dp=4", "shard_map"),
    ("qwen3_next", "expert=2,tp=2,dp=2", "jit"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pins", "backend"), PROGRAMS)
def test_programs_cut_by_heads_are_exact(
    name: str, pins: str, backend: Any, tmp_path: Path
) -> None:
    path = str(write(tmp_path, CONFIGS[name]))
    made = planner.plan(
        f"{path},seq=16", devices=8, batch=8, precision="fp32", hardware="cpu", baselines=False,
        pins=pins,
    )  # fmt: skip
    report = worker.verify(made, f"{path},seq=16", backend=backend)
    assert report.ok, report.text()
