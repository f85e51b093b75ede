"""Time of one node's kernels under a split, what its backward pass keeps and what it needs while it
runs: shared by the space, which asks for all splits of a node at once (`SplitArrays`), and by the price of
whole plans."""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.graph.ir import Graph, Node
from planner.ops import OPERATORS, experts
from planner.ops.attention import QUERY_BLOCK, in_query_blocks
from planner.ops.control import Region, kept_elements, region, trips
from planner.ops.free import FREE
from planner.ops.loss import LOSS_ROWS, USER_BYTES
from planner.pricing.split_arrays import SplitArrays, compute_type
from planner.sharding.layout import group, local_shape
from planner.sharding.rule import Split

if TYPE_CHECKING:
    from planner.analysis.facts import GraphFacts
    from planner.pricing.pricer import Pricer

ALIGNED = 8
"""Elements that extents of products are padded to on matrix units."""
RINGED = "Attention"
"""The operator whose operands may pass by on a ring."""


def kernel_times(base: GraphFacts, i: int, split: Split, pricer: Pricer) -> tuple[float, float]:
    """(forward, backward) seconds of the node's kernels on its local pieces, collectives excluded.

    Products: one kernel forward, one as large per operand with a gradient; attention makes its
    scores again. Memory-bound work: operands and results cross memory once (a fused operator only
    writes its result), twice that backward.
    """
    ins, outs = local_bytes(base, i, split, pricer)
    forward, backward = times_of(
        base, i, SplitArrays.of((split,), pricer.sizes), np.array([ins]), np.array([outs]), pricer
    )
    return float(forward[0]), float(backward[0])


def local_bytes(base: GraphFacts, i: int, split: Split, pricer: Pricer) -> tuple[float, float]:
    """Bytes of the node's local operands and of its results."""
    graph, node, rule = base.graph, base.graph.nodes[i], base.rules[i]
    mesh, order = pricer.sizes, tuple(pricer.sizes)
    live = [o for o in node.outputs if o]
    ins = sum(
        _bytes(
            base,
            pricer,
            n,
            local_shape(graph.tensors[n].shape, rule.operand(slot, split, order), mesh),
        )
        for slot, n in enumerate(node.inputs)
        if n
    )
    outs = sum(
        _bytes(
            base, pricer, n, local_shape(graph.tensors[n].shape, rule.result(k, split, order), mesh)
        )
        for k, n in enumerate(live)
    )
    return ins, outs


def times_of(
    base: GraphFacts, i: int, cuts: SplitArrays, ins: np.ndarray, outs: np.ndarray, pricer: Pricer
) -> tuple[np.ndarray, np.ndarray]:
    """`kernel_times` of several splits. ins, outs: bytes of the node's local operands and results.
    [splits] each"""
    graph, node, rule, mesh, splits = (
        base.graph,
        base.graph.nodes[i],
        base.rules[i],
        pricer.sizes,
        cuts.splits,
    )
    if pricer.runtime.kernels is not None:
        from planner.pricing.frameworks.kernels import times

        forward, backward = np.array(
            [
                times(base, i, *each, pricer)
                for each in zip(splits, ins.tolist(), outs.tolist(), strict=True)
            ]
        ).T
        return forward, backward
    if node.op in FREE:
        return np.zeros(len(splits)), np.zeros(len(splits))
    operator, dtype = OPERATORS.get(node.op), compute_type(graph, i, pricer.recipe)
    if node.bodies:
        forward = np.array(
            [_bodies_s(node, graph, base.regions[i], split, pricer, dtype) for split in splits]
        )
    elif node.op == "RoutedExperts":
        forward = np.array([_experts_s(base, i, split, pricer, dtype) for split in splits])
    else:
        fused = (
            operator is not None and operator.fusible and not pricer.topology.virtual
        )  # a core's time is that of its elements, wherever their operands are
        moved = (outs * pricer.runtime.fused_traffic if fused else ins + outs) * (
            operator.traffic if operator else 1.0
        )
        flops = (rule.flops * cuts.share(rule)).tolist() if rule.flops else [0.0] * len(splits)
        work = list(zip(flops, moved.tolist(), strict=True))
        alike = {each: pricer.kernel_s(*each, dtype) for each in dict.fromkeys(work)}
        forward = np.array([alike[each] for each in work])
    if not base.training or base.grad.isdisjoint(node.outputs):
        return forward, np.zeros(len(splits))
    more = base.backward[i] if rule.flops else 2
    if rule.flops and rule.fringe and node.inputs[0] in base.grad:
        return forward, (more + np.array([rule.beyond(split, mesh) for split in splits])) * forward
    return forward, more * forward


