"""Attention with what is added to its scores: ALiBi's slopes, tables of relative positions, learned
temperatures; what is no known form is a finding."""

from __future__ import annotations

import numpy as np
import pytest

from planner.api import plan
from planner.graph.ir import Graph
from planner.reader import read_model
from planner.verify.numerics import compare, seeded_values
from planner.workload.open import open_model
from tests.reader.reader_models import model, ops, rand, same

B, H, S, D = 2, 4, 6, 8
HEAD = "(float[2,4,6,8] q, float[2,4,6,8] k, float[2,4,6,8] v) => (float[2,4,6,8] y)"
SCORES = "t = Transpose <perm = [0, 1, 3, 2]> (k) s0 = MatMul(q, t) s = Mul(s0, half)"
END = "p = Softmax <axis = -1> (m) y = MatMul(p, v)"
FLAT = (
    "qf = Reshape(q, flat) kf = Reshape(k, flat) vf = Reshape(v, flat) t = Transpose <perm = [0, 2,"
    " 1]> (kf) s0 = MatMul(qf, t) s1 = Mul(s0, half) s2 = Add(s1, slopes8) s = Reshape(s2, parted)"
)
FORMS = {
    "bias, then masked": (f"{SCORES} a = Add(s, slopes) m = Where(later, low, a) {END}", 1, 4),
    "bias, then kept": (f"{SCORES} a = Add(s, slopes) m = Where(earlier, a, low) {END}", 1, 4),
    "bias and mask added": (f"{SCORES} a = Add(s, slopes) m = Add(a, causal) {END}", 1, 4),
    "mask and bias added": (f"{SCORES} a = Add(causal, s) m = Add(slopes, a) {END}", 1, 4),
    "two biases": (f"{SCORES} a = Add(s, slopes) m = Add(a, other) {END}", 0, 4),
    "bias, then a mask of data": (
        (
            f"{SCORES} z = ReduceSum <keepdims = 0> (k, last) w = Greater(z, nought) wu ="
            f" Unsqueeze(w, two) a = Add(s, slopes) m = Where(wu, a, low) {END}"
        ),
        0,
        4,
    ),
    "batch and heads in one dim": (f"{FLAT} m = Add(s, causal) {END}", 1, 4),
    "batch and heads in one dim, weights too": (
        (
            f"{FLAT} m = Add(s, causal) p = Softmax <axis = -1> (m) pf = Reshape(p, square) yf ="
            " MatMul(pf, vf) y = Reshape(yf, whole)"
        ),
        1,
        4,
    ),
    "capped": (f"{SCORES} c = Tanh(s) m = Mul(c, half) {END}", 0, 3),
    "capped by division, then masked": (
        f"{SCORES} d = Div(s, two_f) c = Tanh(d) e = Mul(c, two_f) m = Where(later, low, e) {END}",
        1,
        3,
    ),
    "capped, bias and mask added": (
        f"{SCORES} d = Div(s, two_f) c = Tanh(d) e = Mul(c, two_f) a = Add(e, slopes)"
        f" m = Add(a, causal) {END}",
        1,
        4,
    ),
    "bias alone": (f"{SCORES} m = Add(s, slopes) {END}", 0, 4),
}


def arrays(text: str) -> dict[str, np.ndarray]:
    tri = np.tri(S, dtype=bool)
    known = {
        "half": np.float32(0.5),
        "slopes": rand(H, 1, S),
        "slopes8": np.tile(rand(H, 1, S), (B, 1, 1)),
        "other": rand(1, 1, S, S),
        "later": ~tri,
        "earlier": tri,
        "low": np.float32(np.finfo(np.float32).min),
        "causal": np.where(tri, 0, np.finfo(np.float32).min).astype(np.float32)[None, None],
        "two_f": np.float32(2),
        "nought": np.float32(0),
        "last": np.array([-1]),
        "two": np.array([2]),
        "flat": np.array([B * H, S, D]),
        "square": np.array([B * H, S, S]),
        "parted": np.array([B, H, S, S]),
        "whole": np.array([B, H, S, D]),
    }
    words = set(text.replace("(", " ").replace(")", " ").replace(",", " ").split())
    return {n: a for n, a in known.items() if n in words}


FEEDS = {n: rand(B, H, S, D, seed=k) for k, n in enumerate("qkv")}


@pytest.mark.parametrize("name", FORMS)
def test_what_is_added_to_scores_is_part_of_attention(name: str) -> None:
    text, causal, operands = FORMS[name]
    graph = same(model(f"{HEAD} {{ {text} }}", **arrays(text)), FEEDS)
    (node,) = (n for n in graph.nodes if n.op == "Attention")
    assert (node.attrs["causal"], len(node.inputs)) == (causal, operands) and "Softmax" not in ops(
        graph
    )
    assert not any(getattr(n, "kind", "") == "attention" for n in graph.notes)
    again = read_model(model(f"{HEAD} {{ {text} }}", **arrays(text)), batch=6)
    assert again.tensors["y"].shape == (6, H, S, D) and ops(again).count("Attention") == 1


PACKED = "(int64[2,6] ids, float[2,4,6,8] q, float[2,4,6,8] k, float[2,4,6,8] v)"
IDS = "a = Unsqueeze(ids, last_a) b = Unsqueeze(ids, last_b) e = Equal(a, b)"


