"""Patterns: recognised where they are exact, left alone where they are not; onnxruntime compares
both ways."""

from __future__ import annotations

import math

import numpy as np
import pytest

from planner.graph.ir import Graph, Node
from tests.reader.reader_models import model, ops, rand, same

F = np.float32
X = "(float[2,5,8] x) => (float[2,5,8] y)"


def one(graph: Graph, op: str) -> Node:
    (found,) = [n for n in graph.nodes if n.op == op]
    return found


# activations

GELU = {
    "half_outside": "{ d = Div(x, r2) e = Erf(d) p = Add(e, one) m = Mul(x, p) y = Mul(m, half) }",
    "half_first": "{ h = Mul(half, x) d = Mul(x, ir2) e = Erf(d) p = Add(one, e) y = Mul(h, p) }",
    "half_inside": "{ d = Div(x, r2) e = Erf(d) p = Add(e, one) m = Mul(half, p) y = Mul(x, m) }",
    "tanh_pow": (
        "{ c = Pow(x, three) k = Mul(c, k3) s = Add(x, k) u = Mul(s, k1) t = Tanh(u) p = Add(t,"
        " one) h = Mul(x, half) y = Mul(h, p) }"
    ),
    "tanh_products": (
        "{ q = Mul(x, x) c = Mul(q, x) k = Mul(k3, c) s = Add(k, x) u = Mul(k1, s) t = Tanh(u) p ="
        " Add(one, t) m = Mul(half, p) y = Mul(x, m) }"
    ),
    "tanh_factored": (
        "{ q = Mul(x, x) k = Mul(q, k3) o = Add(k, one) s = Mul(x, o) u = Mul(s, k1) t = Tanh(u) p"
        " = Add(t, one) m = Mul(x, p) y = Div(m, two) }"
    ),
}
NUMBERS = {
    "r2": F(math.sqrt(2)),
    "ir2": F(math.sqrt(0.5)),
    "one": F(1),
    "half": F(0.5),
    "three": F(3),
    "two": F(2),
    "k3": F(0.044715),
    "k1": F(math.sqrt(2 / math.pi)),
}


@pytest.mark.parametrize("name", sorted(GELU))
def test_gelu(name: str) -> None:
    graph = same(model(f"{X} {GELU[name]}", **NUMBERS), {"x": rand(2, 5, 8)})
    assert ops(graph) == ["Gelu"]
    assert graph.nodes[0].attrs["approximate"] == ("tanh" if "tanh" in name else "none")
    assert len(graph.nodes[0].members) > 4


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        (GELU["half_outside"], {"half": F(0.4)}),
        (GELU["half_outside"], {"r2": F(1.4)}),
        (GELU["tanh_pow"], {"k3": F(0.05)}),
        (
            (
                "{ d = Div(x, r2) e = Erf(d) p = Add(e, one) m = Mul(x, p) z = Mul(m, half) y ="
                " Add(z, e) }"
            ),
            {},
        ),  # the curve is read elsewhere
        (
            (
                "{ d = Div(x, r2) e = Erf(d) p = Add(e, one) o = Exp(x) m = Mul(o, p) y = Mul(m,"
                " half) }"
            ),
            {},
        ),  # another tensor outside
    ],
)
def test_what_is_no_gelu(text: str, numbers: dict[str, np.ndarray]) -> None:
    assert "Gelu" not in ops(
        same(model(f"{X} {text}", **{**NUMBERS, **numbers}), {"x": rand(2, 5, 8)})
    )


def test_silu_either_way_round_and_not_when_the_gate_is_read() -> None:
    assert ops(same(model(f"{X} {{ s = Sigmoid(x) y = Mul(s, x) }}"), {"x": rand(2, 5, 8)})) == [
        "Silu"
    ]
    kept = model("(float[2,3] x) => (float[2,3] y, float[2,3] s) { s = Sigmoid(x) y = Mul(x, s) }")
    assert ops(same(kept, {"x": rand(2, 3)})) == ["Sigmoid", "Mul"]


# norms