def _bodies_s(
    node: Node, graph: Graph, found: Region, split: Split, pricer: Pricer, dtype: str
) -> float:
    """Seconds of the slower body, as often as it runs: each kernel of an iteration pays its launch;
    what fuses is one more."""
    slowest = 0.0
    for body, rules, splits in zip(
        node.bodies, found.rules, found.splits(node, split), strict=True
    ):
        seconds = fused = 0.0
        for inner, rule in zip(body.nodes, rules, strict=True):
            own, operator = splits[inner.id], OPERATORS.get(inner.op)
            share = float(SplitArrays.of((own,), pricer.sizes).share(rule)[0])
            made = share * sum(
                body.tensors[o].elements * pricer.itemsize(body.tensors[o].dtype)
                for o in inner.outputs
                if o
            )
            read = share * sum(
                body.tensors[n].elements * pricer.itemsize(body.tensors[n].dtype)
                for n in inner.inputs
                if n
            )
            if inner.bodies:
                seconds += _bodies_s(inner, body, region(inner, body), own, pricer, dtype)
            elif operator is not None and operator.fusible:
                fused += made * pricer.runtime.fused_traffic
            elif inner.op not in FREE:
                seconds += pricer.kernel_s(rule.flops * share, read + made, dtype)
        slowest = max(slowest, seconds + (pricer.kernel_s(0.0, fused, dtype) if fused else 0.0))
    return trips(node) * slowest


def _experts_s(base: GraphFacts, i: int, split: Split, pricer: Pricer, dtype: str) -> float:
    """Seconds of routed experts' forward pass: their blocks one after the other (a gather and a
    scatter of rows, two or three products), on the busiest device."""
    rule, mesh = base.rules[i], pricer.sizes
    (rows, count), local, itemsize = (
        experts.blocks(rule, split, mesh),
        rule.local(split, mesh),
        pricer.itemsize("float32"),
    )
    h, f = local["h"], local["f"]
    product = pricer.kernel_s(2.0 * rows * h * f, (h * f + rows * (h + f)) * itemsize, dtype)
    each = (
        pricer.kernel_s(0.0, 4 * rows * h * itemsize, dtype)
        + (3 if base.graph.nodes[i].inputs[3] else 2) * product
    )
    return experts.IMBALANCE * local["e"] * count * each


def working_bytes(
    base: GraphFacts, i: int, split: Split, ins: float, outs: float, weights: float, pricer: Pricer
) -> float:
    """Bytes that live only while the node runs, where it needs most: training, its backward pass.
    ins, outs, weights: bytes of its local operands, results and weights."""
    return float(
        working_of(
            base,
            i,
            SplitArrays.of((split,), pricer.sizes),
            np.array([ins]),
            np.array([outs]),
            np.array([weights]),
            pricer,
        )[0]
    )


