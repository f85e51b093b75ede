"""Layouts that travel: what must not be cut unevenly, and which tensors carry gradients."""

from __future__ import annotations

import numpy as np
import pytest

from planner.execution.layout_flow import derive
from planner.execution.plan import Plan
from planner.graph.ir import Graph, Node, Tensor
from planner.ops.lookup import gradient_tensors, rule_of
from planner.sharding.rule import Split, legal
from planner.workload.loss import add_loss, prune

EIGHT = {"data": 8}


def graph(
    nodes, shapes, *, inputs=(), weights=(), constants=None, outputs=(), trainable=None, dtypes=None
) -> Graph:
    """A graph of float32 tensors, from shapes by name."""
    constants = constants or {}
    role = lambda n: (  # noqa: E731
        "input"
        if n in inputs
        else "weight"
        if n in weights
        else "constant"
        if n in constants
        else "activation"
    )
    tensors = {
        n: Tensor(n, tuple(s), (dtypes or {}).get(n, "float32"), role(n)) for n, s in shapes.items()
    }
    return Graph(
        "g",
        tuple(nodes),
        tensors,
        tuple(inputs),
        tuple(outputs),
        weights=dict.fromkeys(weights),
        constants=constants,
        labels={w: w for w in weights},
        trainable=frozenset(weights if trainable is None else trainable),
    )


def one(op: str, shapes: list[tuple[int, ...]], attrs=None, constants=None) -> bool:
    """Whether dim 0 of the result, 15 rows, may be cut over eight devices (one row of padding)."""
    names = [f"x{i}" for i in range(len(shapes))]
    node = Node("n", op, tuple(names), ("y",), attrs or {})
    known = constants or {}
    g = graph(
        [node],
        {**dict(zip(names, shapes, strict=True)), "y": (15, 4)},
        inputs=[n for n in names if n not in known],
        constants=known,
        outputs=["y"],
    )
    rule, reason = rule_of(node, g)
    assert not reason
    factor = next(f for f, n in rule.sizes.items() if n == 15)
    return legal(rule, Split.of({factor: ["data"]}), EIGHT)


@pytest.mark.parametrize("op", ["Sqrt", "Log", "Reciprocal"])
def test_padding_never_reaches_a_pole(op):
    # A padded row is zeros; its slope would be infinite, and infinity times the zero that cuts it
    # off again is no number.
    assert not one(op, [(15, 4)])
    assert one("Exp", [(15, 4)])


def test_padding_never_divides():
    assert not one("Div", [(15, 4), (15, 1)])
    assert one("Div", [(15, 4), (1, 4)])  # the divisor has no rows to pad
    assert one("Div", [(15, 4), ()], constants={"x1": np.float32(3)})
    assert not one("Div", [(15, 4), (15, 1)], constants={"x1": np.ones((15, 1), np.float32)})


def test_padding_and_powers():
    assert one("Pow", [(15, 4), ()], constants={"x1": np.float32(2)})
    assert not one("Pow", [(15, 4), ()], constants={"x1": np.float32(0.5)})
    assert not one("Pow", [(15, 4), (15, 4)])


def test_padding_of_norms_needs_an_epsilon():
    assert one("RMSNormalization", [(15, 4), (4,)], {"axis": 1, "epsilon": 1e-5})
    assert not one("RMSNormalization", [(15, 4), (4,)], {"axis": 1, "epsilon": 0.0})


def test_split_of_which_one_part_is_read():
    nodes = [
        Node("mm", "MatMul", ("x", "w"), ("h",)),
        Node("cut", "Split", ("h",), ("a", "b", "c"), {"axis": 1}),
        Node("join", "Add", ("a", "c"), ("y",)),
    ]
    shapes = {
        "x": (8, 4),
        "w": (4, 12),
        "h": (8, 12),
        "a": (8, 3),
        "b": (8, 6),
        "c": (8, 3),
        "y": (8, 3),
    }
    g = graph(nodes, shapes, inputs=["x"], weights=["w"], outputs=["y", "b"])
    whole = prune(g)
    assert [n.op for n in whole.nodes] == [
        "MatMul",
        "Split",
        "Add",
    ]  # all parts are outputs or read: nothing changes
    trained = add_loss(g, "mse")
    cuts = [n for n in trained.nodes if n.op == "Slice"]
    assert [(n.id, n.outputs, n.attrs["starts"], n.attrs["ends"]) for n in cuts] == [
        ("cut", ("a",), (0,), (3,)),
        ("cut/2", ("c",), (9,), (12,)),
    ]
    assert all(not rule_of(n, trained)[1] for n in trained.nodes) and "b" not in trained.tensors


def test_gradients_stop_at_integers_and_steps():
    nodes = [
        Node("mm", "MatMul", ("x", "w"), ("h",)),
        Node("cast", "Cast", ("h",), ("i",), {"to": "int32"}),
        Node("back", "Cast", ("i",), ("f",), {"to": "float32"}),
        Node("floor", "Floor", ("h",), ("q",)),
        Node("sum", "Add", ("f", "q"), ("s",)),
        Node("all", "Add", ("s", "v"), ("t",)),
        Node("loss", "ReduceSum", ("t",), ("l",), {"axes": (0, 1), "keepdims": 0}),
    ]
    shapes = {"x": (8, 4), "w": (4, 4), "v": (4,), "l": (), **dict.fromkeys("hifqst", (8, 4))}
    g = graph(nodes, shapes, inputs=["x"], weights=["w", "v"], outputs=["l"], dtypes={"i": "int32"})
    assert gradient_tensors(g) == {"v", "t", "l"}


def tied(training: bool):
    """A table that is looked up whole by every device and multiplied by cut columns, on eight
    devices; its flow and that of its storage."""
    nodes = [
        Node("look", "Gather", ("table", "ids"), ("h",), {"axis": 0}),
        Node("head", "MatMul", ("h", "table"), ("y",), {"trans_b": 1}),
        Node("loss", "ReduceSum", ("y",), ("l",), {"axes": (0, 1), "keepdims": 0}),
    ]
    shapes = {"table": (64, 16), "ids": (8,), "h": (8, 16), "y": (8, 64), "l": ()}
    g = graph(
        nodes, shapes, inputs=["ids"], weights=["table"], outputs=["l"], dtypes={"ids": "int32"}
    )
    splits = {
        "look": Split.of({"v": ["data"]} if not training else {"i0": ["data"]}),
        "head": Split.of({"m": ["data"]} if not training else {"n": ["data"]}),
    }
    return derive(g, Plan((("data", 8),), splits), training=training)


def test_tied_weight_is_stored_where_its_uses_are_cheapest():
    # Inference: the head needs it whole, the lookup a piece that can be cut out for nothing: kept
    # whole, nothing travels.
    flow = tied(training=False)
    assert flow.weights["table"].layout.dims == ((), ())
    assert not any(s.forward for s in flow.trees["table"].steps())
    # Training: kept whole, gradients of the whole table would be summed for the lookup and gathered
    # for the head; cut, one gather and one scatter do.
    flow = tied(training=True)
    assert flow.weights["table"].layout.dims == (("data",), ())
    assert flow.weights["table"].grad_partial == ()
    assert [(s.forward, s.backward) for s in flow.trees["table"].steps()] == [
        ("all-gather", "reduce-scatter")
    ]