AXES = {
    "ax": np.array([-1]),
    "e": F(1e-5),
    "two": F(2),
    "one": F(1),
    "zero": F(0),
    "w": rand(8),
    "b": rand(8, seed=1),
}
NORMS = {
    "rms_div": (
        (
            "{ q = Pow(x, two) m = ReduceMean(q, ax) v = Add(m, e) s = Sqrt(v) n = Div(x, s) y ="
            " Mul(n, w) }"
        ),
        "RMSNormalization",
    ),
    "rms_reciprocal": (
        (
            "{ q = Mul(x, x) m = ReduceMean(q, ax) v = Add(e, m) s = Sqrt(v) r = Reciprocal(s) n ="
            " Mul(r, x) y = Mul(w, n) }"
        ),
        "RMSNormalization",
    ),
    "rms_one_over": (
        (
            "{ q = Mul(x, x) m = ReduceMean(q, ax) v = Add(m, e) s = Sqrt(v) r = Div(one, s) n ="
            " Mul(x, r) y = Mul(w, n) }"
        ),
        "RMSNormalization",
    ),
    "rms_pow": (
        (
            "{ h = Constant <value_float = -0.5> () q = Mul(x, x) m = ReduceMean(q, ax) v = Add(m,"
            " e) r = Pow(v, h) n = Mul(x, r) y = Mul(w, n) }"
        ),
        "RMSNormalization",
    ),
    "rms_bare": (
        "{ q = Mul(x, x) m = ReduceMean(q, ax) v = Add(m, e) s = Sqrt(v) y = Div(x, s) }",
        "RMSNormalization",
    ),
    "layer": (
        (
            "{ u = ReduceMean(x, ax) d = Sub(x, u) q = Pow(d, two) m = ReduceMean(q, ax) v = Add(m,"
            " e) s = Sqrt(v) n = Div(d, s) g = Mul(n, w) y = Add(g, b) }"
        ),
        "LayerNormalization",
    ),
    "layer_no_bias": (
        (
            "{ u = ReduceMean(x, ax) d = Sub(x, u) q = Mul(d, d) m = ReduceMean(q, ax) v = Add(m,"
            " e) s = Sqrt(v) n = Div(d, s) y = Mul(n, w) }"
        ),
        "LayerNormalization",
    ),
    "layer_centred_twice": (
        (
            "{ u = ReduceMean(x, ax) d = Sub(x, u) u2 = ReduceMean(x, ax) d2 = Sub(x, u2) q ="
            " Mul(d2, d2) m = ReduceMean(q, ax) v = Add(m, e) s = Sqrt(v) n = Div(d, s) g = Mul(n,"
            " w) y = Add(b, g) }"
        ),
        "LayerNormalization",
    ),
    "layer_second_moment": (
        (
            "{ u = ReduceMean(x, ax) d = Sub(x, u) q = Mul(x, x) m2 = ReduceMean(q, ax) u2 = Mul(u,"
            " u) r = Sub(m2, u2) c = Max(r, zero) v = Add(c, e) s = Sqrt(v) n = Div(d, s) g ="
            " Mul(n, w) y = Add(g, b) }"
        ),
        "LayerNormalization",
    ),
}


@pytest.mark.parametrize("name", sorted(NORMS))
def test_norm(name: str) -> None:
    text, op = NORMS[name]
    graph = same(model(f"{X} {text}", **AXES), {"x": rand(2, 5, 8)}, 1e-4)
    assert ops(graph) == [op]
    assert graph.nodes[0].attrs == {"axis": 2, "epsilon": pytest.approx(1e-5)}
    if "bare" not in name:
        assert "w" in graph.trainable


@pytest.mark.parametrize(
    "text",
    [
        (  # not the last dim
            "{ u = ReduceMean(x, a1) d = Sub(x, u) q = Mul(d, d) m = ReduceMean(q, a1) v = Add(m,"
            " e) s = Sqrt(v) y = Div(d, s) }"
        ),
        (  # another tensor over the root
            "{ q = Mul(x, x) m = ReduceMean(q, ax) v = Add(m, e) s = Sqrt(v) h = Exp(x) y = Div(h,"
            " s) }"
        ),
        (  # the root is read twice
            "{ q = Mul(x, x) m = ReduceMean(q, ax) v = Add(m, e) s = Sqrt(v) n = Div(x, s) y ="
            " Add(n, s) }"
        ),
        (  # uncentred square
            "{ u = ReduceMean(x, ax) d = Sub(x, u) q = Mul(x, x) m = ReduceMean(q, ax) v = Add(m,"
            " e) s = Sqrt(v) y = Div(d, s) }"
        ),
    ],
)
def test_what_is_no_norm(text: str) -> None:
    graph = same(model(f"{X} {text}", a1=np.array([1]), **AXES), {"x": rand(2, 5, 8)}, 1e-4)
    assert not {"RMSNormalization", "LayerNormalization"} & set(ops(graph))


def test_casts_around_a_norm_are_part_of_it() -> None:
    text = (
        "(float16[2,5,8] x) => (float16[2,5,8] y) { f = Cast <to = 1> (x) q = Pow(f, two) m ="
        " ReduceMean(q, ax) v = Add(m, e) s = Sqrt(v) r = Reciprocal(s) n = Mul(f, r) h = Cast <to"
        " = 10> (n) y = Mul(w16, h) }"
    )
    graph = same(
        model(text, w16=rand(8, dtype="float16"), **AXES),
        {"x": rand(2, 5, 8, dtype="float16")},
        5e-3,
    )
    assert ops(graph) == ["RMSNormalization"] and graph.trainable == {"w16"}


