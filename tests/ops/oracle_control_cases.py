"""The oracle's cases of control flow: the nodes that the reader makes of small models."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper

from planner.reader import read_model
from tests.ops.oracle import Case
from tests.reader import control_models
from tests.reader.control_models import BOOL, FLOAT, INT, info, model, stored


def case_of(
    name: str, made: Any, values: dict[str, Any] | None = None, frozen: tuple[int, ...] = ()
) -> Case:
    """The node with bodies of a model's graph; floats are drawn, other operands given."""
    graph = read_model(made)
    node = next(n for n in graph.nodes if n.bodies)
    inputs = tuple(
        None if not n else (values or {}).get(n, graph.tensors[n].shape) for n in node.inputs
    )
    outputs = [graph.tensors[o] for o in node.outputs]
    return Case(
        name,
        node.op,
        inputs,
        tuple(o.shape for o in outputs),
        dict(node.attrs),
        tuple(o.dtype for o in outputs),
        frozen=frozen,
        bodies=node.bodies,
    )


def counted() -> Any:
    """A loop that only its own number stops."""
    nodes = [
        helper.make_node("Mul", ["h", "by"], ["more"]),
        helper.make_node("Less", ["i", "last"], ["still_on"]),
    ]
    body = helper.make_graph(
        nodes,
        "body",
        [info("i", INT, []), info("on", BOOL, []), info("h", FLOAT, [8, 12])],
        [info("still_on", BOOL, []), info("more", FLOAT, [8, 12])],
    )
    loop = helper.make_node("Loop", ["most", "", "x"], ["y"], name="loop", body=body)
    inputs = [info("x", FLOAT, [8, 12]), info("by", FLOAT, [12]), info("most", INT, [])]
    return model([loop], inputs, [info("y", FLOAT, [8, 12])], stored(last=np.int64(40)))


def control_cases() -> list[Case]:
    """All of this file."""
    return [
        case_of("if", control_models.branches(), {"is_high": np.asarray(True)}),
        case_of("if-other", control_models.branches(), {"is_high": np.asarray(False)}),
        case_of(
            "scan-counted", control_models.counted_loop(40), {"loop/w": control_models.W1}
        ),  # other weights, and sixty times, would make rounding grow
        case_of("scan", control_models.scan(), {"w": control_models.W1}),
        case_of("while", counted(), {"most": np.int32(3)}, frozen=(2, 3)),
    ]
