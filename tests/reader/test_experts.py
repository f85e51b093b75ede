"""Mixtures of experts: every known form becomes RoutedExperts and computes what onnxruntime
computes of the file; near misses are left alone."""

from __future__ import annotations

import numpy as np
import pytest

from planner.errors import PlanError
from planner.reader import read_model
from tests.reader.reader_models import model, ops, rand, same

F = np.float32
B, S, H, W, E, K = 2, 5, 8, 6, 4, 2
HEAD = "(float[2,5,8] x) => (float[2,5,8] y)"
ROUTE = (
    "l = MatMul(x, router) p = Softmax <axis = -1> (l) v, i = TopK <axis = -1> (p, k) t = ReduceSum"
    " <keepdims = 1> (v, last) s = Div(v, t)"
)
FLAT = (
    "f = Reshape(x, flat) l = MatMul(f, router) p = Softmax <axis = -1> (l) s, i = TopK <axis = -1>"
    " (p, k)"
)
SPREAD = (
    "o = OneHot <axis = -1> (i, depth, offon) su = Unsqueeze(s, last) c = Mul(o, su) q = ReduceSum"
    " <keepdims = 0> (c, two)"
)
WEIGH = (
    "r = Transpose <perm = [0, 2, 1]> (q) ru = Unsqueeze(r, three) z = Mul(d, ru) y = ReduceSum"
    " <keepdims = 0> (z, one)"
)
ROWS = "xu = Unsqueeze(x, twothree)"
CHOOSE = (
    "m = Squeeze(d, three) su = Unsqueeze(s, last) z = Mul(m, su) y = ReduceSum <keepdims = 0> (z,"
    " two)"
)
SILU = "a = Sigmoid(g) b = Mul(g, a) h = Mul(b, u)"
ALL = f"{ROUTE} {SPREAD} xu = Unsqueeze(x, one)"
PICK = f"{ROUTE} {ROWS} ed = Gather(wd, i)"
BACK = (
    "sr = Reshape(s, single) z0 = Mul(d1, sr) z = Reshape(z0, choices) y0 = ReduceSum <keepdims ="
    " 0> (z, one) y = Reshape(y0, shaped)"
)
RELU = "u = MatMul(xu, wu) h = Relu(u) d = MatMul(h, wd)"
FORMS = {
    "dense": f"{ALL} g = MatMul(xu, wg) u = MatMul(xu, wu) {SILU} d = MatMul(h, wd) {WEIGH}",
    "dense_relu": f"{ALL} {RELU} {WEIGH}",
    "dense_biases": (
        f"{ALL} u0 = MatMul(xu, wu) u = Add(u0, bu1) h = Relu(u) d0 = MatMul(h, wd) d = Add(bd1,"
        f" d0) {WEIGH}"
    ),
    "dense_expanded": (
        f"{ROUTE} {SPREAD} x1 = Unsqueeze(x, one) xu = Expand(x1, all) {RELU} {WEIGH}"
    ),
    "dense_scattered": (
        f"{ROUTE} q = ScatterElements <axis = -1> (zeros, i, s) xu = Unsqueeze(x, one) {RELU}"
        f" {WEIGH}"
    ),
    "gathered": (
        f"{PICK} eg = Gather(wg, i) eu = Gather(wu, i) g = MatMul(xu, eg) u = MatMul(xu, eu) {SILU}"
        f" d = MatMul(h, ed) {CHOOSE}"
    ),
    "gathered_biases": (
        f"{PICK} eu = Gather(wu, i) cu = Gather(bu, i) cd = Gather(bd, i) vu = Unsqueeze(cu, three)"
        " vd = Unsqueeze(cd, three) u0 = MatMul(xu, eu) u = Add(u0, vu) h = Tanh(u) d0 = MatMul(h,"
        f" ed) d = Add(d0, vd) {CHOOSE}"
    ),
    "gathered_columns": (
        f"{FLAT} x1 = Unsqueeze(f, one) x2 = Expand(x1, twice) x3 = Reshape(x2, column) ii ="
        " Reshape(i, rows) eg = Gather(wf, ii) gu = MatMul(eg, x3) g1 = Squeeze(gu, two) g, u ="
        f" Split <axis = 1> (g1, halves) {SILU} h1 = Unsqueeze(h, two) ed = Gather(wt, ii) d ="
        f" MatMul(ed, h1) d1 = Squeeze(d, two) {BACK}"
    ),
    "gathered_tokens": (
        f"{FLAT} x3 = Gather(f, places) x5 = Unsqueeze(x3, one) ii = Reshape(i, rows) ih ="
        " Unsqueeze(ii, one) eg = GatherND(wu, ih) u = MatMul(x5, eg) h = Relu(u) ed ="
        f" GatherND(wd, ih) d = MatMul(h, ed) d1 = Squeeze(d, one) {BACK}"
    ),
    "alternating": (
        f"{PICK} eg = Gather(wi, i) gu = MatMul(xu, eg) g = Slice(gu, zero, twelve, last, two) u ="
        f" Slice(gu, one, twelve, last, two) {SILU} d = MatMul(h, ed) {CHOOSE}"
    ),
}
FORMS |= {
    "gathered_tiled": (
        FORMS["gathered_columns"].replace("x2 = Expand(x1, twice)", "x2 = Tile(x1, onetwo)")
    ),
    "gathered_in_pieces": (
        FORMS["gathered_columns"].replace(
            "g, u = Split <axis = 1> (g1, halves)",
            "q = SplitToSequence <axis = 1> (g1, width) g = SequenceAt(q, i0) u ="
            " SequenceAt(q, i1)",
        )
    ),
}
OTHER = (
    "n = ArgMax <axis = -1, keepdims = 0> (x) n1 = Unsqueeze(n, two) n2 = Mod(n1, four) n3 ="
    " Expand(n2, pairs) eg = Gather(wg, n3)"
)
NEAR = {
    "the last layer's indices are others": (
        FORMS["gathered"].replace(
            "ed = Gather(wd, i)",
            "v2, i2 = TopK <axis = -1, largest = 0> (p, k) ed = Gather(wd, i2)",
        )
    ),
    "inside read outside": (
        FORMS["dense"].replace("y =", "y0 =")
        + " w0 = ReduceSum <keepdims = 1> (h, oneandlast) w1 = Squeeze(w0, one) y = Add(y0, w1)"
    ),
    "not the router's choice": FORMS["gathered"].replace("eg = Gather(wg, i)", OTHER),
    "a token of its own for each expert": f"{ROUTE} {SPREAD} xu = Expand(x4, all) {RELU} {WEIGH}",
    "share by feature": (
        FORMS["gathered"].replace(
            "su = Unsqueeze(s, last)", "s1 = Unsqueeze(s, last) su = Add(s1, feature)"
        )
    ),
}


