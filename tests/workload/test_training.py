"""Losses appended to exported graphs, what they prune, and the errors around them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from planner.api import plan
from planner.emit.from_strategy import program
from planner.errors import PlanError
from planner.graph.ir import Graph, Node, Tensor
from planner.verify.numerics import Twin, compare, seeded_values
from planner.workload.loss import add_loss, default_loss
from planner.workload.open import open_model
from planner.workload.user_loss import priced, read_user_loss
from planner.workload.weights import load
from tests.reader.reader_models import model, rand


def graph(logits: tuple[int, ...] = (8, 5), dtype: str = "float32") -> Graph:
    tensors = {
        "x": Tensor("x", (8, 4), "float32", "input"),
        "w": Tensor("w", (4, 5), "float32", "weight"),
        "y": Tensor("y", logits, dtype),
        "z": Tensor("z", (8, 4), "float32"),
        "s": Tensor("s", (), "float32"),
    }
    nodes = (
        Node("mm", "MatMul", ("x", "w"), ("y",)),
        Node("side", "Relu", ("x",), ("z",)),
        Node("sum", "ReduceSum", ("y",), ("s",), {"axes": (0, 1), "keepdims": 0}),
    )
    return Graph(
        "g",
        nodes,
        tensors,
        ("x",),
        ("y", "z", "s"),
        weights={"w": None},
        trainable=frozenset({"w"}),
    )  # type: ignore[dict-item]


def test_cross_entropy_adds_labels_and_prunes_other_outputs() -> None:
    g = add_loss(graph())
    assert (
        g.outputs == ("loss",)
        and g.tensors["labels"].shape == (8,)
        and g.tensors["labels"].dtype == "int32"
    )
    assert [n.id for n in g.nodes] == ["mm", "loss"]


def test_mse_targets_have_the_output_s_shape() -> None:
    assert add_loss(graph(), "mse").tensors["targets"].shape == (8, 5)


def test_a_scalar_output_can_be_the_loss() -> None:
    g = add_loss(graph(), "output:s")
    assert g.outputs == ("s",) and g.inputs == ("x",)


def two_losses(second: str = "loss_aux") -> onnx.ModelProto:
    body = (
        "h = MatMul(x, w) s = Mul(h, h) t = ReduceMean <keepdims = 0> (s) loss_nce = Identity(t) k"
        f" = MatMul(h, head) a = Abs(k) {second} = ReduceMean <keepdims = 1> (a)"
    )
    return model(
        f"(float[8,4] x) => (float loss_nce, float[1,1] {second}, float[8,6] h) {{ {body} }}",
        w=rand(4, 6),
        head=rand(6, 3),
    )


def test_several_losses_are_weighted_and_added() -> None:
    alone = [_gradients(two_losses(), f"output:{n}") for n in ("loss_nce", "loss_aux")]
    both = _gradients(two_losses(), "output:loss_nce+0.25*output:loss_aux")
    assert both[0] == pytest.approx(alone[0][0] + 0.25 * alone[1][0], rel=1e-5)
    assert np.allclose(
        both[1]["w"], alone[0][1]["w"] + 0.25 * alone[1][1]["w"], atol=1e-6
    ) and np.allclose(both[1]["head"], 0.25 * alone[1][1]["head"], atol=1e-7)
    assert _gradients(two_losses(), "1e-1*output:loss_aux+output:loss_nce")[0] == pytest.approx(
        alone[0][0] + 0.1 * alone[1][0], rel=1e-5
    )


def _gradients(made: onnx.ModelProto, loss: str) -> tuple[float, dict[str, np.ndarray]]:
    g = open_model(made, 1, loss=loss).graph(1)
    found, gradients = Twin(g, "train", seeded_values(g, load(g, None))).gradients(
        {"x": rand(8, 4)}, 1
    )
    return float(found), gradients


def test_a_sum_of_losses_is_emitted_and_equals_the_unsharded_one() -> None:
    options: dict = {
        "devices": 8,
        "hardware": "cpu",
        "precision": "fp32",
        "batch": 16,
        "loss": "output:loss_nce+0.5*output:loss_aux",
    }
    strategy = plan(two_losses(), **options, pins="dp=8", baselines=False)
    opened = open_model(two_losses(), 8, batch=16, loss=options["loss"])
    found, _ = compare(
        opened.graph(1),
        strategy.plan_for(opened.graph(1)),
        workload="train",
        backend="shard_map",
        values=seeded_values(opened.plain, {}),
        step=True,
    )
    assert (
        found.compared == 2
        and found.gradients < 1e-4
        and strategy.workload["training"]["loss"] == options["loss"]
    )
    assert not strategy.findings


def test_an_output_with_layers_of_its_own_is_missed() -> None:
    """A detector's boxes beside its classes: a tenth of its parameters did not train, and nothing
    said so."""
    made = model(
        "(float[2,8] x) => (float[2,4] classes, float[2,4] boxes) { h = MatMul(x, shared)"
        " classes = MatMul(h, w) boxes = MatMul(h, v) }",
        shared=rand(8, 8),
        w=rand(8, 4),
        v=rand(8, 4, seed=1),
    )
    for logits, other in (("", "boxes"), ("boxes", "classes")):
        notes = open_model(made, 1, logits=logits).plain.notes
        (text,) = (n for n in notes if getattr(n, "kind", "") == "loss")
        assert f"{other!r} (0.00 M parameters)" in text and "--logits" in text


@pytest.mark.parametrize("second", ["loss_aux", "regulariser"])
def test_a_loss_that_is_left_out_is_a_finding(second: str) -> None:
    notes = open_model(two_losses(second), 1).plain.notes
    (text,) = (n for n in notes if getattr(n, "kind", "") == "loss")
    assert (
        f"{second!r} looks like a loss" in text
        and "'head'" in text
        and f"--loss 'output:loss_nce+output:{second}'" in text
    )
    assert not any(
        getattr(n, "kind", "") == "loss"
        for n in open_model(two_losses(second), 1, workload="infer").plain.notes
    )
    assert not any(
        getattr(n, "kind", "") == "loss"
        for n in open_model(
            two_losses(second), 1, loss=f"output:loss_nce+output:{second}"
        ).plain.notes
    )


@pytest.mark.parametrize(
    "loss",
    [
        "output:loss_nce,output:loss_aux",
        "output:loss_nce+output:loss_ax",
        "2.5.1*output:loss_nce",
        "output:h+output:loss_nce",
        "output:loss_nce+mse",
    ],
)
def test_sums_that_cannot_be_made_name_the_form(loss: str) -> None:
    with pytest.raises(PlanError, match="P032") as e:
        open_model(two_losses(), 1, loss=loss).graph(1)
    assert e.value.help


def test_microbatches_of_one_row_have_the_loss_of_the_batch() -> None:
    """One row's click is a single number, and no loss."""
    model = open_model("zoo:dlrm-tiny", 1, batch=4)
    assert [model.graph(m).nodes[-1].op for m in (1, 2, 4)] == ["MSELoss"] * 3
    assert open_model("zoo:dlrm-tiny", 1, batch=1).graph(1).nodes[-1].op == "MSELoss"


