"""Experts written one by one, with weights of their own: sums over all of a router's experts become
RoutedExperts and compute what onnxruntime computes."""

from __future__ import annotations

import numpy as np
import pytest

from planner.errors import PlanError
from planner.graph.ir import Graph
from planner.reader import read_model
from planner.workload.weights import load
from tests.reader.reader_models import model, ops, rand, same

B, S, H, W, E, K = 2, 5, 8, 6, 3, 2
ROUTE = (
    "l = MatMul(x, router) p = Softmax <axis = -1> (l) v, i = TopK <axis = -1> (p, k) t = ReduceSum"
    " <keepdims = 1> (v, last) s = Div(v, t)"
)
COLUMNS = {
    "mask": (
        "q{e} = Equal(i, n{e}) m{e} = Cast <to = 1> (q{e}) c{e} = Mul(s, m{e}) w{e} = ReduceSum"
        " <keepdims = 1> (c{e}, last)"
    ),
    "where": (
        "q{e} = Equal(i, n{e}) c{e} = Where(q{e}, s, nought) r{e} = ReduceSum <keepdims = 0> (c{e},"
        " last) w{e} = Unsqueeze(r{e}, last)"
    ),
    "hot": (
        "m{e} = Gather <axis = -1> (o, n{e}) c{e} = Mul(m{e}, s) w{e} = ReduceSum <keepdims = 1>"
        " (c{e}, last)"
    ),
    "slice": "w{e} = Slice(d, b{e}, b{next}, last)",
    "gather": "r{e} = Gather <axis = -1> (d, n{e}) w{e} = Unsqueeze(r{e}, last)",
    "split": "",
}
BEFORE = {
    "hot": "o = OneHot <axis = -1> (i, depth, offon)",
    "slice": "d = ScatterElements <axis = -1> (zeros, i, s)",
    "gather": "d = ScatterElements <axis = -1> (zeros, i, s)",
    "split": (
        "d = ScatterElements <axis = -1> (zeros, i, s) w0, w1, w2 = Split <axis = -1> (d, ones)"
    ),
}
EXPERTS = {
    "gated": (
        "g{e} = MatMul(x, wg{e}) u{e} = MatMul(x, wu{e}) sg{e} = Sigmoid(g{e}) a{e} = Mul(g{e},"
        " sg{e}) h{e} = Mul(a{e}, u{e}) f{e} = MatMul(h{e}, wd{e})"
    ),
    "turned": (
        "tu{e} = Transpose <perm = [1, 0]> (vu{e}) u{e} = MatMul(x, tu{e}) h{e} = Relu(u{e}) f{e} ="
        " MatMul(h{e}, wd{e})"
    ),
    "biased": (
        "u0{e} = MatMul(x, wu{e}) u{e} = Add(u0{e}, bu{e}) h{e} = Tanh(u{e}) f0{e} = MatMul(h{e},"
        " wd{e}) f{e} = Add(bd{e}, f0{e})"
    ),
    "halves": (
        "z{e} = MatMul(x, wf{e}) g{e}, u{e} = Split <axis = -1> (z{e}, halves) sg{e} ="
        " Sigmoid(g{e}) a{e} = Mul(g{e}, sg{e}) h{e} = Mul(a{e}, u{e}) f{e} = MatMul(h{e}, wd{e})"
    ),
    "flat": (
        "xr{e} = Reshape(x, rows) u{e} = MatMul(xr{e}, wu{e}) h{e} = Relu(u{e}) f0{e} ="
        " MatMul(h{e}, wd{e}) f{e} = Reshape(f0{e}, whole)"
    ),
}
ENDS = {
    "sum": "t1 = Add(y0, y1) y = Add(t1, y2)",
    "zeros": "z0 = Add(none, y0) t1 = Add(z0, y1) y = Add(t1, y2)",
    "residual": "t1 = Add(y0, y1) t2 = Add(t1, y2) y = Add(x, t2)",
    "residual first": "t0 = Add(x, y0) t1 = Add(t0, y1) y = Add(t1, y2)",
}


def text(column: str, expert: str, end: str) -> str:
    each = "".join(
        f"{COLUMNS[column]} {EXPERTS[expert]} y{{e}} = Mul(f{{e}}, w{{e}}) ".replace(
            "{e}", str(e)
        ).replace("{next}", str(e + 1))
        for e in range(E)
    )
    return (
        f"(float[2,5,8] x) => (float[2,5,8] y) {{ {ROUTE} {BEFORE.get(column, '')} {each}"
        f" {ENDS[end]} }}"
    )


