"""One line (or a few) per operator for the oracle: operands with all extents distinct, so that no
transposition can hide."""

from __future__ import annotations

import numpy as np

from tests.ops.oracle import Case
from tests.ops.oracle_control_cases import control_cases
from tests.ops.oracle_expert_cases import expert_cases
from tests.ops.oracle_rare_cases import rare_cases
from tests.ops.oracle_sample_cases import sample_cases

RNG = np.random.default_rng(7)


def ints(high: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, high, shape).astype(np.int32)


def flags(*shape: int) -> np.ndarray:
    return RNG.integers(0, 2, shape).astype(bool)


def pointwise() -> list[Case]:
    one = [
        "Relu",
        "Sigmoid",
        "Tanh",
        "Erf",
        "Exp",
        "Softplus",
        "Silu",
        "Sin",
        "Cos",
        "Abs",
        "Neg",
        "Reciprocal",
        "Gelu",
        "Identity",
        "Softsign",
        "Mish",
        "Elu",
        "LeakyRelu",
        "HardSigmoid",
        "HardSwish",
        "Tan",
        "Floor",
        "Ceil",
        "Round",
        "Sign",
    ]
    cases = [Case(op.lower(), op, ((8, 12),), ((8, 12),), {}) for op in one]
    cases += [
        Case(f"{op.lower()}-square", op, ((8, 12), (8, 12)), ((8, 12),), {})
        for op in ("Add", "Sub", "Mul", "Div", "Max", "Min")
    ]
    cases += [
        Case(f"{op.lower()}-broadcast", op, ((8, 1, 12), (4, 1)), ((8, 4, 12),), {})
        for op in ("Add", "Mul", "Div")
    ]
    positive = np.abs(RNG.normal(size=(8, 12))).astype(np.float32) + 0.5
    cases += [
        Case(f"{op.lower()}-positive", op, (positive,), ((8, 12),), {}) for op in ("Log", "Sqrt")
    ]
    cases += [
        Case("mul-constant", "Mul", ((8, 12), np.float32(3.0)), ((8, 12),), {}, constants=(1,)),
        Case("pow", "Pow", (positive, np.float32(3.0)), ((8, 12),), {}, constants=(1,)),
        Case(
            "dropout",
            "Dropout",
            ((8, 12), np.int32(5)),
            ((8, 12), ()),
            {"ratio": 0.25, "training_mode": 1},
            ("float32", "int32"),
        ),
        Case(
            "random-uniform",
            "RandomUniform",
            (np.int32(5),),
            ((8, 12), ()),
            {"low": -1.0, "high": 2.0, "dtype": "float32"},
            ("float32", "int32"),
        ),
        Case(
            "random-normal",
            "RandomNormal",
            (np.int32(5),),
            ((8, 12), ()),
            {"mean": 1.0, "scale": 0.5, "dtype": "float32"},
            ("float32", "int32"),
        ),
        Case("where", "Where", (flags(8, 1), (8, 12), (12,)), ((8, 12),), {}),
        Case("cast", "Cast", (ints(9, 8, 12),), ((8, 12),), {"to": "float32"}),
        Case("clip", "Clip", ((8, 12),), ((8, 12),), {"min": -0.5, "max": 0.5}),
        Case("isnan", "IsNaN", ((8, 12),), ((8, 12),), {}, ("bool",)),
        Case("not", "Not", (flags(8, 12),), ((8, 12),), {}, ("bool",)),
        Case("int-div", "Div", (ints(90, 8, 12), ints(9, 8, 12) + 1), ((8, 12),), {}, ("int32",)),
        Case("mod", "Mod", (ints(90, 8, 12), ints(9, 8, 12) + 1), ((8, 12),), {}, ("int32",)),
    ]
    cases += [
        Case(op.lower(), op, (ints(3, 8, 12), ints(3, 12)), ((8, 12),), {}, ("bool",))
        for op in ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
    ]
    cases += [
        Case(op.lower(), op, (flags(8, 12), flags(8, 12)), ((8, 12),), {}, ("bool",))
        for op in ("And", "Or", "Xor")
    ]
    return cases