def test_default_loss_follows_the_output() -> None:
    assert default_loss(graph()) == "cross_entropy"
    assert default_loss(replace(graph(), outputs=("s",))) == "output:s"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"loss": "hinge"}, "P030"),
        ({"logits": "nope"}, "P031"),
        ({"loss": "output:y"}, "P032"),
        ({"loss": "cross_entropy", "logits": "s"}, "P033"),
    ],
)
def test_impossible_losses_are_named(options: dict, code: str) -> None:
    with pytest.raises(PlanError) as e:
        add_loss(graph(), **options)
    assert e.value.code == code and e.value.exit_code == 2 and e.value.help


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "mse"},
        {"lr": 0.1, "freeze": ("*",)},
        {"shift_labels": True},
        {"lora": "rank=4,targets=*"},
    ],
)
def test_inference_with_options_of_training_is_an_error(options: dict) -> None:
    with pytest.raises(PlanError, match="P028.*infer") as e:
        open_model("zoo:gpt-tiny", 1, workload="infer", **options)
    assert all("--" + n.replace("_", "-") in e.value.what for n in options)


def test_nothing_trainable_is_an_error() -> None:
    with pytest.raises(PlanError, match="nothing in this graph is trainable"):
        add_loss(replace(graph(), trainable=frozenset()))


