"""The oracle's cases of sampled images, windows with indices, transforms and caches."""

from __future__ import annotations

import numpy as np

from tests.ops.oracle import Case

RNG = np.random.default_rng(19)


def grid(*shape: int) -> np.ndarray:
    """Positions, some of them outside."""
    return RNG.uniform(-1.3, 1.3, shape).astype(np.float32)


def ints(high: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, high, shape).astype(np.int32)


def windows() -> list[Case]:
    window = {
        "kernel_shape": (3, 2),
        "strides": (2, 2),
        "pads": (1, 0, 1, 0),
        "dilations": (1, 1),
        "ceil_mode": 0,
    }
    x, y = (8, 12, 9, 10), (8, 12, 5, 5)
    plane = np.argsort(RNG.normal(size=(8, 12, 80)), -1)[..., :20]
    where = (plane + (np.arange(96) * 80).reshape(8, 12, 1)).reshape(8, 12, 4, 5).astype(np.int32)
    return [
        Case("lp-pool", "LpPool", (x,), (y,), {**window, "p": 3.0}),
        Case(
            "max-pool-indices",
            "MaxPoolIndices",
            (x,),
            (y, y),
            {**window, "storage_order": 0},
            ("float32", "int32"),
        ),
        Case(
            "max-unpool",
            "MaxUnpool",
            ((8, 12, 4, 5), where),
            ((8, 12, 8, 10),),
            {"extents": (8, 10)},
        ),
        Case(
            "col2im",
            "Col2Im",
            ((8, 72, 20),),
            ((8, 12, 9, 10),),
            {
                "image": (9, 10),
                "block": (3, 2),
                "blocks": (4, 5),
                "strides": (2, 2),
                "pads": (0, 0, 0, 0),
                "dilations": (1, 1),
            },
        ),
    ]


def samples() -> list[Case]:
    plain = {"mode": "linear", "padding": "zeros", "align_corners": 0}
    image, points = (8, 12, 7, 9), grid(8, 4, 6, 2)
    cases = [
        Case(
            f"grid-sample-{mode}-{padding}",
            "GridSample",
            (image, points),
            ((8, 12, 4, 6),),
            {**plain, "mode": mode, "padding": padding, "align_corners": corners},
            frozen=(1,) if mode == "nearest" else (),
        )
        for mode, padding, corners in (
            ("cubic", "border", 1),
            ("nearest", "zeros", 0),
            ("linear", "reflection", 0),
        )
    ]
    corners = RNG.uniform(0, 9, (16, 2)).astype(np.float32)
    rois = np.concatenate([corners, corners + RNG.uniform(1, 9, (16, 2)).astype(np.float32)], 1)
    align = {"cells": (3, 2), "scale": 0.5, "ratio": 2, "half_pixel": 1, "most": 0}
    numbered = np.concatenate([ints(5, 16, 1).astype(np.float32), rois], 1)
    return [
        *cases,
        Case(
            "grid-sample-volume",
            "GridSample",
            ((8, 12, 3, 4, 5), grid(8, 2, 4, 6, 3)),
            ((8, 12, 2, 4, 6),),
            plain,
        ),
        Case("roi-align", "RoiAlign", ((5, 12, 7, 9), rois, ints(5, 16)), ((16, 12, 3, 2),), align),
        Case(
            "roi-align-max",
            "RoiAlign",
            ((5, 12, 7, 9), rois, ints(5, 16)),
            ((16, 12, 3, 2),),
            {**align, "half_pixel": 0, "most": 1},
        ),
        Case(
            "max-roi-pool",
            "MaxRoiPool",
            ((5, 12, 7, 9), numbered),
            ((16, 12, 3, 2),),
            {"cells": (3, 2), "scale": 0.5},
            frozen=(1,),
        ),
    ]


def deformed() -> list[Case]:
    window = {"strides": (1, 1), "pads": (1, 1, 1, 1), "dilations": (1, 1)}
    offset, mask = (
        RNG.normal(0, 0.6, (8, 72, 5, 8)).astype(np.float32),
        RNG.uniform(0, 1, (8, 36, 5, 8)).astype(np.float32),
    )
    x, out = (8, 4, 5, 8), (8, 16, 5, 8)
    return [
        Case(
            "deform-conv-mask",
            "DeformConv",
            (x, (16, 4, 3, 3), offset[:, :18], mask[:, :9]),
            (out,),
            {**window, "group": 1, "offset_group": 1},
        ),
        Case(
            "deform-conv-moved",
            "DeformConv",
            (x, (16, 4, 3, 3), offset, mask),
            (out,),
            {**window, "group": 1, "offset_group": 4},
        ),
        Case(
            "deform-conv-groups",
            "DeformConv",
            (x, (16, 1, 3, 3), offset, mask),
            (out,),
            {**window, "group": 4, "offset_group": 4},
        ),
        Case(
            "deform-conv-shared",
            "DeformConv",
            (x, (16, 1, 3, 3), offset[:, :18]),
            (out,),
            {**window, "group": 4, "offset_group": 1},
        ),
    ]


def lines() -> list[Case]:
    steps = {"axis": 1, "length": 9, "inverse": 0, "onesided": 0}
    lengths = np.array([6, 5, 1, 3, 2, 6, 4, 0], np.int32)
    return [
        Case("dft", "DFT", ((8, 9, 12, 2),), ((8, 9, 12, 2),), steps),
        Case(
            "dft-one-sided",
            "DFT",
            ((8, 9, 12, 1),),
            ((8, 6, 12, 2),),
            {**steps, "length": 10, "onesided": 1},
        ),
        Case(
            "dft-back",
            "DFT",
            ((8, 6, 12, 2),),
            ((8, 10, 12, 1),),
            {**steps, "length": 10, "inverse": 1, "onesided": 1},
        ),
        Case(
            "cumprod-back",
            "CumProd",
            ((8, 6, 12),),
            ((8, 6, 12),),
            {"axis": 1, "exclusive": 1, "reverse": 1},
        ),
        Case(
            "reverse-sequence-batch",
            "ReverseSequence",
            ((8, 6, 12), lengths),
            ((8, 6, 12),),
            {"time_axis": 1, "batch_axis": 0},
        ),
        Case(
            "tensor-scatter",
            "TensorScatter",
            ((8, 4, 9, 5), (8, 4, 3, 5), ints(6, 8)),
            ((8, 4, 9, 5),),
            {"axis": 2, "circular": 0},
        ),
        Case("det", "Det", ((8, 12, 3, 3),), ((8, 12),), {}),
    ]


def sample_cases() -> list[Case]:
    """All of this file."""
    return [*windows(), *samples(), *deformed(), *lines()]
