"""The oracle's cases of rarer operators: quantised arithmetic, recurrent layers, bits, windows over
channels."""

from __future__ import annotations

import numpy as np

from tests.ops.oracle import Case

RNG = np.random.default_rng(11)


def of(dtype: str, *shape: int, high: int = 100) -> np.ndarray:
    """Integers of a type; signed ones on both sides of zero."""
    low = -high if dtype.startswith("int") else 0
    return RNG.integers(low, high, shape).astype(dtype)


def scale(*shape: int) -> np.ndarray:
    return RNG.uniform(0.02, 0.1, shape).astype(np.float32)


def quantised() -> list[Case]:
    x, w = of("uint8", 6, 10, 8), of("int8", 8, 12)
    image, kernel = of("uint8", 8, 4, 9, 10), of("int8", 12, 4, 3, 3)
    window = {"strides": (2, 2), "pads": (1, 1, 1, 1), "dilations": (1, 1), "group": 1}
    grouped = {"strides": (1,), "pads": (0, 0), "dilations": (1,), "group": 4}
    one, zero = scale(), np.uint8(7)
    return [
        Case(
            "quantize",
            "QuantizeLinear",
            ((8, 12), np.float32(0.1), np.uint8(100)),
            ((8, 12),),
            {},
            ("uint8",),
            frozen=(0, 1),
        ),
        Case(
            "quantize-axis",
            "QuantizeLinear",
            ((8, 12, 5), scale(12), of("int8", 12)),
            ((8, 12, 5),),
            {"axis": 1},
            ("int8",),
            frozen=(0, 1),
        ),
        Case(
            "dequantize",
            "DequantizeLinear",
            (of("uint8", 8, 12), scale(12), of("uint8", 12)),
            ((8, 12),),
            {"axis": 1},
        ),
        Case(
            "dequantize-constant",
            "DequantizeLinear",
            (of("int32", 8, 12), np.float32(0.3)),
            ((8, 12),),
            {},
            constants=(1,),
        ),
        Case(
            "matmul-integer",
            "MatMulInteger",
            (x, w, zero, of("int8", 12)),
            ((6, 10, 12),),
            {},
            ("int32",),
        ),
        Case(
            "matmul-integer-rows",
            "MatMulInteger",
            (of("uint8", 16, 8), w, of("uint8", 16)),
            ((16, 12),),
            {},
            ("int32",),
        ),
        Case(
            "qlinear-matmul",
            "QLinearMatMul",
            (x, one, zero, w, scale(12), of("int8", 12), np.float32(9.0), np.uint8(99)),
            ((6, 10, 12),),
            {},
            ("uint8",),
            frozen=(1, 4, 6),
        ),
        Case(
            "conv-integer",
            "ConvInteger",
            (image, kernel, zero, of("int8", 12)),
            ((8, 12, 5, 5),),
            window,
            ("int32",),
        ),
        Case(
            "conv-integer-groups",
            "ConvInteger",
            (of("uint8", 6, 8, 7), of("int8", 16, 2, 3), zero),
            ((6, 16, 5),),
            grouped,
            ("int32",),
        ),
        Case(
            "qlinear-conv",
            "QLinearConv",
            (
                image,
                one,
                zero,
                kernel,
                scale(12),
                of("int8", 12),
                np.float32(5.0),
                np.uint8(90),
                of("int32", 12),
            ),
            ((8, 12, 5, 5),),
            window,
            ("uint8",),
            frozen=(1, 4, 6),
        ),
    ]


def recurrent() -> list[Case]:
    gru = {"hidden_size": 7, "direction": "bidirectional", "linear_before_reset": 0}
    lengths = np.array([5, 3, 1, 4, 2, 5, 3, 4], np.int32)
    return [
        Case(
            "gru",
            "GRU",
            ((5, 8, 6), (2, 21, 6), (2, 21, 7), (2, 42)),
            ((5, 2, 8, 7), (2, 8, 7)),
            gru,
        ),
        Case(
            "gru-reset-after",
            "GRU",
            ((5, 8, 6), (1, 21, 6), (1, 21, 7), (1, 42), lengths, (1, 8, 7)),
            ((5, 1, 8, 7), (1, 8, 7)),
            {"hidden_size": 7, "direction": "reverse", "linear_before_reset": 1},
        ),
        Case(
            "rnn",
            "RNN",
            ((5, 8, 6), (1, 7, 6), (1, 7, 7), (1, 14), None, (1, 8, 7)),
            ((5, 1, 8, 7), (1, 8, 7)),
            {"hidden_size": 7, "direction": "forward", "activations": ("Relu",), "clip": 0.5},
        ),
        Case(
            "lstm-full",
            "LSTM",
            ((5, 8, 6), (2, 28, 6), (2, 28, 7), (2, 56), lengths, None, None, (2, 21)),
            ((5, 2, 8, 7), (2, 8, 7), (2, 8, 7)),
            {"hidden_size": 7, "direction": "bidirectional"},
        ),
    ]