# what the loss is, against numpy


def language(loss: str = "", **options: object) -> Graph:
    """Logits [2, 6, 5] = x @ w."""
    tensors = {
        "x": Tensor("x", (2, 6, 4), "float32", "input"),
        "w": Tensor("w", (4, 5), "float32", "weight"),
        "y": Tensor("y", (2, 6, 5), "float32"),
    }
    nodes = (Node("mm", "MatMul", ("x", "w"), ("y",)),)
    g = Graph(
        "g",
        nodes,
        tensors,
        ("x",),
        ("y",),
        weights={"w": None},
        labels={"w": "w"},
        trainable=frozenset({"w"}),
    )  # type: ignore[dict-item]
    return add_loss(g, loss, **options)  # type: ignore[arg-type]


def computed(g: Graph, **feeds: np.ndarray) -> tuple[float, np.ndarray]:
    """Loss of the unsharded program, and its gradient by w."""
    loss, grads = Twin(g, "train", {"w": W}).gradients({"x": X, **feeds})
    return float(loss), grads["w"]


RNG = np.random.default_rng(3)
X, W = RNG.normal(size=(2, 6, 4)).astype(np.float32), RNG.normal(size=(4, 5)).astype(np.float32)
LABELS = np.array([[1, 2, 3, -100, 4, 0], [0, -100, -100, 2, 2, 1]], np.int32)


def expected(labels: np.ndarray, counts: np.ndarray) -> float:
    logits = (X @ W).astype(np.float64)
    log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    each = -np.take_along_axis(log, np.where(counts, labels, 0)[..., None], -1)[..., 0]
    return float(each[counts].mean())


def test_ignored_rows_do_not_count() -> None:
    loss, grad = computed(language(ignore_index=-100), labels=LABELS)
    assert loss == pytest.approx(expected(LABELS, LABELS != -100), rel=1e-5)
    lower = (computed(language(ignore_index=-100), labels=LABELS)[0], W.copy())
    W[0, 0] += 1e-2
    try:
        assert (
            computed(language(ignore_index=-100), labels=LABELS)[0] - lower[0]
        ) / 1e-2 == pytest.approx(grad[0, 0], rel=0.05)
    finally:
        W[0, 0] = lower[1][0, 0]


def test_shifted_labels_are_the_next_ones() -> None:
    plain = np.where(LABELS < 0, 1, LABELS)
    loss, _ = computed(language(shift_labels=True), labels=plain)
    following = np.concatenate([plain[:, 1:], np.full((2, 1), -100)], 1)
    assert loss == pytest.approx(expected(following, following != -100), rel=1e-5)
    loss, _ = computed(language(shift_labels=True, ignore_index=-100), labels=LABELS)
    following = np.concatenate([LABELS[:, 1:], np.full((2, 1), -100)], 1)
    assert loss == pytest.approx(expected(following, following != -100), rel=1e-5)


def test_a_batch_without_a_label_has_no_loss() -> None:
    loss, grad = computed(language(ignore_index=-100), labels=np.full_like(LABELS, -100))
    assert loss == 0 and not grad.any()


@pytest.mark.parametrize(
    ("loss", "formula"),
    [
        ("mse", lambda y, t: np.square(y - t)),
        ("l1", lambda y, t: np.abs(y - t)),
        ("bce-with-logits", lambda y, t: np.logaddexp(0, y) - y * t),
    ],
)
def test_losses_of_targets(loss: str, formula: object) -> None:
    targets = RNG.uniform(size=(2, 6, 5)).astype(np.float32)
    assert computed(language(loss), targets=targets)[0] == pytest.approx(
        float(formula(X @ W, targets).mean()), rel=1e-5
    )  # type: ignore[operator]