def working_of(
    base: GraphFacts,
    i: int,
    cuts: SplitArrays,
    ins: np.ndarray,
    outs: np.ndarray,
    weights: np.ndarray,
    pricer: Pricer,
) -> np.ndarray:
    """`working_bytes` of several splits. [splits]

    Gradients of operands and results are as large as they are. In a repeated block operands,
    results and weights are also cut out of what all repeats keep, and a weight's gradient is made
    before it is put with the others.
    """
    graph, node, rule, splits = base.graph, base.graph.nodes[i], base.rules[i], cuts.splits
    trained = base.training and not base.grad.isdisjoint(node.outputs)
    size = 2 * (ins + outs + weights) if trained and i in base.repeated else ins + outs
    if trained and base.written_out and node.op in OPERATORS and OPERATORS[node.op].fusible:
        size = np.where(
            weights, ins + outs, np.maximum(ins, outs)
        )  # written out, an elementwise operator's gradient takes the place of its result's
    itemsize = pricer.itemsize("float32")
    if rule.flops and (i in base.epilogue or base.written_out):
        size = size + weights * _copied(base, i, splits, pricer)
    if node.op == "Attention":
        each = zip(splits, cuts.share(rule, "e").tolist(), outs.tolist(), strict=True)
        size = size + np.array(
            [
                _attention_bytes(base, i, split, share, out, trained, pricer)
                for split, share, out in each
            ]
        )
    elif (
        node.bodies and trained
    ):  # what iterations, or the branch that was taken, leave for the backward pass
        size = size + kept_elements(node) * cuts.share(rule) * itemsize
    elif node.op == "RoutedExperts":
        size = size + np.array(
            [_experts_bytes(base, i, split, trained, pricer) for split in splits]
        )
    elif node.op == "MaxPool" and trained:
        size = size + np.array([_positions(base, i, split, pricer) for split in splits])
    elif node.op == "UserLoss":
        size = size + USER_BYTES * prod(graph.tensors[node.inputs[0]].shape) * cuts.share(rule)
    elif (
        node.op == "CrossEntropyLoss"
    ):  # a block of rows in float32; the gradient takes the logits' place
        rows, logits = (
            prod(graph.tensors[node.inputs[1]].shape),
            graph.tensors[node.inputs[0]].shape,
        )
        size = size - ins if trained else size
        size = size + 4 * prod(logits) * cuts.share(rule) * np.minimum(
            1.0, LOSS_ROWS / (rows * cuts.share(rule, "v"))
        )
    return size


def _copied(base: GraphFacts, i: int, splits: Sequence[Split], pricer: Pricer) -> np.ndarray:
    """Whether a product's weights are copied: compilers pad odd extents of a product's operands
    (vocabularies). [splits]"""
    graph, rule, order = base.graph, base.rules[i], tuple(pricer.sizes)
    shapes = {
        slot: graph.tensors[n].shape
        for slot, n in enumerate(base.graph.nodes[i].inputs)
        if n in graph.weights and len(graph.tensors[n].shape) == 2
    }
    return np.array(
        [
            any(
                n % ALIGNED
                for slot, shape in shapes.items()
                for n in local_shape(shape, rule.operand(slot, s, order), pricer.sizes)
            )
            for s in splits
        ]
    )


def _attention_bytes(
    base: GraphFacts, i: int, split: Split, share: float, outs: float, trained: bool, pricer: Pricer
) -> float:
    """Bytes that attention takes beside operands and results: scores and their gradient in float32,
    the weights as computed with. share: of the scores (`SplitArrays.share`)."""
    graph, node, rule, itemsize = (
        base.graph,
        base.graph.nodes[i],
        base.rules[i],
        pricer.itemsize("float32"),
    )
    q, _, v = graph.shapes(node.inputs[:3])
    around = group(split.axes("ring"), pricer.sizes)
    scores = rule.flops / (2 * (q[3] + v[3])) * share / around
    queries = rule.local(split, pricer.sizes).get("s", q[2])
    size = (
        scores
        * (QUERY_BLOCK / queries if in_query_blocks(queries) else 1)
        * (4 + (2 if trained else 1) * itemsize)
    )
    if (
        around > 1
        # the next piece of keys beside this one, results and gradients summed up in float32, and
        # what is on its way of these
    ):
        pieces, wide = (
            _keys(base, i, split, pricer),
            itemsize / pricer.itemsize(graph.tensors[node.inputs[0]].dtype),
        )
        size += pieces + (3 * wide * pieces + 2 * wide * outs if trained else wide * outs)
    return size + (
        2 * outs if trained and i in base.repeated else 0.0
    )  # the residual stream's gradient, as wide as the result, as carried and as added to


