"""Sampling of images: grids, regions, windows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from planner.onnx_backend.table import Call, Refused, Value, as_array, handles


def _reflected(at: np.ndarray, low: float, high: float) -> np.ndarray:
    """Positions folded back into [low, high]."""
    span = high - low
    if span <= 0:
        return np.full_like(at, low)
    folded = np.mod(at - low, 2 * span)
    return low + np.where(folded > span, 2 * span - folded, folded)


def _pixels(x: np.ndarray, index: list[np.ndarray], padding: str, corners: bool) -> np.ndarray:
    """x [C, ...] at integer positions per spatial dim: [C, points]; what lies outside is zero, the border, or reflected."""
    inside = np.ones(index[0].shape, bool)
    clipped = []
    for at, n in zip(index, x.shape[1:], strict=True):
        if padding == "reflection":
            at = np.rint(_reflected(at.astype(np.float64), 0.0 if corners else -0.5, n - 1.0 if corners else n - 0.5)).astype(int)
        inside &= (at >= 0) & (at < n)
        clipped.append(np.clip(at, 0, n - 1))
    found = x[(slice(None), *clipped)]
    return np.where(inside, found, 0) if padding == "zeros" else found


def _taps(t: np.ndarray, mode: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """First neighbour's offset and the weights of the neighbours of positions with fraction t."""
    if mode == "linear":
        return np.zeros(1, int), [1 - t, t]
    a = -0.75
    near = lambda d: ((a + 2) * d - (a + 3)) * d * d + 1  # noqa: E731
    far = lambda d: ((a * d - 5 * a) * d + 8 * a) * d - 4 * a  # noqa: E731
    return np.full(1, -1), [far(t + 1), near(t), near(1 - t), far(2 - t)]


@handles("GridSample")
def grid_sample(call: Call) -> Value:
    """x [N, C, ...] at the positions a grid [N, ..., dims] gives, -1 and 1 being the ends; the grid's last dim runs from the innermost dim out."""
    x, grid = as_array(call.get(0)), as_array(call.get(1))
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(call.attr("mode", "linear"), call.attr("mode", "linear"))
    padding, corners = call.attr("padding_mode", "zeros"), bool(call.attr("align_corners", 0))
    out = np.zeros((*x.shape[:2], *grid.shape[1:-1]), np.float64)
    for n in range(x.shape[0]):
        places = []
        for size, g in zip(x.shape[2:], np.moveaxis(grid[n].astype(np.float64), -1, 0)[::-1], strict=True):
            at = (g + 1) / 2 * (size - 1) if corners else ((g + 1) * size - 1) / 2
            if padding == "border":
                at = np.clip(at, 0, size - 1)
            elif padding == "reflection":
                at = _reflected(at, 0.0 if corners else -0.5, size - 1.0 if corners else size - 0.5)
            places.append(at)
        if mode == "nearest":
            out[n] = _pixels(x[n], [np.rint(at).astype(int) for at in places], padding, corners)
            continue
        first = [np.floor(at) for at in places]
        taps = [_taps(at - f, mode) for at, f in zip(places, first, strict=True)]
        for combination in itertools.product(*(range(len(w)) for _, w in taps)):
            index = [(f + low + k).astype(int) for f, (low, _), k in zip(first, taps, combination, strict=True)]
            weight = np.prod([w[k] for (_, w), k in zip(taps, combination, strict=True)], axis=0)
            out[n] += weight * _pixels(x[n], index, padding, corners)
    return out.astype(x.dtype)


@handles("RoiAlign", since=16)
def roi_align(call: Call) -> Value:
    """Averages (or maxima) of bilinear samples in the cells of a grid over each region (x0, y0, x1, y1)."""
    return _roi_align(call, 0.5 if call.attr("coordinate_transformation_mode", "half_pixel") == "half_pixel" else 0.0)


@handles("RoiAlign", since=10)
def roi_align_10(call: Call) -> Value:
    """As later, without the shift by half a pixel."""
    return _roi_align(call, 0.0)


def _roi_align(call: Call, shift: float) -> Value:
    x, regions, samples = (as_array(v) for v in call.inputs)
    rows, columns = int(call.attr("output_height", 1)), int(call.attr("output_width", 1))
    scale, ratio, most = float(call.attr("spatial_scale", 1.0)), int(call.attr("sampling_ratio", 0)), call.attr("mode", "avg") == "max"
    out = np.zeros((len(regions), x.shape[1], rows, columns), np.float64)
    for own, region, sample in zip(out, regions.astype(np.float64) * scale - shift, samples.tolist(), strict=True):
        left, top, right, bottom = region
        width, height = right - left, bottom - top
        if not shift:
            width, height = max(width, 1.0), max(height, 1.0)
        ys = _cell_points(top, height, rows, ratio)
        xs = _cell_points(left, width, columns, ratio)
        weights, pixels = zip(_corners(ys, x.shape[2]), _corners(xs, x.shape[3]), strict=True)
        parts = []
        for (wy, iy), (wx, ix) in itertools.product(*_pairs(weights, pixels)):
            parts.append(x[sample][:, iy][:, :, :, ix] * (wy[:, :, None, None] * wx))
        points = np.max(parts, 0) if most else np.sum(parts, 0)  # the maximum is over weighted neighbours, as ONNX defines it
        own[:] = points.max((2, 4)) if most else points.mean((2, 4))
    return out.astype(x.dtype)