def arrays(text: str) -> dict[str, np.ndarray]:
    known = {
        "router": rand(H, E),
        "wg": rand(E, H, W),
        "wu": rand(E, H, W, seed=1),
        "wd": rand(E, W, H),
        "wf": rand(E, 2 * W, H),
        "wt": rand(E, H, W, seed=2),
        "wi": rand(E, H, 2 * W),
        "bu": rand(E, W),
        "bd": rand(E, H),
        "bu1": rand(E, 1, W),
        "bd1": rand(E, 1, H),
        "zeros": np.zeros((B, S, E), F),
        "offon": np.array([0, 1], F),
        "x4": rand(B, E, 1, H),
        "feature": rand(H),
        "places": np.repeat(np.arange(B * S), K),
        "depth": np.int64(E),
        "four": np.int64(E),
        "pairs": np.array([B, S, K]),
        "oneandlast": np.array([1, 3]),
        "k": np.array([K]),
        "last": np.array([-1]),
        "zero": np.array([0]),
        "one": np.array([1]),
        "two": np.array([2]),
        "three": np.array([3]),
        "twothree": np.array([2, 3]),
        "twelve": np.array([2 * W]),
        "all": np.array([B, E, S, H]),
        "flat": np.array([-1, H]),
        "twice": np.array([B * S, K, H]),
        "column": np.array([B * S * K, H, 1]),
        "onetwo": np.array([1, K, 1]),
        "width": np.int64(W),
        "i0": np.int64(0),
        "i1": np.int64(1),
        "rows": np.array([B * S * K]),
        "halves": np.array([W, W]),
        "single": np.array([B * S * K, 1]),
        "choices": np.array([B * S, K, H]),
        "shaped": np.array([B, S, H]),
    }
    words = set(text.replace("(", " ").replace(")", " ").replace(",", " ").split())
    return {n: a for n, a in known.items() if n in words}


