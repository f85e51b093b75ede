"""Which weights are matrices of hidden layers: those that Muon orthogonalises. It is decided here
alone; prices, programs and reports read `Graph.orthogonalised`.

A weight is one where operators read it as nothing but matrices that vectors are multiplied by
(`Operator.matrices`): per index of the dims before the last two a matrix, so of experts each its
own. It is none where it is looked up by rows (an embedding, and a head tied to it), where it is a
kernel of a convolution, recurrent or a vector, and where its product makes what the loss reads (the
head). All these take AdamW's update, as Muon's authors have it.
"""

from __future__ import annotations

from planner.errors import PlanError
from planner.graph.ir import Graph
from planner.graph.repeats import find_runs
from planner.ops.base import operator_of


def hidden_matrices(graph: Graph) -> frozenset[str]:
    """The weights of a training graph that are matrices of hidden layers."""
    heads = _heads(graph)
    return frozenset(
        name
        for name in graph.weights
        if min((1, 1, *graph.tensors[name].shape)[-2:]) > 1
        and graph.tensors[name].is_float
        and (readers := graph.consumers.get(name, ()))
        and all(
            slot in operator_of(graph.nodes[i].op).matrices(graph.nodes[i]) and i not in heads
            for i, slot in readers
        )
    )


def orthogonalised(graph: Graph) -> frozenset[str]:
    """The weights of a training graph that Muon orthogonalises. Raises PlanError P024 where there
    is none: all would take AdamW's steps."""
    matrices = hidden_matrices(graph)
    if not matrices:
        raise PlanError(
            "P024",
            "--optimizer muon takes AdamW's steps but for matrices of hidden layers, and the model"
            " has none",
            help=["--optimizer adamw"],
        )
    return matrices


def _heads(graph: Graph) -> frozenset[int]:
    """Products that make what a loss reads: they and their loss have nothing but operators of one
    tensor that is no weight between them. What a repeated block ends with is none: its repeats are
    alike."""
    inside = {
        i for first, n, repeats in find_runs(graph) for i in range(first, first + n * repeats)
    }
    losses = [node for node in graph.nodes if operator_of(node.op).kind == "loss"]
    heads = set[int]()
    for name in [node.inputs[0] for node in losses] or graph.outputs[:1]:
        while (i := graph.producer.get(name, -1)) >= 0:
            node = graph.nodes[i]
            if operator_of(node.op).matrices(node):
                heads.add(i)
                break
            float_inputs = [
                n for n in node.inputs if n in graph.producer and graph.tensors[n].is_float
            ]
            if len(float_inputs) != 1:
                break
            name = float_inputs[0]
    return frozenset(heads - inside)
