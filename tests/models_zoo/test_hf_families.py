"""Model types of the last years: as many parameters as published, layers that see what they should,
files that wrap a text model, and those that are refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from models_zoo.hf_config import KNOWN, UNWRITTEN, WRAPPERS, _read, from_config
from planner.errors import PlanError
from planner.ops.attention_pairs import Positions
from planner.reader import read_model

from .test_hf import notes, write
from .test_run import close, first, inputs, weights
from .test_zoo import parameters

SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)
PUBLISHED: list[tuple[str, str, tuple[int | None, ...], dict[str, Any], int]] = [
    (
        "gemma-2-27b",
        "gemma2",
        (4608, 46, 32, 16, 36864, 256000),
        {"head_dim": 128, "query_pre_attn_scalar": 144, "sliding_window": 4096},
        27_227_128_320,
    ),
    (
        "gemma-3-1b",
        "gemma3_text",
        (1152, 26, 4, 1, 6912, 262144),
        {
            "head_dim": 256,
            "sliding_window": 512,
            "rope_local_base_freq": 10000,
            "sliding_window_pattern": 6,
        },
        999_885_952,
    ),
    (
        "gemma-3-27b",
        "gemma3",
        (5376, 62, 32, 16, 21504, 262208),
        {"head_dim": 128, "query_pre_attn_scalar": 168, "sliding_window": 1024},
        27_009_346_304,
    ),
    (
        "phi-3-mini",
        "phi3",
        (3072, 32, 32, 32, 8192, 32064),
        {"sliding_window": 2047},
        3_821_079_552,
    ),
    ("phi-4", "phi3", (5120, 40, 40, 10, 17920, 100352), {"sliding_window": None}, 14_659_507_200),
    (
        "phi-4-mini",
        "phi3",
        (3072, 32, 24, 8, 8192, 200064),
        {"partial_rotary_factor": 0.75, "sliding_window": 262144, "tie_word_embeddings": True},
        3_836_021_760,
    ),
    (
        "phi-2",
        "phi",
        (2560, 32, 32, 32, 10240, 51200),
        {"partial_rotary_factor": 0.4},
        2_779_683_840,
    ),
    ("olmo-2-32b", "olmo2", (5120, 64, 40, 8, 27648, 100352), {}, 32_234_279_936),
    (
        "olmo-3-32b",
        "olmo3",
        (5120, 64, 40, 8, 27648, 100278),
        {"sliding_window": 4096},
        32_233_522_176,
    ),
    (
        "olmoe-1b-7b",
        "olmoe",
        (2048, 16, 16, 16, 1024, 50304),
        {"num_experts": 64, "num_experts_per_tok": 8},
        6_919_161_856,
    ),
    ("smollm3-3b", "smollm3", (2048, 36, 16, 4, 11008, 128256), {}, 3_075_098_624),
    (
        "granite-3.3-8b",
        "granite",
        (4096, 40, 32, 8, 12800, 49159),
        {"tie_word_embeddings": True},
        8_170_864_640,
    ),
    (
        "granite-3.0-3b-a800m",
        "granitemoe",
        (1536, 32, 24, 8, 512, 49155),
        {"num_local_experts": 40, "num_experts_per_tok": 8, "tie_word_embeddings": True},
        3_298_793_472,
    ),
    (
        "glm-4-9b-0414",
        "glm4",
        (4096, 40, 32, 2, 13696, 151552),
        {"head_dim": 128, "attention_bias": False, "partial_rotary_factor": 0.5},
        9_400_094_720,
    ),
    (
        "glm-4-9b-hf",
        "glm",
        (4096, 40, 32, 2, 13696, 151552),
        {"head_dim": 128, "attention_bias": True},
        9_399_951_360,
    ),
    (
        "glm-4.5",
        "glm4_moe",
        (5120, 92, 96, 8, 12288, 151552),
        {
            "head_dim": 128,
            "attention_bias": True,
            "use_qk_norm": True,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 160,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "partial_rotary_factor": 0.5,
            "num_nextn_predict_layers": 1,
        },
        352_797_829_024,
    ),
    (
        "glm-4.5-air",
        "glm4_moe",
        (4096, 46, 96, 8, 10944, 151552),
        {
            "head_dim": 128,
            "attention_bias": True,
            "use_qk_norm": False,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "partial_rotary_factor": 0.5,
        },
        106_852_251_264,
    ),
    ("glm-4.7-flash", "glm4_moe_lite", (None, None, None, None, None, None), {}, 29_943_393_920),
    (
        "starcoder2-15b",
        "starcoder2",
        (6144, 40, 48, 4, 24576, 49152),
        {"sliding_window": 4096, "tie_word_embeddings": False},
        15_957_889_024,
    ),
    (
        "pythia-6.9b",
        "gpt_neox",
        (4096, 32, 32, None, 16384, 50432),
        {"rotary_pct": 0.25},
        6_857_302_016,
    ),
    (
        "falcon-7b",
        "falcon",
        (4544, 32, 71, None, None, 65024),
        {
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
            "alibi": False,
            "new_decoder_architecture": False,
        },
        6_921_720_704,
    ),
    (
        "falcon-40b",
        "falcon",
        (8192, 60, 128, None, None, 65024),
        {
            "num_kv_heads": 8,
            "new_decoder_architecture": True,
            "bias": False,
            "alibi": False,
            "parallel_attn": True,
        },
        41_303_293_952,
    ),
    ("command-r", "cohere", (8192, 40, 64, 64, 22528, 256000), {}, 34_980_831_232),
    (
        "command-r7b",
        "cohere2",
        (4096, 32, 32, 8, 14336, 256000),
        {"sliding_window": 4096, "logit_scale": 0.25},
        8_028_033_024,
    ),
    (
        "gpt-oss-120b",
        "gpt_oss",
        (2880, 36, 64, 8, 2880, 201088),
        {
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "attention_bias": True,
        },
        116_829_154_368,
    ),
    (
        "llama-4-scout",
        "llama4",
        (5120, 48, 40, 8, 8192, 202048),
        {
            "head_dim": 128,
            "intermediate_size_mlp": 16384,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 8192,
        },
        107_769_861_120,
    ),
    (
        "llama-4-maverick",
        "llama4",
        (5120, 48, 40, 8, 8192, 202048),
        {
            "head_dim": 128,
            "intermediate_size_mlp": 16384,
            "num_local_experts": 128,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8192,
            "use_qk_norm": False,
        },
        400_711_848_960,
    ),
    (
        "kimi-k2",
        "kimi_k2",
        (7168, 61, 64, 64, 18432, 163840),
        {
            "n_routed_experts": 384,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "norm_topk_prob": True,
        },
        1_026_408_232_448,
    ),
    (
        "minimax-m2",
        "minimax_m2",
        (3072, 62, 48, 8, 1536, 200064),
        {"head_dim": 128, "rotary_dim": 64, "num_local_experts": 256, "num_experts_per_tok": 8},
        228_689_764_864,
    ),
    (
        "seed-oss-36b",
        "seed_oss",
        (5120, 64, 80, 8, 27648, 155136),
        {"head_dim": 128, "attention_bias": True, "attention_out_bias": False},
        36_151_104_512,
    ),
    ("ernie-4.5-0.3b", "ernie4_5", (None, None, None, None, None, None), {}, 360_748_032),
    ("minitron-4b", "nemotron", (3072, 32, 24, 8, 9216, 256000), {"head_dim": 128}, 4_190_509_056),
    ("afm-4.5b", "arcee", (2560, 36, 20, 4, 18432, 128004), {"head_dim": 128}, 4_619_184_640),
    (
        "ministral-3-8b",
        "ministral3",
        (4096, 34, 32, 8, 14336, 131072),
        {"head_dim": 128},
        8_489_553_920,
    ),
    (
        "mistral-small-3.1",
        "mistral3",
        (5120, 40, 32, 8, 32768, 131072),
        {"head_dim": 128, "sliding_window": None},
        23_572_403_200,
    ),
    (
        "qwen2.5-vl-7b",
        "qwen2_5_vl",
        (3584, 28, 28, 4, 18944, 152064),
        {
            "use_sliding_window": False,
            "max_window_layers": 28,
            "sliding_window": 32768,
            "tie_word_embeddings": False,
        },
        7_615_616_512,
    ),
]
"""Name, model type, sizes (`SIZES`), other fields as published, parameters: those of transformers
5.24's own model of these fields, buffers of routers counted."""


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row[0])
def test_a_published_config_has_the_published_parameters(
    row: tuple[str, str, tuple[int | None, ...], dict[str, Any], int], tmp_path: Path
) -> None:
    _, kind, sizes, fields, count = row
    fields = {**{k: n for k, n in zip(SIZES, sizes, strict=True) if n is not None}, **fields}
    data = {"text_config": fields} if kind in WRAPPERS and kind != "qwen2_5_vl" else fields
    model = from_config(write(tmp_path, {"model_type": kind, **data}))
    assert parameters(model) == count
    assert ("text model of" in notes(model)) == (kind in WRAPPERS)


SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "moe_intermediate_size": 40,
    "ffn_hidden_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 16,
    "head_dim": 16,
    "sliding_window": 4,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 5,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
NEWER = re.findall(
    r"\w+",
    "arcee cohere cohere2 ernie4_5 exaone4 falcon gemma2 gemma3_text glm glm4 glm4_moe"
    " glm4_moe_lite gpt_neox gpt_oss granite granitemoe kimi_k2 llama4_text minimax_m2 ministral3"
    " mistral mixtral nemotron olmo2 olmo3 olmoe phi phi3 seed_oss smollm3 starcoder2",
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", NEWER)
def test_a_small_model_runs_and_no_token_sees_later_ones(kind: str, tmp_path: Path) -> None:
    model = from_config(write(tmp_path, {"model_type": kind, **SMALL}), {"weights": "inline"})
    feeds = inputs(model, 2)
    before = first(model, feeds)
    assert before.shape == (2, 16, 128) and np.isfinite(before).all()
    feeds["input_ids"][:, 9] += 1
    after = first(model, feeds)
    close(after[:, :9], before[:, :9])
    assert np.abs(after[:, 9:] - before[:, 9:]).max() > 1e-4


def attentions(model: onnx.ModelProto) -> list[Positions]:
    """What the reader finds of each layer's attention, none of which has a mask left."""
    graph = read_model(model, batch=2)
    found = [node for node in graph.nodes if node.op == "Attention"]
    assert all(len(node.inputs) < 4 or not node.inputs[3] for node in found)
    return [Positions.of(node) for node in found]


WINDOWS: list[tuple[str, dict[str, Any], str]] = [
    ("mistral", {}, "nnnn"),
    ("mixtral", {}, "nnnn"),
    ("mistral", {"sliding_window": None}, "ffff"),
    ("mistral", {"sliding_window": 16}, "ffff"),
    ("qwen2", {}, "ffff"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, "ffnn"),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, "nnnn"),
    ("gemma2", {}, "nfnf"),
    ("gemma3_text", {"num_hidden_layers": 7}, "nnnnnfn"),
    ("gemma3_text", {"sliding_window_pattern": 3}, "nnfn"),
    ("gpt_oss", {}, "nfnf"),
    ("olmo3", {}, "nnnf"),
    ("cohere2", {}, "nnnf"),
    ("cwm", {}, "fnnn"),
    ("cwm", {"num_hidden_layers": 6}, "fnnnfn"),
    ("exaone4", {"sliding_window_pattern": "LLG"}, "nnfn"),
    ("starcoder2", {}, "nnnn"),
    ("phi3", {}, "nnnn"),
    ("olmo3", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2}, "ffnn"),
    ("gemma2", {"layer_types": ["full_attention"] * 4}, "ffff"),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("kind", "fields", "layers"), WINDOWS)
