"""The ONNX backend: a sample of the ONNX project's own suite by default, all of it in the slow
suite; its interface; what it refuses."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, parser

import planner.onnx_backend
from benchmarks.onnx_backend import MARKS, Outcome, draws, missed, reason_of, report, run_suite
from planner.errors import PlanError
from planner.onnx_backend import Backend
from planner.onnx_backend.handlers import HANDLERS, handler_of

STEP = 37
"""Every so many-th case of the suite's node tests is run by default."""
POOLS = ("averagepool", "lppool")
"""Modules of the suite that pool in plain Python for longer than the sample runs: in `make slow`."""


def text(source: str, opset: int = 20, extra: str = "") -> onnx.ModelProto:
    """A model from ONNX's text form."""
    return parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}{extra}]> agraph {source}'
    )


def node_cases(whole: bool) -> list[Any]:
    """The suite's node tests, which its modules make as they are imported."""
    from onnx.backend.test.case import node

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in sorted(m.name for m in pkgutil.iter_modules(node.__path__)):
            if whole or module not in POOLS:
                importlib.import_module(f"{node.__name__}.{module}")
        return list(node._NodeTestCases)


def outcome(case: Any) -> str:
    """'ok', or why a case of the suite does not pass; compared by the suite's own function."""
    from onnx.backend.test.runner import Runner, _normalize_tensor

    try:
        prepared = Backend.prepare(case.model)
        for inputs, expected in case.data_sets:
            found = prepared.run([_normalize_tensor(i) for i in inputs])
            Runner.assert_similar_outputs(
                [_normalize_tensor(e) for e in expected], found, case.rtol, case.atol
            )
    except Exception as error:  # an outcome, whatever it is
        return reason_of(error, case.model)
    return "ok"


