"""Oracle cases of kernels that exchange with their neighbours: attention on a ring of devices,
windows over images whose rows are cut."""

from __future__ import annotations

import numpy as np

from tests.ops.oracle import Case

RNG = np.random.default_rng(3)


def _flags(*shape: int) -> np.ndarray:
    """A mask that leaves some rows nothing to attend to."""
    flags = RNG.random(shape) < 0.6
    flags[..., 1, :] = False
    return flags


def row_cases() -> list[Case]:
    """Windows of every reach: to both sides, one, none; strided, dilated, grouped, transposed;
    statistics of rows."""

    def conv(
        name: str,
        x: tuple[int, ...],
        w: tuple[int, ...],
        y: tuple[int, ...],
        pads: tuple[int, ...],
        stride: int = 1,
        dilation: int = 1,
        group: int = 1,
    ) -> Case:
        n = len(pads) // 2
        return Case(
            name,
            "Conv",
            (x, w),
            (y,),
            {"strides": (stride,) * n, "pads": pads, "dilations": (dilation,) * n, "group": group},
        )

    def back(
        name: str,
        x: tuple[int, ...],
        w: tuple[int, ...],
        y: tuple[int, ...],
        pads: tuple[int, ...],
        stride: int,
        group: int = 1,
    ) -> Case:
        return Case(
            name,
            "ConvTranspose",
            (x, w),
            (y,),
            {
                "strides": (stride, stride),
                "pads": pads,
                "dilations": (1, 1),
                "group": group,
                "output_padding": (0, 0),
            },
        )

    def pool(
        name: str,
        op: str,
        x: tuple[int, ...],
        y: tuple[int, ...],
        kernel: int,
        stride: int,
        pads: tuple[int, ...],
        counted: int = 0,
    ) -> Case:
        return Case(
            name,
            op,
            (x,),
            (y,),
            {
                "kernel_shape": (kernel,) * 2,
                "strides": (stride,) * 2,
                "pads": pads,
                "dilations": (1, 1),
                "ceil_mode": 0,
                "count_include_pad": counted,
            },
        )

    image, norm = (2, 8, 16, 5), {"epsilon": 1e-5}
    return [
        conv("rows-3x3", (2, 8, 16, 6), (4, 8, 3, 3), (2, 4, 16, 6), (1, 1, 1, 1)),
        conv("rows-1x1", (2, 8, 16, 6), (4, 8, 1, 1), (2, 4, 16, 6), (0, 0, 0, 0)),
        conv("rows-7x7-stride", (2, 3, 32, 6), (4, 3, 7, 7), (2, 4, 16, 3), (3, 3, 3, 3), 2),
        conv("rows-1x1-stride", (2, 8, 16, 6), (4, 8, 1, 1), (2, 4, 8, 3), (0, 0, 0, 0), 2),
        conv("rows-2x2-patch", (2, 8, 16, 6), (4, 8, 2, 2), (2, 4, 8, 3), (0, 0, 0, 0), 2),
        conv("rows-dilated", (2, 4, 32, 6), (4, 4, 3, 3), (2, 4, 32, 6), (2, 2, 2, 2), 1, 2),
        conv("rows-grouped", (2, 8, 16, 6), (16, 2, 3, 3), (2, 16, 16, 6), (1, 1, 1, 1), 1, 1, 4),
        conv("rows-causal", (2, 8, 32), (8, 1, 4), (2, 8, 32), (3, 0), 1, 1, 8),
        conv("rows-uneven-pads", (2, 8, 16, 6), (4, 8, 4, 3), (2, 4, 16, 6), (1, 1, 2, 1)),
        conv("rows-volume", (2, 3, 8, 5, 4), (4, 3, 3, 3, 3), (2, 4, 8, 5, 4), (1, 1, 1, 1, 1, 1)),
        conv(
            "columns-where-rows-do-not-line-up",
            (2, 3, 5, 16),
            (4, 3, 3, 3),
            (2, 4, 3, 16),
            (0, 1, 0, 1),
        ),
        back("rows-up-2x2", (2, 8, 8, 3), (8, 4, 2, 2), (2, 4, 16, 6), (0, 0, 0, 0), 2),
        back("rows-up-4x4", (2, 8, 16, 3), (8, 4, 4, 4), (2, 4, 32, 6), (1, 1, 1, 1), 2),
        back("rows-up-grouped", (2, 8, 16, 6), (8, 2, 3, 3), (2, 8, 16, 6), (1, 1, 1, 1), 1, 4),
        pool("rows-max", "MaxPool", (2, 8, 16, 6), (2, 8, 8, 3), 3, 2, (1, 1, 1, 1)),
        pool("rows-max-same", "MaxPool", (2, 8, 16, 6), (2, 8, 16, 6), 5, 1, (2, 2, 2, 2)),
        pool("rows-average", "AveragePool", (2, 8, 16, 6), (2, 8, 16, 6), 3, 1, (1, 1, 1, 1)),
        pool(
            "rows-average-counted",
            "AveragePool",
            (2, 8, 16, 6),
            (2, 8, 8, 3),
            3,
            2,
            (1, 1, 1, 1),
            1,
        ),
        Case(
            "rows-nearest",
            "Resize",
            ((2, 8, 8, 3),),
            ((2, 8, 24, 9),),
            {
                "mode": "nearest",
                "coordinate_mode": "half_pixel",
                "nearest_mode": "round_prefer_floor",
                "scales": (1.0, 1.0, 3.0, 3.0),
            },
        ),
        Case("rows-instance-norm", "InstanceNormalization", (image, (8,), (8,)), (image,), norm),
        Case(
            "rows-group-norm",
            "GroupNormalization",
            (image, (8,), (8,)),
            (image,),
            {**norm, "num_groups": 4},
        ),
        Case(
            "rows-batch-norm-live",
            "BatchNormalization",
            (image, (8,), (8,), (8,), (8,)),
            (image, (8,), (8,)),
            {**norm, "momentum": 0.9, "training_mode": 1},
            frozen=(3, 4),
        ),
    ]