def _experts_bytes(base: GraphFacts, i: int, split: Split, trained: bool, pricer: Pricer) -> float:
    """Bytes that routed experts take beside operands and results: one expert's weights (in the
    backward pass their gradients in float32 too), a block of rows, and the rows of a round under
    way: sent, received, worked on and returned."""
    rule, mesh, itemsize = base.rules[i], pricer.sizes, pricer.itemsize("float32")
    (rows, _), local = experts.blocks(rule, split, mesh), rule.local(split, mesh)
    one = sum(
        prod(local[f] for dim in rule.operands[k] for f in dim)
        for k in (3, 4, 5)
        if base.graph.nodes[i].inputs[k]
    ) / max(1, local["e"])
    size = (
        one * (itemsize + 4) + rows * (3 * local["h"] + 4 * local["f"]) * (itemsize + 4)
        if trained
        else one * itemsize + rows * (2 * local["h"] + 3 * local["f"]) * itemsize
    )
    if experts.exchanges(rule, split):
        size += (
            (5 if trained else 3)
            * experts.IMBALANCE
            * experts.token_rows(rule, local)
            * local["h"]
            * itemsize
        )
    return size


def _positions(base: GraphFacts, i: int, split: Split, pricer: Pricer) -> float:
    """Bytes of where the largest elements of max pooling are: one a window, along one dim after the
    other from the last."""
    graph, node, rule, order = base.graph, base.graph.nodes[i], base.rules[i], tuple(pricer.sizes)
    given = local_shape(
        graph.tensors[node.inputs[0]].shape, rule.operand(0, split, order), pricer.sizes
    )
    made = local_shape(
        graph.tensors[node.outputs[0]].shape, rule.result(0, split, order), pricer.sizes
    )
    return float(sum(prod(given[:d] + made[d:]) for d in range(2, len(made))))


def inner_times(
    base: GraphFacts, i: int, split: Split, pricer: Pricer
) -> tuple[float, float, float]:
    """Seconds of the collectives inside the node's kernel: forward, backward, and those of the
    forward pass whose results a block may keep."""
    rule, mesh = base.rules[i], pricer.sizes
    local = rule.local(split, mesh)
    forward = backward = kept = 0.0
    for inner in rule.inner:
        axes = inner.axes(split, mesh)
        if not axes:
            continue
        size = float(inner.payload_bytes(local, group(axes, mesh), pricer.itemsize("float32")))
        (f, b), each = inner.times(group(axes, mesh)), pricer.collective_s(inner.kind, axes, size)
        wanted = inner.operand < 0 or base.graph.nodes[i].inputs[inner.operand] in base.grad
        forward, backward, kept = (
            forward + f * each,
            backward + b * each * wanted,
            kept + f * each * inner.kept,
        )
    return forward, backward if base.training else 0.0, kept


def _bytes(base: GraphFacts, pricer: Pricer, name: str, shape: tuple[int, ...]) -> float:
    tensor = base.graph.tensors[name]
    return pricer.stored_bytes(shape, tensor.dtype, tensor.shape in base.images)


def _keys(base: GraphFacts, i: int, split: Split, pricer: Pricer) -> float:
    """Bytes of the local keys and values of an attention."""
    rule, node, order = base.rules[i], base.graph.nodes[i], tuple(pricer.sizes)
    return sum(
        _bytes(
            base,
            pricer,
            node.inputs[k],
            local_shape(
                base.graph.tensors[node.inputs[k]].shape,
                rule.operand(k, split, order),
                pricer.sizes,
            ),
        )
        for k in (1, 2)
    )


def saved_beside_of(
    base: GraphFacts, i: int, slot: int, splits: Sequence[Split], pricer: Pricer
) -> Any:
    """`saved_beside` of several splits. [splits], or 0 where none keeps anything"""
    return (
        np.array([saved_beside(base, i, slot, split, pricer) for split in splits])
        if base.graph.nodes[i].op == RINGED and not slot
        else 0.0
    )


def saved_beside(base: GraphFacts, i: int, slot: int, split: Split, pricer: Pricer) -> float:
    """Bytes that a kernel keeps for its backward pass beside operands and results of the graph,
    counted with its operand `slot`.

    Attention on a ring keeps its result, and a float32 a row of scores.
    """
    if slot or base.graph.nodes[i].op != RINGED or not split.axes("ring"):
        return 0.0
    (out,), local = base.rules[i].results, base.rules[i].local(split, pricer.sizes)
    rows, width = (prod(local[f] for dim in dims for f in dim) for dims in (out[:3], out[3:]))
    return rows * (
        width * pricer.itemsize(base.graph.tensors[base.graph.nodes[i].outputs[0]].dtype) + 4
    )
