"""The models of the equivalence benchmark, with every weight at hand, and what onnxruntime says of
them.

Weights that a file does not carry are written, seeded, into the external file it names, beside a
copy of the model: planner and onnxruntime then read the same bytes. Models above 50 million
parameters run shrunk (planner.verify.shrink); onnxruntime then runs the shrunk graph, written back
as ONNX, so for those it judges the program and not the reader. All their trained parameters are
seeded.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import PlanError
from planner.graph.ir import FLOATS, Graph, Tensor
from planner.workload.model import Model, Workload

LARGE = 50e6
"""Parameters above which a model runs shrunk."""
DIMS = (16, 12, 8)
"""Values of a file's free dims beside the batch, in order of appearance."""
ZOO = (
    "zoo:resnet-tiny,training=1",
    "zoo:resnet-tiny",
    "zoo:mlp-tiny",
    "zoo:gpt-tiny",
    "zoo:llama-tiny",
    "zoo:mixtral-tiny",
    "zoo:bert-tiny",
    "zoo:t5-tiny",
    "zoo:vit-tiny",
    "zoo:unet-tiny",
    "zoo:dlrm-tiny",
    "zoo:ssm-tiny",
    "zoo:lstm-tiny",
)


@dataclass(frozen=True)
class Case:
    """A model at a batch: `model(kind)` for a workload; `source` is what is opened; `shrunk` says
    how it was made smaller."""

    name: str
    source: str
    batch: int
    devices: int
    dims: Mapping[str, int]
    shrink: bool = True

    def model(self, kind: str) -> Model:
        """The model for a workload, shrunk when it is large."""
        model = Model.open(
            self.source, Workload(kind=kind, batch=self.batch, dims=self.dims), self.devices
        )
        if not self.shrink or model.plain.parameters <= LARGE:
            return model
        return Shrunk(model.name, model.workload, model.devices, model.folder, model.proto)


class Shrunk(Model):
    """A model whose graphs, at every batch, are the shrunk ones, in float32."""

    def read(self, batch: int | None, *, part: bool = False) -> Graph:
        """The shrunk graph. Raises PlanError where another batch would be shrunk to other weights
        than the global batch."""
        from planner.verify.shrink import shrink

        graph = in_float32(
            shrink(super().read(batch, part=part), LARGE, keep=self.devices, folder=self.folder)
        )
        if self._plain is not None and weight_shapes(graph) != weight_shapes(self._plain):
            raise PlanError(
                "P035",
                f"shrunk at batch {batch}, the model has other weights than at batch {self.batch}",
            )
        return graph


def weight_shapes(graph: Graph) -> dict[str, tuple[int, ...]]:
    """label -> shape of every weight."""
    return {graph.labels[n]: graph.tensors[n].shape for n in graph.weights}


def free_dims(source: str) -> dict[str, int]:
    """A value for every free dim of a file's inputs that is not the batch (dim 0)."""
    import onnx

    if source.startswith("zoo:"):
        return {}
    names: dict[str, None] = {}
    for value in onnx.load(source, load_external_data=False).graph.input:
        for d in value.type.tensor_type.shape.dim[1:]:
            if d.dim_param:
                names[d.dim_param] = None
    return {name: DIMS[min(i, len(DIMS) - 1)] for i, name in enumerate(names)}


def with_weights(source: str, folder: Path) -> str:
    """The source itself when its weights are at hand, else that of a copy with seeded ones. Large
    models keep theirs absent."""
    if source.startswith("zoo:"):
        return f"{source},weights=inline"
    import onnx

    proto = onnx.load(source, load_external_data=False)
    outside = [t for t in proto.graph.initializer if t.external_data]
    missing = [t for t in outside if not (Path(source).parent / _entry(t)["location"]).exists()]
    if not missing or sum(math.prod(t.dims) for t in proto.graph.initializer) > LARGE:
        return source
    ones = near_one(source)
    for tensor in missing:
        entry = _entry(tensor)
        kind, offset = (
            onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type),
            int(entry.get("offset", 0)),
        )
        mean = 1.0 if (entry["location"], offset) in ones else 0.0
        rng = np.random.default_rng(offset)
        value = (
            rng.normal(mean, 0.02, tuple(tensor.dims))
            if np.issubdtype(kind, np.floating)
            else np.zeros(tuple(tensor.dims))
        )
        path = folder / Path(entry["location"]).name
        path.touch()
        with path.open("r+b") as f:
            f.seek(offset)
            f.write(np.ascontiguousarray(value.astype(kind)).tobytes())
    copy = folder / Path(source).name
    shutil.copyfile(source, copy)
    return str(copy)


def near_one(source: str) -> set[tuple[str, int]]:
    """(file, offset) of stored weights that scale a normalisation or are its variance, as the
    reader finds them: exporters spell a group or root-mean-square normalisation as several
    operators, of which none says what its operand is."""
    from planner.emit.tables import initial_mean

    graph = Model.open(source, Workload(kind="infer", dims=free_dims(source))).plain
    return {
        (ref.location, ref.offset)
        for name, ref in graph.weights.items()
        if ref.kind == "external" and initial_mean(graph, name) == 1.0
    }


