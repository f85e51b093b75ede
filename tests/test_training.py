"""Losses appended to exported graphs, what they prune, and the errors around them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.errors import PlanError
from planner.graph import Graph, Node, Tensor
from planner.training import add_loss, default_loss


def graph(logits: tuple[int, ...] = (8, 5), dtype: str = "float32") -> Graph:
    tensors = {
        "x": Tensor("x", (8, 4), "float32", "input"), "w": Tensor("w", (4, 5), "float32", "weight"), "y": Tensor("y", logits, dtype),
        "z": Tensor("z", (8, 4), "float32"), "s": Tensor("s", (), "float32"),
    }  # fmt: skip
    nodes = (Node("mm", "MatMul", ("x", "w"), ("y",)), Node("side", "Relu", ("x",), ("z",)), Node("sum", "ReduceSum", ("y",), ("s",), {"axes": (0, 1), "keepdims": 0}))
    return Graph("g", nodes, tensors, ("x",), ("y", "z", "s"), weights={"w": None}, trainable=frozenset({"w"}))  # type: ignore[dict-item]


def test_cross_entropy_adds_labels_and_prunes_other_outputs() -> None:
    g = add_loss(graph())
    assert g.outputs == ("loss",) and g.tensors["labels"].shape == (8,) and g.tensors["labels"].dtype == "int32"
    assert [n.id for n in g.nodes] == ["mm", "loss"]


def test_mse_targets_have_the_output_s_shape() -> None:
    assert add_loss(graph(), "mse").tensors["targets"].shape == (8, 5)


def test_a_scalar_output_can_be_the_loss() -> None:
    g = add_loss(graph(), "output:s")
    assert g.outputs == ("s",) and g.inputs == ("x",)


def test_default_loss_follows_the_output() -> None:
    assert default_loss(graph()) == "cross_entropy"
    assert default_loss(replace(graph(), outputs=("s",))) == "output:s"


@pytest.mark.parametrize(
    ("options", "code"),
    [({"loss": "hinge"}, "P030"), ({"logits": "nope"}, "P031"), ({"loss": "output:y"}, "P032"), ({"loss": "cross_entropy", "logits": "s"}, "P033")],
)
def test_impossible_losses_are_named(options: dict, code: str) -> None:
    with pytest.raises(PlanError) as e:
        add_loss(graph(), **options)
    assert e.value.code == code and e.value.exit_code == 2 and e.value.help


def test_nothing_trainable_is_an_error() -> None:
    with pytest.raises(PlanError, match="nothing in this graph is trainable"):
        add_loss(replace(graph(), trainable=frozenset()))
