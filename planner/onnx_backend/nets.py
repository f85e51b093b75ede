"""Layers in forms that programs do not have: pools that say where the maximum was, norms of windows, deformable convolution."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.onnx_backend.table import Call, Value, as_array, handles


def _window(call: Call, sizes: tuple[int, ...]) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """kernel, strides, dilations, begin pads and output extents of a pool."""
    kernel = list(call.attr("kernel_shape"))
    n = len(kernel)
    strides, dilations = list(call.attr("strides", [1] * n)), list(call.attr("dilations", [1] * n))
    pads = list(call.attr("pads", [0] * 2 * n))
    auto, ceil = call.attr("auto_pad", "NOTSET"), bool(call.attr("ceil_mode", 0))
    outs = []
    for k in range(n):
        span = dilations[k] * (kernel[k] - 1) + 1
        if auto.startswith("SAME"):
            out = -(-sizes[k] // strides[k])
            total = max(0, (out - 1) * strides[k] + span - sizes[k])
            pads[k] = total // 2 if auto == "SAME_UPPER" else total - total // 2
        else:
            if auto == "VALID":
                pads[k] = pads[n + k] = 0
            room = sizes[k] + pads[k] + pads[n + k] - span
            out = (-(-room // strides[k]) if ceil else room // strides[k]) + 1
            if ceil and (out - 1) * strides[k] >= sizes[k] + pads[k]:
                out -= 1  # no window starts in the end padding
        outs.append(out)
    return kernel, strides, dilations, pads[:n], outs


def _taps(x: np.ndarray, call: Call, fill: float) -> tuple[np.ndarray, np.ndarray]:
    """[taps, N, C, out...] values under the window, `fill` outside; and [taps, out...] flat positions, -1 outside."""
    kernel, strides, dilations, begins, outs = _window(call, x.shape[2:])
    sizes = x.shape[2:]
    values, places = [], []
    for tap in itertools.product(*map(range, kernel)):
        axes = [np.arange(o) * s + t * d - b for o, s, t, d, b in zip(outs, strides, tap, dilations, begins, strict=True)]
        grid = np.meshgrid(*axes, indexing="ij")
        inside = np.logical_and.reduce([(g >= 0) & (g < n) for g, n in zip(grid, sizes, strict=True)])
        clipped = [np.clip(g, 0, n - 1) for g, n in zip(grid, sizes, strict=True)]
        values.append(np.where(inside, _at(x, clipped), x.dtype.type(fill)))
        places.append(np.where(inside, np.ravel_multi_index(clipped, sizes), -1))
    return np.stack(values), np.stack(places)


def _at(x: np.ndarray, index: Sequence[np.ndarray]) -> np.ndarray:
    """x [N, C, ...] at positions per spatial dim."""
    where: tuple[Any, ...] = (slice(None), slice(None), *index)
    return x[where]


@handles("MaxPool")
def max_pool(call: Call) -> tuple[Value, ...]:
    """Maxima under a window, and where each was in the whole flat tensor (`storage_order` 1: columns first within a plane)."""
    x = as_array(call.get(0))
    low = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
    values, places = _taps(x, call, low)
    best = np.argmax(values, 0)
    out = np.take_along_axis(values, best[None], 0)[0]
    spread = np.broadcast_to(places[:, None, None], values.shape)
    at = np.take_along_axis(spread, best[None], 0)[0]
    sizes = x.shape[2:]
    if call.attr("storage_order", 0):
        at = np.ravel_multi_index(np.unravel_index(at, sizes), sizes, order="F")
    plane = int(np.prod(sizes))
    first = (np.arange(x.shape[0] * x.shape[1]) * plane).reshape(*x.shape[:2], *[1] * len(sizes))
    return out, (at + first).astype(np.int64)


@handles("LpPool")
def lp_pool(call: Call) -> Value:
    """The p-norm of what is under a window."""
    x = as_array(call.get(0))
    p = float(call.attr("p", 2))
    values, _ = _taps(x, call, 0.0)
    return (np.sum(np.abs(values) ** p, 0) ** (1 / p)).astype(x.dtype)


@handles("GlobalLpPool")
def global_lp_pool(call: Call) -> Value:
    """The p-norm over space."""
    x, p = as_array(call.get(0)), float(call.attr("p", 2))
    return (np.sum(np.abs(x) ** p, tuple(range(2, x.ndim)), keepdims=True) ** (1 / p)).astype(x.dtype)


@handles("DeformConv")
def deform_conv(call: Call) -> Value:
    """Convolution whose taps are moved by offsets [N, groups * taps * 2, ...], read bilinearly, and scaled by a mask."""
    x, w, offset = (as_array(v) for v in call.inputs[:3])
    bias, mask = call.get(3), call.get(4)
    groups, moved = int(call.attr("group", 1)), int(call.attr("offset_group", 1))
    strides, dilations, pads = call.attr("strides", [1, 1]), call.attr("dilations", [1, 1]), call.attr("pads", [0] * 4)
    kernel, (rows, columns) = w.shape[2:], offset.shape[2:]
    n, channels = x.shape[:2]
    shift = offset.reshape(n, moved, *kernel, 2, rows, columns)
    weight = np.ones((n, moved, *kernel, rows, columns)) if mask is None else as_array(mask).reshape(n, moved, *kernel, rows, columns)
    patches = np.zeros((n, channels, *kernel, rows, columns))
    for b, c in itertools.product(range(n), range(channels)):
        g = c * moved // channels
        for i, j in itertools.product(range(kernel[0]), range(kernel[1])):
            y = np.arange(rows)[:, None] * strides[0] - pads[0] + i * dilations[0] + shift[b, g, i, j, 0]
            z = np.arange(columns)[None] * strides[1] - pads[1] + j * dilations[1] + shift[b, g, i, j, 1]
            patches[b, c, i, j] = _bilinear(x[b, c], y, z) * weight[b, g, i, j]
    own = patches.reshape(n, groups, channels // groups, *kernel, rows, columns)
    filters = w.reshape(groups, w.shape[0] // groups, *w.shape[1:])
    out = np.einsum("bgcijrs,gocij->bgors", own, filters).reshape(n, w.shape[0], rows, columns)
    return (out if bias is None else out + as_array(bias)[:, None, None]).astype(x.dtype)


def _bilinear(image: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """An image at real positions; zero outside."""
    total = np.zeros(np.broadcast_shapes(y.shape, x.shape))
    for dy, dx in itertools.product((0, 1), repeat=2):
        iy, ix = np.floor(y).astype(int) + dy, np.floor(x).astype(int) + dx
        inside = (iy >= 0) & (iy < image.shape[0]) & (ix >= 0) & (ix < image.shape[1])
        total += np.where(inside, image[np.clip(iy, 0, image.shape[0] - 1), np.clip(ix, 0, image.shape[1] - 1)], 0) * (1 - np.abs(y - iy)) * (1 - np.abs(x - ix))
    return total
