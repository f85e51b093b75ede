"""Operators of vision, sound and caches that few models use: windows, samples of images, Fourier
transforms, running products.

Sizes and axes that ONNX passes as operands become attributes. Operand shapes are checked here: the
result's shape follows from attributes alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from planner.reader.draft.draft import FOLD_ELEMENTS
from planner.reader.draft.shapes import ShapeError
from planner.reader.lower.call import Call, Unsupported
from planner.reader.lower.layers import add_channel_bias, pool, windows

Rule = Callable[[Call], None]


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise ShapeError(what)


def _pooled(call: Call, kernel: tuple[int, ...], attrs: dict[str, Any]) -> tuple[int, ...]:
    """Extents of a pool's result; no window starts in the end padding."""
    sizes, n = call.shape()[2:], len(kernel)
    _need(len(sizes) == n, f"a window {list(kernel)} over {list(call.shape())}")
    extents = []
    for k, size in enumerate(sizes):
        stride, low, high = attrs["strides"][k], attrs["pads"][k], attrs["pads"][n + k]
        room = size + low + high - attrs["dilations"][k] * (kernel[k] - 1) - 1
        count = (-(-room // stride) if attrs["ceil_mode"] else room // stride) + 1
        if attrs["ceil_mode"] and (count - 1) * stride >= size + low:
            count -= 1
        _need(count > 0, f"a window {list(kernel)} larger than {list(sizes)}")
        extents.append(count)
    return (*call.shape()[:2], *extents)


def _window_attrs(call: Call, kernel: tuple[int, ...]) -> dict[str, Any]:
    return {
        **windows(call, kernel, call.shape()[2:]),
        "kernel_shape": kernel,
        "ceil_mode": int(call.attr("ceil_mode", 0)),
    }


def _lp_pool(call: Call) -> None:
    if call.op == "GlobalLpPool":
        n = len(call.shape()) - 2
        kernel = call.shape()[2:]
        attrs: dict[str, Any] = {
            "strides": (1,) * n,
            "pads": (0,) * 2 * n,
            "dilations": (1,) * n,
            "kernel_shape": kernel,
            "ceil_mode": 0,
        }
    else:
        kernel = tuple(call.attr("kernel_shape"))
        attrs = _window_attrs(call, kernel)
    attrs["p"] = float(call.attr("p", 2))
    _need(attrs["p"] > 0, f"a norm with p = {attrs['p']}")
    call.result("LpPool", [call.arg(0)], attrs, shape=_pooled(call, kernel, attrs))


def _max_pool(call: Call) -> None:
    """Indices of maxima are a result of their own operator."""
    if not call.wants(1):
        pool(call)
        return
    kernel = tuple(call.attr("kernel_shape"))
    attrs = {**_window_attrs(call, kernel), "storage_order": int(call.attr("storage_order", 0))}
    call.results("MaxPoolIndices", [call.arg(0)], attrs, shape=_pooled(call, kernel, attrs))


def _max_unpool(call: Call) -> None:
    kernel, n = tuple(call.attr("kernel_shape")), len(call.attr("kernel_shape"))
    strides, pads = call.attr("strides", [1] * n), call.attr("pads", [0] * 2 * n)
    x = call.shape()
    _need(
        len(x) == n + 2 and call.shape(1) == x and len(strides) == n and len(pads) == 2 * n,
        f"indices of shape {list(call.shape(1))} for {list(x)}",
    )
    inner = (
        *x[:2],
        *((x[2 + k] - 1) * strides[k] + kernel[k] - pads[k] - pads[n + k] for k in range(n)),
    )
    _need(min(inner) > 0, f"a result of shape {list(inner)}")
    y = call.emit(
        "MaxUnpool",
        call.inputs[:2],
        {"extents": inner[2:]},
        shape=inner,
        out="" if call.has(2) else call.name(0),
    )
    if call.has(2):
        wanted = tuple(call.ints(2, "the output shape"))
        _need(
            len(wanted) == n + 2
            and wanted[:2] == x[:2]
            and all(a <= b for a, b in zip(inner, wanted, strict=True)),
            f"{list(inner)} does not fit {list(wanted)}",
        )
        room = tuple(b - a for a, b in zip(inner, wanted, strict=True))
        y = call.emit(
            "Pad",
            [y],
            {"pads": (*(0,) * (n + 2), *room), "mode": "constant", "value": 0.0},
            out=call.name(0),
        )
    call.bind(y)


def _col2im(call: Call) -> None:
    size, window = call.ints(1, "the image's shape"), tuple(call.ints(2, "the block's shape"))
    n = len(size)
    _need(len(window) == n, f"blocks {list(window)} of an image {size}")
    attrs = windows(call, window, window)
    wide = [size[k] + attrs["pads"][k] + attrs["pads"][n + k] for k in range(n)]
    blocks = [
        (wide[k] - attrs["dilations"][k] * (window[k] - 1) - 1) // attrs["strides"][k] + 1
        for k in range(n)
    ]
    shape, taps = call.shape(), math.prod(window)
    _need(
        len(shape) == 3
        and shape[1] % taps == 0
        and shape[2] == math.prod(blocks)
        and min(blocks) > 0,
        f"{blocks} blocks of {list(window)} are not {list(shape)}",
    )
    attrs |= {"image": tuple(size), "block": window, "blocks": tuple(blocks)}
    call.result("Col2Im", [call.arg(0)], attrs, shape=(shape[0], shape[1] // taps, *size))


_MODES = {
    "bilinear": "linear",
    "bicubic": "cubic",
    "linear": "linear",
    "cubic": "cubic",
    "nearest": "nearest",
}


def _grid_sample(call: Call) -> None:
    x, grid = call.shape(), call.shape(1)
    n = len(x) - 2
    _need(
        n > 0 and len(grid) == n + 2 and grid[0] == x[0] and grid[-1] == n,
        f"a grid {list(grid)} over {list(x)}",
    )
    attrs = {
        "mode": _MODES[call.attr("mode", "linear")],
        "padding": call.attr("padding_mode", "zeros"),
        "align_corners": int(call.attr("align_corners", 0)),
    }
    if attrs["padding"] not in ("zeros", "border", "reflection"):
        raise Unsupported(f"padding mode {attrs['padding']!r}")
    call.result("GridSample", call.inputs[:2], attrs, shape=(*x[:2], *grid[1:-1]))


def _roi_align(call: Call) -> None:
    x, rois = call.shape(), call.shape(1)
    _need(
        len(x) == 4 and len(rois) == 2 and rois[1] == 4 and call.shape(2) == rois[:1],
        f"regions {list(rois)} of {list(call.shape(2))} images over {list(x)}",
    )
    rows, columns = int(call.attr("output_height", 1)), int(call.attr("output_width", 1))
    half = (
        call.opset >= 16
        and call.attr("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    )
    attrs = {
        "cells": (rows, columns),
        "scale": float(call.attr("spatial_scale", 1.0)),
        "ratio": int(call.attr("sampling_ratio", 0)),
        "half_pixel": int(half),
        "most": int(call.attr("mode", "avg") == "max"),
    }
    _need(min(rows, columns) > 0, f"cells {rows} x {columns}")
    call.result("RoiAlign", call.inputs[:3], attrs, shape=(rois[0], x[1], rows, columns))


def _max_roi_pool(call: Call) -> None:
    x, rois, cells = call.shape(), call.shape(1), tuple(call.attr("pooled_shape"))
    _need(
        len(x) == 4 and len(rois) == 2 and rois[1] == 5 and len(cells) == 2 and min(cells) > 0,
        f"regions {list(rois)} over {list(x)}",
    )
    call.result(
        "MaxRoiPool",
        call.inputs[:2],
        {"cells": cells, "scale": float(call.attr("spatial_scale", 1.0))},
        shape=(rois[0], x[1], *cells),
    )


def _deform_conv(call: Call) -> None:
    x, w, offset = call.shape(), call.shape(1), call.shape(2)
    if len(x) != 4:
        raise Unsupported(f"deformable convolution over {len(x) - 2} dims")
    kernel, taps = w[2:], w[2] * w[3]
    attrs: dict[str, Any] = {
        **windows(call, kernel, x[2:]),
        "group": int(call.attr("group", 1)),
        "offset_group": int(call.attr("offset_group", 1)),
    }
    extents = [
        (
            x[2 + k]
            + attrs["pads"][k]
            + attrs["pads"][2 + k]
            - attrs["dilations"][k] * (kernel[k] - 1)
            - 1
        )
        // attrs["strides"][k]
        + 1
        for k in range(2)
    ]
    groups, moved = attrs["group"], attrs["offset_group"]
    _need(
        min(groups, moved) > 0
        and x[1] == w[1] * groups
        and w[0] % groups == 0
        and x[1] % moved == 0,
        f"{groups} and {moved} groups of {list(x)} and {list(w)}",
    )
    _need(
        offset == (x[0], moved * taps * 2, *extents),
        f"offsets {list(offset)} for a result of {extents}",
    )
    operands = list(call.inputs[:3])
    if call.has(4):
        _need(
            call.shape(4) == (x[0], moved * taps, *extents),
            f"a mask {list(call.shape(4))} for a result of {extents}",
        )
        operands.append(call.arg(4))
    y = call.emit(
        "DeformConv",
        operands,
        attrs,
        shape=(x[0], w[0], *extents),
        out="" if call.has(3) else call.name(0),
    )
    call.bind(add_channel_bias(call, y, call.arg(3)) if call.has(3) else y)


def _dft(call: Call) -> None:
    shape = call.shape()
    axis = (
        call.ints(2, "the axis")[0]
        if call.has(2)
        else int(call.attr("axis", 1))
        if call.opset < 20
        else -2
    )
    axis = call.axis(axis, len(shape))
    length = call.ints(1, "the length")[0] if call.has(1) else None
    _transform(
        call,
        call.arg(0),
        axis,
        length,
        bool(call.attr("inverse", 0)),
        bool(call.attr("onesided", 0)),
    )


def _transform(
    call: Call, x: str, axis: int, length: int | None, inverse: bool, onesided: bool
) -> None:
    """Pairs in the last dim; one-sided: half of the frequencies out, or in."""
    shape = call.draft.shape(x)
    _need(
        axis < len(shape) - 1 and shape[-1] in (1, 2),
        f"a transform along dim {axis} of {list(shape)}",
    )
    size = (
        length
        if length is not None
        else 2 * (shape[axis] - 1)
        if inverse and onesided
        else shape[axis]
    )
    _need(size > 0, f"a transform of length {size}")
    bins = size // 2 + 1 if onesided and not inverse else size
    attrs = {"axis": axis, "length": size, "inverse": int(inverse), "onesided": int(onesided)}
    call.result(
        "DFT",
        [x],
        attrs,
        shape=(*shape[:axis], bins, *shape[axis + 1 : -1], 1 if inverse and onesided else 2),
    )


def _stft(call: Call) -> None:
    """Frames are gathered, weighted and transformed."""
    x, shape = call.arg(0), call.shape()
    if len(shape) == 2:
        x, shape = call.emit("Reshape", [x], shape=(*shape, 1)), (*shape, 1)
    _need(len(shape) == 3, f"a signal of shape {list(shape)}")
    step = call.ints(1, "the step between frames")[0]
    size = (
        call.ints(3, "the length of a frame")[0]
        if call.has(3)
        else call.shape(2)[0]
        if call.has(2)
        else 0
    )
    _need(
        0 < size <= shape[1] and step > 0, f"frames of {size} samples, {step} apart, of {shape[1]}"
    )
    starts = np.arange(0, shape[1] - size + 1, step)
    if starts.size * size > FOLD_ELEMENTS:
        raise Unsupported(f"{starts.size} frames of {size} samples: too many to list")
    frames = call.emit(
        "Gather",
        [x, call.constant((starts[:, None] + np.arange(size)).astype(np.int64), "frames")],
        {"axis": 1},
    )
    if call.has(2):
        _need(
            call.shape(2) == (size,),
            f"a window of shape {list(call.shape(2))} for frames of {size}",
        )
        frames = call.emit("Mul", [frames, call.emit("Reshape", [call.arg(2)], shape=(size, 1))])
    _transform(call, frames, 2, None, False, bool(call.attr("onesided", 1)))


def _cum_prod(call: Call) -> None:
    axis = call.axis(call.ints(1, "the axis")[0], len(call.shape()))
    call.result(
        "CumProd",
        [call.arg(0)],
        {
            "axis": axis,
            "exclusive": int(call.attr("exclusive", 0)),
            "reverse": int(call.attr("reverse", 0)),
        },
    )


def _reverse_sequence(call: Call) -> None:
    shape = call.shape()
    time, batch = (
        call.axis(call.attr(name, default), len(shape))
        for name, default in (("time_axis", 0), ("batch_axis", 1))
    )
    _need(
        time != batch and call.shape(1) == (shape[batch],),
        f"lengths {list(call.shape(1))} for dim {batch} of {list(shape)}",
    )
    call.result("ReverseSequence", call.inputs[:2], {"time_axis": time, "batch_axis": batch})


def _tensor_scatter(call: Call) -> None:
    past, update = call.shape(), call.shape(1)
    axis = call.axis(call.attr("axis", -2), len(past))
    fits = (
        len(past) == len(update)
        and axis > 0
        and all(
            a == b or (k == axis and a >= b)
            for k, (a, b) in enumerate(zip(past, update, strict=True))
        )
    )
    _need(
        fits and (not call.has(2) or call.shape(2) == past[:1]),
        f"an update {list(update)} of a cache {list(past)} along dim {axis}",
    )
    attrs = {"axis": axis, "circular": int(call.attr("mode", "linear") == "circular")}
    call.result(
        "TensorScatter", [call.arg(0), call.arg(1), *([call.arg(2)] if call.has(2) else [])], attrs
    )


def _det(call: Call) -> None:
    shape = call.shape()
    _need(len(shape) > 1 and shape[-1] == shape[-2], f"determinants of {list(shape)}")
    call.result("Det", [call.arg(0)], {}, shape=shape[:-2])


RARE: dict[str, Rule] = {
    "LpPool": _lp_pool,
    "GlobalLpPool": _lp_pool,
    "MaxPool": _max_pool,
    "MaxUnpool": _max_unpool,
    "Col2Im": _col2im,
    "GridSample": _grid_sample,
    "RoiAlign": _roi_align,
    "MaxRoiPool": _max_roi_pool,
    "DeformConv": _deform_conv,
    "DFT": _dft,
    "STFT": _stft,
    "CumProd": _cum_prod,
    "ReverseSequence": _reverse_sequence,
    "TensorScatter": _tensor_scatter,
    "Det": _det,
}