KERAS = {
    "jax": "t = ReduceSum <keepdims = 0> (x, a) u = Reshape(t, keep) e = Div(u, n) d = Sub(x, e)"
    " q = Mul(d, d) w = ReduceSum <keepdims = 0> (q, a) z = Reshape(w, keep) g = Div(z, n)"
    " v = Where(true, g, none) s = Add(v, eps) o = Sqrt(s) r = Div(one, o) f = Mul(r, scale)"
    " m = ReduceMean(x, a) k = Neg(m) b = Mul(k, f) c = Add(b, bias) h = Mul(x, f) y = Add(h, c)",
    "tensorflow": "m = ReduceMean(x, a) d = Sub(x, m) q = Mul(d, d) v = ReduceMean(q, a)"
    " s = Add(v, eps) o = Sqrt(s) r = Reciprocal(o) f = Mul(r, scale) h = Mul(x, f)"
    " b = Mul(m, f) c = Sub(bias, b) y = Add(h, c)",
}


@pytest.mark.parametrize("backend", list(KERAS))
def test_layer_norm_as_keras_writes_it(backend: str) -> None:
    """Its scale was no parameter, and it ran as a dozen operators."""
    arrays: dict[str, np.ndarray] = {"a": np.array([-1]), "eps": F(1e-3), "scale": rand(1, 1, 8)}
    arrays |= {"bias": rand(1, 1, 8, seed=1)}
    if backend == "jax":
        arrays |= {"keep": np.array([2, 5, 1]), "n": F(8), "one": F(1), "true": np.array(True)}
        arrays |= {"none": np.full((2, 5, 1), np.nan, F)}
    made = model(f"(float[2,5,8] x) => (float[2,5,8] y) {{ {KERAS[backend]} }}", 18, **arrays)
    graph = same(made, {"x": rand(2, 5, 8)})
    assert ops(graph)[-1] == "LayerNormalization" and len(graph.nodes) <= 3
    assert graph.trainable == {"scale", "bias"}


def test_group_norm_of_old_exporters() -> None:
    text = (
        "(float[2,6,4,4] x) => (float[2,6,4,4] y) { r = Reshape(x, g) n = InstanceNormalization"
        " <epsilon = 0.001> (r, ones, zeros) s = Shape(x) o = Reshape(n, s) m = Mul(o, w) y ="
        " Add(m, b) }"
    )
    arrays = {
        "g": np.array([0, 3, -1]),
        "ones": np.ones(3, F),
        "zeros": np.zeros(3, F),
        "w": rand(6, 1, 1),
        "b": rand(6, 1, 1, seed=1),
    }
    graph = same(model(text, **arrays), {"x": rand(2, 6, 4, 4)})
    assert ops(graph) == ["GroupNormalization"] and graph.nodes[0].attrs["num_groups"] == 3
    assert graph.trainable == {"w", "b"} and graph.tensors["w"].shape == (6,)


def test_group_norm_whose_result_is_seen_otherwise() -> None:
    """That of attention in a VAE, over an image as a sequence."""
    text = (
        "(float[2,6,4,4] x) => (float[2,6,16] y) { r = Reshape(x, g) n = InstanceNormalization"
        " <epsilon = 0.001> (r, ones, zeros) o = Reshape(n, flat) m = Mul(o, w) y = Add(m, b) }"
    )
    arrays = {"g": np.array([0, 3, -1]), "flat": np.array([0, 6, -1])}
    vectors = {"ones": np.ones(3, F), "zeros": np.zeros(3, F), "w": rand(6, 1), "b": rand(6, 1)}
    graph = same(model(text, **arrays, **vectors), {"x": rand(2, 6, 4, 4)})
    assert ops(graph)[-1] == "GroupNormalization" and graph.trainable == {"w", "b"}


def test_group_norm_of_a_channel_each_has_one_scale() -> None:
    """The first layer of wav2vec 2.0 and HuBERT: the ones that an exporter writes are no scale."""
    text = (
        "(float[2,6,9] x) => (float[2,6,9] y) { n = InstanceNormalization <epsilon = 0.001>"
        " (x, ones, zeros) m = Mul(n, w) y = Add(m, b) }"
    )
    vectors = {"ones": np.ones(6, F), "zeros": np.zeros(6, F), "w": rand(6, 1), "b": rand(6, 1)}
    graph = same(model(text, **vectors), {"x": rand(2, 6, 9)})
    assert ops(graph) == ["InstanceNormalization"] and graph.trainable == {"w", "b"}


