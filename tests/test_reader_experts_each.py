"""Experts written one by one, with weights of their own: sums over all of a router's experts become RoutedExperts and compute what onnxruntime computes."""

from __future__ import annotations

import numpy as np
import pytest

from planner.graph import Graph
from planner.reader import read_model
from planner.weights import load
from tests.reader_models import model, ops, rand, same

B, S, H, W, E, K = 2, 5, 8, 6, 3, 2
ROUTE = "l = MatMul(x, router) p = Softmax <axis = -1> (l) v, i = TopK <axis = -1> (p, k) t = ReduceSum <keepdims = 1> (v, last) s = Div(v, t)"
COLUMNS = {
    "mask": "q{e} = Equal(i, n{e}) m{e} = Cast <to = 1> (q{e}) c{e} = Mul(s, m{e}) w{e} = ReduceSum <keepdims = 1> (c{e}, last)",
    "where": "q{e} = Equal(i, n{e}) c{e} = Where(q{e}, s, nought) r{e} = ReduceSum <keepdims = 0> (c{e}, last) w{e} = Unsqueeze(r{e}, last)",
    "hot": "m{e} = Gather <axis = -1> (o, n{e}) c{e} = Mul(m{e}, s) w{e} = ReduceSum <keepdims = 1> (c{e}, last)",
    "slice": "w{e} = Slice(d, b{e}, b{next}, last)",
    "gather": "r{e} = Gather <axis = -1> (d, n{e}) w{e} = Unsqueeze(r{e}, last)",
    "split": "",
}
BEFORE = {
    "hot": "o = OneHot <axis = -1> (i, depth, offon)", "slice": "d = ScatterElements <axis = -1> (zeros, i, s)", "gather": "d = ScatterElements <axis = -1> (zeros, i, s)",
    "split": "d = ScatterElements <axis = -1> (zeros, i, s) w0, w1, w2 = Split <axis = -1> (d, ones)",
}  # fmt: skip
EXPERTS = {
    "gated": "g{e} = MatMul(x, wg{e}) u{e} = MatMul(x, wu{e}) sg{e} = Sigmoid(g{e}) a{e} = Mul(g{e}, sg{e}) h{e} = Mul(a{e}, u{e}) f{e} = MatMul(h{e}, wd{e})",
    "turned": "tu{e} = Transpose <perm = [1, 0]> (vu{e}) u{e} = MatMul(x, tu{e}) h{e} = Relu(u{e}) f{e} = MatMul(h{e}, wd{e})",
    "biased": "u0{e} = MatMul(x, wu{e}) u{e} = Add(u0{e}, bu{e}) h{e} = Tanh(u{e}) f0{e} = MatMul(h{e}, wd{e}) f{e} = Add(bd{e}, f0{e})",
    "halves": "z{e} = MatMul(x, wf{e}) g{e}, u{e} = Split <axis = -1> (z{e}, halves) sg{e} = Sigmoid(g{e}) a{e} = Mul(g{e}, sg{e}) h{e} = Mul(a{e}, u{e}) "
              "f{e} = MatMul(h{e}, wd{e})",
    "flat": "xr{e} = Reshape(x, rows) u{e} = MatMul(xr{e}, wu{e}) h{e} = Relu(u{e}) f0{e} = MatMul(h{e}, wd{e}) f{e} = Reshape(f0{e}, whole)",
}  # fmt: skip
ENDS = {
    "sum": "t1 = Add(y0, y1) y = Add(t1, y2)",
    "zeros": "z0 = Add(none, y0) t1 = Add(z0, y1) y = Add(t1, y2)",
    "residual": "t1 = Add(y0, y1) t2 = Add(t1, y2) y = Add(x, t2)",
    "residual first": "t0 = Add(x, y0) t1 = Add(t0, y1) y = Add(t1, y2)",
}


def text(column: str, expert: str, end: str) -> str:
    each = "".join(f"{COLUMNS[column]} {EXPERTS[expert]} y{{e}} = Mul(f{{e}}, w{{e}}) ".replace("{e}", str(e)).replace("{next}", str(e + 1)) for e in range(E))
    return f"(float[2,5,8] x) => (float[2,5,8] y) {{ {ROUTE} {BEFORE.get(column, '')} {each} {ENDS[end]} }}"


