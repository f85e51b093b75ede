"""Lowering, operator by operator: onnxruntime gives the same for a model and for its canonical
graph."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest

from planner.errors import PlanError
from planner.reader import read_model
from planner.reader.draft.shapes import CANONICAL
from tests.reader.reader_models import model, ops, rand, same

F = np.float32

# name -> (text, opset, constants, expected canonical operators)
CASES: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "gemm": (
        (
            "(float[3,4] x) => (float[3,5] y) { y = Gemm <alpha = 0.5, beta = 2.0, transB = 1> (x,"
            " w, c) }"
        ),
        20,
        {"w": rand(5, 4), "c": rand(5)},
        "MatMul Mul Mul Add",
    ),
    "gemm_plain": (
        "(float[3,4] x) => (float[3,5] y) { y = Gemm(x, w) }",
        20,
        {"w": rand(4, 5)},
        "MatMul",
    ),
    "gemm_transposed": (
        "(float[4,3] x) => (float[3,5] y) { y = Gemm <transA = 1> (x, w, c) }",
        20,
        {"w": rand(4, 5), "c": rand(1, 5)},
        "MatMul Add",
    ),
    "vector_matmul": (
        "(float[4] x) => (float[5] y) { y = MatMul(x, w) }",
        20,
        {"w": rand(4, 5)},
        "Reshape MatMul Reshape",
    ),
    "matvec": (
        "(float[2,3,4] x) => (float[2,3] y) { y = MatMul(x, v) }",
        20,
        {"v": rand(4)},
        "MatMul Reshape",
    ),
    "transposed_weight": (
        "(float[3,4] x) => (float[3,5] y) { t = Transpose(w) y = MatMul(x, t) }",
        20,
        {"w": rand(5, 4)},
        "MatMul",
    ),
    "conv_bias": (
        (
            "(float[2,3,8,8] x) => (float[2,4,4,4] y) { y = Conv <strides = [2,2], pads ="
            " [1,1,1,1]> (x, w, b) }"
        ),
        20,
        {"w": rand(4, 3, 3, 3), "b": rand(4)},
        "Conv Add",
    ),
    "conv_same": (
        (
            "(float[1,2,7,6] x) => (float[1,4,4,3] y) { y = Conv <strides = [2,2], auto_pad ="
            ' "SAME_UPPER", group = 2> (x, w) }'
        ),
        20,
        {"w": rand(4, 1, 3, 3)},
        "Conv",
    ),
    "conv_same_lower": (
        (
            "(float[1,2,7] x) => (float[1,4,4] y) { y = Conv <strides = [2], auto_pad ="
            ' "SAME_LOWER"> (x, w) }'
        ),
        20,
        {"w": rand(4, 2, 4)},
        "Conv",
    ),
    "conv_transpose": (
        (
            "(float[1,3,5,5] x) => (float[1,2,a,b] y) { y = ConvTranspose <strides = [2,2], pads ="
            " [1,1,1,1], output_padding = [1,1]> (x, w, b2) }"
        ),
        20,
        {"w": rand(3, 2, 3, 3), "b2": rand(2)},
        "ConvTranspose Add",
    ),
    "conv_transpose_shape": (
        (
            "(float[1,3,5] x) => (float[1,2,a] y) { y = ConvTranspose <strides = [3], output_shape"
            " = [16]> (x, w) }"
        ),
        20,
        {"w": rand(3, 2, 3)},
        "ConvTranspose",
    ),
    "max_pool": (
        (
            "(float[1,2,9,9] x) => (float[1,2,a,b] y) { y = MaxPool <kernel_shape = [3,3], strides"
            " = [2,2], ceil_mode = 1> (x) }"
        ),
        20,
        {},
        "MaxPool",
    ),
    "average_pool": (
        (
            "(float[1,2,9,9] x) => (float[1,2,a,b] y) { y = AveragePool <kernel_shape = [2,2], pads"
            " = [1,1,0,0], count_include_pad = 1> (x) }"
        ),
        20,
        {},
        "AveragePool",
    ),
    "global_pools": (
        (
            "(float[2,3,4,5] x) => (float[2,3,1,1] y) { a = GlobalAveragePool(x) m ="
            " GlobalMaxPool(x) y = Add(a, m) }"
        ),
        20,
        {},
        "ReduceMean ReduceMax Add",
    ),
    "batch_norm": (
        (
            "(float[2,3,4] x) => (float[2,3,4] y) { y = BatchNormalization <epsilon = 0.01> (x, s,"
            " b, m, v) }"
        ),
        20,
        {"s": rand(3), "b": rand(3, seed=1), "m": rand(3, seed=2), "v": np.abs(rand(3)) + F(0.5)},
        "BatchNormalization",
    ),
    "instance_norm": (
        "(float[2,3,4] x) => (float[2,3,4] y) { y = InstanceNormalization(x, s, b) }",
        20,
        {"s": rand(3), "b": rand(3, seed=1)},
        "InstanceNormalization",
    ),
    "layer_norm_no_bias": (
        "(float[2,3,4] x) => (float[2,3,4] y) { y = LayerNormalization <axis = 1> (x, s) }",
        20,
        {"s": rand(3, 4)},
        "LayerNormalization",
    ),
    "layer_norm_broadcast": (
        (
            "(float[2,3,4] x) => (float[2,3,4] y) { a = LayerNormalization(x, s, b) y ="
            " RMSNormalization <axis = 1> (a, s) }"
        ),
        23,
        {"s": rand(1, 1, 4), "b": rand(1)},
        None,
    ),
    "softmax_old": (
        "(float[2,3,4] x) => (float[2,3,4] y) { y = Softmax <axis = 1> (x) }",
        11,
        {},
        "Reshape Softmax Reshape",
    ),
    "softmax_last": (
        "(float[2,3,4] x) => (float[2,3,4] y) { y = LogSoftmax <axis = 2> (x) }",
        11,
        {},
        "LogSoftmax",
    ),
    "sum_of_three": (
        "(float[2,3] x) => (float[2,3] y) { y = Sum(x, x, b) }",
        20,
        {"b": rand(3)},
        "Add Add",
    ),
    "mean": (
        "(float[2,3] x) => (float[2,3] y) { y = Mean(x, b, x) }",
        20,
        {"b": rand(3)},
        "Add Add Div",
    ),
    "max_min": (
        "(float[2,3] x) => (float[2,3] y) { m = Max(x, b, c) y = Min(m, c) }",
        20,
        {"b": rand(3), "c": F(0.2)},
        "Max Max Min",
    ),
    "clip": (
        "(float[2,3] x) => (float[2,3] y) { a = Clip(x, lo) y = Clip(a, , hi) }",
        20,
        {"lo": F(-0.5), "hi": F(0.5)},
        "Clip Clip",
    ),
    "clip_old": (
        "(float[2,3] x) => (float[2,3] y) { y = Clip <min = -0.1, max = 0.2> (x) }",
        6,
        {},
        "Clip",
    ),
    "clip_by_data": (
        (
            "(float[2,3] x) => (float[2,3] y) { m = ReduceMax <keepdims = 0> (x) h = Mul(m, c) y ="
            " Clip(x, , h) }"
        ),
        13,
        {"c": F(0.5)},
        "ReduceMax Mul Min",
    ),
    "pow_of_int": (
        "(float[2,3] x) => (float[2,3] y) { y = Pow(x, p) }",
        20,
        {"p": np.int64(3)},
        "Pow",
    ),
    "prelu": (
        "(float[2,3,4] x) => (float[2,3,4] y) { y = PRelu(x, s) }",
        20,
        {"s": np.abs(rand(3, 1))},
        "Min Mul Relu Add",
    ),
    "activations": (
        (
            "(float[2,3] x) => (float[2,3] y) { a = Elu(x) b = LeakyRelu(a) c = HardSigmoid(b) d ="
            " HardSwish(c) e = Selu(d) f = Celu(e) y = Mish(f) }"
        ),
        20,
        {},
        "",
    ),
    "reductions": (
        (
            "(float[2,3,4] x) => (float y) { a = ReduceL2 <keepdims = 1> (x, ax) b = ReduceL1(a,"
            " ax) c = ReduceSumSquare <keepdims = 0> (b, ax) d = ReduceLogSumExp <keepdims = 0> (c,"
            " one) y = ReduceProd <keepdims = 0> (d, zero) }"
        ),
        18,
        {"ax": np.array([-1]), "one": np.array([1]), "zero": np.array([0])},
        "",
    ),
    "reduce_all": (
        "(float[2,3,4] x) => (float y) { y = ReduceMean <keepdims = 0> (x) }",
        13,
        {},
        "ReduceMean",
    ),
    "reduce_none": (
        (
            "(float[2,3] x) => (float[2,3] y) { y = ReduceSum <noop_with_empty_axes = 1> (x) z ="
            " Relu(y) }"
        ),
        13,
        {},
        None,
    ),
    "views": (
        (
            "(float[2,3,4] x) => (float[4,6] y) { a = Flatten(x) b = Unsqueeze(a, z) c = Squeeze(b,"
            " z) y = Reshape(c, s) }"
        ),
        13,
        {"z": np.array([0]), "s": np.array([4, -1])},
        "Reshape",
    ),
    "squeeze_old": (
        "(float[2,1,3] x) => (float[2,3,1] y) { a = Squeeze(x) y = Unsqueeze <axes = [-1]> (a) }",
        11,
        {},
        "Reshape",
    ),
    "reshape_zero": (
        "(float[2,3,4] x) => (float[2,12] y) { y = Reshape(x, s) }",
        13,
        {"s": np.array([0, -1])},
        "Reshape",
    ),
    "transposes": (
        (
            "(float[2,3,4] x) => (float[2,3,4] y) "
            "{ a = Transpose <perm = [1,2,0]> (x) b = Transpose <perm = [2,0,1]> (a) y = Relu(b) }"
        ),
        13,
        {},
        "Relu",
    ),
    "casts": (
        (
            "(int32[2,3] x) => (int32[2,3] y) { a = Cast <to = 7> (x) b = Cast <to = 6> (a) y ="
            " Neg(b) }"
        ),
        13,
        {},
        "Neg",
    ),
    "lossy_casts_stay": (
        "(float[2,3] x) => (float[2,3] y) { a = Cast <to = 10> (x) y = Cast <to = 1> (a) }",
        13,
        {},
        "Cast Cast",
    ),
    "split_sizes": (
        (
            "(float[2,7] x) => (float[2,3] y) { a, b = Split <axis = 1> (x, s) c = Slice(b, z, t,"
            " o) y = Add(a, c) }"
        ),
        13,
        {"s": np.array([3, 4]), "z": np.array([0]), "t": np.array([3]), "o": np.array([1])},
        "Split Slice Add",
    ),
    "split_uneven": (
        "(float[7,2] x) => (float[1,2] y) { a, b, y = Split <num_outputs = 3> (x) }",
        18,
        {},
        "Split",
    ),
    "slice_negative": (
        "(float[5,6] x) => (float[a,b] y) { y = Slice(x, s, e, ax, st) }",
        13,
        {
            "s": np.array([-1, 10]),
            "e": np.array([-(2**62), -4]),
            "ax": np.array([0, -1]),
            "st": np.array([-2, -1]),
        },
        "Slice",
    ),
    "slice_old": (
        "(float[5,6] x) => (float[2,5] y) { y = Slice <starts = [1, 0], ends = [3, -1]> (x) }",
        9,
        {},
        "Slice",
    ),
    "slice_all": (
        "(float[5,6] x) => (float[5,6] y) { a = Slice(x, s, e) y = Relu(a) }",
        13,
        {"s": np.array([0, 0]), "e": np.array([2**63 - 1, 6])},
        "Relu",
    ),
    "pad": (
        "(float[2,3] x) => (float[a,b] y) { y = Pad(x, p, v) }",
        13,
        {"p": np.array([0, 1, 1, 2]), "v": F(1.5)},
        "Pad",
    ),
    "pad_axes": (
        "(float[2,3] x) => (float[2,b] y) { y = Pad(x, p, , ax) }",
        18,
        {"p": np.array([1, 2]), "ax": np.array([-1])},
        "Pad",
    ),
    "crop": (
        "(float[4,5] x) => (float[a,b] y) { y = Pad(x, p) }",
        13,
        {"p": np.array([-1, 0, 0, -2])},
        "Slice",
    ),
    "pad_reflect": (
        '(float[1,4,5] x) => (float[1,a,b] y) { y = Pad <mode = "reflect"> (x, p) }',
        13,
        {"p": np.array([0, 1, 1, 0, 1, 2])},
        "Pad",
    ),
    "tile_expand": (
        "(float[1,3] x) => (float[4,6] y) { t = Tile(x, r) y = Expand(t, s) }",
        13,
        {"r": np.array([1, 2]), "s": np.array([4, 1])},
        "Tile Expand",
    ),
    "expand_dies": (
        "(float[1,3] x, float[4,3] z) => (float[4,3] y) { e = Expand(x, s) y = Mul(e, z) }",
        13,
        {"s": np.array([4, 3])},
        "Mul",
    ),
    "expand_sinks": (
        (
            "(float[1,3] x, float[4,3] z) => (float[4,3] y) { e = Expand(x, s) f = Exp(e) y ="
            " Mul(f, z) }"
        ),
        13,
        {"s": np.array([4, 3])},
        "Exp Mul",
    ),
    "trilu": (
        "(float[3,4] x) => (float[3,4] y) { y = Trilu <upper = 0> (x, k) }",
        14,
        {"k": np.int64(1)},
        "Trilu",
    ),
    "gather_slice": (
        "(float[2,5,3] x) => (float[2,3] y) { y = Gather <axis = 1> (x, i) }",
        13,
        {"i": np.int64(-1)},
        "Slice Reshape",
    ),
    "gather_range": (
        "(float[2,5,3] x) => (float[2,2,3] y) { y = Gather <axis = 1> (x, i) }",
        13,
        {"i": np.array([2, 3])},
        "Slice",
    ),
    "gather_all": (
        "(float[2,6] x) => (float[2,2,3] y) { g = Gather <axis = 1> (x, i) y = Relu(g) }",
        13,
        {"i": np.arange(6).reshape(2, 3)},
        "Reshape Relu",
    ),
    "gather_some": (
        "(float[2,5] x) => (float[2,3] y) { y = Gather <axis = 1> (x, i) }",
        13,
        {"i": np.array([4, -5, 2])},
        "Gather",
    ),
    "gather_nd_grid": (
        "(float[2,3] x) => (float[2,1,1,3] y) { y = GatherND(x, i) }",
        13,
        {
            "i": (
                np.stack(np.meshgrid(np.arange(2), np.arange(3), indexing="ij"), -1).reshape(
                    2, 1, 1, 3, 2
                )
            )
        },
        "Reshape",
    ),
    "gather_nd": (
        "(float[2,3,4] x) => (float[2,4] y) { y = GatherND(x, i) }",
        13,
        {"i": np.array([[1, 2], [0, 0]])},
        "GatherND",
    ),
    "gather_nd_rows": (
        "(float[4,3] x) => (float[2,3] y) { y = GatherND(x, i) }",
        13,
        {"i": np.array([[3], [1]])},
        "Gather",
    ),
    "gather_elements": (
        "(float[2,3] x) => (float[2,2] y) { y = GatherElements <axis = 1> (x, i) }",
        13,
        {"i": np.array([[2, 0], [1, -1]])},
        "GatherElements",
    ),
    "scatter": (
        (
            "(float[2,3] x) => (float[2,3] y) { a = ScatterElements <axis = 1> (x, i, u) y ="
            " ScatterND(a, j, v) }"
        ),
        16,
        {"i": np.array([[2], [0]]), "u": rand(2, 1), "j": np.array([[1, 1]]), "v": rand(1)},
        "ScatterElements ScatterND",
    ),
    "resize_nearest": (
        (
            '(float[1,2,3,4] x) => (float[1,2,6,8] y) { y = Resize <mode = "nearest", '
            'coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"> (x, , s) }'
        ),
        13,
        {"s": np.array([1, 1, 2, 2], F)},
        "Resize",
    ),
    "resize_sizes": (
        '(float[1,2,3,4] x) => (float[1,2,5,7] y) { y = Resize <mode = "linear"> (x, , , s) }',
        13,
        {"s": np.array([1, 2, 5, 7])},
        "Resize",
    ),
    "upsample": (
        '(float[1,2,3,4] x) => (float[1,2,6,8] y) { y = Upsample <mode = "nearest"> (x, s) }',
        9,
        {"s": np.array([1, 1, 2, 2], F)},
        "Resize",
    ),
    "top_k": (
        "(float[2,6] x) => (float[2,3] y, int64[2,3] i) { y, i = TopK(x, k) }",
        13,
        {"k": np.array([3])},
        "TopK",
    ),
    "one_hot": (
        "(int64[2,3] x) => (float[2,3,5] y) { y = OneHot(x, d, v) }",
        13,
        {"d": np.int64(5), "v": np.array([0, 1], F)},
        "OneHot",
    ),
    "cumsum": (
        "(float[2,5] x) => (float[2,5] y) { y = CumSum <exclusive = 1, reverse = 1> (x, a) }",
        14,
        {"a": np.int64(1)},
        "CumSum",
    ),
    "arg_max": (
        "(float[2,5] x) => (int64[2,1] y) { y = ArgMax <axis = -1> (x) }",
        13,
        {},
        "ArgMax",
    ),
    "comparisons": (
        (
            "(float[2,3] x) => (bool[2,3] y) { a = Less(x, c) b = GreaterOrEqual(x, d) e = Or(a, b)"
            " y = Not(e) }"
        ),
        20,
        {"c": F(0), "d": F(0.5)},
        "",
    ),
    "where": (
        "(float[2,3] x) => (float[2,3] y) { c = Greater(x, z) y = Where(c, x, z) }",
        20,
        {"z": F(0)},
        "Greater Where",
    ),
    "einsum": (
        (
            '(float[2,3,4] x, float[2,5,4] z) => (float[2,3,5] y) { y = Einsum <equation = "bij, b'
            ' kj -> bik"> (x, z) }'
        ),
        20,
        {},
        None,
    ),
    "einsum_dots": (
        (
            "(float[2,3,4] x, float[4,5] z) => (float[2,3,5] y) { y = Einsum <equation ="
            ' "...ij,jk"> (x, z) }'
        ),
        20,
        {},
        None,
    ),
    "einsum_into_heads": (
        (
            '(float[2,3,8] x) => (float[2,3,2,5] y) { y = Einsum <equation = "bsh,hnd->bsnd"> (x, w) }'
        ),
        20,
        {"w": rand(8, 2, 5)},
        "MatMul Reshape",
    ),
    "einsum_of_turned_heads": (
        (
            '(float[2,3,8] x) => (float[2,3,2,5] y) { y = Einsum <equation = "bsh,ndh->bsnd"> (x, w) }'
        ),
        20,
        {"w": rand(2, 5, 8)},
        "MatMul Reshape",
    ),
    "einsum_from_heads": (
        (
            '(float[2,3,2,5] x) => (float[2,3,8] y) { y = Einsum <equation = "bsnd,ndh->bsh"> (x, w) }'
        ),
        20,
        {"w": rand(2, 5, 8)},
        "Reshape MatMul",
    ),
    "einsum_that_stays": (
        (
            '(float[2,3,2,5] x, float[2,3,4,6] z) => (float[2,3,2,5] y) { y = Einsum <equation = "abcd,abef->abcd"> (x, z) }'
        ),
        20,
        {},
        "Einsum",
    ),
    "einsum_permute": (
        '(float[2,3,4] x) => (float[4,2,3] y) { y = Einsum <equation = "abc->cab"> (x) }',
        20,
        {},
        "Transpose",
    ),
    "space_to_depth": (
        (
            "(float[1,4,4,6] x) => (float[1,4,4,6] y) { a = SpaceToDepth <blocksize = 2> (x) y ="
            " DepthToSpace <blocksize = 2> (a) }"
        ),
        13,
        {},
        None,
    ),
    "depth_crd": (
        (
            "(float[1,8,2,3] x) => (float[1,2,4,6] y) { y = DepthToSpace <blocksize = 2, mode ="
            ' "CRD"> (x) }'
        ),
        13,
        {},
        None,
    ),
    "dropout_eval": (
        "(float[2,3] x) => (float[2,3] y) { a = Dropout(x) y = Relu(a) }",
        13,
        {},
        "Relu",
    ),
    "identity_chain": (
        "(float[2,3] x) => (float[2,3] y) { a = Identity(x) b = Relu(a) y = Identity(b) }",
        13,
        {},
        "Relu",
    ),
    "lstm": (
        (
            "(float[4,2,3] x) => (float[4,1,2,5] y, float[1,2,5] h, float[1,2,5] c) { y, h, c ="
            " LSTM <hidden_size = 5> (x, w, r, b) }"
        ),
        14,
        {"w": rand(1, 20, 3), "r": rand(1, 20, 5), "b": rand(1, 40)},
        "LSTM",
    ),
    "gru_both_ways": (
        (
            "(float[4,2,3] x) => (float[4,2,2,5] y) { y = GRU <hidden_size = 5, direction ="
            ' "bidirectional", linear_before_reset = 1> (x, w, r) }'
        ),
        14,
        {"w": rand(2, 15, 3), "r": rand(2, 15, 5)},
        "GRU",
    ),
    "neutral_elements": (
        (
            "(float[2,3] x) => (float[2,3] y) { a = Mul(x, one) b = Add(a, zero) c = Div(b, one) d"
            " = Sub(c, zero) e = Pow(d, one) y = Relu(e) }"
        ),
        20,
        {"one": F(1), "zero": F(0)},
        "Relu",
    ),
    "shape_arithmetic": (
        (
            "(float[2,3,4] x) => (float[2,12] y) { s = Shape(x) b = Gather(s, i) t = Unsqueeze(b,"
            " z) u = Concat <axis = 0> (t, m) y = Reshape(x, u) }"
        ),
        13,
        {"i": np.int64(0), "z": np.array([0]), "m": np.array([-1])},
        "Reshape",
    ),
    "range_mask": (
        (
            "(float[2,4] x) => (float[2,4] y) { s = Shape(x) n = Gather(s, i) r = Range(z, n, o) c"
            " = Cast <to = 1> (r) y = Mul(x, c) }"
        ),
        13,
        {"i": np.int64(1), "z": np.int64(0), "o": np.int64(1)},
        "Mul",
    ),
    "constant_of_shape": (
        (
            "(float[2,4] x) => (float[2,4] y) { s = Shape(x) c = ConstantOfShape(s) y = Add(x, c) z"
            " = Relu(y) }"
        ),
        13,
        {},
        None,
    ),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_operator(name: str) -> None:
    text, opset, arrays, expected = CASES[name]
    made = model(text, opset, **arrays)
    feeds = {}
    for value in made.graph.input:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        integer = value.type.tensor_type.elem_type in (6, 7)
        counting = np.arange(math.prod(shape)).reshape(shape) % 5
        feeds[value.name] = (
            counting.astype(np.int32 if value.type.tensor_type.elem_type == 6 else np.int64)
            if integer
            else rand(*shape)
        )
    graph = same(made, feeds, 1e-4 if "float16" in text or "lossy" in name else 1e-5)
    assert set(ops(graph)) <= CANONICAL
    if expected:
        assert " ".join(ops(graph)) == expected


def test_a_scatter_at_no_place_is_its_operand() -> None:
    """Windows that are not shifted along a dim (Swin 3D): the rule took rows that there are not."""
    made = model(
        "(float[2,3] x) => (float[2,3] y) { a = ScatterND(x, places, rows) y = Relu(a) }",
        places=np.zeros((0, 2, 1), np.int64),
        rows=np.zeros((0, 3), np.float32),
    )
    assert [node.op for node in read_model(made).nodes] == ["Relu"]


def test_a_long_tensor_is_written_into_soon() -> None:
    """MViT writes all rows but the first of 25,089: each was looked up in a new set of them."""
    rows = 25_089
    made = model(
        f"(float[{rows},2] x, float[{rows - 1},2] u) => (float[{rows},2] y)"
        " { y = ScatterND(x, places, u) }",
        places=np.arange(1, rows)[:, None],
    )
    started = time.process_time()
    assert [node.op for node in read_model(made).nodes][-1] == "Gather"
    assert time.process_time() - started < 2


def test_attention_operator_in_both_forms() -> None:
    q, k, v = rand(2, 5, 12), rand(2, 5, 6, seed=1), rand(2, 5, 6, seed=2)
    flat = model(
        "(float[2,5,12] q, float[2,5,6] k, float[2,5,6] v) => (float[2,5,12] y)"
        "{ y = Attention <q_num_heads = 4, kv_num_heads = 2, is_causal = 1> (q, k, v) }",
        23,
    )
    graph = same(flat, {"q": q, "k": k, "v": v})
    (node,) = [n for n in graph.nodes if n.op == "Attention"]
    assert node.attrs["causal"] == 1 and graph.tensors[node.inputs[1]].shape == (2, 2, 5, 3)
    assert node.attrs["scale"] == pytest.approx(1 / math.sqrt(3))
    mask = np.tril(np.ones((5, 5), bool))
    heads = model(
        "(float[2,4,5,3] q, float[2,4,5,3] k, float[2,4,5,3] v) => (float[2,4,5,3] y) { y ="
        " Attention <scale = 0.25> (q, k, v, m) }",
        23,
        m=mask,
    )
    q4, k4, v4 = (rand(2, 4, 5, 3, seed=s) for s in range(3))
    graph = same(heads, {"q": q4, "k": k4, "v": v4})
    assert (
        ops(graph) == ["Attention"]
        and graph.nodes[0].attrs == {"scale": 0.25, "causal": 1}
        and len(graph.nodes[0].inputs) == 3
    )


def test_softcap_of_the_operator_caps_scores() -> None:
    made = model(
        "(float[1,2,4,3] q, float[1,2,4,3] k, float[1,2,4,3] v) => (float[1,2,4,3] y) { y ="
        " Attention <softcap = 2.0> (q, k, v) }",
        23,
    )
    graph = same(made, {n: rand(1, 2, 4, 3, seed=s) for s, n in enumerate("qkv")})
    (node,) = graph.nodes
    assert node.op == "Attention" and node.attrs["cap"] == 2.0


def test_rotary_operator_gathers_its_tables() -> None:
    made = model(
        "(float[2,4,5,6] x, int64[2,5] p) => (float[2,4,5,6] y) { y = RotaryEmbedding(x, c, s,"
        " p) }",
        23,
        c=np.cos(rand(9, 3)),
        s=np.sin(rand(9, 3)),
    )
    positions = np.arange(10).reshape(2, 5) % 9
    graph = same(made, {"x": rand(2, 4, 5, 6), "p": positions})
    assert ops(graph)[-1] == "RotaryEmbedding"


def test_training_dropout_and_batch_norm_are_kept() -> None:
    made = model(
        "(float[2,3] x) => (float[2,3] y, float[3] m, float[3] v){ d, k = Dropout(x, r, t) y, m, v"
        " = BatchNormalization <training_mode = 1> (d, s, b, rm, rv) }",
        15,
        r=F(0.25),
        t=np.array(True),
        s=rand(3),
        b=rand(3),
        rm=rand(3),
        rv=np.ones(3, F),
    )
    graph = read_model(made)
    assert ops(graph) == ["Dropout", "BatchNormalization"]
    assert graph.nodes[0].attrs == {"ratio": 0.25, "training_mode": 1}
    assert set(graph.weights) == {"s", "b", "rm", "rv"} and graph.trainable == {
        "s",
        "b",
    }  # running statistics are state


def test_rewritten_ids_and_members() -> None:
    made = model(
        "(float[3,4] x) => (float[3,5] y) { h = Gemm(x, w, c) y = Relu(h) }",
        w=rand(4, 5),
        c=rand(5),
    )
    made.graph.node[0].name, made.graph.node[1].name = "fc", ""
    graph = read_model(made)
    assert [(n.id, n.members) for n in graph.nodes] == [
        ("fc/matmul", ("fc",)),
        ("fc/add", ("fc",)),
        ("Relu.0", ()),
    ]


def test_outputs_keep_their_names_and_order() -> None:
    made = model(
        "(float[2,3] x) => (float[2,3] b, float[2,3] a, float[2,3] again) { r = Relu(x) a ="
        " Identity(r) b = Neg(a) again = Identity(r) }"
    )
    graph = same(made, {"x": rand(2, 3)})
    assert graph.outputs == ("b", "a", "again")
    straight = same(
        model("(float[2,3] x) => (float[2,3] y, float[2,3] z) { y = Identity(x) z = Relu(x) }"),
        {"x": rand(2, 3)},
    )
    assert straight.outputs == ("y", "z")


def test_shape_errors_name_node_and_shapes() -> None:
    made = model("(float[4,7] x) => (float[4,8] y) { y = MatMul(x, w) }", w=rand(8, 8))
    made.graph.node[0].name = "mm"
    with pytest.raises(PlanError, match=r"'mm'.*\[4, 7\].*\[8, 8\]") as caught:
        read_model(made)
    assert caught.value.code == "P115"


def test_every_operand_of_a_recurrence_is_checked() -> None:
    text = (
        "(float[4,2,3] x) => (float[4,1,2,5] y) { y = LSTM <hidden_size = 5> (x, w, r, , , , ,"
        " peepholes) }"
    )
    arrays = {"w": rand(1, 20, 3), "r": rand(1, 20, 5)}
    same(model(text, 14, **arrays, peepholes=rand(1, 15)), {"x": rand(4, 2, 3)})
    with pytest.raises(PlanError, match=r"operand 7 is \[1, 20, 3\]; \[1, 15\] expected"):
        read_model(model(text, 14, **arrays, peepholes=rand(1, 20, 3)))


@pytest.mark.slow
def test_onnx_node_suite() -> None:
    """The node tests that ship with onnx: what is lowered to canonical operators gives their
    outputs."""
    from tests.reader.onnx_suite import run_suite

    counts, wrong = run_suite()
    assert not wrong
    assert counts["ok"] >= 1150