def test_windows_are_those_of_the_layers(
    kind: str, fields: dict[str, Any], layers: str, tmp_path: Path
) -> None:
    for spread in ("0", "1"):
        model = from_config(
            write(tmp_path, {"model_type": kind, **SMALL, **fields}), {"decomposed": spread}
        )
        assert attentions(model) == [Positions(True, 4 if near == "n" else 0) for near in layers]


def test_a_window_hides_earlier_tokens(tmp_path: Path) -> None:
    one = {"model_type": "mistral", **SMALL, "num_hidden_layers": 1}
    model = from_config(write(tmp_path, one), {"weights": "inline"})
    feeds = inputs(model, 2)
    before = first(model, feeds)
    feeds["input_ids"][:, 5] += 1
    changed = np.abs(first(model, feeds) - before).max(axis=(0, 2)) > 1e-5
    assert list(np.flatnonzero(changed)) == [5, 6, 7, 8]


def test_chunks_hide_earlier_tokens(tmp_path: Path) -> None:
    one = {"model_type": "llama4_text", **SMALL, "num_hidden_layers": 1}
    model = from_config(write(tmp_path, one), {"weights": "inline"})
    feeds = inputs(model, 2)
    before = first(model, feeds)
    feeds["input_ids"][:, 6] += 1
    changed = np.abs(first(model, feeds) - before).max(axis=(0, 2)) > 1e-5
    assert list(np.flatnonzero(changed)) == [6, 7, 8, 9]


def test_layers_without_positions_see_a_set(tmp_path: Path) -> None:
    """The last token of a model without positions and masks of its own sees all others alike."""
    bare = {"no_rope_layers": [0, 0], "num_hidden_layers": 2}
    model = from_config(
        write(tmp_path, {"model_type": "smollm3", **SMALL, **bare, "num_hidden_layers": 1}),
        {"weights": "inline"},
    )
    feeds = inputs(model, 1)
    before = first(model, feeds)[:, -1]
    feeds["input_ids"][:, :15] = feeds["input_ids"][:, :15][:, ::-1].copy()
    close(first(model, feeds)[:, -1], before)


