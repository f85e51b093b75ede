"""Heads of odd vocabularies: the product that makes logits for a cross-entropy, whose classes are
no whole number of a matrix unit's rows.

GPUs multiply such a head at a third of their rate (50,257 columns against 50,304), so programs pad
the head's weight just before the product, and the loss leaves the padding out. The parameter, its
gradient and its state stay as they are. What else reads the logits, and reshards between the
product and the loss, get them without the padding.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from planner.execution.layout_flow import Flow
from planner.execution.uneven_pipeline import uneven_pipeline_of
from planner.graph.ir import Graph, Node
from planner.ops import operator_of
from planner.sharding.layout import Axes, group
from planner.sharding.rule import Rule

ALIGNED, TILE = 8, 128
"""Elements that a product's columns are a multiple of where it runs at the full rate, and what odd
ones are padded to."""
FEWEST = 2048
"""Classes of one device from which on a head is padded: of fewer the padding is more than 6 %, and
the product little of a step."""


def odd_heads(graph: Graph) -> Mapping[int, int]:
    """Product -> the cross-entropy that alone reads its logits, of weights with classes along one
    of two dims."""
    if "odd heads" not in graph.memo:
        graph.memo["odd heads"] = {
            i: loss
            for loss, node in enumerate(graph.nodes)
            if (i := _head(graph, node)) is not None
        }
    known: Mapping[int, int] = graph.memo["odd heads"]
    return known


def _head(graph: Graph, loss: Node) -> int | None:
    """The product whose logits a loss alone reads, last dim first; None where there is none."""
    operator = operator_of(loss.op)
    if operator.kind != "loss" or not operator.pads:
        return None
    logits = loss.inputs[0]
    i, last = graph.producer.get(logits), len(graph.tensors[logits].shape) - 1
    if i is None or last != loss.attrs["axis"] or logits in graph.outputs:
        return None
    node, readers = graph.nodes[i], graph.consumers[logits]
    weight = node.inputs[1] if len(node.inputs) == 2 else ""
    fits = (
        operator_of(node.op).kind == "product"
        and operator_of(node.op).pads
        and len(readers) == 1
        and weight in graph.weights
        and len(graph.tensors[weight].shape) == 2
    )
    return i if fits else None


def widened(classes: int) -> int:
    """Columns that one device's product of so many classes has."""
    odd = classes >= FEWEST and classes % ALIGNED
    return -(-classes // TILE) * TILE if odd else classes


def widenings(rule: Rule, parts: np.ndarray) -> np.ndarray:
    """Factors by which padding makes the product of a head with this rule more work, cut into so
    many pieces by its classes. [splits]"""
    local = -(-rule.sizes["n"] // np.asarray(parts))
    return np.array([widened(int(n)) / n for n in local])


def wide_nodes(flow: Flow) -> Mapping[int, int]:
    """Node -> columns of one device, padding included, of the heads of a flow that are padded, and
    of the losses that get their logits as they are."""
    if "wide nodes" not in flow.memo:
        columns = flow.memo["wide nodes"] = dict[int, int]()
        for i, loss in odd_heads(flow.graph).items():
            rule, split = flow.rules[i], flow.split(i)
            axes = rule.axes("n", split, flow.plan.order)
            local = -(-rule.sizes["n"] // group(axes, dict(flow.plan.mesh)))
            if widened(local) == local or (loss, 0) not in flow.need:
                continue
            columns[i] = widened(local)
            if not _between(flow, i, loss):
                columns[loss] = columns[i]
    known: Mapping[int, int] = flow.memo["wide nodes"]
    return known


def _between(flow: Flow, i: int, loss: int) -> bool:
    """Whether logits are sent or brought into another layout on their way from a head to a loss."""
    stages = uneven_pipeline_of(flow)
    if stages is not None and any(i < start <= loss for start in stages.starts):
        return True
    logits = flow.graph.nodes[loss].inputs[0]
    return bool(flow.trees[logits].path(flow.need[loss, 0]))


def cut_back(flow: Flow, i: int) -> int:
    """Columns without the padding, of a padded head whose logits go on without it; else 0."""
    wide = wide_nodes(flow)
    if i not in wide or odd_heads(flow.graph).get(i, i) in wide:
        return 0
    axes = flow.rules[i].axes("n", flow.split(i), flow.plan.order)
    return -(-flow.rules[i].sizes["n"] // group(axes, dict(flow.plan.mesh)))


def wide_extent(flow: Flow, tensor: str, axes: Axes) -> int:
    """Columns of all devices of logits that axes cut, padding of their heads included; 0 of any
    other tensor."""
    i = flow.graph.producer.get(tensor, -1)
    loss = odd_heads(flow.graph).get(i, -1)
    return wide_nodes(flow).get(loss, 0) * group(axes, dict(flow.plan.mesh)) if axes else 0