def arrays(used: str) -> dict[str, np.ndarray]:
    known: dict[str, np.ndarray] = {
        "router": rand(H, E), "k": np.array([K]), "last": np.array([-1]), "nought": np.float32(0), "depth": np.int64(E), "offon": np.array([0, 1], np.float32),
        "zeros": np.zeros((B, S, E), np.float32), "none": np.zeros((B, S, H), np.float32), "ones": np.array([1, 1, 1]), "halves": np.array([W, W]), "b3": np.array([E]),
        "rows": np.array([B * S, H]), "whole": np.array([B, S, H]),
    }  # fmt: skip
    for e in range(E):
        known |= {f"n{e}": np.int64(e), f"b{e}": np.array([e]), f"wg{e}": rand(H, W, seed=e), f"wu{e}": rand(H, W, seed=5 + e), f"wd{e}": rand(W, H, seed=9 + e),
                  f"vu{e}": rand(W, H, seed=5 + e), f"wf{e}": rand(H, 2 * W, seed=20 + e), f"bu{e}": rand(W, seed=30 + e), f"bd{e}": rand(H, seed=40 + e)}  # fmt: skip
    words = set(used.replace("(", " ").replace(")", " ").replace(",", " ").split())
    return {name: array for name, array in known.items() if name in words}


def check(written: str) -> Graph:
    return same(model(written, **arrays(written)), {"x": rand(B, S, H)})


@pytest.mark.parametrize(("column", "expert", "end"), [
    *((column, "gated", "sum") for column in COLUMNS), *(("mask", expert, "sum") for expert in EXPERTS if expert != "gated"),
    *(("slice", "gated", end) for end in ENDS if end != "sum"),
])  # fmt: skip
def test_known_forms(column: str, expert: str, end: str) -> None:
    graph = check(text(column, expert, end))
    assert ops(graph).count("RoutedExperts") == 1 and ops(graph).count("MatMul") == 1
    assert not graph.notes or not any("one by one" in note for note in graph.notes)
    stacks = [n for n in graph.weights if graph.tensors[n].shape[0] == E]
    assert stacks and set(stacks) <= graph.trainable


GATED = text("mask", "gated", "sum")
NEAR = {
    "an expert is missing": GATED.replace("t1 = Add(y0, y1) y = Add(t1, y2)", "y = Add(y0, y2)"),
    "an expert comes twice": GATED.replace("Equal(i, n2)", "Equal(i, n1)"),
    "weights are shared": GATED.replace("MatMul(x, wg1)", "MatMul(x, wg0)"),
    "an expert reads other rows": GATED.replace("MatMul(x, wu1)", "MatMul(p, wo)"),
    "another activation": GATED.replace("a1 = Mul(g1, sg1)", "a1 = Tanh(sg1)"),
    "inside read outside": GATED.replace("y = Add(t1, y2)", "y9 = Add(t1, y2) hs = ReduceSum <keepdims = 1> (h1, last) y = Add(y9, hs)"),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_misses(name: str) -> None:
    written = NEAR[name]
    graph = same(model(written, **arrays(written), **({"wo": rand(E, W)} if "wo" in written else {})), {"x": rand(B, S, H)})
    assert "RoutedExperts" not in ops(graph)
    assert any("one by one" in note for note in graph.notes)


def test_stacks_are_named_by_what_the_experts_names_share_and_load_what_is_stored() -> None:
    made = model(GATED, **arrays(GATED))
    for tensor in made.graph.initializer:
        if tensor.name[:2] in ("wg", "wu", "wd"):
            new = f"mlp.experts.{tensor.name[2]}.{tensor.name[:2]}.weight"
            for node in made.graph.node:
                node.input[:] = [new if i == tensor.name else i for i in node.input]
            tensor.name = new
    graph = read_model(made)
    assert {"mlp.experts.wg.weight", "mlp.experts.wu.weight", "mlp.experts.wd.weight"} <= set(graph.weights)
    stored = load(graph, None)["mlp.experts.wd.weight"]
    assert np.array_equal(stored, np.stack([arrays(GATED)[f"wd{e}"] for e in range(E)]))
