"""Tables beside the weights: positions, masks and rows of parameters that an exporter wrote into
the data file are known as those inside the model are; parameters stay closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from planner.errors import PlanError
from planner.graph.ir import Graph
from planner.reader import read, read_model
from planner.workload.weights import load
from tests.reader.reader_models import rand

S, D = 4, 8
KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
FOLDED = "pkg.onnxscript.optimizer.folded_from"


def stored(
    folder: Path,
    nodes: list[onnx.NodeProto],
    arrays: dict[str, np.ndarray],
    records: dict[str, tuple[str, str]],
) -> Path:
    """A model over x [2, S, D] whose initializers all lie in a file of their own."""
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, S, D]) for n in "xy"]
    tensors = [numpy_helper.from_array(np.asarray(a), n) for n, a in arrays.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    for name, (key, value) in records.items():
        info = helper.make_tensor_value_info(name, TensorProto.FLOAT, arrays[name].shape)
        entry = info.metadata_props.add()
        entry.key, entry.value = key, value
        graph.value_info.append(info)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    path = folder / "m.onnx"
    options: Any = {"save_as_external_data": True, "location": "m.data", "size_threshold": 0}
    onnx.save(model, path, **options)
    return path


def attending(folder: Path) -> Path:
    """Attention whose causal mask is made of positions, as exporters write it."""
    nodes = [
        helper.make_node("LessOrEqual", ["keys", "queries"], ["mask"]),
        helper.make_node("Reshape", ["x", "heads"], ["h"]),
        helper.make_node("Attention", ["h", "h", "h", "mask"], ["a"]),
        helper.make_node("Reshape", ["a", "flat"], ["y"]),
    ]
    arrays = {
        "keys": np.arange(S).reshape(1, 1, 1, S),
        "queries": np.arange(S).reshape(1, 1, S, 1),
        "heads": np.array([2, 1, S, D]),
        "flat": np.array([2, S, D]),
    }
    return stored(folder, nodes, arrays, {})


def test_positions_beside_the_weights_make_attention_causal(tmp_path: Path) -> None:
    graph = read(attending(tmp_path))
    (attention,) = (n for n in graph.nodes if n.op == "Attention")
    assert attention.attrs["causal"] == 1
    assert not any(attention.inputs[3:])
    assert not graph.weights


def summed(folder: Path, table: np.ndarray, name: str, record: tuple[str, str]) -> Graph:
    nodes = [helper.make_node("Add", ["x", name], ["s"]), helper.make_node("Relu", ["s"], ["y"])]
    return read(stored(folder, nodes, {name: table}, {name: record}))


def test_floats_that_the_exporter_calls_no_parameter_are_known(tmp_path: Path) -> None:
    table = rand(S, D)
    graph = summed(tmp_path, table, "angles", (KIND, "BUFFER"))
    np.testing.assert_array_equal(graph.constants["angles"], table)


@pytest.mark.parametrize("record", [(KIND, "PARAMETER"), (FOLDED, "['layer.weight']")])
def test_parameters_and_what_is_made_of_them_stay_closed(
    tmp_path: Path, record: tuple[str, str]
) -> None:
    graph = summed(tmp_path, rand(S, D), "val_3", record)
    assert [ref.kind for ref in graph.weights.values()] == ["external"]


def test_rows_of_a_parameter_are_that_parameter(tmp_path: Path) -> None:
    """Once for all samples of the batch, where they were copied for each."""
    table = np.repeat(rand(1, S, D), 2, 0)
    graph = summed(tmp_path, table, "embedding", (FOLDED, "['position_embeddings.weight']"))
    (name,) = graph.trainable
    assert graph.labels[name] == "position_embeddings.weight"
    np.testing.assert_array_equal(load(graph, tmp_path)[graph.labels[name]], table[:1])


def test_tables_that_are_not_there_are_unknown(tmp_path: Path) -> None:
    path = attending(tmp_path)
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        if tensor.name in ("heads", "flat"):  # extents must be known
            tensor.CopyFrom(numpy_helper.from_array(_extents(tensor.name), tensor.name))
    onnx.save(model, path)
    (tmp_path / "m.data").unlink()
    graph = read(path)
    (attention,) = (n for n in graph.nodes if n.op == "Attention")
    assert attention.attrs["causal"] == 0 and attention.inputs[3]


def _extents(name: str) -> np.ndarray:
    return np.array([2, 1, S, D] if name == "heads" else [2, S, D])


def test_ones_that_were_made_of_a_parameter_are_that_parameter(tmp_path: Path) -> None:
    """A norm's scale as it was initialised, in a shape of its own, is no norm without one."""
    nodes = [
        helper.make_node("LayerNormalization", ["x", "val_9"], ["n"], axis=2),
        helper.make_node("Relu", ["n"], ["y"]),
    ]
    records = {"val_9": (FOLDED, "['norm.weight', 'val_8']")}
    path = stored(tmp_path, nodes, {"val_9": np.ones(D, np.float32)}, records)
    graph = read_model(onnx.load(path))  # with its numbers inside
    assert list(graph.trainable) == ["val_9"]


def test_a_data_file_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("planner.reader.onnx.tables.np.memmap", refused)
    with pytest.raises(PlanError, match=r"external data 'm\.data' cannot be read") as caught:
        read(attending(tmp_path))
    assert caught.value.code == "P135" and "Permission denied" in str(caught.value.detail)
