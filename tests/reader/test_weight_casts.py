"""Weights that a model casts before it uses them are weights all the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import planner
from planner.reader import read_model
from planner.reader.draft.weight_transforms import stored_axes, transformed

WIDTH = 64


def layers(form: str) -> onnx.ModelProto:
    """Three linear layers in bfloat16. form: "cast" of weights in float32, "transposed" and cast as
    a torch module under autocast has it, "twice" cast by two layers, "both" read in both types, or
    "stored" in bfloat16."""
    nodes: list[Any] = [helper.make_node("Cast", ["x"], ["h0"], to=TensorProto.BFLOAT16)]
    weights: list[onnx.TensorProto] = []

    def node(op: str, inputs: list[str], out: str, **attrs: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [out], **attrs))
        return out

    for k in range(3):
        name = "fc.weight" if form == "twice" else f"fc{k}.weight"
        square = np.arange(WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH) / 1000 + k
        if form == "stored":
            weights.append(
                helper.make_tensor(name, TensorProto.BFLOAT16, square.shape, square.ravel())
            )
        elif form != "twice" or k == 0:
            weights.append(numpy_helper.from_array(square, name))
        read = name
        if form != "stored":
            read = node("Cast", [name], f"cast{k}", to=TensorProto.BFLOAT16)
        if form == "transposed":
            read = node("Transpose", [read], f"turned{k}", perm=[1, 0])
        node("Relu", [node("MatMul", [f"h{k}", read], f"m{k}")], f"h{k + 1}")
    end = node("Cast", ["h3"], "y", to=TensorProto.FLOAT)
    if form == "both":
        end = node("MatMul", ["y", "fc0.weight"], "again")
    graph = helper.make_graph(
        nodes,
        "layers",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH])],
        [helper.make_tensor_value_info(end, TensorProto.FLOAT, ["batch", WIDTH])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    return model


@pytest.mark.parametrize("form", ["cast", "transposed", "twice", "both"])
def test_products_read_the_weights_themselves(form: str) -> None:
    graph = read_model(layers(form), batch=64)
    assert len(graph.weights) == (1 if form == "twice" else 3)
    read = [n.inputs[1] for n in graph.nodes if n.op == "MatMul"]
    assert set(read) == set(graph.weights)
    assert sum(n.op == "Cast" for n in graph.nodes) == 2, "of the input and of the result"
    assert sorted(graph.labels[w] for w in graph.weights) == sorted(
        {"fc.weight"} if form == "twice" else {f"fc{k}.weight" for k in range(3)}
    )


def test_plans_are_those_of_weights_stored_in_that_type() -> None:
    """They had no ZeRO stage: gradients were summed at the casts."""
    options: dict[str, Any] = {"devices": 8, "batch": 64, "loss": "mse", "pins": "dp=8,zero=3"}
    cast, stored = (planner.plan(layers(form), **options) for form in ("cast", "stored"))
    assert cast.costs["memory_breakdown_bytes"] == stored.costs["memory_breakdown_bytes"]
    assert cast.costs["step_time_s"] == stored.costs["step_time_s"]
    assert {row["zero"]["level"] for row in cast.tensors.values() if "zero" in row} == {3}


@given(st.data())
def test_cuts_are_followed_back_through_reshapes_and_transposes(data: st.DataObject) -> None:
    """A piece of the weight as it is stored holds what the piece after all steps holds."""
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 4, 6]), min_size=1, max_size=4)))
    array = np.arange(np.prod(shape)).reshape(shape)
    steps: list[tuple[str, tuple[int, ...]]] = []
    for _ in range(data.draw(st.integers(0, 3))):
        now = transformed(array, steps, "w").shape
        if data.draw(st.booleans()):
            steps.append(("transpose", tuple(data.draw(st.permutations(range(len(now)))))))
        elif data.draw(st.booleans()):
            steps.append(("reshape", (int(np.prod(now)),)))
        else:
            at = data.draw(st.integers(0, len(now) - 1))
            factor = data.draw(st.sampled_from([f for f in (1, 2, 3) if now[at] % f == 0]))
            steps.append(("reshape", (*now[:at], factor, now[at] // factor, *now[at + 1 :])))
    after = transformed(array, steps, "w")
    dim = data.draw(st.integers(0, after.ndim - 1))
    back = stored_axes([("data",) if d == dim else () for d in range(after.ndim)], shape, steps)
    if ("data",) not in back:
        return
    old = back.index(("data",))
    for parts in (2, 3):
        if after.shape[dim] % parts or shape[old] % parts:
            continue
        pieces = np.split(after, parts, dim), np.split(array, parts, old)
        for new_piece, old_piece in zip(*pieces, strict=True):
            assert sorted(new_piece.ravel()) == sorted(old_piece.ravel())