@pytest.mark.parametrize(
    "options", [{"loss": "mse", "shift_labels": True}, {"loss": "mse", "ignore_index": 1}]
)
def test_options_of_cross_entropy_are_for_nothing_else(options: dict) -> None:
    with pytest.raises(PlanError, match="P033"):
        language(**options)
    with pytest.raises(PlanError, match="P033"):
        add_loss(graph(), shift_labels=True)  # no sequence


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("shift", "pins", "backend"),
    [
        (False, "dp=4,tp=2,micro=4", "shard_map"),
        (True, "dp=8,micro=2,zero=2", "shard_map"),
        pytest.param(False, "dp=4,tp=2,micro=4", "jit", marks=pytest.mark.slow),
        pytest.param(True, "dp=8,micro=2,zero=2", "jit", marks=pytest.mark.slow),
    ],
)
def test_microbatches_of_unlike_numbers_of_rows_make_one_mean(
    shift: bool, pins: str, backend: str
) -> None:
    options = {"batch": 16, "ignore_index": -100, "shift_labels": shift}
    strategy = plan(
        "zoo:gpt-tiny,layers=1",
        devices=8,
        hardware="cpu",
        precision="fp32",
        baselines=False,
        pins=pins,
        **options,
    )  # type: ignore[arg-type]
    model = open_model("zoo:gpt-tiny,layers=1", 8, **options)  # type: ignore[arg-type]
    micro = int(strategy.techniques["microbatches"])
    g, whole = model.graph(micro), model.graph(1)
    labels = RNG.integers(0, 512, (16, 16)).astype(np.int32)
    labels[:5] = -100  # a whole microbatch and more
    labels[6:9, 3:] = -100
    ids = RNG.integers(0, 512, (16, 16)).astype(np.int32)
    pieces = {"labels": labels.reshape(micro, -1, 16), "input_ids": ids.reshape(micro, -1, 16)}
    values = seeded_values(g, {})
    found, _ = compare(
        g, strategy.plan_for(g), workload="train", backend=backend, values=values, batch=pieces
    )
    assert found.gradients < 1e-4 and found.loss == pytest.approx(found.reference_loss, rel=1e-5)
    once, grads = Twin(whole, "train", values).gradients(
        {"labels": labels, "input_ids": ids}
    )  # one batch, no microbatches
    many, summed = Twin(g, "train", values).gradients(pieces, micro)
    assert float(many) == pytest.approx(float(once), rel=1e-5)
    assert all(
        np.abs(summed[n] - grads[n]).max() <= 1e-5 * np.abs(grads[n]).max() + 1e-8 for n in grads
    )


# a loss of one's own

SMOOTH = """from __future__ import annotations

import jax
import jax.numpy as jnp

WEIGHT = 0.1
SUM = "loss_of"  # names of the program may be used


def smooth(logits, labels, x):
    \"\"\"Label smoothing,
    and a term of the input.\"\"\"
    p = jax.nn.log_softmax(logits.astype(jnp.float32))
    hit = jnp.take_along_axis(p, labels[..., None], -1)[..., 0]
    return -((1 - WEIGHT) * hit + WEIGHT * p.mean(-1)) + 0 * x.sum(-1)


def other(y, targets):
    return jnp.abs(y - targets) ** 1.5


def scalar(logits):
    return logits.mean()
"""


@pytest.fixture
def smooth(tmp_path: Path) -> str:
    (tmp_path / "my loss.py").write_text(SMOOTH)
    return f"{tmp_path / 'my loss.py'}:smooth"


def test_a_function_is_the_loss(smooth: str) -> None:
    labels = np.where(LABELS < 0, 1, LABELS)
    logits = (X @ W).astype(np.float64)
    log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    want = -(
        0.9 * np.take_along_axis(log, labels[..., None], -1)[..., 0] + 0.1 * log.mean(-1)
    ).mean()
    assert computed(language(smooth), labels=labels)[0] == pytest.approx(want, rel=1e-5)