@pytest.mark.parametrize("name", sorted(FORMS))
def test_known_forms(name: str) -> None:
    graph = same(model(f"{HEAD} {{ {FORMS[name]} }}", **arrays(FORMS[name])), {"x": rand(B, S, H)})
    assert ops(graph).count("RoutedExperts") == 1 and not {
        "OneHot",
        "ScatterElements",
        "Gather",
    } & set(ops(graph))
    (node,) = [n for n in graph.nodes if n.op == "RoutedExperts"]
    assert graph.tensors[node.inputs[0]].shape == (B, S, H) and node.members
    assert all(n in graph.trainable for n in node.inputs[3:] if n)


@pytest.mark.parametrize("after", [False, True])
def test_a_sum_in_a_wider_type_than_the_experts(after: bool) -> None:
    text = FORMS["gathered"].replace(
        "l = MatMul(x, router)", "xw = Cast <to = 1> (x) l = MatMul(xw, router)"
    )
    if after:
        text = text.replace("s = Div(v, t)", "sw = Div(v, t) s = Cast <to = 10> (sw)")
        text = text.replace(
            "y = ReduceSum <keepdims = 0> (z,",
            "zw = Cast <to = 1> (z) y = ReduceSum <keepdims = 0> (zw,",
        )
    else:
        text = text.replace(
            "m = Squeeze(d, three)", "dw = Cast <to = 1> (d) m = Squeeze(dw, three)"
        )
    known = {
        n: a if n == "router" or a.dtype.kind != "f" else a.astype(np.float16)
        for n, a in arrays(text).items()
    }
    graph = same(
        model(f"(float16[2,5,8] x) => (float[2,5,8] y) {{ {text} }}", **known),
        {"x": rand(B, S, H).astype(np.float16)},
        4e-3,
    )
    assert (
        ops(graph).count("RoutedExperts") == 1
        and ops(graph)[-1] == "Cast"
        and not any("not a known form" in n for n in graph.notes)
    )


@pytest.mark.parametrize("name", sorted(NEAR))
def test_near_misses(name: str) -> None:
    graph = same(model(f"{HEAD} {{ {NEAR[name]} }}", **arrays(NEAR[name])), {"x": rand(B, S, H)})
    assert "RoutedExperts" not in ops(graph)
    assert any("not a known form of experts" in n for n in graph.notes) == ("Gather" in ops(graph))


CONTRIB = {
    "relu": "activation_type = 'relu'",
    "gelu normalised": "activation_type = 'gelu', normalize_routing_weights = 1",
    "silu": "activation_type = 'silu'",
    "swiglu": "activation_type = 'swiglu', swiglu_fusion = 1, normalize_routing_weights = 1",
    "swiglu bounded": (
        "activation_type = 'swiglu', swiglu_fusion = 1, activation_alpha = 1.702, activation_beta ="
        " 1.0, swiglu_limit = 0.7"
    ),
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", sorted(CONTRIB))
def test_onnxruntime_s_own_operator(name: str, biased: bool) -> None:
    fused = 2 * W if "swiglu" in name else W
    stacks = {
        "router": rand(H, E),
        "flat": np.array([-1, H]),
        "w1": rand(E, fused, H),
        "w2": rand(E, H, W),
    }
    biases = {"b1": rand(E, fused), "b2": rand(E, H)} if biased else {}
    operands = "w1, b1, w2, b2" if biased else 'w1, "", w2'
    text = (
        f"{HEAD} {{ f = Reshape(x, flat) l = MatMul(f, router) y = com.microsoft.MoE <k = 2,"
        f" {CONTRIB[name]}> (x, l, {operands}) }}".replace("'", '"')
    )
    made = model(text, **stacks, **biases)
    made.opset_import.add(domain="com.microsoft", version=1)
    graph = same(made, {"x": rand(B, S, H)})
    assert ops(graph).count("RoutedExperts") == 1 and "Slice" not in ops(graph)
    assert len(graph.trainable) == 1 + (3 if "swiglu" in name else 2) + (
        len(biases) + ("swiglu" in name) if biased else 0
    )


def test_what_the_operator_leaves_open_is_not_guessed() -> None:
    stacks = {
        "router": rand(H, E),
        "flat": np.array([-1, H]),
        "w1": rand(E, W, H),
        "w2": rand(E, H, W),
    }
    text = (
        f"{HEAD} {{ f = Reshape(x, flat) l = MatMul(f, router) y = com.microsoft.MoE <k = 2,"
        ' use_sparse_mixer = 1> (x, l, w1, "", w2) }'
    )
    made = model(text, **stacks)
    made.opset_import.add(domain="com.microsoft", version=1)
    with pytest.raises(PlanError, match="sparse mixing"):
        read_model(made)
