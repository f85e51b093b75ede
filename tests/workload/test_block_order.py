"""Repeated blocks do not depend on the order in which a file has its nodes and its operands."""

from __future__ import annotations

import random

import onnx
import pytest

import models_zoo
from planner.graph.ir import Graph
from planner.graph.repeats import find_runs
from planner.workload.model import Model, Workload


def shuffled(proto: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """The model with its nodes in another order that makes operands before they are read, and
    operands of sums and products in either."""
    dice, result = random.Random(seed), onnx.ModelProto()
    result.CopyFrom(proto)
    graph = result.graph
    waiting, order = list(graph.node), list[onnx.NodeProto]()
    made = {"", *(x.name for x in (*graph.input, *graph.initializer))}
    while waiting:
        node = dice.choice([n for n in waiting if made.issuperset(n.input)])
        waiting.remove(node)
        made.update(node.output)
        order.append(node)
        if node.op_type in ("Add", "Mul") and dice.random() < 0.5:
            node.input.reverse()
    nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for n in order]
    del graph.node[:]
    graph.node.extend(nodes)
    return result


def blocks(graph: Graph) -> list[tuple[int, int]]:
    """Nodes in a block and its repeats, of each that is found."""
    return [(period, repeats) for _, period, repeats in find_runs(graph)]


def read(proto: onnx.ModelProto) -> Graph:
    return Model.open(proto, Workload("train", batch=4)).graph(1)


@pytest.mark.parametrize(
    "spec", ["gpt-tiny", "llama-tiny,layers=3", "mixtral-tiny", "tiny-whisper", "resnet50"]
)
def test_blocks_are_seen_in_any_order(spec: str) -> None:
    proto = models_zoo.build(f"zoo:{spec}")
    as_written = read(proto)
    found = read(shuffled(proto, 1))
    assert blocks(as_written)
    assert blocks(found) == blocks(as_written)
    assert sorted(n.id for n in found.nodes) == sorted(n.id for n in as_written.nodes)
    made = set[str]()
    for node in found.nodes:
        assert all(n in made for n in node.inputs if n in found.producer)
        made.update(node.outputs)


def test_files_whose_blocks_are_seen_keep_their_order() -> None:
    proto = models_zoo.build("zoo:gpt-tiny,layers=4")
    found = read(proto)
    names = [n.name for n in proto.graph.node]
    kept = [names.index(n.id) for n in found.nodes if n.id in names]
    assert blocks(found) == [(26, 4)]
    assert kept == sorted(kept)