def test_scales_of_group_norms_that_were_merged_are_parted() -> None:
    norm = (
        "r{k} = Reshape({x}, g) n{k} = InstanceNormalization <epsilon = 0.001> (r{k}, ones, zeros)"
        " o{k} = Reshape(n{k}, whole) m{k} = Mul(o{k}, w) y{k} = Add(m{k}, b)"
    )
    text = f"{norm.format(k=1, x='x')} h = Relu(y1) {norm.format(k=2, x='h')}"
    made = model(
        f"(float[2,6,4,4] x) => (float[2,6,4,4] y2) {{ {text} }}",
        g=np.array([0, 3, -1]),
        whole=np.array([0, 6, 4, 4]),
        ones=np.ones(3, F),
        zeros=np.zeros(3, F),
        w=np.ones((6, 1, 1), F),
        b=np.zeros((6, 1, 1), F),
    )
    graph = same(made, {"x": rand(2, 6, 4, 4)})
    assert ops(graph).count("GroupNormalization") == 2 and len(graph.trainable) == 4


# rotary embeddings

HALVES = {
    "z": np.array([0]),
    "h": np.array([4]),
    "n": np.array([2**62]),
    "l": np.array([-1]),
    "cos": np.cos(rand(5, 8)),
    "sin": np.sin(rand(5, 8)),
}
ROTARY = "(float[2,3,5,8] x) => (float[2,3,5,8] y)"


@pytest.mark.parametrize(
    "text",
    [
        (
            "{ a = Mul(x, cos) lo = Slice(x, z, h, l) hi = Slice(x, h, n, l) m = Neg(hi) t = Concat"
            " <axis = -1> (m, lo) c = Mul(t, sin) y = Add(a, c) }"
        ),
        (
            "{ lo, hi = Split <axis = 3, num_outputs = 2> (x) m = Neg(hi) t = Concat <axis = 3> (m,"
            " lo) c = Mul(sin, t) a = Mul(cos, x) y = Add(c, a) }"
        ),
    ],
)
def test_rotary(text: str) -> None:
    graph = same(model(f"{ROTARY} {text}", **HALVES), {"x": rand(2, 3, 5, 8)})
    assert ops(graph) == ["RotaryEmbedding"] and graph.nodes[0].inputs == ("x", "cos", "sin")


def test_rotary_under_autocast() -> None:
    """Turned in half precision, multiplied in float32: the cast goes before both."""
    text = (
        "(float16[2,3,5,8] x) => (float[2,3,5,8] y) { f = Cast <to = 1> (x) a = Mul(f, cos) lo ="
        " Slice(x, z, h, l) hi = Slice(x, h, n, l) m = Neg(hi) t = Concat <axis = -1> (m, lo) g ="
        " Cast <to = 1> (t) c = Mul(g, sin) y = Add(a, c) }"
    )
    graph = same(model(text, **HALVES), {"x": rand(2, 3, 5, 8, dtype="float16")})
    assert ops(graph) == ["Cast", "RotaryEmbedding"]


@pytest.mark.parametrize(
    "text",
    [
        (
            "{ a = Mul(x, cos) lo = Slice(x, z, h, l) hi = Slice(x, h, n, l) m = Neg(lo) t = Concat"
            " <axis = -1> (m, hi) c = Mul(t, sin) y = Add(a, c) }"
        ),
        (
            "{ a = Mul(x, cos) lo = Slice(x, z, h, l) hi = Slice(x, h, n, l) m = Neg(hi) t = Concat"
            " <axis = -1> (lo, m) c = Mul(t, sin) y = Add(a, c) }"
        ),
    ],
)
def test_other_rotations_stay(text: str) -> None:
    assert "RotaryEmbedding" not in ops(
        same(model(f"{ROTARY} {text}", **HALVES), {"x": rand(2, 3, 5, 8)})
    )


# attention