def products() -> list[Case]:
    return [
        Case("matmul", "MatMul", ((6, 10, 8), (8, 12)), ((6, 10, 12),), {}),
        Case("matmul-trans", "MatMul", ((8, 6), (12, 8)), ((6, 12),), {"trans_a": 1, "trans_b": 1}),
        Case("matmul-batch", "MatMul", ((1, 6, 4, 8), (5, 1, 8, 12)), ((5, 6, 4, 12),), {}),
        Case("matmul-padded", "MatMul", ((7, 15), (15, 11)), ((7, 11),), {}),
        Case(
            "einsum", "Einsum", ((6, 4, 8), (4, 8, 12)), ((6, 12, 4),), {"equation": "abc,bcd->adb"}
        ),
        Case(
            "conv",
            "Conv",
            ((8, 4, 9, 10), (12, 4, 3, 3)),
            ((8, 12, 5, 5),),
            {"strides": (2, 2), "pads": (1, 1, 1, 1), "dilations": (1, 1), "group": 1},
        ),
        Case(
            "conv-groups",
            "Conv",
            ((6, 8, 7), (16, 2, 3)),
            ((6, 16, 5),),
            {"strides": (1,), "pads": (0, 0), "dilations": (1,), "group": 4},
        ),
        Case(
            "conv-depthwise",
            "Conv",
            ((6, 8, 7), (8, 1, 3)),
            ((6, 8, 7),),
            {"strides": (1,), "pads": (1, 1), "dilations": (1,), "group": 8},
        ),
        Case(
            "conv-transpose",
            "ConvTranspose",
            ((8, 4, 5, 6), (4, 12, 3, 3)),
            ((8, 12, 9, 11),),
            {"strides": (2, 2), "pads": (1, 1, 1, 1), "dilations": (1, 1), "group": 1},
        ),
    ]


def norms() -> list[Case]:
    positive = np.abs(RNG.normal(size=(12,))).astype(np.float32) + 0.5
    return [
        Case("softmax", "Softmax", ((8, 12, 5),), ((8, 12, 5),), {"axis": 1}),
        Case("log-softmax", "LogSoftmax", ((8, 12, 5),), ((8, 12, 5),), {"axis": 2}),
        Case(
            "layer-norm",
            "LayerNormalization",
            ((8, 6, 12), (12,), (12,)),
            ((8, 6, 12),),
            {"axis": 2, "epsilon": 1e-5},
        ),
        Case(
            "rms-norm",
            "RMSNormalization",
            ((8, 6, 12), (12,)),
            ((8, 6, 12),),
            {"axis": 2, "epsilon": 1e-5},
        ),
        Case(
            "instance-norm",
            "InstanceNormalization",
            ((8, 12, 5, 3), (12,), (12,)),
            ((8, 12, 5, 3),),
            {"epsilon": 1e-5},
        ),
        Case(
            "group-norm",
            "GroupNormalization",
            ((8, 12, 5, 3), (12,), (12,)),
            ((8, 12, 5, 3),),
            {"num_groups": 4, "epsilon": 1e-5},
        ),
        Case(
            "batch-norm",
            "BatchNormalization",
            ((8, 12, 5, 3), (12,), (12,), (12,), positive),
            ((8, 12, 5, 3),),
            {"epsilon": 1e-5, "momentum": 0.9, "training_mode": 0},
        ),
        Case(
            "batch-norm-live",
            "BatchNormalization",
            ((8, 12, 5, 3), (12,), (12,), (12,), positive),
            ((8, 12, 5, 3),),
            {"epsilon": 1e-5, "momentum": 0.9, "training_mode": 1},
            frozen=(3, 4),
        ),
        Case(
            "batch-norm-live-all",
            "BatchNormalization",
            ((8, 12, 5, 3), (12,), (12,), (12,), positive),
            ((8, 12, 5, 3), (12,), (12,)),
            {"epsilon": 1e-5, "momentum": 0.9, "training_mode": 1},
            frozen=(3, 4),
        ),
    ]


