"""examples/export_hf.py on small configurations; needs torch, transformers and onnxscript, which
the project itself does not."""

from __future__ import annotations

import importlib.util
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest

from models_zoo.hf_config import from_config
from planner.reader import read, read_model

for name in ("torch", "transformers", "onnxscript"):
    pytest.importorskip(name)

SCRIPT = Path(__file__).parents[2] / "examples" / "export_hf.py"
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
}
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("LlamaForCausalLM", {"model_type": "llama", "num_key_value_heads": 2, **SMALL}),
    (
        "GemmaForCausalLM",
        {"model_type": "gemma", "num_key_value_heads": 1, "head_dim": 16, **SMALL},
    ),
    (
        "MixtralForCausalLM",
        {"model_type": "mixtral", "num_local_experts": 4, "num_key_value_heads": 2, **SMALL},
    ),
    ("BertForMaskedLM", {"model_type": "bert", **SMALL}),
    (
        "ViTForImageClassification",
        {"model_type": "vit", "image_size": 32, "patch_size": 8, **SMALL},
    ),
    (
        "T5ForConditionalGeneration",
        {
            "model_type": "t5",
            "d_model": 64,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "d_kv": 16,
            "vocab_size": 512,
        },
    ),
]


def script() -> Any:
    spec = importlib.util.spec_from_file_location("export_hf", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("architecture", "config"), CONFIGS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_an_export_without_weights_is_the_configured_model(
    architecture: str, config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **config}))
    target = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert script().main([str(tmp_path / "config.json"), "-o", str(target), "--seq", "16"]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.onnx"]
    found, wanted = read(target), read_model(from_config(tmp_path / "config.json"))
    assert found.parameters == wanted.parameters
    assert all(ref.kind == "external" for n, ref in found.weights.items() if n in found.trainable)
    shapes = lambda g: sorted(  # noqa: E731
        tuple(sorted(d for d in g.tensors[n].shape if d > 1))
        for n in g.weights
        if len(g.tensors[n].shape) > 1
    )
    if config["model_type"] != "mixtral":  # whose exporter stacks two matrices
        assert shapes(found) == shapes(wanted)
    assert sum(math.prod(found.tensors[n].shape) for n in found.trainable) >= 0.9 * found.parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "config"), [c for c in CONFIGS if c[0] == "LlamaForCausalLM"]
)
def test_a_decoder_is_exported_with_its_cache_and_planned_for_serving(
    architecture: str, config: dict[str, Any], tmp_path: Path
) -> None:
    from planner.serving.serve import serve

    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **config}))
    out = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert (
            script().main([str(tmp_path), "-o", str(out), "--cache", "--batch", "2", "--seq", "3"])
            == 0
        )
    made = serve(out, prompt=8, generate=6, concurrency=4, devices=4)
    assert (
        made.figures["fits"]
        and sum(str(t.get("label", "")).startswith("cache.") for t in made.step.tensors.values())
        == 4
    )