def test_a_function_is_the_same_on_every_mesh_and_its_file_is_in_the_program(smooth: str) -> None:
    loss = smooth.replace(":smooth", ":other")
    strategy = plan(
        "zoo:mlp-tiny",
        devices=8,
        hardware="cpu",
        precision="fp32",
        batch=16,
        baselines=False,
        pins="dp=4,tp=2",
        loss=loss,
    )
    assert strategy.workload["training"]["loss"].endswith(":other")
    model = open_model("zoo:mlp-tiny", 8, batch=16, loss=loss)
    g = model.graph(int(strategy.techniques["microbatches"]))
    found, _ = compare(
        g, strategy.plan_for(g), workload="train", backend="shard_map", values=seeded_values(g, {})
    )
    assert found.gradients < 1e-4 and found.loss == pytest.approx(found.reference_loss, rel=1e-5)
    assert "def other(" in program(strategy, "zoo:mlp-tiny").text


def test_what_a_function_costs_is_said(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(
        SMOOTH.replace("labels, x)", "labels)").replace(" + 0 * x.sum(-1)", "")
    )
    losses = ("cross_entropy", f"{tmp_path / 'plain.py'}:smooth")
    made = [
        plan(
            "zoo:gpt-tiny,layers=1",
            devices=8,
            hardware="cpu",
            batch=16,
            baselines=False,
            pins="dp=8",
            loss=loss,
        )
        for loss in losses
    ]
    assert any(
        "loss smooth is not run to be priced" in a and "product" not in a
        for a in made[1].assumptions
    )
    assert (
        made[1].cost.step_time_s > made[0].cost.step_time_s
        and made[1].costs["memory_per_device_bytes"] > made[0].costs["memory_per_device_bytes"]
    )
    (tmp_path / "f.py").write_text(
        "import jax.numpy as jnp\n\n\ndef f(y):\n    return jnp.einsum('bi,bj->bij', y, y).sum((1,"
        " 2))\n\n\ndef g(y):\n    return y @ y.T\n"
    )
    assert "matrix products (line 5, 9) have no price" in priced(f"{tmp_path / 'f.py'}:f")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("absent.py:f", ""),
        ("f.py:g", "def f(y): return y"),
        ("f.py:f", "def f(y: return"),
        ("f.py:f", "def f(*y): return y"),
        ("f.py:f", "def f(): return 0"),
        ("f.py:f", "from math import *\ndef f(y): return y"),
        ("f.py:f", "def f(y, weather): return y"),
        ("f.py:f", "f = lambda y: y"),
        ("f.py:f", "\0"),
        ("f.py:f", "(" * 3000),
    ],
)
def test_functions_that_cannot_be_the_loss_are_named(name: str, text: str, tmp_path: Path) -> None:
    if text:
        (tmp_path / "f.py").write_text(text)
    with pytest.raises(PlanError, match="P038"):
        language(f"{tmp_path}/{name}")


def test_a_file_is_read_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(
        f"from __future__ import annotations\nopen({str(tmp_path / 'mark')!r}, 'w')\ndef f(y):"
        " return y\n"
    )
    found = read_user_loss(f"{tmp_path / 'f.py'}:f")
    assert (
        found.arguments == ("y",)
        and "__future__" not in found.source
        and not (tmp_path / "mark").exists()
    )


def test_a_function_without_the_batch_is_told_when_it_runs(smooth: str) -> None:
    with pytest.raises(ValueError, match="one value a sample"):
        computed(language(smooth.replace(":smooth", ":scalar")))


def test_an_operator_without_a_rule_is_named_where_nothing_trains_for_it(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    value = helper.make_tensor("w", TensorProto.FLOAT, [4, 2], [0.5] * 8)
    graph = helper.make_graph(
        [helper.make_node("Fancy", ["x", "w"], ["y"], domain="my.domain")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 2])],
        [value],
    )
    onnx.save(helper.make_model(graph), path)
    with pytest.raises(PlanError, match="P034") as e:
        plan(path, devices=1)
    assert "my.domain::Fancy has no rule: what it reads gets no gradient" in str(e.value)