def shapes() -> list[Case]:
    return [
        Case("reshape-split", "Reshape", ((6, 32),), ((6, 8, 4),), {}),
        Case("reshape-merge", "Reshape", ((8, 4, 6),), ((32, 6),), {}),
        Case("reshape-opaque", "Reshape", ((8, 6, 10),), ((8, 4, 15),), {}),
        Case("transpose", "Transpose", ((8, 4, 12),), ((12, 8, 4),), {"perm": (2, 0, 1)}),
        Case("expand", "Expand", ((8, 1, 12),), ((4, 8, 6, 12),), {}),
        Case("concat", "Concat", ((8, 3, 12), (8, 5, 12)), ((8, 8, 12),), {"axis": 1}),
        Case("split", "Split", ((8, 6, 12),), ((8, 2, 12), (8, 4, 12)), {"axis": 1}),
        Case(
            "slice",
            "Slice",
            ((8, 9, 12),),
            ((8, 4, 12),),
            {"axes": (1,), "starts": (1,), "ends": (8,), "steps": (2,)},
        ),
        Case(
            "slice-back",
            "Slice",
            ((8, 9, 12),),
            ((8, 9, 12),),
            {"axes": (1,), "starts": (8,), "ends": (-1,), "steps": (-1,)},
        ),
        Case(
            "pad",
            "Pad",
            ((8, 9, 12),),
            ((8, 12, 12),),
            {"pads": (0, 1, 0, 0, 2, 0), "mode": "constant", "value": 0.5},
        ),
        Case("tile", "Tile", ((8, 3, 12),), ((8, 6, 12),), {"repeats": (1, 2, 1)}),
        Case(
            "range", "Range", (), ((12,),), {"start": 3, "delta": -2, "dtype": "int64"}, ("int32",)
        ),
        Case(
            "constant-of-shape",
            "ConstantOfShape",
            (),
            ((8, 6),),
            {"value": 1.5, "dtype": "float32"},
        ),
        Case("trilu", "Trilu", ((8, 6, 5),), ((8, 6, 5),), {"k": 1, "upper": 0}),
    ]


def reductions() -> list[Case]:
    cases = [
        Case(op.lower(), op, ((8, 6, 12),), ((8, 1, 12),), {"axes": (1,), "keepdims": 1})
        for op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd")
    ]
    return cases + [
        Case(
            "reduce-mean-two",
            "ReduceMean",
            ((8, 7, 12),),
            ((12,),),
            {"axes": (0, 1), "keepdims": 0},
        ),
        Case(
            "cumsum",
            "CumSum",
            ((8, 6, 12),),
            ((8, 6, 12),),
            {"axis": 1, "exclusive": 1, "reverse": 1},
        ),
        Case(
            "topk",
            "TopK",
            ((8, 6, 12),),
            ((8, 6, 3), (8, 6, 3)),
            {"k": 3, "axis": 2, "largest": 1, "sorted": 1},
            ("float32", "int32"),
        ),
        Case("argmax", "ArgMax", ((8, 6, 12),), ((8, 12),), {"axis": 1, "keepdims": 0}, ("int32",)),
        Case(
            "argmin", "ArgMin", ((8, 6, 12),), ((8, 1, 12),), {"axis": 1, "keepdims": 1}, ("int32",)
        ),
        Case(
            "onehot",
            "OneHot",
            (ints(12, 8, 6),),
            ((8, 6, 12),),
            {"axis": 2, "depth": 12, "on_value": 2.0, "off_value": 0.5},
        ),
    ]


def indexing() -> list[Case]:
    return [
        Case("gather", "Gather", ((12, 5), ints(12, 8, 6)), ((8, 6, 5),), {"axis": 0}),
        Case("gather-inner", "Gather", ((4, 12, 5), ints(12, 8) - 3), ((4, 8, 5),), {"axis": 1}),
        Case(
            "gather-nd", "GatherND", ((8, 6, 5), ints(8, 12, 1)), ((12, 6, 5),), {"batch_dims": 0}
        ),
        Case(
            "gather-nd-deep", "GatherND", ((8, 6, 5), ints(6, 12, 2)), ((12, 5),), {"batch_dims": 0}
        ),
        Case(
            "gather-nd-batch",
            "GatherND",
            ((8, 6, 5), ints(6, 8, 12, 1)),
            ((8, 12, 5),),
            {"batch_dims": 1},
        ),
        Case(
            "gather-elements",
            "GatherElements",
            ((8, 12, 5), ints(12, 8, 4, 5)),
            ((8, 4, 5),),
            {"axis": 1},
        ),
        Case(
            "scatter-elements",
            "ScatterElements",
            (
                (8, 12, 5),
                np.argsort(RNG.normal(size=(8, 12, 5)), 1)[:, :4].astype(np.int32),
                (8, 4, 5),
            ),
            ((8, 12, 5),),
            {"axis": 1, "reduction": "add"},
        ),
    ]