@pytest.mark.filterwarnings("ignore")
def test_a_sample_of_the_node_tests() -> None:
    cases = [c for c in node_cases(whole=False)[::STEP] if not draws(c.model)]
    assert len(cases) > 45
    wrong = {c.name: why for c in cases if (why := outcome(c)) != "ok"}
    assert wrong == {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_whole_suite_meets_its_marks() -> None:
    outcomes = run_suite(["node", "simple", "pytorch-operator", "pytorch-converted", "light"])
    assert missed(outcomes) == [], "\n".join(report(outcomes))


def test_a_wrong_kernel_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from planner.ops import OPERATORS

    monkeypatch.setitem(
        OPERATORS, "Sin", replace(OPERATORS["Sin"], kernel=lambda c: f"jnp.cos({c.args[0]})")
    )
    (case,) = [c for c in node_cases(whole=False) if c.name == "test_sin"]
    assert outcome(case).startswith("differs")


def test_marks_are_counted_by_kind() -> None:
    made = [
        Outcome("light", f"l{k}", k != 3, "graph", "" if k != 3 else "differs: x", 0.1)
        for k in range(9)
    ]
    assert missed(made) == ["light: 8 of 9, mark 9"] and MARKS["light"] == 9
    assert (
        missed([o for o in made if o.ok] + [Outcome("light", "l3", True, "graph", "", 0.1)]) == []
    )
    assert "light: 1 x differs: x" in report(made)


def test_model_node_and_device() -> None:
    x = np.array([[1.0, -2.0]], np.float32)
    model = text(
        "(float[n,2] x, int64[1] axes) => (float[m] y) { r = Relu(x) y = ReduceSum<keepdims=0>(r,"
        " axes) }"
    )
    prepared = planner.onnx_backend.prepare(model)
    assert prepared.run([x, np.array([1])]).y.tolist() == [1.0] and prepared.way == "graph"
    assert prepared.run({"axes": np.array([0]), "x": x})[0].tolist() == [1.0, 0.0]
    assert planner.onnx_backend.run_model(model, [np.ones((3, 2), np.float32), np.array([1])])[
        0
    ].tolist() == [2.0, 2.0, 2.0]
    (made,) = planner.onnx_backend.run_node(helper.make_node("Add", ["a", "a"], ["b"]), [x])
    assert made.tolist() == [[2.0, -4.0]]
    assert planner.onnx_backend.supports_device(
        "CPU:0"
    ) and not planner.onnx_backend.supports_device("CUDA")


def test_types_are_exact() -> None:
    model = text(
        "(double[2] x, int64[2] i) => (double[2] y, int64[2] j) { y = Add(x, x) j = Mul(i, i) }"
    )
    y, j = Backend.run_model(model, [np.array([1e300, 1 + 1e-15]), np.array([2**31, 3])])
    assert (
        y.dtype == np.float64 and y[1] == 2 * (1 + 1e-15) and j.dtype == np.int64 and j[0] == 2**62
    )


@pytest.mark.parametrize(
    ("inputs", "code"),
    [
        ([], "P172"),
        ([np.zeros(2, np.float32)] * 2, "P172"),
        ({"y": np.zeros(2, np.float32)}, "P172"),
    ],
)
def test_wrong_inputs_are_refused(inputs: Any, code: str) -> None:
    with pytest.raises(PlanError) as found:
        Backend.run_model(text("(float[2] x) => (float[2] y) { y = Relu(x) }"), inputs)
    assert found.value.code == code


def test_what_cannot_be_run_is_named() -> None:
    with pytest.raises(PlanError) as device:
        Backend.prepare(text("(float[2] x) => (float[2] y) { y = Relu(x) }"), "CUDA")
    assert device.value.code == "P173"
    with pytest.raises(PlanError) as custom:
        Backend.run_model(
            text("(float[2] x) => (float[2] y) { y = custom.Odd(x) }", extra=', "custom" : 1'),
            [np.zeros(2, np.float32)],
        )
    assert custom.value.code == "P171" and "Odd" in str(custom.value)
    with pytest.raises(PlanError) as empty:
        Backend.run_model(
            text("(optional(float) x) => (float y) { y = OptionalGetElement(x) }"), [None]
        )
    assert empty.value.code == "P171" and "empty optional" in str(empty.value)


def test_handlers_follow_the_opset() -> None:
    old, new = handler_of("", "RoiAlign", 10), handler_of("", "RoiAlign", 16)
    assert (
        old is not None
        and old is not new
        and handler_of("", "RoiAlign", 15) is old
        and handler_of("", "RoiAlign", 25) is new
    )
    assert handler_of("", "Split", 11) is None and ("", "Split") in HANDLERS


def test_loops_with_growing_values_run_node_by_node() -> None:
    made = "g = Concat<axis=0>(h, h) s = ReduceSum<keepdims=0>(g) d = Less(s, most)"
    body = f"<body = b (int64 i, bool c, float[n] h) => (bool d, float[m] g) {{ {made} }}>"
    model = text(f"(float most, float[n] x) => (float[m] y) {{ y = Loop {body} (, , x) }}")
    prepared = Backend.prepare(model)
    (y,) = prepared.run([np.asarray(20.0, np.float32), np.array([1.0, 2.0], np.float32)])
    assert (
        y.tolist() == [1.0, 2.0] * 8
        and prepared.way == "nodes"
        and prepared.machine.ways["kernel"] == 9
    )


def test_a_function_of_the_model_sees_its_own_attributes() -> None:
    source = """<ir_version: 8, opset_import: ["" : 18, "f" : 1]>
        agraph (float[2] x) => (float[n] y) { s = SequenceConstruct(x, x) e = SequenceAt(s, one) y = f.leak<slope = 0.5>(e) }
        <domain: "f", opset_import: ["" : 18]> leak <slope> (x) => (y) { y = LeakyRelu<alpha: float = @slope>(x) }"""
    model = parser.parse_model(
        source.replace("one", "k").replace("{ s =", "{ k = Constant<value_int = 1>() s =")
    )
    (y,) = Backend.run_model(model, [np.array([-2.0, 3.0], np.float32)])
    assert y.tolist() == [-1.0, 3.0]


def test_opening_the_backend_does_not_import_jax() -> None:
    program = (
        "import sys, planner.onnx_backend as b; b.prepare; print([m for m in sys.modules if"
        " m.split('.')[0] in ('jax', 'jaxlib')])"
    )
    made = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("opset", "expected"), [(11, [[[0.0, 0.0], [1.0, 0.0]]]), (13, [[[0.0, 1.0], [1.0, 0.0]]])]
)
def test_one_operator_two_meanings(opset: int, expected: list[Any]) -> None:
    """Hardmax took everything from the axis on as one dim before opset 13; run node by node here,
    as there is a sequence around it."""
    model = text(
        "(float[1,2,2] x) => (float[1,2,2] y) { k = Constant<value_int = 0>() s ="
        " SequenceConstruct(x) z = SequenceAt(s, k) y = Hardmax<axis=1>(z) }".replace(
            "value_int = 0", "value = int64 {0}"
        ),
        opset,
    )
    (y,) = Backend.run_model(model, [np.array([[[1.0, 3.0], [9.0, 2.0]]], np.float32)])
    assert y.tolist() == expected


def test_region_pooling_equals_onnxruntime() -> None:
    """An operator that the suite has no case of."""
    ort = pytest.importorskip("onnxruntime")
    model = text(
        "(float[2,3,9,7] x, float[n,5] r) => (float[n,3,2,3] y) { y = MaxRoiPool<pooled_shape ="
        " [2,3], spatial_scale = 0.5>(x, r) }",
        20,
    )
    x = np.random.default_rng(0).normal(size=(2, 3, 9, 7)).astype(np.float32)
    regions = np.array(
        [[0, 0, 0, 11, 15], [1, 3, 5, 13, 12], [1, 6, 9, 6, 9], [0, 2, 2, 30, 30]], np.float32
    )
    (expected,) = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x, "r": regions})
    np.testing.assert_allclose(Backend.run_model(model, [x, regions])[0], expected)
