"""The sixteen exported graphs: every shape static, canonical, and computing what the file
computes."""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from planner.graph.ir import Graph
from planner.reader import read, read_model
from planner.reader.draft.shapes import CANONICAL
from tests.reader.canonical_onnx import difference, feeds_for, run, to_onnx
from tests.reader.reader_models import SHARED

MODELS = SHARED / "models"
pytestmark = pytest.mark.skipif(not MODELS.exists(), reason="needs the shared models")
FILES = sorted(p.name for p in MODELS.glob("*.onnx")) if MODELS.exists() else []
DIMS = {"seq": 16, "tgt": 12}
WITH_WEIGHTS = [
    f for f in FILES if "7b" not in f and "gpt2_small" not in f and "bert_base" not in f
]
STATIC = [
    f for f in FILES if "static" in f or "dit" in f or "lstm" in f or "mlp" in f or "jax2onnx" in f
]


def symbols(path: Path) -> set[str]:
    graph = onnx.load(path, load_external_data=False).graph
    return {d.dim_param for i in graph.input for d in i.type.tensor_type.shape.dim if d.dim_param}


def opened(name: str, batch: int | None = None, folder: Path = MODELS) -> Graph:
    known = symbols(folder / name)
    return read(folder / name, dims={k: v for k, v in DIMS.items() if k in known}, batch=batch)


@pytest.mark.parametrize("name", FILES)
def test_reads_with_every_shape_static(name: str) -> None:
    graph = opened(name)
    assert all(isinstance(n, int) and n > 0 for t in graph.tensors.values() for n in t.shape)
    assert {n.op for n in graph.nodes} <= CANONICAL
    assert len({n.id for n in graph.nodes}) == len(graph.nodes)
    assert sorted(graph.labels) == sorted(graph.weights) and len(set(graph.labels.values())) == len(
        graph.labels
    )
    assert not any(n.op in ("Identity", "Shape", "Constant") for n in graph.nodes)
    known = {*graph.inputs, *graph.weights, *graph.constants}
    for node in graph.nodes:  # in dependency order, nothing unused
        assert all(i in known for i in node.inputs if i), node.id
        known.update(node.outputs)
    assert set(graph.outputs) <= known
    assert all(c.size <= 65536 for c in graph.constants.values())


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_computes_what_the_file_computes(name: str, tmp_path: Path) -> None:
    source = MODELS / name
    if "unet" in name:  # its large weights are external and absent: give it some
        source = Path(shutil.copy(source, tmp_path / name))
        np.random.default_rng(0).standard_normal(1_000_000).astype(np.float32).tofile(
            tmp_path / "weights.bin"
        )
    graph = opened(name, 2 if "batch" in symbols(source) else None, source.parent)
    feeds = feeds_for(graph)
    expected = run(evaluating(source) if "trainmode" in name else str(source), feeds)
    for a, b in zip(run(to_onnx(graph, source.parent), feeds), expected, strict=True):
        assert difference(a, b) < 1e-4