QKV = "(float[2,4,6,8] q, float[2,4,6,8] k, float[2,4,6,8] v) => (float[2,4,6,8] y)"
FEEDS = {n: rand(2, 4, 6, 8, seed=s) for s, n in enumerate("qkv")}
CAUSAL = np.tril(np.ones((6, 6), bool))
ADDED = np.where(CAUSAL, 0, -np.inf).astype(F)
C = {"c": F(0.3), "r": F(math.sqrt(8)), "zero": F(0), "low": F(-np.inf), "lowest": np.finfo(F).min}
KT = "t = Transpose <perm = [0,1,3,2]> (k)"
ATTENTION = {
    "scale_on_scores": (
        f"{{ {KT} s = MatMul(q, t) d = Div(s, r) p = Softmax <axis = -1> (d) y = MatMul(p, v) }}",
        1 / math.sqrt(8),
        0,
    ),
    "scale_on_both": (
        (
            f"{{ a = Mul(q, c) {KT} u = Mul(t, c) s = MatMul(a, u) p = Softmax <axis = 3> (s) y ="
            " MatMul(p, v) }"
        ),
        0.09,
        0,
    ),
    "no_scale": (f"{{ {KT} s = MatMul(q, t) p = Softmax(s) y = MatMul(p, v) }}", 1.0, 0),
    "casts": (
        (
            f"{{ {KT} s = MatMul(q, t) f = Cast <to = 11> (s) p = Softmax(f) g = Cast <to = 1> (p)"
            " y = MatMul(g, v) }"
        ),
        1.0,
        0,
    ),
    "causal_added": (
        (
            f"{{ {KT} s = MatMul(q, t) d = Mul(s, c) m = Add(d, added) p = Softmax(m) y = MatMul(p,"
            " v) }"
        ),
        0.3,
        1,
    ),
    "causal_finite": (
        (
            f"{{ {KT} s = MatMul(q, t) d = Mul(s, c) m = Add(finite, d) p = Softmax(m) y ="
            " MatMul(p, v) }"
        ),
        0.3,
        1,
    ),
    "causal_filled": (
        (
            f"{{ {KT} s = MatMul(q, t) d = Mul(s, c) m = Where(causal, d, low) p = Softmax(m) y ="
            " MatMul(p, v) }"
        ),
        0.3,
        1,
    ),
    "causal_filled_inverted": (
        (
            f"{{ {KT} s = MatMul(q, t) n = Not(causal) m = Where(n, lowest, s) p = Softmax(m) y ="
            " MatMul(p, v) }"
        ),
        1.0,
        1,
    ),
    "causal_by_positions": (
        (
            f"{{ w = LessOrEqual(row, column) f = Where(w, zero, low) {KT} s = MatMul(q, t) m ="
            " Add(s, f) p = Softmax(m) y = MatMul(p, v) }"
        ),
        1.0,
        1,
    ),
    "guarded": (
        (
            f"{{ {KT} s = MatMul(q, t) m = Add(s, added) p = Softmax(m) i = IsNaN(p) g = Where(i,"
            " zero, p) y = MatMul(g, v) }"
        ),
        1.0,
        1,
    ),
    "mask_of_zeros": (
        f"{{ {KT} s = MatMul(q, t) m = Add(s, nothing) p = Softmax(m) y = MatMul(p, v) }}",
        1.0,
        0,
    ),
}
MASKS = {
    "added": ADDED,
    "finite": np.where(CAUSAL, 0, np.finfo(F).min).astype(F).reshape(1, 1, 6, 6),
    "causal": CAUSAL,
    "nothing": np.zeros((1, 6), F),
    "row": np.arange(6).reshape(1, 1, 1, 6),
    "column": np.arange(6).reshape(1, 1, 6, 1),
}


@pytest.mark.parametrize("name", sorted(ATTENTION))
def test_attention(name: str) -> None:
    text, scale, causal = ATTENTION[name]
    graph = same(model(f"{QKV} {text}", **C, **MASKS), FEEDS, 1e-5)
    node = one(graph, "Attention")
    assert ops(graph) == ["Attention"]
    assert (
        len(node.inputs) == 3
        and node.attrs["causal"] == causal
        and node.attrs["scale"] == pytest.approx(scale)
    )
    assert "guard" not in node.attrs and not graph.constants


@pytest.mark.parametrize(
    "text",
    [
        's = Einsum <equation = "bhqd,bhkd->bhqk">(q, k) c = Mul(s, eighth) p = Softmax(c)'
        ' y = Einsum <equation = "bhqk,bhkd->bhqd">(p, v)',
        "a = Transpose <perm = [0,2,1,3]>(q) e = Transpose <perm = [0,2,1,3]>(k)"
        " f = Transpose <perm = [0,2,1,3]>(v)"
        ' s = Einsum <equation = "bqhd,bkhd->bhqk">(a, e) c = Mul(s, eighth) p = Softmax(c)'
        ' o = Einsum <equation = "bhqk,bkhd->bqhd">(p, f) y = Transpose <perm = [0,2,1,3]>(o)',
    ],
)
def test_attention_by_einsum(text: str) -> None:
    graph = same(model(f"{QKV} {{ {text} }}", eighth=F(0.125)), FEEDS, 1e-5)
    assert ops(graph) == ["Attention"]


