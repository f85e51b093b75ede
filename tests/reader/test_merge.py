"""Copies of tables and masks that an exporter wrote into every layer are one; what a layer trains,
draws or gives out stays its own."""

from __future__ import annotations

import numpy as np

from planner.graph.ir import Graph
from planner.graph.repeats import find_runs, hoist
from planner.reader import read_model
from tests.reader.reader_models import model, ops, rand, same

LAYERS, D = 3, 8
HEAD = "(float[2,4,8] x, int64[2,4] positions, bool[2,4] keep) => (float[2,4,8] y)"


def tables(k: int) -> str:
    """Rotary tables and a mask from the model's inputs, with the names of layer k."""
    return f"""
        pu{k} = Unsqueeze(positions, axis) pf{k} = Cast <to = 1> (pu{k}) m{k} = Mul(pf{k}, rate{k}) half{k} = Concat <axis = 2> (m{k}, m{k})
        cos{k} = Cos(half{k}) sin{k} = Sin(half{k}) ku{k} = Unsqueeze(keep, axis) mask{k} = Where(ku{k}, one{k}, low{k})"""


def layer(k: int, table: int) -> str:
    """Rows turned by the tables, one product, and what the mask keeps of it."""
    return f"""
        a{k}, b{k} = Split <axis = 2, num_outputs = 2> (x{k}) nb{k} = Neg(b{k}) r{k} = Concat <axis = 2> (nb{k}, a{k})
        c{k} = Mul(x{k}, cos{table}) s{k} = Mul(r{k}, sin{table}) t{k} = Add(c{k}, s{k}) h{k} = MatMul(t{k}, w{k}) g{k} = Relu(h{k})
        q{k} = Mul(g{k}, mask{table}) x{k + 1} = Add(q{k}, x{k})"""


def stack(copies: bool) -> Graph:
    """Layers with one set of tables, or a copy each; onnxruntime checks what is read."""
    arrays = {f"w{k}": rand(D, D, seed=k) for k in range(LAYERS)} | {
        "w": rand(D, D, seed=9),
        "axis": np.array([2]),
    }
    for k in range(LAYERS):
        arrays |= {
            f"rate{k}": np.array([1.0, 0.5, 0.25, 0.125], np.float32),
            f"one{k}": np.float32(1),
            f"low{k}": np.float32(0.25),
        }
    text = "".join(
        (tables(k) if copies or k == 0 else "") + layer(k, k if copies else 0)
        for k in range(LAYERS)
    )
    feeds = {"x": rand(2, 4, D), "positions": np.arange(8).reshape(2, 4), "keep": rand(2, 4) > 0}
    return same(
        model(f"{HEAD} {{ x0 = MatMul(x, w) {text} y = Identity(x{LAYERS}) }}", **arrays), feeds
    )


def test_layers_with_tables_of_their_own_fold_as_those_that_share_them() -> None:
    one, each = (hoist(stack(copies)) for copies in (False, True))
    assert len(one.nodes) == len(each.nodes) and find_runs(one) == find_runs(each)
    ((_, _, repeats),) = find_runs(each)
    assert repeats == LAYERS


def test_merged_nodes_keep_the_names_of_all() -> None:
    named = [n for n in stack(True).nodes if n.op == "Cos"]
    assert len(named) == 1 and len(named[0].members) == LAYERS


def test_what_is_trained_stays_apart() -> None:
    # Two products of an input with weights of equal values, and what follows: training would drive
    # them apart.
    w = rand(8, 8)
    graph = same(
        model(
            "(float[2,8] x) => (float[2,8] y) { a = MatMul(x, w1) b = MatMul(x, w2) c = Relu(a) d ="
            " Relu(b) y = Mul(c, d) }",
            w1=w,
            w2=w.copy(),
        ),
        {"x": rand(2, 8)},
    )
    assert ops(graph).count("MatMul") == 2 and ops(graph).count("Relu") == 2


def test_outputs_of_the_model_keep_their_operations() -> None:
    graph = same(
        model("(float[2,8] x) => (float[2,8] y, float[2,8] z) { y = Relu(x) z = Relu(x) }"),
        {"x": rand(2, 8)},
    )
    assert ops(graph) == ["Relu", "Relu"]


def test_constants_that_differ_keep_their_readers() -> None:
    text = (
        "(float[2,8] x) => (float[2,8] y) { a = Mul(x, k1) b = Mul(x, k2) c = Mul(x, k3) d = Add(a,"
        " b) y = Sub(d, c) }"
    )
    graph = same(
        model(text, k1=np.float32(2), k2=np.float32(3), k3=np.float32(2)), {"x": rand(2, 8)}
    )
    assert ops(graph).count("Mul") == 2


def test_draws_stay_apart() -> None:
    text = (
        "(float[2,8] x) => (float[2,8] y) { a = Dropout(x, half, yes) b = Dropout(x, half, yes) y ="
        " Add(a, b) }"
    )
    graph = read_model(model(text, half=np.float32(0.5), yes=np.array(True)))
    assert ops(graph).count("Dropout") == 2
