"""Options of `read`: which dim is the batch, what must be bound, and what the errors say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.errors import PlanError
from planner.reader import read_model
from planner.workload.model import Model, Workload
from tests.reader.reader_models import model, ops, rand

TOKENS = "(int64[batch, seq] ids, int64[batch, seq] mask) => (float[batch, total, 8] y)"
BODY = "{ e = Gather(w, ids) c = Cast <to = 1> (mask) u = Unsqueeze(c, two) y = Mul(e, u) }"
W = {"w": rand(10, 8), "two": np.array([2])}


def fails(made: Any, code: str, *parts: str, **options: Any) -> str:
    with pytest.raises(PlanError) as caught:
        read_model(made, **options)
    text = str(caught.value)
    assert caught.value.code == code and caught.value.exit_code == 2, text
    assert all(p in text for p in parts), text
    return text


def test_unbound_dims_are_listed_once_and_outputs_never() -> None:
    made = model(
        "(float[batch, seq, width] x, float[batch, seq] z) => (float[a, b, c] y) { u = Unsqueeze(z,"
        " two) y = Add(x, u) }",
        **W,
    )
    text = fails(made, "P140", "seq, width", "--dim seq=? --dim width=?")
    assert "batch=?" not in text and " a=" not in text
    graph = read_model(made, dims={"seq": 4, "width": 6}, batch=2)
    assert graph.tensors["y"].shape == (2, 4, 6)
    assert graph.dims == {"batch": 2, "seq": 4, "width": 6}


@pytest.mark.parametrize(
    "symbol", ["batch", "N", "B", "batch_size", "dynamic_batch", "bsz", "whatever"]
)
def test_the_batch_is_found(symbol: str) -> None:
    graph = read_model(
        model(f"(float[{symbol}, 4] x) => (float[{symbol}, 4] y) {{ y = Relu(x) }}"), batch=6
    )
    assert graph.tensors["x"].shape == (6, 4) and graph.dims["batch"] == 6


def test_a_named_batch_wins_over_the_first_dim() -> None:
    made = model("(float[steps, batch, 4] x) => (float[steps, batch, 4] y) { y = Relu(x) }")
    fails(made, "P140", "--dim steps=?")
    assert read_model(made, dims={"steps": 5}, batch=3).tensors["y"].shape == (5, 3, 4)


def test_unnamed_first_dims_are_the_batch_and_others_are_asked_for() -> None:
    made = model("(float[n, 4, m] x, float[n, 4, 1] z) => (float[n, 4, m] y) { y = Add(x, z) }")
    for value in made.graph.input:
        value.type.tensor_type.shape.dim[0].ClearField("dim_param")
    made.graph.input[0].type.tensor_type.shape.dim[
        2
    ].dim_value = -1  # what some exporters write for unknown
    fails(made, "P140", "--dim x.2=?")
    assert read_model(made, dims={"x.2": 7}, batch=2).tensors["y"].shape == (2, 4, 7)


def test_default_batch_is_a_multiple_of_the_devices() -> None:
    made = model(f"{TOKENS} {BODY}", **W)
    assert read_model(made, dims={"seq": 4}).dims["batch"] == 1
    graph = read_model(made, dims={"seq": 4}, devices=8)
    assert graph.dims["batch"] == 8 and any("8 devices" in n for n in graph.notes)
    static = model("(float[6, 4] x) => (float[6, 4] y) { y = Relu(x) }")
    assert read_model(static).dims["batch"] == 6
    assert read_model(static, devices=4).dims["batch"] == 8
    assert read_model(static, devices=3).dims["batch"] == 6


def test_the_batch_may_be_given_as_a_dim() -> None:
    made = model(f"{TOKENS} {BODY}", **W)
    assert read_model(made, dims={"seq": 4, "batch": 3}).dims["batch"] == 3
    fails(made, "P142", "--batch 2", dims={"seq": 4, "batch": 3}, batch=2)
    static = model("(float[6, 4] x) => (float[6, 4] y) { y = Relu(x) }")
    assert read_model(static, dims={"batch": 12}).tensors["y"].shape == (12, 4)


@pytest.mark.parametrize(
    "given",
    [
        {"dims": {"batch": 8, "seq": 4}},
        {"shapes": {"ids": (8, 4)}},
        {"shapes": {"ids": (8, 4)}, "batch": 8},
        {"dims": {"seq": 4}, "shapes": {"ids": (8, 4), "mask": (8, 4)}},
    ],
)
def test_microbatches_are_parts_of_a_batch_that_dims_or_shapes_say(given: dict[str, Any]) -> None:
    workload = Workload("infer", **given)
    made = Model.open(model(f"{TOKENS} {BODY}", **W), workload, 2)
    assert made.batch == 8 and made.graph(4).dims["batch"] == 2
    assert made.graph(4).tensors["ids"].shape == (2, 4)
    with pytest.raises(PlanError, match="given twice"):
        Model.open(made.proto, replace(workload, batch=4), 2).graph(1)


def test_tokens_per_step() -> None:
    made = model(f"{TOKENS} {BODY}", **W)
    assert read_model(made, dims={"seq": 16}, tokens_per_step=64).dims["batch"] == 4
    fails(made, "P145", "65", "16", dims={"seq": 16}, tokens_per_step=65)
    fails(made, "P142", dims={"seq": 16}, tokens_per_step=64, batch=2)
    fails(
        model("(float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }"),
        "P145",
        "token ids",
        tokens_per_step=64,
    )


def test_wrong_names_and_values() -> None:
    made = model(f"{TOKENS} {BODY}", **W)
    fails(made, "P141", "'sequ'", "did you mean 'seq'", dims={"sequ": 4})
    fails(made, "P141", "'idz'", "did you mean 'ids'", shapes={"idz": (2, 4)})
    fails(made, "P142", "--dim seq", dims={"seq": 0})
    fails(made, "P142", "--batch", dims={"seq": 4}, batch=-1)
    fails(made, "P142", "3 dims", shapes={"ids": (2, 4, 1)})


def test_a_shape_binds_a_formula_of_dims_that_nothing_else_has() -> None:
    """As optimum says the length of a mask beside a cache, which may be gone."""
    made = model(f"{TOKENS} {BODY}", **W)
    for value in made.graph.input:
        value.type.tensor_type.shape.dim[1].dim_param = "past + new"
    given = {"ids": (3, 5), "mask": (3, 5)}
    assert read_model(made, shapes=given).tensors["ids"].shape == (3, 5)
    made.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "new"
    fails(made, "P142", "'past + new' is given twice: 7 and 5", shapes=given, dims={"past": 2})


def test_shapes_bind_symbols_and_may_not_contradict() -> None:
    made = model(f"{TOKENS} {BODY}", **W)
    graph = read_model(made, shapes={"ids": (3, 5)})
    assert graph.tensors["mask"].shape == (3, 5) and graph.dims["batch"] == 3
    fails(made, "P142", "seq", shapes={"ids": (3, 5), "mask": (3, 6)})
    fails(
        model("(float[6, 4] x) => (float[6, 4] y) { y = Relu(x) }"),
        "P142",
        "contradicts",
        "--batch",
        shapes={"x": (8, 4)},
    )


def test_inputs_without_a_shape() -> None:
    made = model("(float[2, 8] x) => (float[2, 8] y) { y = Relu(x) }")
    made.graph.input[0].type.tensor_type.ClearField("shape")
    fails(made, "P144", "'x'", "--shape x=4,8")
    assert read_model(made, shapes={"x": (4, 8)}).tensors["y"].shape == (4, 8)


def test_dims_that_are_formulas() -> None:
    made = model(
        "(float[batch, past] x, float[batch, total] z) => (float[a, b] y) { y = Concat <axis = 1>"
        " (x, z) }"
    )
    made.graph.input[1].type.tensor_type.shape.dim[1].dim_param = "past + 2*new"
    fails(made, "P140", "--dim new=? --dim past=?")
    graph = read_model(made, batch=2, dims={"past": 3, "new": 4})
    assert graph.tensors["z"].shape == (2, 11) and graph.tensors["y"].shape == (2, 14)


def test_initializers_among_the_inputs_are_weights() -> None:
    made = model(
        "(float[2, 8] x, float[8, 8] w8) => (float[2, 8] y) { y = MatMul(x, w8) }", w8=rand(8, 8)
    )
    made.ir_version = 3
    graph = read_model(made)
    assert graph.inputs == ("x",) and graph.trainable == {"w8"} and ops(graph) == ["MatMul"]


def test_one_sample_has_the_operators_of_many() -> None:
    """Dims of 1 look like no dims at all: a class token is expanded for one sample as for eight."""
    text = (
        "(float[batch, 4, 8] x) => (float[batch, 5, 8] y) { s = Shape <end = 1> (x) t = Concat"
        " <axis = 0> (s, ones) e = Expand(cls, t) y = Concat <axis = 1> (e, x) }"
    )
    made = model(text, ones=np.array([1, 8]), cls=rand(1, 1, 8))
    graphs = [read_model(made, batch=b) for b in (1, 2, 8)]
    assert [ops(g) for g in graphs] == [["Expand", "Concat"]] * 3
    assert [g.tensors["y"].shape for g in graphs] == [(b, 5, 8) for b in (1, 2, 8)]
    assert not any("rebatched" in n for g in graphs for n in g.notes)
