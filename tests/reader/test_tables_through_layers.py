"""Layers that are run over a learned table before any data meets it, as DeBERTa runs its
projections over relative positions: what they multiply, add and scale by is trained."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from planner.graph.ir import Graph
from planner.reader import read_model
from tests.reader.reader_models import rand, same

LAYERS = 2


def relative(normed: bool) -> onnx.ModelProto:
    """Scores of inputs and of a table's rows, layer by layer: the table is projected by a weight
    that the exporter transposed under a name of its own, and one bias of zeros is stored for
    all."""
    arrays = {"rel.weight": rand(5, 4), "rel.scale": rand(4), "layer.0.key.bias": np.zeros(4, "f")}
    nodes = []
    table = "rel.weight"
    if normed:
        nodes.append(helper.make_node("LayerNormalization", [table, "rel.scale"], ["normed"], "n"))
        table = "normed"
    x = "x"
    for k in range(LAYERS):
        arrays |= {f"val_{k}": rand(4, 4, seed=k), f"back_{k}": rand(5, 4, seed=k)}
        for op, inputs, made in (
            ("MatMul", [table, f"val_{k}"], "product"),
            ("Add", [f"product_{k}", "layer.0.key.bias"], "keys"),
            ("Transpose", [f"keys_{k}"], "turned"),
            ("MatMul", [x, f"turned_{k}"], "scores"),
            ("MatMul", [f"scores_{k}", f"back_{k}"], "out"),
        ):
            node = helper.make_node(op, inputs, [f"{made}_{k}"], f"layer.{k}.{made}")
            scope = node.metadata_props.add()
            scope.key, scope.value = "pkg.torch.onnx.name_scopes", f"['', 'layer.{k}.key', 'op']"
            nodes.append(node)
        x = f"out_{k}"
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 3, 4]) for n in ("x", x)]
    tensors = [onnx.numpy_helper.from_array(a, n) for n, a in arrays.items()]
    return helper.make_model(
        helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=10,
    )


def trained(graph: Graph) -> list[str]:
    return sorted(graph.labels[w] for w in graph.trainable)


def test_projections_of_a_table_are_trained() -> None:
    graph = same(relative(normed=False), {"x": rand(2, 3, 4)})
    names = trained(graph)
    assert "rel.weight" in names
    assert sum(n.endswith("bias") for n in names) == LAYERS, names
    assert len(names) == 1 + 3 * LAYERS, names  # of a layer two matrices and a bias


def test_a_normed_table_is_trained_with_its_norm() -> None:
    graph = same(relative(normed=True), {"x": rand(2, 3, 4)})
    names = trained(graph)
    assert {"rel.weight", "rel.scale"} <= set(names)
    assert len(names) == 2 + 3 * LAYERS, names


def test_products_of_buffers_stay_constants() -> None:
    made = relative(normed=False)
    for tensor in made.graph.initializer:
        if tensor.name == "rel.weight":
            tensor.name = "angles"
    for node in made.graph.node:
        node.input[:] = ["angles" if i == "rel.weight" else i for i in node.input]
    assert not any("angles" in n for n in trained(read_model(made)))