def attentions() -> list[Case]:
    q, k, v = (4, 8, 6, 10), (4, 8, 12, 10), (4, 8, 12, 16)
    plain = {"scale": 0.3, "causal": 0, "guard": 0}
    return [
        Case("attention", "Attention", (q, k, v), ((4, 8, 6, 16),), plain),
        Case(
            "attention-causal",
            "Attention",
            ((4, 8, 12, 10), k, v),
            ((4, 8, 12, 16),),
            {**plain, "causal": 1},
        ),
        Case(
            "attention-window",
            "Attention",
            ((4, 8, 12, 10), k, v),
            ((4, 8, 12, 16),),
            {**plain, "causal": 1, "window": 5},
        ),
        Case(
            "attention-cap",
            "Attention",
            ((4, 8, 12, 10), k, v),
            ((4, 8, 12, 16),),
            {**plain, "causal": 1, "cap": 0.7},
        ),
        Case(
            "attention-cap-mask",
            "Attention",
            (q, k, v, flags(4, 1, 6, 12)),
            ((4, 8, 6, 16),),
            {**plain, "guard": 1, "cap": 0.7},
        ),
        Case(
            "attention-window-mask",
            "Attention",
            ((2, 8, 256, 2), (2, 8, 256, 2), (2, 8, 256, 4), flags(2, 1, 1, 256)),
            ((2, 8, 256, 4),),
            {**plain, "guard": 1, "causal": 1, "window": 40},
            query_block=64,
        ),
        Case(
            "attention-long-causal",
            "Attention",
            ((2, 2, 48, 2), (2, 2, 48, 2), (2, 2, 48, 2)),
            ((2, 2, 48, 2),),
            {**plain, "causal": 1},
            query_block=16,
        ),
        Case(
            "attention-long",
            "Attention",
            ((4, 8, 32, 2), (4, 8, 6, 2), (4, 8, 6, 4), flags(4, 1, 32, 6)),
            ((4, 8, 32, 4),),
            {**plain, "guard": 1},
            query_block=16,
        ),
        Case(
            "attention-gqa",
            "Attention",
            ((4, 16, 6, 10), (4, 4, 12, 10), (4, 4, 12, 16)),
            ((4, 16, 6, 16),),
            plain,
        ),
        Case(
            "attention-mqa",
            "Attention",
            ((4, 8, 6, 10), (4, 1, 12, 10), (4, 1, 12, 16)),
            ((4, 8, 6, 16),),
            plain,
        ),
        Case(
            "attention-mask",
            "Attention",
            (q, k, v, flags(4, 1, 6, 12)),
            ((4, 8, 6, 16),),
            {**plain, "guard": 1},
        ),
        Case(
            "attention-segments",
            "Attention",
            ((4, 8, 12, 10), k, v, ints(3, 4, 1, 1, 12)),
            ((4, 8, 12, 16),),
            {**plain, "segments": 1},
        ),
        Case(
            "attention-segments-causal",
            "Attention",
            ((2, 4, 32, 2), (2, 2, 32, 2), (2, 2, 32, 2), ints(3, 2, 1, 1, 32)),
            ((2, 4, 32, 2),),
            {**plain, "causal": 1, "segments": 1},
            query_block=16,
        ),
        Case(
            "linear-attention",
            "LinearAttention",
            ((8, 6, 4, 3), (8, 6, 4, 3), (8, 6, 4, 5), (8, 6, 4)),
            ((8, 6, 4, 5), (8, 4, 3, 5)),
            {"scale": 0.3, "chunk": 4},
        ),
        Case(
            "linear-attention-delta",
            "LinearAttention",
            ((8, 10, 4, 3), (8, 10, 4, 3), (8, 10, 4, 5), (8, 10, 4), (8, 10, 4)),
            ((8, 10, 4, 5), (8, 4, 3, 5)),
            {"scale": 0.3, "chunk": 4},
        ),
        Case(
            "linear-attention-one-group",
            "LinearAttention",
            ((8, 6, 1, 3), (8, 6, 1, 3), (8, 6, 4, 5), (8, 6, 4)),
            ((8, 6, 4, 5), (8, 4, 3, 5)),
            {"scale": 0.3, "chunk": 4},
        ),
        Case(
            "linear-attention-groups",
            "LinearAttention",
            ((4, 6, 2, 3), (4, 6, 2, 3), (4, 6, 8, 5), (4, 6, 8)),
            ((4, 6, 8, 5), (4, 8, 3, 5)),
            {"scale": 0.3, "chunk": 4},
        ),
        Case(
            "linear-attention-delta-groups",
            "LinearAttention",
            ((4, 6, 2, 3), (4, 6, 2, 3), (4, 6, 8, 5), (4, 6, 8), (4, 6, 8)),
            ((4, 6, 8, 5), (4, 8, 3, 5)),
            {"scale": 0.3, "chunk": 4},
        ),
        Case(
            "linear-attention-step",
            "LinearAttention",
            ((8, 1, 4, 3), (8, 1, 4, 3), (8, 1, 4, 5), (8, 1, 4), None, (8, 4, 3, 5)),
            ((8, 1, 4, 5), (8, 4, 3, 5)),
            {"scale": 0.3, "chunk": 4},
        ),
        Case(
            "linear-attention-delta-step",
            "LinearAttention",
            ((4, 1, 2, 3), (4, 1, 2, 3), (4, 1, 8, 5), (4, 1, 8), (4, 1, 8), (4, 8, 3, 5)),
            ((4, 1, 8, 5), (4, 8, 3, 5)),
            {"scale": 0.3, "chunk": 4},
        ),
        Case(
            "linear-attention-goes-on",
            "LinearAttention",
            ((4, 6, 2, 3), (4, 6, 2, 3), (4, 6, 8, 5), (4, 6, 8), (4, 6, 8), (4, 8, 3, 5)),
            ((4, 6, 8, 5), (4, 8, 3, 5)),
            {"scale": 0.3, "chunk": 4},
        ),
        Case(
            "linear-attention-step-kept",
            "LinearAttention",
            ((4, 1, 2, 3), (4, 1, 2, 3), (4, 1, 8, 5), (4, 1, 8), (4, 1, 8), (4, 8, 5, 3)),
            ((4, 1, 8, 5), (4, 8, 5, 3)),
            {"scale": 0.3, "chunk": 4, "kept": 1},
        ),
        Case(
            "conv-step", "ConvStep", ((4, 8, 3), (4, 8, 1), (8, 1, 4)), ((4, 8, 1), (4, 8, 3)), {}
        ),
        Case(
            "cached-attention",
            "CachedAttention",
            (
                (4, 8, 1, 10),
                (4, 8, 1, 10),
                (4, 8, 1, 16),
                (4, 8, 12, 10),
                (4, 8, 12, 16),
                flags(4, 1, 1, 12),
            ),
            ((4, 8, 1, 16),),
            plain,
        ),
        Case(
            "cached-attention-gqa",
            "CachedAttention",
            ((4, 16, 2, 10), (4, 4, 2, 10), (4, 4, 2, 16), (4, 4, 12, 10), (4, 4, 12, 16)),
            ((4, 16, 2, 16),),
            plain,
        ),
        Case(
            "cached-attention-cap",
            "CachedAttention",
            ((4, 8, 1, 10), (4, 8, 1, 10), (4, 8, 1, 16), (4, 8, 12, 10), (4, 8, 12, 16)),
            ((4, 8, 1, 16),),
            {**plain, "cap": 0.7},
        ),
        *latents(),
        Case("attention-bias", "Attention", (q, k, v, (1, 8, 6, 12)), ((4, 8, 6, 16),), plain),
        Case(
            "attention-gqa-bias",
            "Attention",
            ((4, 16, 6, 10), (4, 4, 12, 10), (4, 4, 12, 16), (16, 6, 12)),
            ((4, 16, 6, 16),),
            plain,
        ),
        Case(
            "rotary",
            "RotaryEmbedding",
            ((4, 8, 6, 10), (1, 1, 6, 10), (1, 1, 6, 10)),
            ((4, 8, 6, 10),),
            {},
        ),
        Case(
            "lstm",
            "LSTM",
            ((5, 8, 6), (2, 28, 6), (2, 28, 7), (2, 56)),
            ((5, 2, 8, 7), (2, 8, 7), (2, 8, 7)),
            {"hidden_size": 7, "direction": "bidirectional"},
        ),
        Case(
            "lstm-state",
            "LSTM",
            ((5, 8, 6), (1, 28, 6), (1, 28, 7), None, None, (1, 8, 7), (1, 8, 7)),
            ((5, 1, 8, 7), (1, 8, 7), (1, 8, 7)),
            {"hidden_size": 7, "direction": "reverse"},
        ),
    ]


