"""A model written otherwise is the same graph: what exporters and optimizers put between tensors
and their readers changes no price."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import models_zoo
from planner.reader import read_model

Between = Callable[[onnx.TensorProto], list[onnx.NodeProto]]


def identity(weight: onnx.TensorProto) -> list[onnx.NodeProto]:
    """A copy under another name."""
    return [helper.make_node("Identity", [weight.name], [f"{weight.name}_copy"])]


def identities(weight: onnx.TensorProto) -> list[onnx.NodeProto]:
    """A copy of a copy, and one that nothing reads."""
    names = [weight.name, f"{weight.name}_first", f"{weight.name}_second"]
    pairs = [(weight.name, f"{weight.name}_unread"), *zip(names, names[1:], strict=False)]
    return [helper.make_node("Identity", [old], [new]) for old, new in pairs]


def turned_twice(weight: onnx.TensorProto) -> list[onnx.NodeProto]:
    """Transposed, and back."""
    turned, back = f"{weight.name}_turned", f"{weight.name}_back"
    order = [*reversed(range(len(weight.dims)))]
    return [
        helper.make_node("Transpose", [weight.name], [turned], perm=order),
        helper.make_node("Transpose", [turned], [back], perm=order),
    ]


def squeezed(weight: onnx.TensorProto) -> list[onnx.NodeProto]:
    """With one dim more, and without it."""
    more, same = f"{weight.name}_more", f"{weight.name}_same"
    return [
        helper.make_node("Unsqueeze", [weight.name, "first"], [more]),
        helper.make_node("Squeeze", [more, "first"], [same]),
    ]


def behind(model: onnx.ModelProto, between: Between) -> onnx.ModelProto:
    """A model whose float weights pass nodes before what reads them."""
    new, nodes = onnx.ModelProto(), list[onnx.NodeProto]()
    new.CopyFrom(model)
    read = dict[str, str]()
    for weight in new.graph.initializer:
        if weight.data_type == onnx.TensorProto.FLOAT and weight.dims:
            nodes += between(weight)
            read[weight.name] = nodes[-1].output[0]
    for node in new.graph.node:
        node.input[:] = [read.get(name, name) for name in node.input]
    nodes += new.graph.node
    del new.graph.node[:]
    new.graph.node.extend(nodes)
    new.graph.initializer.append(numpy_helper.from_array(np.array([0]), "first"))
    return new


@pytest.mark.parametrize("between", [identity, identities, turned_twice, squeezed])
@pytest.mark.parametrize("name", ["vit-tiny", "t5-tiny"])
def test_what_passes_weights_on_is_seen_through(name: str, between: Between) -> None:
    """A class token is trained behind an Identity, too, under its own name."""
    model = models_zoo.build(name)
    graph, other = (read_model(m) for m in (model, behind(model, between)))
    assert other.trainable == graph.trainable and other.weights.keys() == graph.weights.keys()
    read = [
        [(node.op, [g.tensors[i].shape for i in node.inputs if i]) for node in g.nodes]
        for g in (graph, other)
    ]
    assert read[0] == read[1]
