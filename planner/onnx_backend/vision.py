"""Images: regions with as many samples as they are large, and decoding."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from planner.onnx_backend.table import Call, Refused, Value, as_array, handles


@handles("RoiAlign", since=16)
def roi_align(call: Call) -> Value:
    """Averages (or maxima) of bilinear samples in the cells of a grid over each region (x0, y0, x1,
    y1)."""
    return _roi_align(
        call,
        0.5 if call.attr("coordinate_transformation_mode", "half_pixel") == "half_pixel" else 0.0,
    )


@handles("RoiAlign", since=10)
def roi_align_10(call: Call) -> Value:
    """As later, without the shift by half a pixel."""
    return _roi_align(call, 0.0)


def _roi_align(call: Call, shift: float) -> Value:
    x, regions, samples = (as_array(v) for v in call.inputs)
    rows, columns = int(call.attr("output_height", 1)), int(call.attr("output_width", 1))
    scale, ratio, most = (
        float(call.attr("spatial_scale", 1.0)),
        int(call.attr("sampling_ratio", 0)),
        call.attr("mode", "avg") == "max",
    )
    pooled = np.zeros((len(regions), x.shape[1], rows, columns), np.float64)
    for cells, region, sample in zip(
        pooled, regions.astype(np.float64) * scale - shift, samples.tolist(), strict=True
    ):
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
        points = (
            np.max(parts, 0) if most else np.sum(parts, 0)
        )  # the maximum is over weighted neighbours, as ONNX defines it
        cells[:] = points.max((2, 4)) if most else points.mean((2, 4))
    return pooled.astype(x.dtype)


def _pairs(weights: Any, pixels: Any) -> Any:
    return [list(zip(w, p, strict=True)) for w, p in zip(weights, pixels, strict=True)]


def _cell_points(start: float, length: float, cells: int, ratio: int) -> np.ndarray:
    """[cells, points] sample positions along one dim."""
    step = length / cells
    count = ratio if ratio > 0 else max(int(np.ceil(step)), 1)
    return start + (np.arange(cells)[:, None] + (np.arange(count) + 0.5) / count) * step


def _corners(positions: np.ndarray, size: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Weights and indices of the two neighbours of each position; positions beyond the border by
    more than one count as zero."""
    outside = (positions < -1) | (positions > size)
    positions = np.clip(positions, 0, size - 1)
    low = np.floor(positions).astype(int)
    part = positions - low
    return [np.where(outside, 0, 1 - part), np.where(outside, 0, part)], [
        low,
        np.minimum(low + 1, size - 1),
    ]


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