def latents() -> list[Case]:
    """Of steps of latent attention: 12 features in a head's part of a matrix, 5 or 7 of them
    read."""
    new, past = ((4, 1, 2, 10), (4, 1, 2, 6)), ((4, 1, 12, 10), (4, 1, 12, 6))
    q, out = ((4, 8, 2, 10), (4, 8, 2, 6)), ((4, 8, 2, 10),)
    plain = {"scale": 0.25}
    forth, back = ((4, 8, 2, 5), (10, 96)), ((4, 8, 2, 10), (96, 10))
    return [
        Case("latents", "CachedLatentAttention", (*q, *new, *past, flags(4, 1, 1, 12)), out, plain),
        Case("latents-cap", "CachedLatentAttention", (*q, *new, *past), out, plain | {"cap": 0.7}),
        Case("head-product", "HeadProduct", forth, out, _columns(3, back=0, transposed=0)),
        Case("head-product-back", "HeadProduct", back, ((4, 8, 2, 7),), _columns(5, 1, 1)),
    ]


def _columns(start: int, back: int, transposed: int) -> dict[str, int]:
    return {"start": start, "back": back, "transposed": transposed}


def spatial() -> list[Case]:
    window = {
        "kernel_shape": (3, 2),
        "strides": (2, 2),
        "pads": (1, 0, 1, 0),
        "dilations": (1, 1),
        "ceil_mode": 0,
    }
    return [
        Case("max-pool", "MaxPool", ((8, 12, 9, 10),), ((8, 12, 5, 5),), window),
        Case(
            "average-pool",
            "AveragePool",
            ((8, 12, 9, 10),),
            ((8, 12, 5, 5),),
            {**window, "count_include_pad": 0},
        ),
        Case(
            "average-pool-padded",
            "AveragePool",
            ((8, 12, 9, 10),),
            ((8, 12, 5, 5),),
            {**window, "count_include_pad": 1},
        ),
        Case(
            "resize-nearest",
            "Resize",
            ((8, 12, 3, 4),),
            ((8, 12, 6, 8),),
            {
                "mode": "nearest",
                "coordinate_mode": "asymmetric",
                "nearest_mode": "floor",
                "scales": (1.0, 1.0, 2.0, 2.0),
            },
        ),
        Case(
            "resize-linear",
            "Resize",
            ((8, 12, 3, 4),),
            ((8, 12, 6, 8),),
            {
                "mode": "linear",
                "coordinate_mode": "half_pixel",
                "nearest_mode": "floor",
                "scales": (1.0, 1.0, 2.0, 2.0),
            },
        ),
    ]