def arrays(used: str) -> dict[str, np.ndarray]:
    known: dict[str, np.ndarray] = {
        "router": rand(H, E),
        "k": np.array([K]),
        "last": np.array([-1]),
        "nought": np.float32(0),
        "depth": np.int64(E),
        "offon": np.array([0, 1], np.float32),
        "zeros": np.zeros((B, S, E), np.float32),
        "none": np.zeros((B, S, H), np.float32),
        "ones": np.array([1, 1, 1]),
        "halves": np.array([W, W]),
        "b3": np.array([E]),
        "rows": np.array([B * S, H]),
        "whole": np.array([B, S, H]),
    }
    for e in range(E):
        known |= {
            f"n{e}": np.int64(e),
            f"b{e}": np.array([e]),
            f"wg{e}": rand(H, W, seed=e),
            f"wu{e}": rand(H, W, seed=5 + e),
            f"wd{e}": rand(W, H, seed=9 + e),
            f"vu{e}": rand(W, H, seed=5 + e),
            f"wf{e}": rand(H, 2 * W, seed=20 + e),
            f"bu{e}": rand(W, seed=30 + e),
            f"bd{e}": rand(H, seed=40 + e),
        }
    words = set(used.replace("(", " ").replace(")", " ").replace(",", " ").split())
    return {name: array for name, array in known.items() if name in words}


def check(written: str) -> Graph:
    return same(model(written, **arrays(written)), {"x": rand(B, S, H)})


@pytest.mark.parametrize(
    ("column", "expert", "end"),
    [
        *((column, "gated", "sum") for column in COLUMNS),
        *(("mask", expert, "sum") for expert in EXPERTS if expert != "gated"),
        *(("slice", "gated", end) for end in ENDS if end != "sum"),
    ],
)
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
    "inside read outside": GATED.replace(
        "y = Add(t1, y2)",
        "y9 = Add(t1, y2) hs = ReduceSum <keepdims = 1> (h1, last) y = Add(y9, hs)",
    ),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_misses(name: str) -> None:
    written = NEAR[name]
    graph = same(
        model(written, **arrays(written), **({"wo": rand(E, W)} if "wo" in written else {})),
        {"x": rand(B, S, H)},
    )
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
    assert {"mlp.experts.wg.weight", "mlp.experts.wu.weight", "mlp.experts.wd.weight"} <= set(
        graph.weights
    )
    stored = load(graph, None)["mlp.experts.wd.weight"]
    assert np.array_equal(stored, np.stack([arrays(GATED)[f"wd{e}"] for e in range(E)]))


# looked up by NonZero, as the tracing exporter writes a loop over experts

LOOKED_UP = (
    "p{e} = Gather <axis = 0> (m, n{e}) pc{e} = Cast <to = 9> (p{e}) z{e} = NonZero(pc{e}) zt{e} ="
    " Transpose <perm = [1, 0]> (z{e}) ka{e}, ta{e} = Split <axis = 1> (zt{e}, halves) k{e} ="
    " Squeeze(ka{e}, one) t{e} = Squeeze(ta{e}, one) x{e} = Gather <axis = 0> (f, t{e}) gu{e} ="
    " Gather <axis = 0> (wgu, n{e}) gt{e} = Transpose <perm = [1, 0]> (gu{e}) h{e} = MatMul(x{e},"
    " gt{e}) g{e} = Slice(h{e}, nil, six, last) u{e} = Slice(h{e}, six, twelve, last) sg{e} ="
    " Sigmoid(g{e}) a{e} = Mul(g{e}, sg{e}) b{e} = Mul(a{e}, u{e}) dw{e} = Gather <axis = 0> (wd,"
    " n{e}) dt{e} = Transpose <perm = [1, 0]> (dw{e}) d{e} = MatMul(b{e}, dt{e}) su{e} ="
    " Unsqueeze(s, two) sf{e} = Flatten <axis = 2> (su{e}) tk{e} = Mul(t{e}, choices) at{e} ="
    " Add(k{e}, tk{e}) c{e} = Gather <axis = 0> (sf{e}, at{e}) r{e} = Mul(d{e}, c{e}) tu{e} ="
    " Unsqueeze(t{e}, one) rs{e} = Shape(r{e}) ti{e} = Expand(tu{e}, rs{e}) y{e} = ScatterElements"
    " <axis = 0> (none, ti{e}, r{e}) "
)
CHOICES = "o = OneHot <axis = -1> (i, depth, offon) m = Transpose <perm = [2, 1, 0]> (o)"
HIT = (
    "ms = ReduceSum <keepdims = 0> (m, lasttwo) mg = Greater(ms, zero) hz = NonZero(mg) ht ="
    " Transpose <perm = [1, 0]> (hz) "
)
HIT += "e0, e1, e2 = Split <axis = 0> (ht, ones) " + "".join(
    f"q{e} = Squeeze(e{e}, nil) n{e} = Gather <axis = 0> (q{e}, first) " for e in range(E)
)


