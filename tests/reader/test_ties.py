"""Scales and biases that an exporter merged because their values are equal: parted by module,
unless the model calls one module twice."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from planner.reader import read_model
from tests.reader.reader_models import rand


def traced(scopes: list[str], share_weight: bool, stored: tuple[str, ...] = ()) -> onnx.ModelProto:
    """Products with a bias each, one after another, as the tracing exporter names them: one stored
    bias for all, copies of it under `stored`."""
    weights = {
        f"{s}.weight": rand(4, 4, seed=k)
        for k, s in enumerate(scopes[:1] if share_weight else scopes)
    }
    arrays = weights | {f"{scopes[0]}.bias": np.zeros(4, np.float32)}
    nodes = [
        helper.make_node("Identity", [f"{scopes[0]}.bias"], [f"{name}.bias"], f"Identity_{k}")
        for k, name in enumerate(stored)
    ]
    x = "x"
    for scope in scopes:
        path = "/" + scope.replace(".", "/")
        weight, bias = scopes[0] if share_weight else scope, scope if scope in stored else scopes[0]
        nodes.append(
            helper.make_node(
                "MatMul", [x, f"{weight}.weight"], [f"{path}/MatMul_output_0"], f"{path}/MatMul"
            )
        )
        nodes.append(
            helper.make_node(
                "Add",
                [f"{bias}.bias", f"{path}/MatMul_output_0"],
                [f"{path}/Add_output_0"],
                f"{path}/Add",
            )
        )
        x = f"{path}/Add_output_0"
    nodes.append(helper.make_node("Relu", [x], ["y"], "/Relu"))
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 4]) for n in "xy"]
    tensors = [onnx.numpy_helper.from_array(a, n) for n, a in arrays.items()]
    return helper.make_model(
        helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )


def biases(made: onnx.ModelProto) -> list[str]:
    graph = read_model(made)
    return [graph.labels[w] for w in graph.weights if graph.labels[w].endswith("bias")]


def test_modules_of_their_own_are_parted() -> None:
    assert biases(traced(["m.fc1", "m.fc2"], share_weight=False)) == ["m.fc1.bias", "m.fc2.bias"]
    assert biases(traced(["m.fc", "m.fc_1"], share_weight=False)) == ["m.fc.bias", "m.fc_1.bias"]


def test_one_module_called_twice_has_one_bias() -> None:
    assert biases(traced(["m.fc", "m.fc_1"], share_weight=True)) == ["m.fc.bias"]


def test_biases_of_copied_layers_are_parted_whatever_their_values() -> None:
    """nn.TransformerEncoder copies one layer: the exporter stores equal biases once, and the layers
    trained as one."""
    for scopes, share_weight, parts in (
        (["h.0.fc", "h.1.fc"], False, 2),
        (["h.0.fc", "h.1.fc"], True, 1),
        (["fc", "fc_1"], False, 1),
    ):
        made = traced(scopes, share_weight=share_weight)
        bias = next(t for t in made.graph.initializer if t.name.endswith("bias"))
        bias.CopyFrom(onnx.numpy_helper.from_array(rand(4, seed=1), bias.name))
        assert len(biases(made)) == parts


def test_a_numbered_name_that_is_stored_is_a_module() -> None:
    assert biases(traced(["m.fc", "m.fc_1"], share_weight=True, stored=("m.fc_1",))) == [
        "m.fc.bias",
        "m.fc_1.bias",
    ]


def test_zeros_of_modules_are_parted() -> None:
    """Filters of zeros, as folding a norm leaves them whose scale begins at zero, were one for all
    layers, and so were values that begin as the identity (ConViT); others that an exporter writes
    under two names are."""
    undrawn = np.zeros((4, 4), np.float32), np.eye(4, dtype=np.float32)
    for values, count in (*((x, 2) for x in undrawn), (rand(4, 4, seed=1), 1)):
        made = traced(["m.fc1", "m.fc2"], share_weight=True)
        made.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(values, "m.fc1.weight"))
        direct = read_model(made)
        made.graph.node.insert(0, helper.make_node("Identity", ["m.fc1.weight"], ["w"], "Identity"))
        made.graph.node[3].input[1] = "w"
        for graph in (direct, read_model(made)):
            assert sum(graph.tensors[n].shape == (4, 4) for n in graph.weights) == count


def normed(scopes: list[str], values: np.ndarray) -> onnx.ModelProto:
    """Norms of such scopes, one after another, that all read the scale of the first."""
    nodes, x = [], "x"
    for scope in scopes:
        path = "/" + scope.replace(".", "/")
        nodes.append(
            helper.make_node(
                "LayerNormalization",
                [x, f"{scopes[0]}.weight"],
                [f"{path}/LayerNormalization_output_0"],
                f"{path}/LayerNormalization",
            )
        )
        x = f"{path}/LayerNormalization_output_0"
    nodes.append(helper.make_node("Relu", [x], ["y"], "/Relu"))
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 4]) for n in "xy"]
    scale = onnx.numpy_helper.from_array(values, f"{scopes[0]}.weight")
    return helper.make_model(
        helper.make_graph(nodes, "g", ends[:1], ends[1:], [scale]),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )


def test_norms_of_modules_are_parted_whatever_their_values() -> None:
    """But for one that may be called twice."""
    drawn = rand(4, seed=1)
    for scopes, parts in (
        (["h.0.norm", "h.1.norm"], 2),
        (["norm", "norm_1"], 1),
        (["h.0.norm", "h.0.norm_1", "h.1.norm"], 1),
    ):
        assert len(read_model(normed(scopes, drawn)).weights) == parts
