"""Runs onnx's own node tests through the reader (tests only): operands other than the first are
baked in as constants."""

from __future__ import annotations

import collections
import warnings
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from planner.errors import PlanError
from planner.graph.ir import Graph
from planner.reader import read_model
from planner.reader.draft.shapes import CANONICAL
from tests.reader.canonical_onnx import ELEMENT, run, to_onnx

# onnxruntime differs from the standard here (its own exclusion list names them)
KNOWN = {
    "test_resize_downsample_scales_linear_align_corners",
    "test_resize_downsample_scales_cubic_align_corners",
}

IN_A_FORM_OF_OURS = {
    "CumProd",
    "DFT",
    "DeformConv",
    "GridSample",
    "LinearAttention",
    "LpPool",
    "MaxPoolIndices",
    "MaxUnpool",
    "RandomNormal",
    "RandomUniform",
    "RoiAlign",
    "TensorScatter",
}
"""Operators that `to_onnx` does not write back; ONNX's cases of them run through the kernels of
programs in tests/onnx_backend."""


def baked(model: onnx.ModelProto, arrays: list[np.ndarray]) -> onnx.ModelProto:
    """The model with every input but the first as an initializer, and the first with a static
    shape."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    inputs = list(made.graph.input)
    for value, array in zip(inputs[1:], arrays[1:], strict=False):
        made.graph.initializer.append(numpy_helper.from_array(np.asarray(array), value.name))
    del made.graph.input[1:]
    for value in made.graph.input:
        del value.type.tensor_type.shape.dim[:]
        for n in np.shape(arrays[0]):
            value.type.tensor_type.shape.dim.add().dim_value = n
        value.type.tensor_type.shape.SetInParent()
    return made


def run_suite() -> tuple[collections.Counter[str], list[str]]:
    """Counts of outcomes, and the cases whose outputs differ. Anything but a PlanError
    propagates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.loader import load_model_tests

        cases = load_model_tests(kind="node")
    counts: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    for case in cases:
        if not case.data_sets:
            continue
        given, expected = (
            [np.asarray(x) if isinstance(x, np.generic) else x for x in side]
            for side in case.data_sets[0]
        )
        if not all(isinstance(x, np.ndarray) for x in (*given, *expected)):
            counts["no tensors"] += 1
            continue
        outcome = judge(case.model, given, expected)
        counts[outcome] += 1
        if outcome == "wrong" and case.name not in KNOWN and "training_dropout" not in case.name:
            wrong.append(case.name)
    return counts, wrong


def judge(model: onnx.ModelProto, given: list[Any], expected: list[Any]) -> str:
    """'ok', 'wrong', or why there is nothing to compare."""
    try:
        graph: Graph = read_model(baked(model, given))
    except PlanError as error:
        assert error.code != "P116", error  # well-formed models: never "malformed"
        return f"error {error.code}"
    if any(n.op not in CANONICAL for n in graph.nodes):
        return "kept whole"
    if any(t.dtype not in ELEMENT for t in graph.tensors.values()):
        return "exotic type"
    if any(n.op in IN_A_FORM_OF_OURS for n in graph.nodes):
        return "in a form of ours"
    feeds = {
        name: np.asarray(x)
        for name, x in zip((i.name for i in model.graph.input), given, strict=False)
        if name in graph.inputs
    }
    try:
        found = run(to_onnx(graph), feeds)
    except Exception as error:  # onnxruntime raises classes of its own that it does not export
        # "different types": a weight that the file casts once has the type of what reads it here.
        texts = ("NOT_IMPLEMENTED", "bfloat16", "Numpy_type", "fmod", "Got: 0", "(z)")
        if any(text in str(error) for text in (*texts, "bound to different types")):
            return "onnxruntime cannot"
        raise
    same = all(
        a.shape == b.shape
        and a.dtype == b.dtype
        and np.allclose(a.astype(float), b.astype(float), 1e-3, 1e-5, equal_nan=True)
        for a, b in zip(found, expected, strict=False)
    )
    return "ok" if same else "wrong"
