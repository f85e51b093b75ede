"""The comparison nets have MindSpore's operators in MindSpore's order, so that its strategies can
be laid on them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import onnx
import pytest

import models_zoo

FILE = Path(__file__).parents[3] / "shared" / "data" / "mindspore" / "strategies.jsonl"
NAMES = {
    "LayerNormalization": "LayerNorm",
    "Gelu": "GeLU",
    "Relu": "ReLU",
    "Conv": "Conv2D",
    "BatchNormalization": "BatchNorm",
}
HEADS = "MatMul Add Reshape Transpose "
BLOCK = (
    "LayerNorm "
    + 3 * HEADS
    + "BatchMatMul Mul Softmax BatchMatMul Transpose Reshape MatMul Add Add "
)
BLOCK += "LayerNorm MatMul Add GeLU MatMul Add Add"
SPECS = {
    "gpt": "gpt,embedding=0,layers={layers}",
    "mlp": "mlp-mindspore,layers={layers}",
    "resnet": "resnet50-mindspore",
}


def operator(node: onnx.NodeProto) -> str:
    """MindSpore's name of an operator: a product of two activations is a BatchMatMul."""
    batched = node.op_type == "MatMul" and not any(i.endswith(".weight") for i in node.input)
    return "BatchMatMul" if batched else NAMES.get(node.op_type, node.op_type)


def from_output(model: onnx.ModelProto) -> list[str]:
    """Operators depth first from the last output, later operands first: the order of MindSpore's
    own listing."""
    made = {out: node for node in model.graph.node for out in node.output}
    found: dict[str, str] = {}
    stack = [made[model.graph.output[-1].name]]
    while stack:
        node = stack.pop()
        if node.name not in found:
            found[node.name] = operator(node)
            stack.extend(made[i] for i in node.input if i in made)
    return list(found.values())


def test_a_block_has_the_operators_of_the_net() -> None:
    model = models_zoo.build("gpt,embedding=0,layers=2")
    ops = [operator(node) for node in model.graph.node]
    assert Counter(ops) == Counter(2 * BLOCK.split() + ["LayerNorm", "MatMul", "ReduceMean"])
    assert [o.name for o in model.graph.output] == ["logits", "mean"]
    assert [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim] == [
        64 * 1024,
        4096,
    ]


@pytest.mark.skipif(not FILE.exists(), reason="the measured strategies are not beside the project")
def test_the_measured_strategies_lie_on_our_nets() -> None:
    compared = Counter[str]()
    for row in map(json.loads, FILE.read_text().splitlines()):
        theirs = [
            re.sub(r"Info\d+$", "", key)
            for key in row["strategies"]
            if not key.startswith("VirtualDataset")
        ]
        ours = from_output(models_zoo.build(SPECS[row["net"]].format(**row)))
        if (
            row["net"] == "resnet" or row["mode"] == "sharding_propagation"
        ):  # listed in another order
            assert Counter(ours) == Counter(theirs)
        else:
            assert ours == theirs
        compared[row["net"]] += 1
    assert set(compared) == {"gpt", "mlp", "resnet"}
