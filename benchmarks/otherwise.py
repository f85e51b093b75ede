"""A model as another export of it may be: other names for all tensors and nodes, another exporter
and day, other values of parameters. To a search it is the same."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import onnx

from planner.reader.onnx.params import named

GRAPH = onnx.AttributeProto.GRAPH


def called_otherwise(proto: Any, seed: int = 0) -> Any:
    """The model with names in another order of the alphabet. Names of weights stay such as tell
    parameters from what an exporter made up (planner.reader.onnx.params.named)."""
    made, rng = onnx.ModelProto(), random.Random(seed)
    made.CopyFrom(proto)
    graph = made.graph
    stored = {t.name for t in graph.initializer}
    names = list(
        dict.fromkeys(
            [
                *(v.name for v in graph.input),
                *(t.name for t in graph.initializer),
                *(o for n in graph.node for o in n.output if o),
            ]
        )
    )
    numbers = rng.sample(range(10 * len(names)), len(names))
    new = {
        n: (
            f"net.p{k}.weight"
            if n in stored and named(n)
            else f"onnx::p_{k}"
            if n in stored
            else f"v{k}"
        )
        for n, k in zip(names, numbers, strict=True)
    }
    _call(graph, new, rng)
    for t in graph.initializer:
        t.name = new[t.name]
        if (
            len(t.dims) == 2 and t.data_type == onnx.TensorProto.FLOAT and any(t.raw_data)
        ):  # what is all zero is no parameter
            t.raw_data = rng.randbytes(2) + t.raw_data[2:]
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.name, value.doc_string = new[value.name], "otherwise"
    made.producer_name, made.producer_version, made.doc_string, graph.name = (
        "other",
        "9",
        "on another day",
        "another",
    )
    return made


def _call(graph: Any, new: Mapping[str, str], rng: random.Random) -> None:
    """Names of the nodes of a graph and of what they read and make, in bodies too; what a body
    defines gets names of its own."""
    for node in graph.node:
        node.name, node.doc_string = f"n{rng.randrange(10**9)}", "otherwise"
        node.metadata_props.add(key="stack", value=f"line {rng.randrange(1000)}")
        node.input[:], node.output[:] = (
            [new.get(n, n) for n in node.input],
            [new.get(n, n) for n in node.output],
        )
        for a in node.attribute:
            for body in (a.g,) if a.type == GRAPH else a.graphs:
                own = dict.fromkeys(
                    [
                        *(v.name for v in body.input),
                        *(t.name for t in body.initializer),
                        *(o for n in body.node for o in n.output),
                    ]
                )
                inner = {k: v for k, v in new.items() if k not in own} | {
                    n: f"{n}_{rng.randrange(1000)}" for n in own if n
                }
                _call(body, inner, rng)
                for value in (*body.input, *body.initializer, *body.output):
                    value.name = inner.get(value.name, value.name)