def rare() -> list[Case]:
    small = RNG.uniform(-0.9, 0.9, (8, 12)).astype(np.float32)
    cases = [
        Case(op.lower(), op, (small,), ((8, 12),), {})
        for op in ("Acos", "Asin", "Asinh", "Atan", "Atanh", "Cosh", "Sinh")
    ]
    bits = (of("uint8", 8, 12), of("uint8", 12, high=7))
    cases += [
        Case(op.lower(), op, bits, ((8, 12),), {}, ("uint8",))
        for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")
    ]
    where = np.array([[0, 3], [2, -1], [5, 0], [4, 2]], np.int32)
    return cases + [
        Case("acosh", "Acosh", (small + np.float32(2),), ((8, 12),), {}),
        Case("bitwise-not", "BitwiseNot", (of("int32", 8, 12),), ((8, 12),), {}, ("int32",)),
        Case("bit-shift", "BitShift", bits, ((8, 12),), {"direction": "RIGHT"}, ("uint8",)),
        Case(
            "isinf",
            "IsInf",
            (np.where(small > 0.5, np.inf, small).astype(np.float32),),
            ((8, 12),),
            {"detect_negative": 0},
            ("bool",),
            frozen=(0,),
        ),
        Case(
            "fmod", "Mod", ((8, 12), small + np.float32(2)), ((8, 12),), {"fmod": 1}, frozen=(0, 1)
        ),
        Case("shrink", "Shrink", ((8, 12),), ((8, 12),), {"bias": 0.2, "lambd": 0.4}),
        Case("selu", "Selu", ((8, 12),), ((8, 12),), {"alpha": 1.5, "gamma": 2.0}),
        Case(
            "onehot-negative",
            "OneHot",
            (of("int32", 8, 6, high=5),),
            ((8, 6, 12),),
            {"axis": -1 % 3, "depth": 12, "on_value": 2.0, "off_value": 0.5},
        ),
        Case(
            "topk-smallest",
            "TopK",
            (of("uint8", 8, 6, 12),),
            ((8, 6, 3), (8, 6, 3)),
            {"k": 3, "axis": 2, "largest": 0, "sorted": 1},
            ("uint8", "int32"),
        ),
        Case(
            "conv-transpose-groups",
            "ConvTranspose",
            ((6, 8, 5), (8, 3, 3)),
            ((6, 12, 11),),
            {"strides": (2,), "pads": (0, 0), "dilations": (1,), "group": 4},
        ),
        Case(
            "resize-cubic",
            "Resize",
            ((8, 12, 3, 4),),
            ((8, 12, 6, 8),),
            {
                "mode": "cubic",
                "coordinate_mode": "half_pixel",
                "nearest_mode": "floor",
                "scales": (1.0, 1.0, 2.0, 2.0),
                "cubic_coeff_a": -0.5,
            },
        ),
        Case(
            "lrn",
            "LRN",
            ((8, 6, 4, 12),),
            ((8, 6, 4, 12),),
            {"size": 3, "alpha": 0.5, "beta": 0.75, "bias": 1.0},
        ),
        Case(
            "l2-normalization", "LpNormalization", ((8, 6, 12),), ((8, 6, 12),), {"axis": 1, "p": 2}
        ),
        Case(
            "l1-normalization",
            "LpNormalization",
            ((8, 6, 12),),
            ((8, 6, 12),),
            {"axis": -1, "p": 1},
        ),
        Case("hardmax", "Hardmax", ((8, 6, 12),), ((8, 6, 12),), {"axis": 1}, frozen=(0,)),
        Case(
            "scatter-nd",
            "ScatterND",
            ((6, 5, 8, 12), where, (4, 8, 12)),
            ((6, 5, 8, 12),),
            {"reduction": "none"},
        ),
        Case(
            "scatter-nd-add",
            "ScatterND",
            ((9, 8, 12), of("int32", 4, 1, high=9), (4, 8, 12)),
            ((9, 8, 12),),
            {"reduction": "add"},
        ),
    ]


def rare_cases() -> list[Case]:
    """All of this file."""
    return [*quantised(), *recurrent(), *rare()]
