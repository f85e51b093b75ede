"""Another batch for static exports, on small models: what is followed, what is lengthened, what is
refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from planner.errors import PlanError
from planner.graph.findings import Finding
from planner.graph.ir import Graph
from planner.reader import read_model
from planner.workload.weights import load
from tests.reader.canonical_onnx import difference, run, to_onnx
from tests.reader.reader_models import model, ops, rand, same

F = np.float32


def rebatched(
    made: onnx.ModelProto, feeds: dict[str, np.ndarray], batch: int, tolerance: float = 1e-5
) -> Graph:
    """Reads at `batch` samples and compares with one run per exported batch; feeds hold `batch`
    samples each in dim 0."""
    graph = read_model(made, batch=batch)
    old = made.graph.input[0].type.tensor_type.shape.dim[0].dim_value
    assert batch % old == 0
    parts = [run(made, {k: v[j : j + old] for k, v in feeds.items()}) for j in range(0, batch, old)]
    for k, found in enumerate(run(to_onnx(graph), feeds)):
        expected = np.concatenate([p[k] for p in parts])
        assert found.shape == expected.shape and difference(found, expected) <= tolerance
    return graph


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "products_in_reshapes": (
        (
            "{ a = Reshape(x, flat) b = MatMul(a, w) c = Reshape(b, heads) d = Transpose <perm ="
            " [0,2,1,3]> (c) e = Reshape(d, merged) y = Reshape(e, back) }"
        ),
        {
            "flat": np.array([6, 8]),
            "w": rand(8, 8),
            "heads": np.array([2, 3, 2, 4]),
            "merged": np.array([4, 3, 4]),
            "back": np.array([2, 3, 8]),
        },
    ),
    "queries_of_each_sample_before_heads": (  # SigLIP's pooling, as torch writes its attention
        (
            "{ m = Transpose <perm = [1,0,2]> (x) h = Reshape(m, heads) p = MatMul(probe, w) q ="
            " Reshape(p, one) k = Transpose <perm = [1,2,0]> (h) r = Transpose <perm = [1,0,2]> (q)"
            " s = MatMul(r, k) a = Softmax <axis = -1> (s) v = Transpose <perm = [1,0,2]> (h) o ="
            " MatMul(a, v) f = Transpose <perm = [1,0,2]> (o) y = Reshape(f, back) }"
        ),
        {
            "heads": np.array([3, 4, 4]),
            "probe": np.repeat(rand(1, 1, 8), 2, axis=1),
            "w": rand(8, 8),
            "one": np.array([1, 4, 4]),
            "back": np.array([2, 8]),
        },
    ),
    "positions_of_each_sample_through_a_convolution": (
        "{ c = Conv(positions, k) r = Reshape(c, rows) y = Add(x, r) }",
        {
            "positions": np.repeat(rand(1, 2, 3, 8), 2, axis=0),
            "k": rand(1, 2, 1, 1),
            "rows": np.array([2, 3, 8]),
        },
    ),
    "expanded_token": (
        "{ e = Expand(cls, shape) c = Concat <axis = 1> (e, x) y = Slice(c, one, four, one) }",
        {
            "cls": rand(1, 1, 8),
            "shape": np.array([2, 1, 8]),
            "one": np.array([1]),
            "four": np.array([4]),
        },
    ),
    "repeating_constant": (
        "{ y = Add(x, c) }",
        {"c": np.broadcast_to(rand(1, 3, 8), (2, 3, 8)).copy()},
    ),
    "counting_indices": (
        "{ y = GatherND(x, i) }",
        {"i": np.stack(np.meshgrid(np.arange(2), np.array([2, 0, 1]), indexing="ij"), -1)},
    ),
    "constant_of_shape": ("{ z = ConstantOfShape(s) y = Add(x, z) }", {"s": np.array([2, 3, 8])}),
    "joined_and_split": (
        "{ c = Concat <axis = 0> (x, n) d = Relu(c) a, b = Split <axis = 0> (d) y = Add(a, b) }",
        {"n": None},
    ),
    "sliced_halves": (
        "{ m = Neg(x) c = Concat <axis = 0> (x, m) y = Slice(c, two, four, zero) }",
        {"two": np.array([2]), "four": np.array([4]), "zero": np.array([0])},
    ),
    "reductions": (
        (
            "{ s = ReduceSum <keepdims = 0> (x, ax) t = Softmax(s) u = Unsqueeze(t, ax) y = Mul(x,"
            " u) }"
        ),
        {"ax": np.array([2])},
    ),
    "one_of_stacked_heads": (
        (
            "{ p = MatMul(x, w) a = Reshape(p, stack) b = Transpose <perm = [2,0,3,1,4]> (a) c ="
            " Slice(b, one, two, zero) d = Squeeze(c, zero) e = Transpose <perm = [0,2,1,3]> (d) f"
            " = Reshape(e, back) y = Add(x, f) }"
        ),
        {
            "w": rand(8, 24),
            "stack": np.array([2, 3, 3, 2, 4]),
            "one": np.array([1]),
            "two": np.array([2]),
            "zero": np.array([0]),
            "back": np.array([2, 3, 8]),
        },
    ),
    "tables_copied_for_each_sample": (
        "{ r = Reshape(x, flat) t = Tile(table, copies) y = MatMul(r, t) }",
        {"flat": np.array([6, 1, 8]), "table": rand(3, 8, 5), "copies": np.array([2, 1, 1])},
    ),
    "resized_behind_the_batch": (
        (
            '{ u = Unsqueeze(x, zero) r = Resize <mode = "nearest"> (u, , scales) y = Squeeze(r,'
            " zero) }"
        ),
        {"zero": np.array([0]), "scales": np.array([1, 1, 1, 2], F)},
    ),
    "layers_over_a_repeated_table": (
        (
            "{ n = LayerNormalization <axis = 2> (queries, scale) q = MatMul(n, w) p = Transpose"
            " <perm = [0, 2, 1]> (x) s = MatMul(q, p) a = Softmax <axis = 2> (s) y = MatMul(a, x) }"
        ),
        {"queries": np.repeat(rand(1, 4, 8), 2, 0), "scale": rand(8), "w": rand(8, 8)},
    ),
    "einsum": (
        (
            '{ e = Einsum <equation = "bsd,btd->bst"> (x, x) y = Einsum <equation = "bst,btd->bsd">'
            " (e, x) }"
        ),
        {},
    ),
}


@pytest.mark.parametrize("batch", [2, 4, 8])
@pytest.mark.parametrize("name", sorted(CASES))
def test_followed(name: str, batch: int) -> None:
    text, arrays = CASES[name]
    if name == "joined_and_split":
        text, arrays = text.replace("(x, n)", "(x, m)").replace("{ c", "{ m = Neg(x) c"), {}
    made = model(f"(float[2,3,8] x) => (float[a,b,c] y) {text}", 13, **arrays)
    rebatched(made, {"x": rand(batch, 3, 8)}, batch)


def test_recurrent_states_are_lengthened() -> None:
    text = "(float[2,5,3] x) => (float[2,5,4] y) { t = Transpose <perm = [1,0,2]> (x) o = LSTM <hidden_size = 4> (t, w, r, , , h, h) s = Squeeze(o, one) y = Transpose <perm = [1,0,2]> (s) }"
    made = model(
        text, 14, w=rand(1, 16, 3), r=rand(1, 16, 4), h=np.zeros((1, 2, 4), F), one=np.array([1])
    )
    graph = rebatched(made, {"x": rand(6, 5, 3)}, 6)
    assert any("lengthened 'h'" in n for n in graph.notes)


def test_single_samples_meet_many() -> None:
    """A batch of one exported: constants of one sample broadcast, or are expanded where operands
    must agree."""
    text = (
        "(float[1,3,8] x) => (float[1,4,8] y) { c = Concat <axis = 1> (cls, x) y = Add(c,"
        " position) }"
    )
    made = model(text, cls=rand(1, 1, 8), position=rand(1, 4, 8))
    graph = rebatched(made, {"x": rand(5, 3, 8)}, 5)
    assert ops(graph) == ["Expand", "Concat", "Add"]
    assert graph.nodes[0].members == ("Concat.0",)


@pytest.mark.parametrize(
    ("text", "arrays", "named"),
    [
        ("{ y = Add(x, table) }", {"table": rand(2, 3, 8)}, "'table'"),
        ("{ y = Reshape(x, s) }", {"s": np.array([3, 16])}, "splits the batch"),
        (
            "{ s = Slice(x, z, o) y = Relu(s) }",
            {"z": np.array([0]), "o": np.array([1])},
            "takes part of the batch",
        ),
        ("{ y = Gather(x, i) }", {"i": np.array([1, 0])}, "'i'"),
        (
            "{ t = Transpose <perm = [1,2,0]> (x) y = MatMul(t, w) }",
            {"w": rand(2, 3)},
            "contracts over the batch",
        ),
        ("{ y = Concat <axis = 0> (x, more) }", {"more": rand(1, 3, 8)}, "joins the batch"),
        ("{ y = Pad(x, p) }", {"p": np.array([0, 0, 0, 1, 0, 0])}, "pads the batch"),
        (
            "{ t = Transpose <perm = [1,2,0]> (x) y, i = TopK(t, k) }",
            {"k": np.array([1])},
            "ranks samples",
        ),
    ],
)
def test_ambiguous_batches_are_refused(text: str, arrays: dict[str, Any], named: str) -> None:
    made = model(f"(float[2,3,8] x) => (float[a,b,c] y) {text}", 13, **arrays)
    assert read_model(made).nodes  # fine as exported
    with pytest.raises(PlanError) as caught:
        read_model(made, batch=6)
    text = str(caught.value)
    assert caught.value.code == "P146" and named in text and "--batch 2" in text, text


def test_a_default_batch_that_cannot_be_traced_is_the_exported_one() -> None:
    made = model(
        "(float[2,3,8] x) => (float[a,b,c] y) { s = Slice(x, z, o) y = Relu(s) }",
        13,
        z=np.array([0]),
        o=np.array([1]),
    )
    graph = read_model(made, devices=8)
    assert graph.dims["batch"] == 2 and graph.tensors["x"].shape == (2, 3, 8)
    (told,) = (n for n in graph.notes if isinstance(n, Finding))
    assert (
        told.kind == "batch"
        and "batch 2: the exported one" in told
        and "(Slice) takes part of the batch" in told
    )
    with pytest.raises(PlanError, match="P146"):
        read_model(made, devices=8, batch=8)


def test_external_constants_are_lengthened_when_loaded(tmp_path: Any) -> None:
    made = model(
        "(float[2,3] x) => (float[2,3] y) { g = Gather(w, ids) y = Add(x, g) }", w=rand(9, 3)
    )
    tensor = onnx.TensorProto(
        name="ids", data_type=7, dims=[2], data_location=onnx.TensorProto.EXTERNAL
    )
    tensor.external_data.add(key="location", value="ids.bin")
    made.graph.initializer.append(tensor)
    graph = read_model(made, tmp_path, batch=6)
    assert graph.tensors["ids"].shape == (6,)
    np.array([3, 4]).tofile(tmp_path / "ids.bin")
    assert load(graph, tmp_path)[graph.labels["ids"]].tolist() == [3, 4, 5, 6, 7, 8]
    np.array([3, 9]).tofile(tmp_path / "ids.bin")
    with pytest.raises(PlanError, match="P146"):
        load(graph, tmp_path)


# exports of one sample: the batch is a 1 among other ones

SINGLES: dict[str, tuple[str, dict[str, Any]]] = {
    "reshape_targets": (
        (
            "{ a = Reshape(x, flat) b = MatMul(a, w) c = Reshape(b, heads) d = Transpose <perm ="
            " [0,2,1,3]> (c) e = Reshape(d, m) f = Transpose <perm = [0,2,1]> (e) g = Reshape(f, n)"
            " y = Reshape(g, back) }"
        ),
        {
            "flat": np.array([-1, 8]),
            "w": rand(8, 8),
            "heads": np.array([1, 3, 2, 4]),
            "m": np.array([1, 6, -1]),
            "n": np.array([1, 2, 2, 6]),
            "back": np.array([1, -1]),
        },
    ),
    "moved_by_squeezes": (
        (
            "{ a = ReduceMean <keepdims = 1, axes = [1]> (x) b = Squeeze(a, one) c = Unsqueeze(b,"
            " zero) d = Unsqueeze(c, two) e = Squeeze(d, zero) y = Add(e, e) }"
        ),
        {"zero": np.array([0]), "one": np.array([1]), "two": np.array([2])},
    ),
    "index_grids": (
        "{ s = ReduceMean <keepdims = 0, axes = [2]> (x) y = GatherND(s, grid) }",
        {"grid": np.stack([np.zeros(3, int), np.arange(3)], -1).reshape(1, 1, 3, 2)},
    ),
    "flattened_gather": (
        (
            "{ s = ReduceMean <keepdims = 0, axes = [2]> (x) f = Flatten <axis = 2> (s) y ="
            " Gather(f, i) }"
        ),
        {"i": np.arange(3).reshape(1, 1, 3)},
    ),
    "tokens_and_positions": (
        "{ c = Concat <axis = 1> (cls, x) y = Add(c, position) }",
        {"cls": rand(1, 1, 8), "position": rand(1, 4, 8)},
    ),
    "shapes_kept_in_the_graph": (
        (
            "{ s = Shape(x) b = Gather(s, z0) t = Unsqueeze(b, zero) u = Concat <axis = 0> (t, m) y"
            " = Reshape(x, u) }"
        ),
        {"z0": np.int64(0), "zero": np.array([0]), "m": np.array([-1])},
    ),
}


@pytest.mark.parametrize("batch", [2, 3, 5])
@pytest.mark.parametrize("name", sorted(SINGLES))
def test_single_samples_followed(name: str, batch: int) -> None:
    text, arrays = SINGLES[name]
    opset = 12 if "axes" in text and "(x, ax)" not in text else 13
    if opset == 12 and "Squeeze" in text:
        text = (
            "{ a = ReduceMean <keepdims = 1, axes = [1]> (x) b = Squeeze <axes = [1]> (a) c ="
            " Unsqueeze <axes = [0]> (b) d = Unsqueeze <axes = [2]> (c)"
        )
        text, arrays = text + " e = Squeeze <axes = [0]> (d) y = Add(e, e) }", {}
    rebatched(
        model(f"(float[1,3,8] x) => (float[a,b,c] y) {text}", opset, **arrays),
        {"x": rand(batch, 3, 8)},
        batch,
    )


def test_time_major_nets_and_their_states() -> None:
    """A recurrent net over one sample: x goes in as [time, 1, width], the state as [layers, 1,
    hidden]."""
    text = (
        "(float[1,3] x, float[2,1,4] state) => (float[1,4] y, float[1,1,4] h) { u = Unsqueeze(x,"
        " zero) s = Slice(state, one, two, zero) o, h = GRU <hidden_size = 4> (u, w, r, , , s) y ="
        " Squeeze(o, both) }"
    )
    arrays = {
        "zero": np.array([0]),
        "one": np.array([1]),
        "two": np.array([2]),
        "both": np.array([0, 1]),
        "w": rand(1, 12, 3),
        "r": rand(1, 12, 4),
    }
    made = model(text, 14, **arrays)
    graph = read_model(made, batch=3)
    assert [graph.tensors[i].shape for i in (*graph.inputs, *graph.outputs)] == [
        (3, 3),
        (2, 3, 4),
        (3, 4),
        (1, 3, 4),
    ]
    assert any("'state' carries the batch in dim 1" in n for n in graph.notes)
    x, state = rand(3, 3), rand(2, 3, 4)
    found = run(to_onnx(graph), {"x": x, "state": state})
    parts = [run(made, {"x": x[j : j + 1], "state": state[:, j : j + 1]}) for j in range(3)]
    assert difference(found[0], np.concatenate([p[0] for p in parts])) < 1e-5
    assert difference(found[1], np.concatenate([p[1] for p in parts], 1)) < 1e-5


@pytest.mark.parametrize(
    ("text", "arrays"),
    [
        (
            "{ s = Slice(x, zero, one, zero) y = Relu(s) }",
            {"zero": np.array([0]), "one": np.array([1])},
        ),  # the first sample, or all of one?
        ("{ t = Transpose <perm = [1,2,0]> (x) y = MatMul(t, w) }", {"w": rand(1, 4)}),
        ("{ y = Concat <axis = 0> (x, more) }", {"more": rand(1, 3, 8)}),
    ],
)
def test_single_samples_refused(text: str, arrays: dict[str, Any]) -> None:
    made = model(f"(float[1,3,8] x) => (float[a,b,c] y) {text}", 13, **arrays)
    assert read_model(made).nodes
    with pytest.raises(PlanError) as caught:
        read_model(made, batch=4)
    assert caught.value.code == "P146" and "exported batch of 1" in str(caught.value)


def test_faults_of_the_file_are_told_before_faults_of_the_batch() -> None:
    made = model("(float[1,3,8] x) => (float[a,b,c] y) { y = MatMul(x, w) }", w=rand(5, 5))
    with pytest.raises(PlanError) as caught:
        read_model(made, batch=4)
    assert caught.value.code == "P115"


WRITES = {
    "rows of the first dim": (
        (
            "t = Transpose <perm = [2, 1, 0]> (x) u = Transpose <perm = [2, 1, 0]> (z) w ="
            " ScatterND (t, i, u) y = Transpose <perm = [2, 1, 0]> (w)"
        ),
        [[4], [0], [2]],
    ),
    "all rows": (
        (
            "t = Transpose <perm = [2, 1, 0]> (z) u = Neg(t) w = ScatterND (t, i, u) y0 = Transpose"
            " <perm = [2, 1, 0]> (w) y = Concat <axis = 2> (y0, z)"
        ),
        [[2], [0], [1]],
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_slices_written_at_known_places_let_the_batch_grow(name: str) -> None:
    text, places = WRITES[name]
    made = model(
        f"(float[2,3,6] x, float[2,3,3] z) => (float[2,3,6] y) {{ {text} }}", i=np.array(places)
    )
    graph = same(made, {"x": rand(2, 3, 6), "z": rand(2, 3, 3)})
    assert not any(n.op == "ScatterND" for n in graph.nodes)
    again = read_model(made, batch=5)
    assert again.tensors["y"].shape == (5, 3, 6)


def test_elements_written_along_the_last_dim_let_the_batch_grow() -> None:
    grid = np.stack(np.meshgrid(np.arange(2), np.arange(3), np.array([5, 1]), indexing="ij"), -1)
    made = model(
        "(float[2,3,6] x, float[2,3,2] z) => (float[2,3,6] y) { y = ScatterND (x, i, z) }", i=grid
    )
    assert "ScatterND" not in [
        n.op for n in same(made, {"x": rand(2, 3, 6), "z": rand(2, 3, 2)}).nodes
    ]
    assert read_model(made, batch=4).tensors["y"].shape == (4, 3, 6)
    crossed = grid.copy()
    crossed[0, 0, :, 2] = [1, 5]
    kept = model(
        "(float[2,3,6] x, float[2,3,2] z) => (float[2,3,6] y) { y = ScatterND (x, i, z) }",
        i=crossed,
    )
    assert "ScatterND" in [n.op for n in same(kept, {"x": rand(2, 3, 6), "z": rand(2, 3, 2)}).nodes]
