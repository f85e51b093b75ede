"""Hugging Face configs become the zoo's graphs; bad ones say which field."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import models_zoo
from models_zoo.hf_config import KNOWN, from_config
from planner.errors import PlanError

from .test_zoo import PUBLISHED, checked, parameters

LLAMA3 = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16",
}
CONFIGS: list[tuple[str, dict[str, Any], int]] = [
    ("llama", LLAMA3, PUBLISHED["llama3-8b"]),
    ("llama", {}, PUBLISHED["llama2-7b"]),
    ("gpt2", {}, PUBLISHED["gpt2-small"]),
    ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}, PUBLISHED["gpt2-xl"]),
    (
        "opt",
        {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "ffn_dim": 16384},
        6_658_473_984,
    ),
    ("bert", {}, PUBLISHED["bert-base"]),
    ("bert", {"architectures": ["BertForMaskedLM"]}, PUBLISHED["bert-base,head=mlm"]),
    ("mixtral", {}, PUBLISHED["mixtral-8x7b"]),
    ("t5", {}, PUBLISHED["t5-small"]),
    ("t5", {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}, PUBLISHED["t5-base"]),
    (
        "t5",
        {
            "d_ff": 1024,
            "num_layers": 8,
            "num_heads": 6,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
        },
        76_961_152,
    ),
    ("mistral", {}, PUBLISHED["mistral-7b"]),
    (
        "qwen2",
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
        7_615_616_512,
    ),
    (
        "qwen2",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
        494_032_768,
    ),
    (
        "qwen3",
        {
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        8_190_735_360,
    ),
    ("gemma", {}, 8_537_680_896),
    (
        "gemma",
        {
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "num_hidden_layers": 18,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "hidden_act": "gelu",
        },
        2_506_172_416,
    ),
    ("qwen2_moe", {}, 14_315_784_192),
    (
        "qwen3_moe",
        {"num_hidden_layers": 48, "head_dim": 128, "num_experts": 128, "norm_topk_prob": True},
        30_532_122_624,
    ),
    (
        "deepseek",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "first_k_dense_replace": 1,
        },
        PUBLISHED["deepseek-moe-16b"],
    ),
    (
        "deepseek_v2",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "num_experts_per_tok": 6,
        },
        PUBLISHED["deepseek-v2-lite"],
    ),
    ("deepseek_v3", {}, PUBLISHED["deepseek-v3"]),
    (
        "roberta",
        {
            "architectures": ["RobertaForMaskedLM"],
            "max_position_embeddings": 514,
            "type_vocab_size": 1,
        },
        124_697_433,
    ),
    (
        "roberta",
        {
            "architectures": ["RobertaForSequenceClassification"],
            "max_position_embeddings": 514,
            "type_vocab_size": 1,
        },
        124_647_170,
    ),
    ("mt5", {}, 300_176_768),
    (
        "mamba2",
        {
            "hidden_size": 768,
            "num_hidden_layers": 24,
            "n_groups": 1,
            "vocab_size": 50288,
            "tie_word_embeddings": True,
        },
        PUBLISHED["mamba2-130m"],
    ),
    ("resnet", {"id2label": {str(i): str(i) for i in range(1000)}}, PUBLISHED["resnet50"]),
    (
        "resnet",
        {
            "layer_type": "basic",
            "hidden_sizes": [64, 128, 256, 512],
            "depths": [2, 2, 2, 2],
            "num_labels": 1000,
        },
        PUBLISHED["resnet18"],
    ),
    ("vit", {"id2label": {str(i): str(i) for i in range(1000)}}, PUBLISHED["vit-b16"]),
]


def write(folder: Path, data: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def notes(model: onnx.ModelProto) -> str:
    said = {p.key: p.value for p in model.metadata_props}
    return "\n".join(said[key] for key in ("left_out", "notes") if key in said)


@pytest.mark.parametrize(("kind", "fields", "count"), CONFIGS)
def test_a_config_gives_the_model_of_that_size(
    kind: str, fields: dict[str, Any], count: int, tmp_path: Path
) -> None:
    model = from_config(write(tmp_path, {"model_type": kind, **fields}))
    assert parameters(model) == count
    assert all(0 not in shape for shape in checked(model).values())


def test_a_config_equals_the_preset(tmp_path: Path) -> None:
    ours = from_config(write(tmp_path, {"model_type": "llama", **LLAMA3}), {"seq": "8k"})
    assert ours.graph.node == models_zoo.build("llama3-8b").graph.node


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    plain = from_config(write(tmp_path, {"model_type": "llama", "num_hidden_layers": 1}))
    assert notes(plain) == ""
    scaled = {"rope_type": "llama3", "factor": 8.0}
    for rope in ({"rope_scaling": scaled}, {"rope_parameters": {**scaled, "rope_theta": 1e6}}):
        long = from_config(
            write(
                tmp_path,
                {
                    "model_type": "llama",
                    "num_hidden_layers": 1,
                    "max_position_embeddings": 131072,
                    **rope,
                },
            )
        )
        assert "Rotary rescaling" in notes(long) and "131072" in notes(long)
        assert checked(long)["input_ids"] == ("batch", 4096)


ERRORS: list[tuple[object, str, str, str]] = [
    ({"model_type": "gpt-2"}, "P075", 'model_type "gpt-2" is not known', "did you mean 'gpt2'?"),
    ({"model_type": "my_net"}, "P075", "my_net", "known: apertus, arcee, bailing_moe,"),
    ({"model_type": ["llama"]}, "P075", '["llama"]', "known:"),
    ({"hidden_size": 8}, "P075", "has no model_type", "known:"),
    ({"format_version": "1.0", "mesh": []}, "P075", "is a plan, not a model", "plan show "),
    ([1], "P074", "a JSON object expected", ""),
    (
        {"model_type": "llama", "hidden_size": "big"},
        "P074",
        'hidden_size = "big": a whole number',
        "",
    ),
    ({"model_type": "llama", "hidden_size": True}, "P074", "hidden_size = true", ""),
    (
        {"model_type": "llama", "num_hidden_layers": 10**6},
        "P074",
        "num_hidden_layers = 1000000",
        "",
    ),
    ({"model_type": "llama", "rope_theta": float("nan")}, "P074", "rope_theta = NaN", ""),
    ({"model_type": "llama", "tie_word_embeddings": 1}, "P074", "true or false", ""),
    (
        {"model_type": "llama", "hidden_act": "relu"},
        "P074",
        'hidden_act = "relu": one of silu, swish',
        "",
    ),
    (
        {"model_type": "llama", "num_attention_heads": 7},
        "P073",
        "hidden=4096 is not a multiple of heads=7",
        "",
    ),
    ({"model_type": "t5", "feed_forward_proj": {}}, "P074", "one of relu, gated-gelu", ""),
    (
        {"model_type": "gemma", "hidden_activation": "relu"},
        "P074",
        'hidden_activation = "relu"',
        "",
    ),
    ({"model_type": "mamba2"}, "P074", "n_groups = null: 1 expected", ""),
    (
        {"model_type": "qwen3_moe", "decoder_sparse_step": 2},
        "P074",
        "decoder_sparse_step = 2: 1 expected",
        "",
    ),
    (
        {"model_type": "deepseek_v3", "scoring_func": "softmax"},
        "P074",
        'scoring_func = "softmax": "sigmoid" expected',
        "",
    ),
    ({"model_type": "deepseek_v3", "n_shared_experts": -1}, "P074", "n_shared_experts = -1", ""),
    (
        {"model_type": "resnet", "hidden_sizes": [64, 128]},
        "P074",
        "[256, 512, 1024, 2048] expected",
        "",
    ),
    ({"model_type": "resnet", "depths": [3, "4"]}, "P074", "depths", ""),
    ({"model_type": "vit", "qkv_bias": False}, "P074", "qkv_bias = false: true expected", ""),
]


@pytest.mark.parametrize(("data", "code", "what", "help"), ERRORS)
def test_bad_configs_name_the_field(
    data: object, code: str, what: str, help: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError) as caught:
        from_config(write(tmp_path, data))
    assert (
        caught.value.code == code
        and what in caught.value.what
        and help in "\n".join(caught.value.help)
    )


def test_files_that_are_no_config(tmp_path: Path) -> None:
    for name, content in (
        ("a", b"{"),
        ("b", b"\xff\xfe"),
        ("c", b"[" * 100_000),
        ("d", b" " * (5 << 20)),
    ):
        (tmp_path / name).write_bytes(content)
    for path in (*(tmp_path / name for name in "abcd"), tmp_path, tmp_path / "none", Path("\0")):
        with pytest.raises(PlanError) as caught:
            from_config(path)
        assert caught.value.code == "P074"


WIDE = st.one_of(
    st.none(),
    st.integers(-2, 20),
    st.floats(),
    st.text(max_size=4),
    st.booleans(),
    st.just([]),
    st.just({}),
)
KEYS = re.findall(
    r"\w+",
    "hidden_size num_attention_heads num_key_value_heads head_dim rope_theta rope_scaling"
    " rope_parameters hidden_act n_embd n_head n_inner n_routed_experts n_shared_experts n_group"
    " topk_group q_lora_rank kv_lora_rank first_k_dense_replace num_local_experts depths"
    " hidden_sizes embedding_size n_positions id2label architectures image_size patch_size d_model"
    " d_kv relative_attention_num_buckets num_experts_per_tok vocab_size",
)


@given(st.sampled_from(sorted(KNOWN)), st.dictionaries(st.sampled_from(KEYS), WIDE, max_size=6))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_fields_give_a_model_or_a_plan_error(
    tmp_path: Path, kind: str, fields: dict[str, Any]
) -> None:
    path = write(tmp_path, {"model_type": kind, **fields})
    try:
        model = from_config(path, {} if kind == "resnet" else {"layers": "3"})
    except PlanError as error:
        assert error.code in ("P073", "P074")
    else:
        assert all(math.prod(t.dims) > 0 for t in model.graph.initializer if "." in t.name)
        onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)


# lengths

SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}


def small(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(SMALL))
    return str(folder / "config.json")


def test_the_sequence_length_is_a_dim_that_can_be_set(tmp_path: Path) -> None:
    from planner.api import plan
    from planner.emit.from_strategy import program
    from planner.workload.open import open_model

    file = small(tmp_path)
    for source, options in ((file, {"dims": {"seq": 96}}), (f"{file},seq=96", {})):
        opened = open_model(source, 1, **options).plain
        assert opened.tensors["input_ids"].shape[1] == 96
    strategy = plan(
        f"{file},seq=96", devices=2, batch=4, hardware="cpu", precision="fp32", baselines=False
    )
    assert strategy.workload["dims"]["seq"] == 96 and not any(
        a.startswith("seq ") for a in strategy.assumptions
    )
    assert "(4, 96)" in program(strategy, file).text.replace("[", "(").replace("]", ")")


def test_a_length_that_nobody_gave_is_an_assumption(tmp_path: Path) -> None:
    from planner.api import plan

    strategy = plan(
        small(tmp_path), devices=2, batch=4, hardware="cpu", precision="fp32", baselines=False
    )
    assert "seq 64 (--dim seq=64)" in strategy.assumptions


@pytest.mark.parametrize(
    ("behind", "options", "code"),
    [
        ("layers=3", {}, "P071"),
        ("seq=x", {}, "P071"),
        ("seq", {}, "P071"),
        ("", {"dims": {"foo": 3}}, "P141"),
    ],
)
def test_lengths_that_a_config_has_not(
    behind: str, options: dict[str, Any], code: str, tmp_path: Path
) -> None:
    from planner.workload.open import open_model

    with pytest.raises(PlanError, match=code):
        open_model(f"{small(tmp_path)},{behind}".rstrip(","), 1, **options).plain  # noqa: B018


def test_a_size_that_is_null_is_said(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama", "num_hidden_layers": 1, "intermediate_size": null}')
    made = from_config(file)
    notes = next(p.value for p in made.metadata_props if p.key == "notes")
    assert "intermediate_size is null in the file: 11008 is taken" in notes
