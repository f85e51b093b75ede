"""Windows, samples of images, transforms and caches: read from ONNX and run as programs run them,
against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

from planner.errors import PlanError
from planner.onnx_backend.program import compiled, function_of
from planner.ops.lookup import rule_of
from planner.reader import read_model
from tests.reader.control_models import FLOAT, INT, info, model, stored

RNG = np.random.default_rng(5)
X = RNG.normal(size=(2, 3, 9, 8)).astype(np.float32)
ROIS = np.array([[1.5, 2.0, 9.0, 12.5], [0.0, 0.0, 15.0, 17.0], [5.0, 6.0, 5.5, 9.0]], np.float32)


def grid(*shape: int) -> np.ndarray:
    return RNG.uniform(-1.2, 1.2, shape).astype(np.float32)


def one(
    op: str,
    operands: dict[str, np.ndarray],
    arrays: dict[str, Any] | None = None,
    outputs: int = 1,
    opset: int = 18,
    **attrs: Any,
) -> tuple[Any, dict[str, np.ndarray]]:
    """A model of one node; `arrays` are stored operands."""
    inputs = [info(n, INT if a.dtype == np.int64 else FLOAT, a.shape) for n, a in operands.items()]
    names = [f"y{k}" for k in range(outputs)]
    node = helper.make_node(op, [*operands, *(arrays or {})], names, name=op, **attrs)
    outs = [info("y0", FLOAT, None), *(info(n, INT, None) for n in names[1:])]
    return model([node], inputs, outs, stored(**(arrays or {})), opset=opset), operands


CASES = {
    "lp-pool": one("LpPool", {"x": X}, kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1], p=3),
    "global-lp-pool": one("GlobalLpPool", {"x": X}, p=2),
    "max-pool-indices": one(
        "MaxPool", {"x": X}, outputs=2, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]
    ),
    "max-pool-columns": one(
        "MaxPool", {"x": X}, outputs=2, kernel_shape=[2, 2], strides=[2, 2], storage_order=1
    ),
    "max-unpool": one(
        "MaxUnpool",
        {
            "x": X[:, :, :2, :2],
            "i": (
                np.arange(6).reshape(2, 3, 1, 1) * 16
                + RNG.choice([0, 1, 4, 5], (2, 3, 2, 2))
                + [[0, 2], [8, 10]]
            ),
        },
        kernel_shape=[2, 2],
        strides=[2, 2],
    ),
    "col2im": one(
        "Col2Im",
        {"x": RNG.normal(size=(2, 12, 12)).astype(np.float32)},
        {"size": np.array([5, 5]), "block": np.array([2, 2])},
        strides=[1, 1],
        dilations=[2, 1],
    ),
    **{
        f"grid-{mode}-{padding}-{corners}": one(
            "GridSample",
            {"x": X, "g": grid(2, 4, 5, 2)},
            opset=16,
            mode=mode,
            padding_mode=padding,
            align_corners=corners,
        )
        for mode, padding, corners in (
            ("bilinear", "zeros", 0),
            ("bicubic", "reflection", 1),
            ("bilinear", "border", 1),
            ("nearest", "zeros", 1),
        )
    },
    "roi-align": one(
        "RoiAlign",
        {"x": X, "r": ROIS, "b": np.array([0, 1, 1])},
        opset=16,
        output_height=3,
        output_width=2,
        sampling_ratio=2,
        spatial_scale=0.5,
    ),
    "dft": one("DFT", {"x": X[..., :2]}, opset=17, axis=2),
    "dft-one-sided": one("DFT", {"x": X[..., :1]}, opset=17, axis=2, onesided=1),
    "stft": one(
        "STFT",
        {"x": X.reshape(2, -1, 1)},
        {"step": np.int64(10), "window": np.hanning(24).astype(np.float32)},
        opset=17,
    ),
    "reverse-sequence": one(
        "ReverseSequence",
        {"x": X[:, :, 0], "n": np.array([3, 1])},
        opset=10,
        batch_axis=0,
        time_axis=1,
    ),
    "max-roi-pool": one(
        "MaxRoiPool",
        {"x": X, "r": np.concatenate([np.array([[0], [1], [1]], np.float32), ROIS], 1)},
        pooled_shape=[3, 2],
        spatial_scale=0.5,
    ),
}


SLOW = (
    "global-lp-pool",
    "max-pool-columns",
    "grid-bilinear-zeros-0",
    "grid-nearest-zeros-1",
    "dft-one-sided",
    "roi-align",
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]
)
def test_equal_to_onnxruntime(name: str) -> None:
    import onnxruntime

    made, values = CASES[name]
    session = onnxruntime.InferenceSession(made.SerializeToString())
    graph = read_model(made)
    for got, want in zip(compiled(graph)(values), session.run(None, values), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert all(not rule_of(node, graph)[1] for node in graph.nodes)


def test_a_norm_of_zeros_has_a_finite_gradient() -> None:
    import jax

    run, _ = function_of(read_model(CASES["lp-pool"][0]))
    assert np.isfinite(jax.grad(lambda x: run({"x": x}, {})[0].sum())(np.zeros_like(X))).all()


@pytest.mark.parametrize(
    ("op", "operands", "attrs"),
    [
        ("GridSample", {"x": X, "g": grid(3, 4, 5, 2)}, {}),
        ("GridSample", {"x": X, "g": grid(2, 4, 5, 3)}, {}),
        ("ReverseSequence", {"x": X, "n": np.array([3, 1, 2])}, {"batch_axis": 0, "time_axis": 1}),
        ("RoiAlign", {"x": X, "r": ROIS, "b": np.array([0, 1])}, {}),
        ("LpPool", {"x": X}, {"kernel_shape": [30, 2]}),
    ],
)
def test_operands_that_do_not_fit_are_refused(
    op: str, operands: dict[str, np.ndarray], attrs: dict[str, Any]
) -> None:
    made, _ = one(op, operands, **attrs)
    with pytest.raises(PlanError, match=f"P115.*{op}"):
        read_model(made)


def test_a_number_of_samples_that_is_data_has_no_program() -> None:
    made, _ = one(
        "RoiAlign",
        {"x": X, "r": ROIS, "b": np.array([0, 1, 1])},
        opset=16,
        output_height=3,
        output_width=2,
    )
    with pytest.raises(PlanError, match="run-time data"):
        compiled(read_model(made))
