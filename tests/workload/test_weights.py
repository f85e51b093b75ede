"""Weight bytes: inline, external, absent, and the reader's rewrites of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from planner.errors import PlanError
from planner.graph.ir import Graph
from planner.reader import read_model
from planner.workload.weights import load, load_one, missing
from tests.reader.reader_models import model, rand


def external(
    tensor: onnx.TensorProto, folder: Path, location: str = "w.bin", offset: int = 0
) -> None:
    """Moves a tensor's bytes to a file."""
    with (folder / location).open("r+b" if (folder / location).exists() else "wb") as file:
        file.seek(offset)
        file.write(tensor.raw_data)
    for key, value in (
        ("location", location),
        ("offset", offset),
        ("length", len(tensor.raw_data)),
    ):
        tensor.external_data.add(key=key, value=str(value))
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL


def two_layers() -> onnx.ModelProto:
    return model(
        "(float[2,3,8,8] x) => (float[2,4,8,8] y) { h = Conv <pads = [1,1,1,1]> (x, w, b) t ="
        " Transpose <perm = [1,0,2,3]> (v) y = Conv(h, t) }",
        w=rand(5, 3, 3, 3),
        b=rand(5),
        v=rand(5, 4, 1, 1),
    )


def check(graph: Graph, arrays: dict[str, np.ndarray]) -> None:
    assert list(arrays) == [graph.labels[w] for w in graph.weights]
    for name, label in graph.labels.items():
        assert (
            arrays[label].shape == graph.tensors[name].shape
            and arrays[label].dtype.name == graph.tensors[name].dtype
        )
    assert np.array_equal(arrays["w"], rand(5, 3, 3, 3))
    assert np.array_equal(
        arrays["b"], rand(5).reshape(5, 1, 1)
    )  # the reshape is done on the stored bias
    assert np.array_equal(arrays["v"], rand(5, 4, 1, 1).transpose(1, 0, 2, 3))


def test_inline_and_external_bytes_are_the_same(tmp_path: Path) -> None:
    check(read_model(two_layers()), load(read_model(two_layers()), None))
    made, at = two_layers(), 16
    for tensor in made.graph.initializer:
        size = len(tensor.raw_data)
        external(tensor, tmp_path, offset=at)
        at += size + 12  # not aligned to anything
    graph = read_model(made, tmp_path)
    assert {r.kind for r in graph.weights.values()} == {"external"}
    check(graph, load(graph, tmp_path))
    assert missing(graph, tmp_path) == ()


def test_missing_files_are_errors_unless_seeding_is_asked_for(tmp_path: Path) -> None:
    made = two_layers()
    external(made.graph.initializer[0], tmp_path)
    graph = read_model(made, tmp_path)
    (tmp_path / "w.bin").unlink()
    assert missing(graph, tmp_path) == ("w",)
    with pytest.raises(PlanError, match=r"'w'.*'w.bin'") as caught:
        load(graph, tmp_path)
    assert caught.value.code == "P151"
    seeded = load(graph, tmp_path, 3, seed_missing=True)
    assert abs(float(seeded["w"].std()) - 0.02) < 0.004 and np.array_equal(
        seeded["b"], rand(5).reshape(5, 1, 1)
    )


def test_short_files_are_refused(tmp_path: Path) -> None:
    made = two_layers()
    external(made.graph.initializer[0], tmp_path)
    graph = read_model(made, tmp_path)
    (tmp_path / "w.bin").write_bytes(b"\0" * 100)
    with pytest.raises(PlanError, match="P134"):
        load(graph, tmp_path)


def absent() -> onnx.ModelProto:
    made = model(
        "(float[2,64] x) => (float[2,64] y) { n = LayerNormalization(x, g, b) m = MatMul(n, w) y ="
        " BatchNormalization(m, s, c, rm, rv) }"
    )
    for name, dims in (
        ("g", [64]),
        ("b", [64]),
        ("w", [64, 64]),
        ("s", [64]),
        ("c", [64]),
        ("rm", [64]),
        ("rv", [64]),
    ):
        made.graph.initializer.append(onnx.TensorProto(name=name, data_type=1, dims=dims))
    return made


def test_absent_weights_are_seeded_by_label() -> None:
    graph = read_model(absent())
    one, again, other = load(graph, None, 1), load(graph, None, 1), load(graph, None, 2)
    assert all(np.array_equal(one[k], again[k]) for k in one) and not np.array_equal(
        one["w"], other["w"]
    )
    assert np.array_equal(
        load_one(graph, "w", None, 1), one["w"]
    )  # each on its own, whatever came before
    for near_one in ("g", "s", "rv"):
        assert abs(float(one[near_one].mean()) - 1) < 0.02
    for near_zero in ("b", "c", "rm", "w"):
        assert abs(float(one[near_zero].mean())) < 0.02 and float(one[near_zero].std()) < 0.03
    assert (one["rv"] > 0).all()
    assert missing(graph, None) == tuple(one)


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16"])
def test_float_types(dtype: str, tmp_path: Path) -> None:
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    code = {"float16": 10, "float64": 11, "bfloat16": 16}[dtype]
    word = {"float16": "float16", "float64": "double", "bfloat16": "bfloat16"}[dtype]
    made = model(f"({word}[2,4] x) => ({word}[2,4] y) {{ y = MatMul(x, w) }}")
    values = rand(4, 4).astype(kind)
    made.graph.initializer.append(helper.make_tensor("w", code, [4, 4], values.tobytes(), raw=True))
    inline = load(read_model(made), None)["w"]
    external(made.graph.initializer[0], tmp_path, offset=2)
    outside = load(read_model(made, tmp_path), tmp_path)["w"]
    assert inline.dtype == outside.dtype == kind
    assert np.array_equal(inline.astype(float), values.astype(float)) and np.array_equal(
        outside.astype(float), values.astype(float)
    )


def test_half_byte_integers(tmp_path: Path) -> None:
    packed = helper.make_tensor("q", onnx.TensorProto.INT4, [4, 4], list(range(-8, 8)))
    made = model(
        "(float[2,4] x) => (float[2,4] y) { w = DequantizeLinear(q, s) y = MatMul(x, w) }",
        21,
        s=np.float32(0.5),
    )
    raw = onnx.TensorProto(
        name="q",
        data_type=onnx.TensorProto.INT4,
        dims=[4, 4],
        raw_data=bytes((k % 16) | ((k + 1) % 16) << 4 for k in range(8, 24, 2)),
    )
    made.graph.initializer.append(raw)
    external(raw := made.graph.initializer[-1], tmp_path)
    graph = read_model(made, tmp_path)
    assert graph.tensors["q"].dtype == "int4" and not graph.trainable
    found = load_one(graph, "q", tmp_path)
    assert np.array_equal(found.astype(int), numpy_helper.to_array(packed).astype(int))


def test_lazy_mapping_does_not_read_the_whole_file(tmp_path: Path) -> None:
    made = model("(float[2,8] x) => (float[2,8] y) { y = MatMul(x, w) }", w=rand(8, 8))
    external(made.graph.initializer[0], tmp_path)
    graph = read_model(made, tmp_path)
    array: Any = load(graph, tmp_path)["w"]
    while array is not None and not isinstance(array, np.memmap):
        array = array.base
    assert isinstance(array, np.memmap)