def test_the_experts_of_gpt_oss_follow_their_definition() -> None:
    from models_zoo import moe

    from .test_run import piece

    c = moe.MoeConfig(
        1, 6, 1, 1, 10, 8, 7, experts=5, top=2, router_bias=True, expert_bias=True, limit=0.7
    )
    for form in ("dense", "gathered", "capacity"):
        own = dataclasses.replace(c, form=form, capacity=5.0)  # type: ignore[arg-type]
        model = piece(lambda at, x: moe.mixture(at, x, own), {"x": (2, 7, 6)}, (2, 7, 6))  # noqa: B023
        feeds = inputs(model, 2)
        w = {k.removeprefix("part."): v for k, v in weights(model).items()}
        wanted = np.zeros((2, 7, 6))
        for place in np.ndindex(2, 7):
            x = feeds["x"][place].astype(np.float64)
            scores = x @ w["gate.weight"] + w["gate.bias"]
            best = np.argsort(-scores)[:2]
            share = np.exp(scores[best]) / np.exp(scores[best]).sum()
            for e, part in zip(best, share, strict=True):
                g, u = (
                    x @ w[f"experts.{n}_proj.weight"][e] + w[f"experts.{n}_proj.bias"][e]
                    for n in ("gate", "up")
                )
                g, u = np.minimum(g, 0.7), np.clip(u, -0.7, 0.7)
                y = (u + 1) * g / (1 + np.exp(-1.702 * g))
                down = w["experts.down_proj.weight"][e], w["experts.down_proj.bias"][e]
                wanted[place] += part * (y @ down[0] + down[1])
        close(first(model, feeds), wanted)


@pytest.mark.parametrize("kind", ["gpt_oss", "olmoe", "granitemoe", "minimax_m2", "llama4_text"])
@pytest.mark.parametrize("form", ["dense", "gathered"])
def test_experts_are_read_as_routed_ones(kind: str, form: str, tmp_path: Path) -> None:
    model = from_config(write(tmp_path, {"model_type": kind, **SMALL}), {"form": form})
    graph = read_model(model, batch=2)
    found = [node for node in graph.nodes if node.op == "RoutedExperts"]
    assert len(found) == (2 if kind == "llama4_text" else 4)
    if kind == "gpt_oss":
        attrs = found[0].attrs
        assert attrs["activation"] == "swiglu" and len(found[0].inputs) == 9
        assert (attrs["alpha"], attrs["beta"], attrs["limit"]) == (pytest.approx(1.702), 1.0, 7.0)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"model_type": "kimi_linear"}, "P075", "state runs along the sequence"),
    ({"model_type": "gemma2", "layer_types": "full"}, "P074", "layer_types"),
    (
        {"model_type": "gemma2", "num_hidden_layers": 3,
         "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        "P074",
        "each n-th layer",
    ),
    ({"model_type": "gemma2", "layer_types": ["linear_attention"] * 26}, "P074", "words or more"),
    ({"model_type": "smollm3", "no_rope_layers": [1, 0, 0] + [1] * 33}, "P074", "each n-th"),
    ({"model_type": "llama4_text", "moe_layers": [0, 5]}, "P074", "interleave_moe_layer_step"),
    ({"model_type": "phi", "partial_rotary_factor": 2}, "P074", "up to 1"),
    ({"model_type": "cohere", "use_qk_norm": True}, "P074", "use_qk_norm"),
    ({"model_type": "kimi_k2", "scoring_func": "softmax"}, "P074", "scoring_func"),
    ({"model_type": "llava", "text_config": {"model_type": "my_net"}}, "P075", '"my_net" is not'),
    ({"model_type": "llava", "text_config": []}, "P074", "text_config"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "code", "what"), REFUSED)
def test_what_the_zoo_cannot_write_is_refused(
    data: dict[str, Any], code: str, what: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError) as caught:
        from_config(write(tmp_path, data))
    assert caught.value.code == code and what in caught.value.what


def test_no_model_type_is_both_written_and_refused() -> None:
    assert not set(UNWRITTEN) & (set(KNOWN) | set(WRAPPERS)) and not set(WRAPPERS) & set(KNOWN)


def test_a_wrapped_text_model_is_that_model(tmp_path: Path) -> None:
    text = {**SMALL, "model_type": "gemma3_text"}
    plain = _read(write(tmp_path, text))[:3]
    wrapped = _read(write(tmp_path, {"model_type": "gemma3", "text_config": text}))[:3]
    assert plain == wrapped
    older = {**SMALL, "model_type": "qwen2_vl", "vision_config": {"hidden_size": 3}}
    family, config, kind, _ = _read(write(tmp_path, older))
    assert (family.name, kind, config.layers) == ("llama", "qwen2", 4)