def neighbour_cases() -> list[Case]:
    """Every kind of mask, of heads and of causality on a ring; keys and queries of different
    numbers; several blocks of queries."""
    plain = {"scale": 0.3, "causal": 0, "guard": 0}
    causal, guarded = {**plain, "causal": 1}, {**plain, "guard": 1}
    q, k, v = (2, 4, 8, 10), (2, 4, 16, 10), (2, 4, 16, 6)
    own = ((2, 4, 16, 10), k, v)
    return [
        Case("ring", "Attention", (q, k, v), ((2, 4, 8, 6),), plain),
        Case("ring-causal", "Attention", own, ((2, 4, 16, 6),), causal),
        # Pieces of three positions, which cannot be halved, and of six and twelve.
        Case(
            "ring-odd",
            "Attention",
            ((2, 4, 24, 10), (2, 4, 24, 10), (2, 4, 24, 6)),
            ((2, 4, 24, 6),),
            causal,
        ),
        Case(
            "ring-odd-gqa",
            "Attention",
            ((2, 8, 24, 10), (2, 2, 24, 10), (2, 2, 24, 6)),
            ((2, 8, 24, 6),),
            causal,
        ),
        Case("ring-window", "Attention", own, ((2, 4, 16, 6),), {**causal, "window": 3}),
        Case("ring-window-wide", "Attention", own, ((2, 4, 16, 6),), {**causal, "window": 6}),
        Case("ring-window-whole", "Attention", own, ((2, 4, 16, 6),), {**causal, "window": 16}),
        Case(
            "ring-guard",
            "Attention",
            (*own, _flags(2, 1, 16, 16)),
            ((2, 4, 16, 6),),
            {**guarded, "causal": 1},
        ),
        Case(
            "ring-mask-heads", "Attention", (q, k, v, _flags(1, 4, 8, 16)), ((2, 4, 8, 6),), guarded
        ),
        Case(
            "ring-mask-keys",
            "Attention",
            (q, k, v, RNG.random((2, 1, 1, 16)) < 0.7),
            ((2, 4, 8, 6),),
            guarded,
        ),
        Case("ring-bias", "Attention", (q, k, v, (1, 4, 8, 16)), ((2, 4, 8, 6),), plain),
        Case("ring-bias-keys", "Attention", (q, k, v, (2, 1, 1, 16)), ((2, 4, 8, 6),), plain),
        Case(
            "ring-bias-queries", "Attention", (q, k, v, (8, 1)), ((2, 4, 8, 6),), plain, frozen=(3,)
        ),  # its gradient is 0: softmax does not see it
        Case(
            "ring-gqa",
            "Attention",
            ((2, 8, 16, 10), (2, 2, 16, 10), (2, 2, 16, 6)),
            ((2, 8, 16, 6),),
            causal,
        ),
        Case(
            "ring-gqa-bias",
            "Attention",
            ((2, 8, 8, 10), (2, 2, 16, 10), (2, 2, 16, 6), (8, 8, 16)),
            ((2, 8, 8, 6),),
            plain,
        ),
        Case(
            "ring-mqa",
            "Attention",
            ((2, 4, 8, 10), (2, 1, 16, 10), (2, 1, 16, 6)),
            ((2, 4, 8, 6),),
            plain,
        ),
        Case(
            "ring-one-batch",
            "Attention",
            ((2, 4, 8, 10), (1, 4, 16, 10), (1, 4, 16, 6)),
            ((2, 4, 8, 6),),
            plain,
        ),
        Case(
            "ring-blocks",
            "Attention",
            ((1, 2, 8192, 2), (1, 2, 8, 2), (1, 2, 8, 3), (8192, 8)),
            ((1, 2, 8192, 3),),
            plain,
        ),
    ]