@pytest.mark.parametrize(
    ("masked", "causal", "segments"),
    [
        (f"{IDS} m = Where(e, s, low)", 0, 1),
        (f"{IDS} c = And(e, earlier) m = Where(c, s, low)", 1, 1),
        (f"{IDS} m0 = Where(e, s, low) m = Where(earlier, m0, low)", 1, 1),
        (f"{IDS} n = Where(e, nought, low) m = Add(s, n)", 0, 1),
        (f"{IDS} g = Greater(b, one_i) c = And(e, g) m = Where(c, s, low)", 0, 0),
        (f"{IDS} n = Not(e) m = Where(n, s, low)", 0, 0),
    ],
    ids=["alone", "and causal", "one after the other", "added", "and padding", "of others"],
)
def test_packed_sequences_are_segments(masked: str, causal: int, segments: int) -> None:
    """A mask of the numbers of positions' sequences is these numbers."""
    text = f"{PACKED} => (float[2,4,6,8] y) {{ {SCORES} {masked} {END} }}"
    more = {"last_a": np.array([1, 3]), "last_b": np.array([1, 2]), "one_i": np.array(0)}
    stored = arrays(text) | {n: a for n, a in more.items() if n in text}
    ids = np.array([[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, 3, 3]])
    graph = same(model(text, **stored), FEEDS | {"ids": ids})
    (node,) = (n for n in graph.nodes if n.op == "Attention")
    assert (node.attrs["causal"], node.attrs.get("segments", 0)) == (causal, segments)
    if segments:
        assert graph.tensors[node.inputs[3]].shape == (2, 1, 1, 6) and "Equal" not in ops(graph)


def learned(scores: str, **stored: np.ndarray) -> Graph:
    text = f"{SCORES} {scores} {END}"
    return same(model(f"{HEAD} {{ {text} }}", **arrays(text), **stored), FEEDS)


def test_a_table_of_zeros_that_is_trained_is_no_mask() -> None:
    graph = learned("m = Add(s, rel_pos_bias)", rel_pos_bias=np.zeros((1, H, S, S), np.float32))
    (node,) = (n for n in graph.nodes if n.op == "Attention")
    assert node.inputs[3] == "rel_pos_bias" and graph.trainable == {"rel_pos_bias"}


@pytest.mark.parametrize(
    "value", [np.float32(1), np.ones((H, 1, 1), np.float32)], ids=["one", "a head"]
)
def test_a_learned_temperature_goes_to_the_queries(value: np.ndarray) -> None:
    graph = learned("e = Exp(logit_scale) m = Mul(s, e)", logit_scale=value)
    assert (
        ops(graph).count("Attention") == 1
        and "Softmax" not in ops(graph)
        and graph.trainable == {"logit_scale"}
    )


@pytest.mark.parametrize(
    "scores",
    [
        "a = Add(s, slopes) c = Tanh(a) m = Mul(c, half)",
        "a = Add(s, slopes) c = Mul(a, half) m = Add(c, slopes)",
        "a = Where(earlier, s, low) m = Add(a, slopes)",
    ],
)
def test_other_forms_are_a_finding_that_says_what_it_costs(scores: str) -> None:
    graph = learned(scores)
    (found,) = (n for n in graph.notes if getattr(n, "kind", "") == "attention")
    assert (
        "no known form" in found
        and f"{B * H * S * S:,} scores" in found
        and "Attention" not in ops(graph)
    )


def test_sinks_beside_the_scores_are_a_finding() -> None:
    """As GPT-OSS is exported: a number a head in each softmax."""
    text = (
        f"{HEAD} {{ {SCORES} c = Concat <axis = -1> (s, sink) p = Softmax(c)"
        " w = Slice(p, from, to, last) y = MatMul(w, v) }"
    )
    stored = arrays(text) | {"sink": np.broadcast_to(rand(H, 1, 1), (B, H, S, 1)).copy()}
    stored |= {"from": np.array([0]), "to": np.array([S]), "last": np.array([3])}
    graph = same(model(text, **stored), FEEDS)
    (found,) = (n for n in graph.notes if getattr(n, "kind", "") == "attention")
    assert "no known form" in found and f"{B * H * S * (S + 1):,} scores" in found


def test_a_softmax_of_something_else_is_no_attention() -> None:
    made = model(
        "(float[2,6,8] x) => (float[2,6,5] y) { g = MatMul(x, router) p = Softmax <axis = -1> (g) y"
        " = MatMul(p, experts) }",
        router=rand(8, 4),
        experts=rand(4, 5),
    )
    assert not any(getattr(n, "kind", "") == "attention" for n in read_model(made).notes)


def test_gradients_of_a_split_program_with_bias_and_temperature() -> None:
    scores = SCORES.replace("(k)", "(kk)").replace("(q, t)", "(qq, t)")
    text = (
        f"qq = Mul(q, scale_q) kk = Mul(k, scale_q) {scores} a = Mul(s, logit_scale) b = Add(a,"
        f" rel_pos_bias) m = Where(later, low, b) {END}"
    )
    made = model(
        f"{HEAD} {{ {text} }}",
        **arrays(text),
        scale_q=rand(D),
        logit_scale=np.ones((H, 1, 1), np.float32),
        rel_pos_bias=rand(1, H, S, S),
    )
    options: dict = {"devices": 8, "hardware": "cpu", "precision": "fp32", "loss": "mse"}
    strategy = plan(made, **options, batch=8, pins="dp=4,tp=2", baselines=False)
    graph = open_model(made, 8, batch=8, loss="mse").graph(1)
    assert [n.attrs["causal"] for n in graph.nodes if n.op == "Attention"] == [1]
    found, _ = compare(
        graph,
        strategy.plan_for(graph),
        workload="train",
        backend="shard_map",
        values=seeded_values(graph, {}),
    )
    assert found.compared == 3 and found.gradients < 1e-4
