"""Attention with windows, or more dims than batch and heads before its rows, is one kernel."""

from __future__ import annotations

import numpy as np
import pytest

from planner.reader import read_model
from tests.reader.reader_models import model, ops, rand, same

F = np.float32
WINDOWS = """(float[2,5,96] x) => (float[2,5,96] y) {
    q = Reshape(x, heads) h = MatMul(q, w) k = Transpose <perm = [0,1,3,2]> (h) s = MatMul(q, k)
    f = Exp(temperature) c = Mul(s, f) p = Add(c, bias) w5 = Reshape(p, apart) m = Add(w5, mask)
    u = Reshape(m, together) a = Softmax <axis = -1> (u) o = MatMul(a, q) y = Reshape(o, back) }"""


@pytest.mark.parametrize("samples", [2, 4])
def test_windows_with_a_mask_each(samples: int) -> None:
    """Swin, as torchvision and timm write it: five windows of four tokens, three heads."""
    made = model(
        WINDOWS,
        heads=np.array([-1, 3, 4, 8]),
        w=rand(8, 8),
        temperature=rand(3, 1, 1),
        bias=rand(1, 3, 4, 4),
        mask=np.where(np.arange(80).reshape(1, 5, 1, 4, 4) % 3 == 0, F(-100), F(0)),
        apart=np.array([-1, 5, 3, 4, 4]),
        together=np.array([-1, 3, 4, 4]),
        back=np.array([-1, 5, 96]),
    )
    graph = same(made, {"x": rand(2, 5, 96)}) if samples == 2 else read_model(made, batch=samples)
    found = next(n for n in graph.nodes if n.op == "Attention")
    shapes = graph.shapes(found.inputs)
    assert "Softmax" not in ops(graph)
    assert shapes[0] == (samples, 15, 4, 8) and shapes[3] == (1, 15, 4, 4)


@pytest.mark.parametrize("bias", [(), (2, 1, 3, 4, 6), (1, 5, 1, 1, 6), (4, 6)])
def test_more_dims_before_the_rows(bias: tuple[int, ...]) -> None:
    """Rows of pairs in AlphaFold, units of a mask in Hiera."""
    score = "p = Add(s, bias)" if bias else "p = Identity(s)"
    made = model(
        "(float[2,5,3,4,8] q, float[2,5,3,6,8] k, float[2,5,3,6,8] v) => (float[2,5,3,4,8] y)"
        f" {{ t = Transpose <perm = [0,1,2,4,3]> (k) s = MatMul(q, t) {score}"
        " a = Softmax <axis = -1> (p) y = MatMul(a, v) }",
        **({"bias": rand(*bias)} if bias else {}),
    )
    feeds = {"q": rand(2, 5, 3, 4, 8), "k": rand(2, 5, 3, 6, 8), "v": rand(2, 5, 3, 6, 8)}
    graph = same(made, feeds)
    assert "Attention" in ops(graph) and "Softmax" not in ops(graph)


def test_keys_shared_by_a_group_stay_as_they_are() -> None:
    """Their dims before the rows are others: no reshape says the same."""
    made = model(
        "(float[2,5,3,4,8] q, float[2,5,1,6,8] k, float[2,5,1,6,8] v) => (float[2,5,3,4,8] y)"
        " { t = Transpose <perm = [0,1,2,4,3]> (k) s = MatMul(q, t) a = Softmax <axis = -1> (s)"
        " y = MatMul(a, v) }"
    )
    feeds = {"q": rand(2, 5, 3, 4, 8), "k": rand(2, 5, 1, 6, 8), "v": rand(2, 5, 1, 6, 8)}
    assert "Softmax" in ops(same(made, feeds))