def _pairs(weights: Any, pixels: Any) -> Any:
    return [list(zip(w, p, strict=True)) for w, p in zip(weights, pixels, strict=True)]


def _cell_points(start: float, length: float, cells: int, ratio: int) -> np.ndarray:
    """[cells, points] sample positions along one dim."""
    step = length / cells
    count = ratio if ratio > 0 else max(int(np.ceil(step)), 1)
    return start + (np.arange(cells)[:, None] + (np.arange(count) + 0.5) / count) * step


def _corners(at: np.ndarray, size: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Weights and indices of the two neighbours of each position; positions beyond the border by more than one count as zero."""
    outside = (at < -1) | (at > size)
    at = np.clip(at, 0, size - 1)
    low = np.floor(at).astype(int)
    part = at - low
    return [np.where(outside, 0, 1 - part), np.where(outside, 0, part)], [low, np.minimum(low + 1, size - 1)]


@handles("Col2Im")
def col2im(call: Call) -> Value:
    """Sliding blocks [N, C * window, blocks] added up into an image [N, C, ...]: the transpose of taking them apart."""
    x, size, window = as_array(call.get(0)), as_array(call.get(1)).tolist(), as_array(call.get(2)).tolist()
    n = len(size)
    strides, dilations, pads = (call.attr(k, [d] * c) for k, d, c in (("strides", 1, n), ("dilations", 1, n), ("pads", 0, 2 * n)))
    wide = [size[k] + pads[k] + pads[n + k] for k in range(n)]
    blocks = [(wide[k] - dilations[k] * (window[k] - 1) - 1) // strides[k] + 1 for k in range(n)]
    columns = x.reshape(x.shape[0], -1, *window, *blocks)
    out = np.zeros((*columns.shape[:2], *wide), x.dtype)
    for tap in itertools.product(*map(range, window)):
        where = tuple(slice(t * d, t * d + s * b, s) for t, d, s, b in zip(tap, dilations, strides, blocks, strict=True))
        out[(slice(None), slice(None), *where)] += columns[(slice(None), slice(None), *tap)]  # type: ignore[arg-type]
    return out[(slice(None), slice(None), *(slice(pads[k], pads[k] + size[k]) for k in range(n)))]


@handles("MaxUnpool")
def max_unpool(call: Call) -> Value:
    """Values put back where a MaxPool found them; zeros elsewhere."""
    x, where = as_array(call.get(0)), as_array(call.get(1))
    kernel = call.attr("kernel_shape")
    n = len(kernel)
    strides, pads = call.attr("strides", [1] * n), call.attr("pads", [0] * 2 * n)
    shape = (*x.shape[:2], *((x.shape[2 + k] - 1) * strides[k] + kernel[k] - pads[k] - pads[n + k] for k in range(n)))
    flat = np.zeros(int(np.prod(shape)), x.dtype)
    flat[where.reshape(-1)] = x.reshape(-1)
    made = flat.reshape(shape)
    if call.get(2) is None:
        return made
    out = np.zeros(tuple(as_array(call.get(2)).tolist()), x.dtype)
    out[tuple(slice(0, s) for s in shape)] = made
    return out


@handles("ImageDecoder")
def decode(call: Call) -> Value:
    """An encoded image as [height, width, channels] bytes; pillow does the decoding."""
    import io

    try:
        from PIL import Image
    except ImportError:
        raise Refused("ImageDecoder needs pillow, which is not installed") from None
    image = Image.open(io.BytesIO(as_array(call.get(0)).tobytes()))
    layout = call.attr("pixel_format", "RGB")
    if layout == "Grayscale":
        return np.asarray(image.convert("L"))[..., None]
    pixels = np.asarray(image.convert("RGB"))
    return pixels if layout == "RGB" else np.ascontiguousarray(pixels[..., ::-1])


@handles("MaxRoiPool")
def max_roi_pool(call: Call) -> Value:
    """Maxima in the cells of a grid over regions (sample, x0, y0, x1, y1) rounded to whole pixels; empty cells are zero."""
    x, regions = as_array(call.get(0)), as_array(call.get(1))
    rows, columns = call.attr("pooled_shape")
    out = np.zeros((len(regions), x.shape[1], rows, columns), x.dtype)
    for own, region in zip(out, regions, strict=True):
        left, top, right, bottom = (int(v) for v in np.floor(region[1:] * call.attr("spatial_scale", 1.0) + 0.5))
        ys, xs = _cells(top, bottom, rows, x.shape[2]), _cells(left, right, columns, x.shape[3])
        for (i, (y0, y1)), (j, (x0, x1)) in itertools.product(enumerate(ys), enumerate(xs)):
            if y0 < y1 and x0 < x1:
                own[:, i, j] = x[int(region[0]), :, y0:y1, x0:x1].max((1, 2))
    return out


def _cells(first: int, last: int, count: int, size: int) -> list[tuple[int, int]]:
    """Bounds of `count` cells over the pixels first to last, within the image."""
    step = max(last - first + 1, 1) / count
    edges = [(int(np.floor(k * step)) + first, int(np.ceil((k + 1) * step)) + first) for k in range(count)]
    return [(min(max(a, 0), size), min(max(b, 0), size)) for a, b in edges]