def _entry(tensor: Any) -> dict[str, str]:
    return {e.key: e.value for e in tensor.external_data}


def in_float32(graph: Graph) -> Graph:
    """The same graph with every float of another type made float32."""
    single = lambda dtype: "float32" if dtype in FLOATS else dtype  # noqa: E731
    tensors = {n: Tensor(n, t.shape, single(t.dtype), t.role) for n, t in graph.tensors.items()}
    nodes = tuple(
        replace(n, attrs={**n.attrs, "to": single(str(n.attrs["to"]))}) if n.op == "Cast" else n
        for n in graph.nodes
    )
    constants = {
        n: v.astype(np.float32) if graph.tensors[n].is_float else v
        for n, v in graph.constants.items()
    }
    return replace(graph, nodes=nodes, tensors=tensors, constants=constants)


def feeds_for(graph: Graph, seed: int = 0) -> dict[str, np.ndarray]:
    """Seeded inputs of the whole batch: integers below their tables (below 8 when they look nothing
    up: times, positions), floats normal, masks [batch, sequence] of ragged rows (the first is
    whole, the others lose up to half of their end).
    """
    from planner.emit.tables import index_limit

    rng, out = np.random.default_rng(seed), {}
    for name in graph.inputs:
        t = graph.tensors[name]
        if "mask" in name.lower() and len(t.shape) == 2:
            rows, columns = t.shape
            lengths = np.where(
                np.arange(rows) == 0, columns, rng.integers((columns + 1) // 2, columns + 1, rows)
            )
            out[name] = (np.arange(columns) < lengths[:, None]).astype(t.dtype)
        elif t.is_float:
            out[name] = rng.normal(size=t.shape).astype(np.float32)
        else:
            out[name] = rng.integers(0, index_limit(graph, name) or 8, t.shape).astype(t.dtype)
    return out


def onnxruntime_outputs(
    model: Model, values: Mapping[str, np.ndarray], feeds: Mapping[str, np.ndarray]
) -> tuple[list[np.ndarray], str]:
    """Outputs of onnxruntime for the whole batch, and what it ran: the file (in pieces of its
    exported batch), or the shrunk graph."""
    import onnx

    if any(n.startswith("shrunk from") for n in model.plain.notes):
        from tests.reader.canonical_onnx import to_onnx

        proto, what = to_onnx(model.plain, model.folder), "shrunk graph"
        labels = {label: name for name, label in model.plain.labels.items()}
        given = {labels[label]: value for label, value in values.items()}
        for tensor in proto.graph.initializer:
            if tensor.name in given:
                kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
                tensor.CopyFrom(
                    onnx.numpy_helper.from_array(
                        np.ascontiguousarray(given[tensor.name].astype(kind)), tensor.name
                    )
                )
        return run_onnx(proto.SerializeToString(), feeds, model.plain), what
    proto = evaluation(model.proto)
    if model.folder is not None:
        onnx.load_external_data_for_model(proto, str(model.folder))
    return run_onnx(proto.SerializeToString(), feeds, model.plain), "file"


def evaluation(proto: Any) -> Any:
    """A copy in evaluation mode: no dropout, running statistics."""
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for node in copy.graph.node:
        if node.op_type == "Dropout":
            del node.input[1:]
        if node.op_type == "BatchNormalization":
            for attribute in node.attribute:
                if attribute.name == "training_mode":
                    attribute.i = 0
            del node.output[1:]
    return copy


def run_onnx(model: bytes, feeds: Mapping[str, np.ndarray], graph: Graph) -> list[np.ndarray]:
    """One session, fed the batch in pieces of the size it takes; pieces are joined along the dim in
    which an output is larger."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    batch = int(graph.dims.get("batch", 1))
    fixed = [
        i.shape[0]
        for i in session.get_inputs()
        if i.shape and isinstance(i.shape[0], int) and feeds[i.name].shape[0] == batch
    ]
    piece = min(fixed, default=batch)
    names = [o for o in graph.outputs if o in {x.name for x in session.get_outputs()}]
    rows = []
    for start in range(0, batch, piece):
        part = {}
        for i in session.get_inputs():
            value = feeds[i.name]
            part[i.name] = (
                value[start : start + piece] if value.ndim and value.shape[0] == batch else value
            )
        rows.append(session.run(names, part))
    out: list[np.ndarray] = []
    for name, parts in zip(names, zip(*rows, strict=True), strict=True):
        shape = graph.tensors[name].shape
        axis = next(
            (d for d, (a, b) in enumerate(zip(parts[0].shape, shape, strict=True)) if a != b), None
        )
        out.append(np.concatenate(parts, axis) if axis is not None else parts[0])
    return out