NEAR = CAUSAL & ~np.tri(6, k=-3, dtype=bool)
WINDOWS = {
    "one mask": "m = Where(near, s, low)",
    "added": "m = Add(s, near_added)",
    "filled and added": "f = Where(far, low, zero) a = Add(s, added) m = Add(a, f)",
    "two conditions": "b = And(causal, behind) m = Where(b, s, low)",
    "positions": (
        "u = LessOrEqual(row, column) e = Sub(column, three) w = Greater(row, e) b = And(u, w) m ="
        " Where(b, s, low)"
    ),
    "positions turned": (
        "u = GreaterOrEqual(column, row) e = Sub(column, two) w = LessOrEqual(e, row) b = And(w, u)"
        " m = Where(b, s, low)"
    ),
}
NEARBY = {
    "near": NEAR,
    "near_added": np.where(NEAR, 0, -np.inf).astype(F).reshape(1, 1, 6, 6),
    "far": np.tri(6, k=-3, dtype=bool),
    "behind": ~np.tri(6, k=-3, dtype=bool),
    "three": np.array(3),
    "two": np.array(2),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_band_under_the_diagonal_is_a_window(name: str) -> None:
    text = f"{{ {KT} s = MatMul(q, t) {WINDOWS[name]} p = Softmax(m) y = MatMul(p, v) }}"
    graph = same(model(f"{QKV} {text}", **C, **MASKS, **NEARBY), FEEDS, 1e-5)
    node = one(graph, "Attention")
    assert ops(graph) == ["Attention"] and len(node.inputs) == 3
    assert node.attrs["causal"] == 1 and node.attrs["window"] == 3


def test_a_window_that_goes_on_after_the_query_stays_a_mask() -> None:
    text = f"{{ {KT} s = MatMul(q, t) m = Where(behind, s, low) p = Softmax(m) y = MatMul(p, v) }}"
    node = one(same(model(f"{QKV} {text}", **C, **NEARBY), FEEDS), "Attention")
    assert "window" not in node.attrs and node.attrs["causal"] == 0 and len(node.inputs) == 4


def test_a_window_of_all_keys_is_none() -> None:
    text = (
        f"{{ e = Sub(column, six) w = Greater(row, e) {KT} s = MatMul(q, t) m = Where(w, s, low) p ="
        " Softmax(m) y = MatMul(p, v) }"
    )
    node = one(same(model(f"{QKV} {text}", six=np.array(6), **C, **MASKS), FEEDS), "Attention")
    assert "window" not in node.attrs and node.attrs["causal"] == 0 and len(node.inputs) == 3


def test_padding_and_causal_mask_come_apart() -> None:
    """Conjunctions keep only what depends on data; rows masked everywhere still give zeros."""
    text = (
        "(float[2,4,6,8] q, float[2,4,6,8] k, float[2,4,6,8] v, bool[2,6] pad) => (float[2,4,6,8]"
        f" y) {{ u = Unsqueeze(pad, axes) b = And(causal, u) f = Where(b, zero, low) {KT} s ="
        " MatMul(q, t) m = Add(s, f) p = Softmax(m) i = IsNaN(p) g = Where(i, zero, p) y ="
        " MatMul(g, v) }"
    )
    pad = np.ones((2, 6), bool)
    pad[0, :2] = False  # the first rows of the first sample attend to nothing
    graph = same(model(text, axes=np.array([1, 2]), **C, **MASKS), {**FEEDS, "pad": pad})
    node = one(graph, "Attention")
    assert node.attrs["causal"] == 1 and node.attrs["guard"] == 1
    assert (
        graph.tensors[node.inputs[3]].shape == (2, 1, 1, 6)
        and graph.tensors[node.inputs[3]].dtype == "bool"
    )
    assert "And" not in ops(graph) and "Where" not in ops(graph)


def test_finite_masks_from_data_stay_additive() -> None:
    text = (
        "(float[2,4,6,8] q, float[2,4,6,8] k, float[2,4,6,8] v, bool[2,1,1,6] pad) =>"
        f" (float[2,4,6,8] y){{ f = Where(pad, zero, lowest) {KT} s = MatMul(q, t) m = Add(s, f) p"
        " = Softmax(m) y = MatMul(p, v) }"
    )
    pad = np.ones((2, 1, 1, 6), bool)
    pad[0] = False  # everything masked: uniform weights, not zeros
    graph = same(model(text, **C), {**FEEDS, "pad": pad})
    node = one(graph, "Attention")
    assert graph.tensors[node.inputs[3]].dtype == "float32" and "guard" not in node.attrs


def test_a_guard_makes_the_lowest_number_a_mask() -> None:
    """torch's exporter of 2.13 writes it for minus infinity, with the guard that torch's own
    attention has: a query that sees no key gets zeros."""
    text = (
        "(float[2,4,6,8] q, float[2,4,6,8] k, float[2,4,6,8] v, bool[2,6] pad) => (float[2,4,6,8]"
        f" y) {{ u = Unsqueeze(pad, axes) b = And(causal, u) f = Where(b, zero, lowest) {KT} s ="
        " MatMul(q, t) m = Add(s, f) p = Softmax(m) i = IsNaN(p) g = Where(i, zero, p) y ="
        " MatMul(g, v) }"
    )
    pad = np.ones((2, 6), bool)
    pad[0, -2:] = False  # behind the sequence: every query sees a key
    graph = same(model(text, axes=np.array([1, 2]), **C, **MASKS), {**FEEDS, "pad": pad})
    node = one(graph, "Attention")
    assert node.attrs["causal"] == 1 and node.attrs["guard"] == 1
    assert graph.tensors[node.inputs[3]].shape == (2, 1, 1, 6)
    assert "Where" not in ops(graph)


@pytest.mark.parametrize(
    "mask",
    [
        np.tril(np.ones((6, 6), bool), 1),
        np.tril(np.ones((6, 6), bool), -1) | np.eye(6, dtype=bool)[::-1],
    ],
)
def test_other_triangles_are_not_causal(mask: np.ndarray) -> None:
    text = f"{{ {KT} s = MatMul(q, t) m = Where(other, s, low) p = Softmax(m) y = MatMul(p, v) }}"
    graph = same(model(f"{QKV} {text}", other=mask, **C), FEEDS)
    node = one(graph, "Attention")
    assert node.attrs["causal"] == 0 and len(node.inputs) == 4


def test_causal_needs_as_many_queries_as_keys() -> None:
    text = (
        "(float[2,4,3,8] q, float[2,4,6,8] k, float[2,4,6,8] v) => (float[2,4,3,8] y)"
        f"{{ {KT} s = MatMul(q, t) m = Where(lower, s, low) p = Softmax(m) y = MatMul(p, v) }}"
    )
    graph = same(
        model(text, lower=np.tril(np.ones((3, 6), bool)), **C), {**FEEDS, "q": rand(2, 4, 3, 8)}
    )
    assert one(graph, "Attention").attrs["causal"] == 0


def test_scores_that_are_read_elsewhere_prevent_fusing() -> None:
    text = (
        "(float[2,4,6,8] q, float[2,4,6,8] k, float[2,4,6,8] v) => (float[2,4,6,8] y,"
        " float[2,4,6,6] p)"
    )
    text += f"{{ {KT} s = MatMul(q, t) p = Softmax(s) y = MatMul(p, v) }}"
    graph = same(model(text), FEEDS)
    assert "Attention" not in ops(graph) and "Softmax" in ops(graph)
    over_queries = f"{{ {KT} s = MatMul(q, t) p = Softmax <axis = 2> (s) y = MatMul(p, v) }}"
    assert "Attention" not in ops(same(model(f"{QKV} {over_queries}"), FEEDS))


def test_projections_through_reshapes_and_transposes() -> None:
    """As torch spells it: keys reshaped, transposed and reshaped before they meet the queries."""
    text = (
        "(float[2,6,32] x) => (float[2,6,32] y) { a = MatMul(x, wq) b = MatMul(x, wk) c3 ="
        " MatMul(x, wv) ar = Reshape(a, heads) q = Transpose <perm = [0,2,1,3]> (ar) br ="
        " Reshape(b, heads) k0 = Transpose <perm = [0,2,1,3]> (br) cr = Reshape(c3, heads) v ="
        " Transpose <perm = [0,2,1,3]> (cr) k1 = Reshape(k0, flat) k2 = Transpose <perm = [0,2,1]>"
        " (k1) k3 = Reshape(k2, back) qs = Mul(q, c) ks = Mul(k3, c) s = MatMul(qs, ks) p ="
        " Softmax(s) o = MatMul(p, v) ot = Transpose <perm = [0,2,1,3]> (o) y = Reshape(ot, out) }"
    )
    arrays = {
        "heads": np.array([2, 6, 4, 8]),
        "flat": np.array([-1, 6, 8]),
        "back": np.array([2, 4, 8, 6]),
        "out": np.array([2, 6, 32]),
        "wq": rand(32, 32),
        "wk": rand(32, 32, seed=1),
        "wv": rand(32, 32, seed=2),
        "c": F(0.6),
    }
    graph = same(model(text, **arrays), {"x": rand(2, 6, 32)}, 1e-4)
    assert ops(graph) == ["MatMul"] * 3 + ["Reshape", "Transpose"] * 3 + [
        "Attention",
        "Transpose",
        "Reshape",
    ] or sorted(ops(graph)) == sorted(["MatMul"] * 3 + ["Reshape", "Transpose"] * 4 + ["Attention"])
    assert len(graph.trainable) == 3


@pytest.mark.parametrize("how", ["expand", "cast", "gather", "before_transpose"])
def test_repeated_key_heads_go_in_unrepeated(how: str) -> None:
    arrays = {
        "two": np.array([2]),
        "three": np.array([3]),
        "rep": np.array([2, 2, 2, 6, 8]),
        "join": np.array([2, 4, 6, 8]),
        "rep2": np.array([2, 6, 2, 2, 8]),
        "join2": np.array([2, 6, 4, 8]),
        "index": np.array([0, 0, 1, 1]),
    }
    shape = "2,6,2,8" if how == "before_transpose" else "2,2,6,8"
    one_side = {
        "expand": "{n}u = Unsqueeze({n}, two) {n}e = Expand({n}u, rep) {n}r = Reshape({n}e, join)",
        "cast": (  # float16 numbers, as under autocast
            "{n}h = Cast <to = 10> ({n}) {n}u = Unsqueeze({n}h, two) {n}e = Expand({n}u, rep)"
            " {n}j = Reshape({n}e, join) {n}r = Cast <to = 1> ({n}j)"
        ),
        "gather": "{n}r = Gather <axis = 1> ({n}, index)",
        "before_transpose": (
            "{n}u = Unsqueeze({n}, three) {n}e = Expand({n}u, rep2) {n}j = Reshape({n}e, join2)"
            " {n}r = Transpose <perm = [0,2,1,3]> ({n}j)"
        ),
    }[how]
    text = (
        f"(float[2,4,6,8] q, float[{shape}] k, float[{shape}] v) => (float[2,4,6,8] y) {{"
        f" {one_side.format(n='k')} {one_side.format(n='v')} t = Transpose <perm = [0,1,3,2]> (kr)"
        " s = MatMul(q, t) p = Softmax(s) y = MatMul(p, vr) }"
    )
    dims = tuple(int(n) for n in shape.split(","))
    graph = same(
        model(text, **arrays), {"q": FEEDS["q"], "k": rand(*dims, seed=1), "v": rand(*dims, seed=2)}
    )
    node = one(graph, "Attention")
    assert [graph.tensors[i].shape for i in node.inputs] == [
        (2, 4, 6, 8),
        (2, 2, 6, 8),
        (2, 2, 6, 8),
    ]
    assert "Expand" not in ops(graph) and "Gather" not in ops(graph)


def test_interleaved_repetition_is_kept() -> None:
    text = (
        "(float[2,4,6,8] q, float[2,2,6,8] k, float[2,2,6,8] v) => (float[2,4,6,8] y) { kr = Gather"
        " <axis = 1> (k, i) vr = Gather <axis = 1> (v, i) t = Transpose <perm = [0,1,3,2]> (kr) s ="
        " MatMul(q, t) p = Softmax(s) y = MatMul(p, vr) }"
    )
    graph = same(
        model(text, i=np.array([0, 1, 0, 1])),
        {"q": FEEDS["q"], "k": rand(2, 2, 6, 8, seed=1), "v": rand(2, 2, 6, 8, seed=2)},
    )
    assert graph.tensors[one(graph, "Attention").inputs[1]].shape == (2, 4, 6, 8)


def test_attention_over_merged_heads() -> None:
    text = (
        "(float[8,6,4] q, float[8,6,4] k, float[8,6,4] v) => (float[8,6,4] y){ t = Transpose <perm"
        " = [0,2,1]> (k) s = MatMul(q, t) d = Mul(s, c) p = Softmax(d) y = MatMul(p, v) }"
    )
    graph = same(model(text, **C), {n: rand(8, 6, 4, seed=s) for s, n in enumerate("qkv")})
    node = one(graph, "Attention")
    assert graph.tensors[node.inputs[0]].shape == (8, 1, 6, 4)
    assert any("MatMul" in m for m in node.members)


def test_flattened_dense_layers_keep_their_dims() -> None:
    """Reshape + Gemm + Reshape, as flax and GPT-2 exports spell a dense layer."""
    text = (
        "(float[2,6,8] x) => (float[2,6,8] y) { f = Reshape(x, flat) a = Gemm(f, w1, b1) g ="
        " Relu(a) h = Gemm(g, w2, b2) r = Reshape(h, back) y = Add(r, x) }"
    )
    arrays = {
        "flat": np.array([-1, 8]),
        "back": np.array([2, 6, 8]),
        "w1": rand(8, 16),
        "b1": rand(16),
        "w2": rand(16, 8),
        "b2": rand(8),
    }
    graph = same(model(text, **arrays), {"x": rand(2, 6, 8)})
    assert ops(graph) == ["MatMul", "Add", "Relu", "MatMul", "Add", "Add"]
    assert all(len(graph.tensors[n.outputs[0]].shape) == 3 for n in graph.nodes)
