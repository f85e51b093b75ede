"""Results of a forward pass that lie where what is made of them goes."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
from onnx import TensorProto, helper

import planner
from planner.analysis.facts import GraphFacts
from planner.workload.model import Model, Workload

TINY = {
    "model_type": "gemma2",
    "vocab_size": 8192,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "final_logit_softcapping": 30.0,
}


def test_capped_logits_lie_in_one_place(tmp_path: Path) -> None:
    """The head's product, and what divides and caps it, lie where the graph's result goes; what a
    second operator reads does not."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    graph = Model.open(f"{path},seq=128", Workload("infer", batch=8), 8).graph(1)
    base = GraphFacts.of(graph, training=False)
    placed = [graph.nodes[i].op for i in range(len(graph.nodes)) if base.has_its_place(i)]
    assert placed == ["MatMul", "Div", "Tanh", "Mul"]
    made = planner.plan(
        f"{path},seq=128", devices=8, batch=64, workload="infer", pins="dp=8", baselines=False
    )
    logits = 64 // 8 * 128 * 8192 * 2
    parts = made.costs["memory_breakdown_bytes"]
    assert logits <= parts["activations"] and parts["temporary"] < 0.5 * logits


def test_long_chains_lie_in_one_place(tmp_path: Path) -> None:
    """A chain of element-wise operators may be longer than calls may be deep."""
    names = [f"t{k}" for k in range(1500)]
    nodes = [
        helper.make_node(("Tanh", "Relu")[k % 2], [x], [y])
        for k, (x, y) in enumerate(zip(["x", *names], [*names, "y"], strict=True))
    ]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 64]) for n in "xy"]
    net = helper.make_graph(nodes, "chain", ends[:1], ends[1:])
    onnx.save(helper.make_model(net), tmp_path / "chain.onnx")
    graph = Model.open(str(tmp_path / "chain.onnx"), Workload("infer", batch=8), 8).graph(1)
    base = GraphFacts.of(graph, training=False)
    assert all(base.has_its_place(i) for i in range(len(graph.nodes)))
