"""A path to a checked ModelProto. External data is not opened here; a file that protobuf cannot
hold is refused by size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from costmodels.hardware.intake import irregular, read_bytes
from planner.errors import PlanError, file_meant

MOST_BYTES = 2**31 - 1
OTHERS = {
    ".py": "a Python program",
    ".ipynb": "a notebook",
    ".pt": "a PyTorch checkpoint",
    ".pth": "a PyTorch checkpoint",
    ".bin": "a checkpoint",
    ".safetensors": "a file of weights",
    ".ckpt": "a checkpoint",
    ".h5": "a Keras file",
    ".keras": "a Keras file",
    ".pb": "a TensorFlow graph",
    ".tflite": "a TensorFlow Lite file",
    ".gguf": "a file of weights",
}
"""Files that people have of a model, by their endings."""
EXPORT = (
    "export the model to ONNX, in PyTorch torch.onnx.export(model, args, 'model.onnx', dynamo=True)"
    " (docs/exporting.md)"
)


def load(path: str | os.PathLike[str]) -> Any:
    """The ModelProto of an ONNX file. Raises PlanError for anything that is not one."""
    path = Path(path)
    try:
        status = path.stat()
        size, mode = status.st_size, status.st_mode
    except FileNotFoundError:
        raise PlanError(
            "P101",
            f"there is no file {str(path)!r}",
            help=file_meant(str(path)) or ["an ONNX file, zoo:NAME, or a Hugging Face config.json"],
        ) from None
    except (OSError, ValueError) as error:
        raise PlanError("P101", f"{str(path)!r} cannot be read", detail=[str(error)]) from None
    if what := irregular(mode):
        raise PlanError("P101", f"{str(path)!r} is not a regular file", detail=[what])
    if size == 0:
        raise PlanError(
            "P102", f"{str(path)!r} is empty: not an ONNX file", help=_other_kind(str(path))
        )
    if size > MOST_BYTES:
        raise PlanError(
            "P103",
            f"{str(path)!r} has {size} bytes; an ONNX file holds at most {MOST_BYTES}",
            help=["save it with external data: onnx.save(model, path, save_as_external_data=True)"],
        )
    try:
        data = read_bytes(path, MOST_BYTES)
    except OSError as error:
        raise PlanError("P101", f"{str(path)!r} cannot be read", detail=[str(error)]) from None
    return parse(data, str(path))


def parse(data: bytes, name: str) -> Any:
    """The ModelProto in these bytes. Raises PlanError."""
    from google.protobuf.message import DecodeError
    from onnx import ModelProto

    model = ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        what = "truncated, not an ONNX protobuf, or nested deeper than protobuf allows"
        raise PlanError(
            "P102",
            f"{name!r} cannot be read as ONNX: {what}",
            detail=[str(error)[:200]],
            help=_other_kind(name),
        ) from None
    check_model(model, name)
    return model


def _other_kind(name: str) -> list[str]:
    """What to do with a file of another kind, by its ending."""
    kind = OTHERS.get(Path(name).suffix.lower())
    return [f"{kind}: {EXPORT}"] if kind else []


def check_model(model: Any, name: str) -> None:
    """The parts every model must have: a graph, and an opset that is known. Raises PlanError."""
    from onnx import defs

    if not model.HasField("graph") or not (
        model.graph.node or model.graph.output or model.graph.input
    ):
        raise PlanError(
            "P104",
            f"{name!r} holds no graph: not an ONNX model, or an empty one",
            help=_other_kind(name),
        )
    if not all(isinstance(text, str) for text in _texts(model)):
        raise PlanError("P102", f"{name!r} is damaged: it holds names that are not UTF-8 text")
    versions = {("" if o.domain == "ai.onnx" else o.domain): o.version for o in model.opset_import}
    if "" not in versions and (
        not versions or any(n.domain in ("", "ai.onnx") for n in model.graph.node)
    ):
        raise PlanError(
            "P105",
            f"{name!r} does not say which opset it uses",
            help=["add opset_import to the model: onnx.helper.make_opsetid('', 20)"],
        )
    newest = defs.onnx_opset_version()
    opset = versions.get("", newest)
    if not 1 <= opset <= newest:
        raise PlanError(
            "P105",
            f"{name!r} uses opset {opset}; opsets 1 to {newest} are known to the installed onnx",
            help=["export it with an older opset, or install a newer onnx"],
        )


def _texts(model: Any) -> Iterator[Any]:
    """Every name the reader relies on. protobuf hands out bytes where a name is not valid UTF-8."""
    yield from (o.domain for o in model.opset_import)
    yield from _graph_texts(model.graph)
    for function in model.functions:
        yield from (
            function.name,
            function.domain,
            *function.input,
            *function.output,
            *function.attribute,
        )
        yield from _node_texts(function.node)


def _graph_texts(graph: Any) -> Iterator[Any]:
    yield graph.name
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield value.name
        yield from (d.dim_param for d in value.type.tensor_type.shape.dim)
    for tensor in graph.initializer:
        yield tensor.name
        yield from (text for e in tensor.external_data for text in (e.key, e.value))
    yield from (s.values.name for s in graph.sparse_initializer)
    yield from _node_texts(graph.node)


def _node_texts(nodes: Any) -> Iterator[Any]:
    for node in nodes:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (text for p in node.metadata_props for text in (p.key, p.value))
        for attribute in node.attribute:
            yield attribute.name
            yield attribute.ref_attr_name
            if attribute.type == 5:
                yield from _graph_texts(attribute.g)
            for graph in attribute.graphs:
                yield from _graph_texts(graph)