def evaluating(path: Path) -> onnx.ModelProto:
    """The MLP with its dropout switched off."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.name == "val_1":
            tensor.CopyFrom(numpy_helper.from_array(np.array(False), "val_1"))
    return model


@pytest.mark.parametrize("name", STATIC)
def test_rebatched_equals_four_runs(name: str) -> None:
    before = opened(name)
    batch = before.dims["batch"]
    after = opened(name, 4 * batch)
    assert [n.id for n in after.nodes] == [n.id for n in before.nodes]
    if name not in WITH_WEIGHTS:
        assert after.tensors[after.outputs[0]].shape[0] == 4 * batch
        return
    feeds = feeds_for(after)
    model = evaluating(MODELS / name) if "trainmode" in name else str(MODELS / name)
    parts = [
        run(model, {k: v[batch * j : batch * (j + 1)] for k, v in feeds.items()}) for j in range(4)
    ]
    for k, found in enumerate(run(to_onnx(after), feeds)):
        axis = next(a for a in range(found.ndim) if found.shape[a] != parts[0][k].shape[a])
        assert difference(found, np.concatenate([p[k] for p in parts], axis)) < 1e-4


@pytest.mark.parametrize("exported", [1, 2])
@pytest.mark.parametrize(
    "name", [f for f in WITH_WEIGHTS if "batch" in symbols(MODELS / f) and "unet" not in f]
)
def test_fixed_batches_become_others(name: str, exported: int) -> None:
    """A dynamic export with its batch fixed, read at four: as the dynamic one at four."""
    fixed = onnx.load(MODELS / name)
    for value in fixed.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "batch":
                dim.dim_value = exported
    known = symbols(MODELS / name)
    graph = read_model(fixed, batch=4, dims={k: v for k, v in DIMS.items() if k in known})
    assert graph.dims["batch"] == 4 and sorted(n.op for n in graph.nodes) == sorted(
        n.op for n in opened(name, 4).nodes
    )
    feeds = feeds_for(graph)
    for a, b in zip(run(to_onnx(graph), feeds), run(str(MODELS / name), feeds), strict=True):
        assert difference(a, b) < 1e-4


# attention count, causal, heads of keys and values, fused norms
EXPECTED = {
    "torch_llama2_7b_static_dynamo.onnx": (
        32,
        0,
        32,
        {"RMSNormalization": 65, "RotaryEmbedding": 64, "Silu": 32},
    ),
    "torch_llama_tiny_op23_static_dynamo.onnx": (
        2,
        1,
        2,
        {"RMSNormalization": 5, "RotaryEmbedding": 4, "Silu": 2},
    ),
    "torch_llama_tiny_eager_legacy17.onnx": (
        2,
        0,
        2,
        {"RMSNormalization": 5, "RotaryEmbedding": 4, "Silu": 2},
    ),
    "torch_mixtral_tiny_batched_mm_static_dynamo.onnx": (
        2,
        1,
        2,
        {"RMSNormalization": 5, "RotaryEmbedding": 4, "RoutedExperts": 2},
    ),
    "torch_gpt2_small_static_dynamo.onnx": (12, 0, 12, {"LayerNormalization": 25, "Gelu": 12}),
    "torch_gpt2_tiny_dynamo.onnx": (2, 1, 4, {"LayerNormalization": 5, "Gelu": 2}),
    "torch_bert_base_dynamo.onnx": (12, 0, 12, {"LayerNormalization": 25, "Gelu": 12}),
    "torch_bert_tiny_legacy17.onnx": (2, 0, 4, {"LayerNormalization": 5, "Gelu": 2}),
    "torch_t5_tiny_legacy17.onnx": (6, 0, 4, {"RMSNormalization": 12}),
    "torch_vit_tiny_dynamo.onnx": (2, 0, 4, {"LayerNormalization": 5, "Gelu": 2}),
    "torch_dit_tiny_dynamo.onnx": (2, 0, 2, {"LayerNormalization": 5, "Gelu": 2, "Silu": 4}),
    "torch_sd_unet_tiny_legacy17.onnx": (
        8,
        0,
        None,
        {"GroupNormalization": 21, "LayerNormalization": 12, "Gelu": 4, "Silu": 19},
    ),
    "jax2onnx_flax_gpt_block.onnx": (2, 0, 4, {"LayerNormalization": 4, "Gelu": 2}),
}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_patterns_are_recognised(name: str) -> None:
    graph = opened(name)
    count, causal, heads, others = EXPECTED[name]
    found = [n for n in graph.nodes if n.op == "Attention"]
    assert len(found) == count
    assert all(n.attrs["causal"] == causal for n in found)
    masks = [graph.tensors[n.inputs[3]].shape for n in found if causal and len(n.inputs) > 3]
    assert all(shape[1:3] == (1, 1) for shape in masks)  # of keys alone: padding
    assert all(graph.tensors[n.inputs[1]].shape[1] == heads for n in found if heads)
    for op, many in others.items():
        assert sum(n.op == op for n in graph.nodes) == many, op
    assert not any(
        n.op in ("Softmax", "Sqrt", "Erf", "IsNaN", "Sigmoid")
        for n in graph.nodes
        if "mixtral" not in name
    )
    assert all(
        n.members for n in graph.nodes if n.op in ("Silu", "RotaryEmbedding", "RoutedExperts")
    )


def test_llama2_7b_parameters_and_labels() -> None:
    graph = opened("torch_llama2_7b_static_dynamo.onnx")
    assert sum(graph.tensors[w].elements for w in graph.trainable) == 6_738_415_616
    labels = {graph.labels[w] for w in graph.trainable}
    for layer in range(32):
        for part in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
        ):
            assert f"m.model.layers.{layer}.{part}.weight" in labels
    assert "m.lm_head.weight" in labels and "m.model.rotary_emb.buffer" not in labels
    assert all(graph.weights[w].kind == "external" for w in graph.trainable)


def test_llama2_7b_is_read_in_two_seconds() -> None:
    start = time.process_time()
    opened("torch_llama2_7b_static_dynamo.onnx")
    assert time.process_time() - start < 2.0


def test_manifest_parameters_are_weights() -> None:
    """Nothing that the manifest counts as a parameter is lost: weights and constants hold at least
    as many elements."""
    for entry in json.loads((MODELS / "manifest.json").read_text()):
        graph = opened(entry["file"])
        kept = graph.parameters + sum(math.prod(c.shape) for c in graph.constants.values())
        assert kept >= 0.99 * entry["params"], entry["file"]


def test_true_and_false_ties() -> None:
    tiny = opened("torch_gpt2_tiny_dynamo.onnx")
    (table,) = [w for w in tiny.weights if len(tiny.consumers[w]) == 2]
    assert {tiny.nodes[k].op for k, _ in tiny.consumers[table]} == {
        "Gather",
        "MatMul",
    }  # the head is the embedding
    norms = [n for n in tiny.nodes if n.op == "LayerNormalization"]
    assert (
        len({n.inputs[1] for n in norms}) == len(norms) == 5
    )  # merged by the exporter, apart again
    assert any("separate parameters" in note for note in tiny.notes)
    t5 = opened("torch_t5_tiny_legacy17.onnx")
    assert any("tie was lost" in note and "m.shared.weight" in note for note in t5.notes)
    dit = opened(
        "torch_dit_tiny_dynamo.onnx"
    )  # norms without affine parameters: ones that nobody trains
    assert all(n.inputs[1] in dit.constants for n in dit.nodes if n.op == "LayerNormalization")


def test_class_tokens_and_position_embeddings_are_trained() -> None:
    vit = opened("torch_vit_tiny_dynamo.onnx")
    assert {"m.vit.embeddings.cls_token", "m.vit.embeddings.position_embeddings"} <= vit.trainable
    assert not any("not trained" in note for note in vit.notes)


def test_position_tables_are_not_trained() -> None:
    for name in (
        "torch_llama_tiny_eager_legacy17.onnx",
        "torch_llama_tiny_op23_static_dynamo.onnx",
    ):
        graph = opened(name)
        assert not any("rotary" in graph.labels[w] for w in graph.trainable)