def looked_up(before: str = HIT, each: str = LOOKED_UP) -> str:
    return (
        "(float[2,5,8] x) => (float[2,5,8] y) { f = Reshape(x, rows) l = MatMul(f, router) p ="
        " Softmax <axis = -1> (l) v, i = TopK <axis = -1> (p, k) t = ReduceSum <keepdims = 1> (v,"
        f" last) s = Div(v, t) {CHOICES} {before}"
        f" {''.join(each.replace('{e}', str(e)) for e in range(E))} s1 = Add(y0, y1) s2 = Add(s1,"
        " y2) y = Reshape(s2, whole) }"
    )


def stored(text: str) -> dict[str, np.ndarray]:
    known: dict[str, np.ndarray] = {
        "router": rand(H, E),
        "wgu": rand(E, 2 * W, H),
        "wd": rand(E, H, W),
        "rows": np.array([-1, H]),
        "whole": np.array([B, S, H]),
        "k": np.array([K]),
        "last": np.array([-1]),
        "depth": np.int64(E + 1),
        "offon": np.array([0, 1]),
        "halves": np.array([1, 1]),
        "one": np.array([1]),
        "two": np.array([2]),
        "nil": np.array([0]),
        "six": np.array([W]),
        "twelve": np.array([2 * W]),
        "choices": np.int64(K),
        "none": np.zeros((B * S, H), np.float32),
        "lasttwo": np.array([-1, -2]),
        "zero": np.int64(0),
        "first": np.int64(0),
        "ones": np.ones(E, np.int64),
        "full": np.ones((B * S, H), np.float32),
        **({f"n{e}": np.int64(e) for e in range(E)} if "n0 =" not in text else {}),
    }
    words = set(text.replace("(", " ").replace(")", " ").replace(",", " ").split())
    return {name: array for name, array in known.items() if name in words}


@pytest.mark.parametrize("before", [HIT, ""], ids=["those that were chosen", "all"])
def test_tokens_that_a_loop_looks_up(before: str) -> None:
    text = looked_up(before)
    graph = same(model(text, opset=17, **stored(text)), {"x": rand(B, S, H)})
    assert (
        ops(graph).count("RoutedExperts") == 1
        and ops(graph).count("MatMul") == 1
        and not {"OneHot", "ArgMax", "ScatterElements"} & set(ops(graph))
    )
    assert len(graph.trainable) == 4  # the router, gates and ups of the one stack, downs
    again = read_model(model(text, opset=17, **stored(text)), batch=4)
    assert (
        again.tensors[again.outputs[0]].shape == (4, S, H)
        and ops(again).count("RoutedExperts") == 1
    )


def test_what_is_not_weighed_is_masked() -> None:
    text = looked_up("", LOOKED_UP.replace("r{e} = Mul(d{e}, c{e})", "r{e} = Tanh(d{e})"))
    graph = same(model(text, opset=17, **stored(text)), {"x": rand(B, S, H)})
    assert "RoutedExperts" not in ops(graph)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            looked_up("", LOOKED_UP.replace("(none, ti{e}", "(full, ti{e}")),
            "in another way than adding",
        ),
        (
            looked_up(
                "",
                LOOKED_UP.replace(
                    "Gather <axis = 0> (sf{e}, at{e})", "Gather <axis = 0> (sf{e}, k{e})"
                ),
            ),
            "something else than shares",
        ),
        (
            looked_up(
                HIT.replace("e0, e1, e2 =", "e0, e1 =").replace(
                    "q2 = Squeeze(e2, nil)", "q2 = Squeeze(e1, nil)"
                )
            ),
            "only 2 of 3 experts were chosen",
        ),
    ],
)
def test_lookups_that_mean_something_else_are_refused(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=f"(?s)P130.*{words}"):
        read_model(model(text, opset=17, **stored(text)))
