"""Small ONNX models for the reader's tests, written as text with arrays beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, parser

from planner.graph.ir import Graph
from planner.reader import read_model
from tests.reader.canonical_onnx import difference, run, to_onnx

SHARED = Path(__file__).parents[3] / "shared" / "data"


def model(text: str, opset: int = 20, **arrays: Any) -> onnx.ModelProto:
    """`text` is "(inputs) => (outputs) {nodes}" in onnx's text syntax; arrays become
    initializers."""
    made = parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> g {text}')
    for name, array in arrays.items():
        made.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    return made


def rand(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    """Normal numbers that depend on the shape and seed alone."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def same(
    made: onnx.ModelProto, feeds: dict[str, np.ndarray], tolerance: float = 1e-5, **options: Any
) -> Graph:
    """Reads a model, asserts that onnxruntime gives the same for it and for what was read, and
    returns the Graph."""
    graph = read_model(made, **options)
    expected = run(made, feeds)
    found = run(to_onnx(graph), feeds)
    for name, a, b in zip(graph.outputs, found, expected, strict=True):
        assert a.shape == b.shape == graph.tensors[name].shape, name
        assert a.dtype == b.dtype, name
        assert np.array_equal(np.isnan(a.astype(float)), np.isnan(b.astype(float))), name
        assert difference(np.nan_to_num(a), np.nan_to_num(b)) <= tolerance, name
    return graph


def ops(graph: Graph) -> list[str]:
    """Operators of a graph in order."""
    return [node.op for node in graph.nodes]
