"""Another batch for static exports, on small models: what is followed, what is lengthened, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from planner.errors import PlanError
from planner.graph import Graph
from planner.reader import read_model
from planner.weights import load
from tests.canonical_onnx import difference, run, to_onnx
from tests.reader_models import model, ops, rand

F = np.float32


def rebatched(made: onnx.ModelProto, feeds: dict[str, np.ndarray], batch: int, tolerance: float = 1e-5) -> Graph:
    """Reads at `batch` samples and compares with one run per exported batch; feeds hold `batch` samples each in dim 0."""
    graph = read_model(made, batch=batch)
    old = made.graph.input[0].type.tensor_type.shape.dim[0].dim_value
    assert batch % old == 0
    parts = [run(made, {k: v[j : j + old] for k, v in feeds.items()}) for j in range(0, batch, old)]
    for k, found in enumerate(run(to_onnx(graph), feeds)):
        expected = np.concatenate([p[k] for p in parts])
        assert found.shape == expected.shape and difference(found, expected) <= tolerance
    return graph


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "products_in_reshapes": ("{ a = Reshape(x, flat) b = MatMul(a, w) c = Reshape(b, heads) d = Transpose <perm = [0,2,1,3]> (c) e = Reshape(d, merged)"
                             " y = Reshape(e, back) }",
                             {"flat": np.array([6, 8]), "w": rand(8, 8), "heads": np.array([2, 3, 2, 4]), "merged": np.array([4, 3, 4]),
                              "back": np.array([2, 3, 8])}),
    "expanded_token": ("{ e = Expand(cls, shape) c = Concat <axis = 1> (e, x) y = Slice(c, one, four, one) }",
                       {"cls": rand(1, 1, 8), "shape": np.array([2, 1, 8]), "one": np.array([1]), "four": np.array([4])}),
    "repeating_constant": ("{ y = Add(x, c) }", {"c": np.broadcast_to(rand(1, 3, 8), (2, 3, 8)).copy()}),
    "counting_indices": ("{ y = GatherND(x, i) }",
                         {"i": np.stack(np.meshgrid(np.arange(2), np.array([2, 0, 1]), indexing="ij"), -1)}),
    "constant_of_shape": ("{ z = ConstantOfShape(s) y = Add(x, z) }", {"s": np.array([2, 3, 8])}),
    "joined_and_split": ("{ c = Concat <axis = 0> (x, n) d = Relu(c) a, b = Split <axis = 0> (d) y = Add(a, b) }", {"n": None}),
    "sliced_halves": ("{ m = Neg(x) c = Concat <axis = 0> (x, m) y = Slice(c, two, four, zero) }",
                      {"two": np.array([2]), "four": np.array([4]), "zero": np.array([0])}),
    "reductions": ("{ s = ReduceSum <keepdims = 0> (x, ax) t = Softmax(s) u = Unsqueeze(t, ax) y = Mul(x, u) }", {"ax": np.array([2])}),
    "einsum": ('{ e = Einsum <equation = "bsd,btd->bst"> (x, x) y = Einsum <equation = "bst,btd->bsd"> (e, x) }', {}),
}  # fmt: skip


@pytest.mark.parametrize("batch", [2, 4, 8])
@pytest.mark.parametrize("name", sorted(CASES))
def test_followed(name: str, batch: int) -> None:
    text, arrays = CASES[name]
    if name == "joined_and_split":
        text, arrays = text.replace("(x, n)", "(x, m)").replace("{ c", "{ m = Neg(x) c"), {}
    made = model(f"(float[2,3,8] x) => (float[a,b,c] y) {text}", 13, **arrays)
    rebatched(made, {"x": rand(batch, 3, 8)}, batch)


def test_recurrent_states_are_lengthened() -> None:
    text = "(float[2,5,3] x) => (float[2,5,4] y) { t = Transpose <perm = [1,0,2]> (x) o = LSTM <hidden_size = 4> (t, w, r, , , h, h) s = Squeeze(o, one) y = Transpose <perm = [1,0,2]> (s) }"  # noqa: E501
    made = model(text, 14, w=rand(1, 16, 3), r=rand(1, 16, 4), h=np.zeros((1, 2, 4), F), one=np.array([1]))
    graph = rebatched(made, {"x": rand(6, 5, 3)}, 6)
    assert any("lengthened 'h'" in n for n in graph.notes)


def test_single_samples_meet_many() -> None:
    """A batch of one exported: constants of one sample broadcast, or are expanded where operands must agree."""
    text = "(float[1,3,8] x) => (float[1,4,8] y) { c = Concat <axis = 1> (cls, x) y = Add(c, position) }"
    made = model(text, cls=rand(1, 1, 8), position=rand(1, 4, 8))
    graph = rebatched(made, {"x": rand(5, 3, 8)}, 5)
    assert ops(graph) == ["Expand", "Concat", "Add"]
    assert graph.nodes[0].id.startswith(graph.nodes[1].id)


@pytest.mark.parametrize(
    ("text", "arrays", "named"),
    [
        ("{ y = Add(x, table) }", {"table": rand(2, 3, 8)}, "'table'"),
        ("{ y = Reshape(x, s) }", {"s": np.array([3, 16])}, "splits the batch"),
        ("{ s = Slice(x, z, o) y = Relu(s) }", {"z": np.array([0]), "o": np.array([1])}, "takes part of the batch"),
        ("{ y = Gather(x, i) }", {"i": np.array([1, 0])}, "'i'"),
        ("{ t = Transpose <perm = [1,2,0]> (x) y = MatMul(t, w) }", {"w": rand(2, 3)}, "contracts over the batch"),
        ("{ y = Concat <axis = 0> (x, more) }", {"more": rand(1, 3, 8)}, "joins the batch"),
        ("{ y = Pad(x, p) }", {"p": np.array([0, 0, 0, 1, 0, 0])}, "pads the batch"),
        ("{ t = Transpose <perm = [1,2,0]> (x) y, i = TopK(t, k) }", {"k": np.array([1])}, "ranks samples"),
    ],
)
def test_ambiguous_batches_are_refused(text: str, arrays: dict[str, Any], named: str) -> None:
    made = model(f"(float[2,3,8] x) => (float[a,b,c] y) {text}", 13, **arrays)
    assert read_model(made).nodes  # fine as exported
    with pytest.raises(PlanError) as caught:
        read_model(made, batch=6)
    text = str(caught.value)
    assert caught.value.code == "P146" and named in text and "--batch 2" in text, text


def test_external_constants_are_lengthened_when_loaded(tmp_path: Any) -> None:
    made = model("(float[2,3] x) => (float[2,3] y) { g = Gather(w, ids) y = Add(x, g) }", w=rand(9, 3))
    tensor = onnx.TensorProto(name="ids", data_type=7, dims=[2], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="ids.bin")
    made.graph.initializer.append(tensor)
    graph = read_model(made, tmp_path, batch=6)
    assert graph.tensors["ids"].shape == (6,)
    np.array([3, 4]).tofile(tmp_path / "ids.bin")
    assert load(graph, tmp_path)[graph.labels["ids"]].tolist() == [3, 4, 5, 6, 7, 8]
    np.array([3, 9]).tofile(tmp_path / "ids.bin")
    with pytest.raises(PlanError, match="P146"):
        load(graph, tmp_path)
