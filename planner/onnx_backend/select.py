"""Selections whose size depends on data."""

from __future__ import annotations

import numpy as np

from planner.onnx_backend.table import Call, Value, as_array, handles


@handles("NonZero")
def non_zero(call: Call) -> Value:
    """Coordinates of elements that are not zero, [rank, count]."""
    return np.asarray(np.nonzero(as_array(call.get(0))), np.int64)


@handles("Compress")
def compress(call: Call) -> Value:
    """Rows (or elements of the flat tensor) where a condition holds."""
    x, condition = as_array(call.get(0)), as_array(call.get(1))
    if "axis" not in call.attrs:
        return x.reshape(-1)[np.nonzero(condition[: x.size])[0]]
    return np.take(x, np.nonzero(condition)[0], call.axis(x.ndim))


@handles("Unique")
def unique(call: Call) -> tuple[Value, ...]:
    """Distinct elements (or slices along an axis), where each first is, which each element equals,
    and how often each occurs."""
    x = as_array(call.get(0))
    axis = call.axis(x.ndim) if "axis" in call.attrs else None
    values, first, inverse, counts = np.unique(
        x, return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    inverse = inverse.reshape(-1)
    if not call.attr("sorted", 1):
        order = np.argsort(first)
        values, first, counts = (
            np.take(values, order, 0 if axis is None else axis),
            first[order],
            counts[order],
        )
        inverse = np.argsort(order)[inverse]
    return values, *(v.astype(np.int64) for v in (first, inverse, counts))


@handles("NonMaxSuppression")
def non_max_suppression(call: Call) -> Value:
    """Per sample and class, boxes by falling score that overlap no box taken before: rows of
    (sample, class, box)."""
    boxes, scores = as_array(call.get(0)), as_array(call.get(1))
    most, overlap, least = (
        None if call.get(k) is None else as_array(call.get(k)).reshape(-1)[0] for k in (2, 3, 4)
    )
    if call.attr("center_point_box", 0):
        x, y, w, h = np.moveaxis(boxes, -1, 0)
        corners = np.stack([y - h / 2, x - w / 2, y + h / 2, x + w / 2], -1)
    else:
        corners = np.concatenate(
            [
                np.minimum(boxes[..., :2], boxes[..., 2:]),
                np.maximum(boxes[..., :2], boxes[..., 2:]),
            ],
            -1,
        )
    rows: list[tuple[int, int, int]] = []
    for b in range(scores.shape[0]):
        for c in range(scores.shape[1]):
            taken: list[int] = []
            for k in np.argsort(-scores[b, c], kind="stable"):
                if len(taken) >= int(most or 0) or (least is not None and scores[b, c, k] <= least):
                    break
                if all(
                    _overlap(corners[b, k], corners[b, t]) <= float(overlap or 0.0) for t in taken
                ):
                    taken.append(int(k))
            rows += [(b, c, k) for k in taken]
    return np.asarray(rows, np.int64).reshape(-1, 3)


def _overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Intersection over union of two boxes (y0, x0, y1, x1)."""
    height, width = (max(0.0, min(a[2 + k], b[2 + k]) - max(a[k], b[k])) for k in (0, 1))
    shared = height * width
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared
    return float(shared / union) if union > 0 else 0.0