HUBER = """import jax.numpy as jnp


def huber(y, targets):
    d = jnp.abs(y - targets)
    return jnp.where(d < 1, 0.5 * d * d, d - 0.5)"""


def losses() -> list[Case]:
    return [
        Case("cross-entropy", "CrossEntropyLoss", ((8, 6, 12), ints(12, 8, 6)), ((),), {"axis": 2}),
        Case(
            "cross-entropy-channels",
            "CrossEntropyLoss",
            ((8, 12, 6), ints(12, 8, 6)),
            ((),),
            {"axis": 1},
        ),
        Case(
            "cross-entropy-padded", "CrossEntropyLoss", ((7, 15), ints(15, 7)), ((),), {"axis": 1}
        ),
        Case(
            "cross-entropy-ignored",
            "CrossEntropyLoss",
            ((8, 6, 12), ints(12, 8, 6)),
            ((),),
            {"axis": 2, "ignore_index": 3, "count": 40},
        ),
        Case(
            "cross-entropy-counted",
            "CrossEntropyLoss",
            ((7, 15), ints(15, 7), np.int32(5)),
            ((),),
            {"axis": 1, "ignore_index": 3},
        ),
        Case(
            "user-loss",
            "UserLoss",
            ((15, 12), (15, 12)),
            ((),),
            {"function": "huber", "source": HUBER},
        ),
        Case("mse", "MSELoss", ((7, 12), (7, 12)), ((),), {}),
        Case("l1", "L1Loss", ((8, 12), (8, 12)), ((),), {}),
        Case("bce", "BCEWithLogitsLoss", ((8, 12), (8, 12)), ((),), {}),
    ]


def all_cases() -> list[Case]:
    """Every operator of the table appears at least once (a test checks it)."""
    groups = (
        pointwise,
        products,
        norms,
        shapes,
        reductions,
        indexing,
        attentions,
        spatial,
        losses,
        rare_cases,
        expert_cases,
        control_cases,
        sample_cases,
    )
    return [case for group in groups for case in group()]
