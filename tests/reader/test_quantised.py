"""Quantised graphs: what does not train is said, another batch is traced, stored numbers run."""

from __future__ import annotations

import numpy as np
import pytest

import planner
import planner.onnx_backend
from planner.errors import PlanError
from planner.reader import read_model
from tests.reader.reader_models import model, rand

DYNAMIC = (
    "(float[4,8] x) => (float[4,6] y) { q, s, z = DynamicQuantizeLinear(x)"
    " n = MatMulInteger(q, w, z) f = Cast<to = 1>(n) m = Mul(f, s) y = Add(m, b) }"
)
STATIC = (
    "(float[4,8] x) => (float[4,6] y) { f = DequantizeLinear<axis = 1>(w, weight_scale)"
    " y = MatMul(x, f) }"
)
WEIGHT = np.arange(48, dtype=np.int8).reshape(8, 6)


def test_quantised_weights_are_said_not_to_train() -> None:
    graph = read_model(model(DYNAMIC, w=WEIGHT, b=rand(6)))
    (note,) = [str(n) for n in graph.notes if getattr(n, "kind", "") == "frozen"]
    assert note.startswith("not trained: 'w': quantised weights have no gradient")
    with pytest.raises(PlanError) as caught:
        planner.plan(model(STATIC, w=WEIGHT, weight_scale=rand(6) ** 2), devices=2)
    assert caught.value.code == "P034"
    assert any("quantised weights have no gradient" in line for line in caught.value.detail)


def test_another_batch_of_a_dynamically_quantised_layer() -> None:
    graph = read_model(model(DYNAMIC, w=WEIGHT, b=rand(6)), batch=12)
    assert graph.tensors["y"].shape == (12, 6)


def test_one_stored_number_is_of_its_own_type() -> None:
    """A constant of one element is a literal of the program."""
    made = model(
        "(float[4] x) => (float[4] y) { c = DequantizeLinear(n, s, z) y = Mul(x, c) }",
        n=np.int8(7),
        s=np.float32(0.5),
        z=np.int8(1),
    )
    x = np.arange(4, dtype=np.float32)
    np.testing.assert_allclose(planner.onnx_backend.run_model(made, [x])[0], 3 * x)
