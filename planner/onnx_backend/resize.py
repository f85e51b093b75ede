"""Resize in full: any axes, cropping, antialiasing, cubic weights, aspect ratios kept.

Along each axis the result is a matrix of weights applied to the operand: each row holds the weights
of one output position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from planner.onnx_backend.table import Call, Refused, Value, as_array, handles

Weights = Callable[[np.ndarray], np.ndarray]


def _linear(d: np.ndarray) -> np.ndarray:
    return np.maximum(0.0, 1.0 - np.abs(d))


def _cubic(a: float) -> Weights:
    """Keys' cubic convolution: a is its slope at distance one."""

    def weights(d: np.ndarray) -> np.ndarray:
        d = np.abs(d)
        near = (a + 2) * d**3 - (a + 3) * d**2 + 1
        far = a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a
        return np.where(d <= 1, near, np.where(d < 2, far, 0.0))

    return weights


def _rounded(positions: np.ndarray, mode: str) -> np.ndarray:
    half_down, half_up = np.ceil(positions - 0.5), np.floor(positions + 0.5)
    return {
        "floor": np.floor(positions),
        "ceil": np.ceil(positions),
        "round_prefer_ceil": half_up,
    }.get(mode, half_down)


def _positions(
    out: int, size: int, scale: float, roi: tuple[float, float], mode: str
) -> np.ndarray:
    """Where each output index lies in the operand."""
    i = np.arange(out, dtype=np.float64)
    length = scale * size  # not rounded: what the scale says
    if mode == "align_corners":
        return i * (size - 1) / (length - 1) if length != 1 else i * 0
    if mode == "asymmetric":
        return i / scale
    if mode == "tf_crop_and_resize":
        first, last = roi
        if out > 1:
            return first * (size - 1) + i * (last - first) * (size - 1) / (length - 1)
        return np.full(out, 0.5 * (first + last) * (size - 1))
    positions = (i + 0.5) / scale - 0.5
    if mode == "pytorch_half_pixel" and length <= 1:
        return i * 0
    if (
        mode == "half_pixel_symmetric"
    ):  # the centre stays where it is though the output is rounded down
        positions += size / 2 * (1 - out / length)
    return positions


def matrix(out: int, size: int, scale: float, roi: tuple[float, float], call: Call) -> np.ndarray:
    """[out, size] weights of one axis; a row of NaN marks a position outside the operand that is to
    be filled."""
    coordinate = str(call.attr("coordinate_transformation_mode", "half_pixel"))
    mode = str(call.attr("mode", "nearest"))
    positions = _positions(out, size, scale, roi, coordinate)
    rows = np.zeros((out, size))
    if mode == "nearest":
        picked = np.clip(
            _rounded(positions, str(call.attr("nearest_mode", "round_prefer_floor"))), 0, size - 1
        ).astype(int)
        rows[np.arange(out), picked] = 1
    else:
        kernel, reach = (
            (_linear, 1)
            if mode == "linear"
            else (_cubic(float(call.attr("cubic_coeff_a", -0.75))), 2)
        )
        shrink = min(scale, 1.0) if call.attr("antialias", 0) else 1.0
        span = int(np.ceil(reach / shrink)) + 1
        taps = np.floor(positions)[:, None] + np.arange(-span, span + 1)
        weights = kernel((taps - positions[:, None]) * shrink)
        if call.attr("exclude_outside", 0):
            weights = np.where((taps >= 0) & (taps < size), weights, 0.0)
        weights = weights / weights.sum(1, keepdims=True)
        np.add.at(rows, (np.arange(out)[:, None], np.clip(taps, 0, size - 1).astype(int)), weights)
    if coordinate == "tf_crop_and_resize":
        rows[(positions < 0) | (positions > size - 1)] = np.nan
    return rows


def _sizes(
    call: Call, shape: tuple[int, ...], axes: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Output extent and scale per axis in `axes`."""
    scales, sizes = call.get(2), call.get(3)
    if scales is not None and as_array(scales).size:
        factors = [float(s) for s in as_array(scales)]
        return [int(np.floor(shape[a] * s)) for a, s in zip(axes, factors, strict=True)], factors
    if sizes is None:
        raise Refused("neither scales nor sizes are given")
    goal = [int(n) for n in as_array(sizes)]
    policy = call.attr("keep_aspect_ratio_policy", "stretch")
    ratios = [n / shape[a] for a, n in zip(axes, goal, strict=True)]
    if policy == "stretch":
        return goal, ratios
    one = (min if policy == "not_larger" else max)(ratios)
    return [int(np.floor(one * shape[a] + 0.5)) for a in axes], [one] * len(goal)


@handles("Resize", since=11)
def resize(call: Call) -> Value:
    """The operand sampled at other positions along some axes."""
    x = as_array(call.get(0))
    axes = [a % x.ndim for a in call.attr("axes", range(x.ndim))]
    outs, scales = _sizes(call, x.shape, axes)
    roi = (
        [0.0] * len(axes) + [1.0] * len(axes)
        if call.get(1) is None or not as_array(call.get(1)).size
        else as_array(call.get(1)).tolist()
    )
    resized = x.astype(np.float64)
    for k, axis in enumerate(axes):
        if (
            outs[k] == x.shape[axis]
            and scales[k] == 1.0
            and call.attr("coordinate_transformation_mode") != "tf_crop_and_resize"
        ):
            continue
        weights = matrix(outs[k], x.shape[axis], scales[k], (roi[k], roi[k + len(axes)]), call)
        resized = np.moveaxis(np.tensordot(weights, resized, (1, axis)), 0, axis)
    filled = np.where(np.isnan(resized), float(call.attr("extrapolation_value", 0.0)), resized)
    return (np.rint(filled) if x.dtype.kind in "iu" else filled).astype(x.dtype)
