"""What attention costs: the kernels of both passes, their workspace, and what they save.

A fused kernel (attention_kernels.py) reads its operands, writes its result and a float32 a row, and
keeps scores on chip; products that a causal mask leaves out are skipped. Attention in blocks of
queries is plain operations: scores and their gradients pass through memory between them, and all
pairs of a query and a key are computed. The passes over scores are those that XLA's GPU compiler
makes of the emitted kernel (benchmarks/RESULTS.md, "Passes over attention's scores").
"""

from __future__ import annotations

from fractions import Fraction
from math import prod

import numpy as np

from planner.ops.attention_kernels import BLOCKS, chosen
from planner.ops.cost import Dots, Kernel, Passes, Pieces, Product
from planner.sharding.layout import group
from planner.sharding.rule import Split

QUERY_BLOCK = 1024
"""Queries per block of the emitted kernel (planner/emit/runtime/kernels/kernels.py; a test holds
the two together)."""
SCORE = 4
"""Bytes of a score, float32."""
LONGEST_ROW = 16384
"""Most keys whose scores XLA's GPU compiler normalises in one kernel; longer rows take a pass for
the maximum, one for the sum and one for the weights."""
PRODUCTS = {"cudnn": 2.5, "splash": 3.5}
"""FLOPs of a fused kernel's backward pass, as a multiple of its forward pass: gradients of queries,
keys, values and weights, and the scores again. Splash runs two kernels that each make scores and
the gradient of weights."""


def in_query_blocks(queries: int) -> bool:
    """Whether the emitted kernel runs over blocks of queries and makes their scores again in the
    backward pass."""
    return queries > QUERY_BLOCK and queries % QUERY_BLOCK == 0


def attention_products(dots: Dots) -> tuple[Product, ...]:
    """Scores = q k', whose share does not depend on how the values' width (e) is cut and which the
    backward pass recomputes; and their product with v."""
    d, e = dots.shapes[0][-1], dots.shapes[2][-1]
    work, share, hot = Fraction(dots.rule.flops), dots.share, dots.trained
    of_scores = prod(share[f] for f in share if f != "e") * work * Fraction(d, d + e)
    of_values = prod(share.values()) * work * Fraction(e, d + e)
    return (
        Product(of_scores, len(hot & {0, 1}), int(bool(hot))),
        Product(of_values, (2 in hot) + bool(hot & {0, 1, 3})),
    )


def attention_passes(pieces: Pieces, operands: np.ndarray, results: np.ndarray) -> list[Passes]:
    """The kernels under each split. operands, results: bytes of them [splits]"""
    shares = pieces.share("").tolist()
    return [
        _fused(pieces, split, share, moved, made)
        if kernel_of(pieces, split) != BLOCKS
        else _in_blocks(pieces, split, share, moved, made)
        for split, share, moved, made in zip(
            pieces.splits, shares, operands.tolist(), results.tolist(), strict=True
        )
    ]


def kernel_of(pieces: Pieces, split: Split) -> str:
    """The kernel that the emitted program runs a node with under a split."""
    return chosen(
        pieces.node,
        pieces.graph,
        pieces.rule,
        split,
        pieces.mesh,
        device_kernel=pieces.attention_kernel,
        compute=pieces.compute,
        partitioned=pieces.partitioned,
    ).kernel


def causal_share(queries: int, keys: int) -> float:
    """What part of all pairs of a query and a key a causal mask leaves; query i sees keys up to
    i."""
    seen = min(queries, keys)
    return (seen * (seen + 1) / 2 + (queries - seen) * keys) / (queries * keys)


def _fused(pieces: Pieces, split: Split, share: float, operands: float, results: float) -> Passes:
    """One kernel a pass over operands and results; the backward pass also reads the result and its
    gradient and writes gradients of the operands."""
    queries, keys = pieces.graph.shapes(pieces.node.inputs[:2])
    flops = pieces.rule.flops * share
    if pieces.node.attrs.get("causal", 0):
        flops *= causal_share(queries[2], keys[2])
    statistics = SCORE * _rows(pieces, split)
    forward = Kernel(flops, operands + results + statistics, attention="forward")
    backward = Kernel(
        PRODUCTS[pieces.attention_kernel] * flops,
        2 * operands + 2 * results + statistics,
        attention="backward",
    )
    return (forward,), (backward,)


def _in_blocks(
    pieces: Pieces, split: Split, share: float, operands: float, results: float
) -> Passes:
    """Every product, and every pass over scores between them, is a kernel of its own, for each
    block of queries and each piece of keys on a ring. The backward pass makes scores and weights
    again. Operands are read from memory by each product."""
    graph, node, rule = pieces.graph, pieces.node, pieces.rule
    q, k, v = graph.shapes(node.inputs[:3])
    d, e, weight = q[3], v[3], pieces.itemsize("float32")
    queries = rule.local(split, pieces.mesh).get("s", q[2])
    often = group(split.axes("ring"), pieces.mesh)
    often *= queries // QUERY_BLOCK if in_query_blocks(queries) else 1
    flops = rule.flops * share / often
    scores = flops / (2 * (d + e))
    of_keys, of_values = flops * d / (d + e), flops * e / (d + e)
    read = (operands + results) / 2 / often  # two of q, k, v and the result
    own_mask = len(node.inputs) > 3 and bool(node.inputs[3])
    masked = SCORE if node.attrs.get("causal", 0) or own_mask else 0

    def product(of: float, score_bytes: float) -> Kernel:
        return Kernel(of, score_bytes * scores + read, often)

    def between(score_bytes: float) -> Kernel:
        return Kernel(0.0, score_bytes * scores, often)

    gradient, wide = SCORE + 2 * weight, k[2] > LONGEST_ROW
    softmax = (2 * SCORE + masked, SCORE, SCORE + weight) if wide else (SCORE + masked + weight,)
    sums = (SCORE, SCORE, SCORE + weight) if wide else (SCORE,)
    forward = (product(of_keys, SCORE), *map(between, softmax), product(of_values, weight))
    backward = (
        product(of_keys, SCORE),  # scores again
        *map(between, sums),
        product(of_values, weight),  # gradient of the weights
        # Weights again, and the gradient of the scores.
        *map(between, (gradient + weight,) if wide else (SCORE + weight, gradient)),
        product(of_keys, weight),  # gradients of q, k and v
        product(of_keys, weight),
        product(of_values, weight),
    )
    return forward, backward


def _rows(pieces: Pieces, split: Split) -> float:
    """Rows of scores that a device has."""
    (out,), local = pieces.rule.results, pieces.rule.local(split, pieces.mesh)
    return float(prod(local[f] for dim in out[:3] for f in dim))


def attention_workspace(pieces: Pieces, results: np.ndarray) -> np.ndarray:
    """Bytes that a pass takes beside operands and results, in the backward pass where one follows:
    of a fused kernel the queries' gradient in float32, of blocks the scores of one."""
    each = zip(pieces.splits, pieces.share("e").tolist(), results.tolist(), strict=True)
    return np.array([_workspace_bytes(pieces, *split) for split in each])


def _workspace_bytes(pieces: Pieces, split: Split, share: float, results: float) -> float:
    """The workspace under one split. share: of the scores; results: bytes of the results."""
    # The residual stream's gradient, as wide as the result, as carried and as added to.
    carried = 2 * results if pieces.trained and pieces.repeated else 0.0
    if kernel_of(pieces, split) == BLOCKS:
        return carried + _scores_bytes(pieces, split, share, results)
    return carried + (SCORE / pieces.itemsize("float32") * results if pieces.trained else 0.0)


def _scores_bytes(pieces: Pieces, split: Split, share: float, results: float) -> float:
    """Scores and their gradient in float32, the weights as computed with, of a block of queries."""
    graph, node, rule, trained = pieces.graph, pieces.node, pieces.rule, pieces.trained
    itemsize = pieces.itemsize("float32")
    q, _, v = graph.shapes(node.inputs[:3])
    around = group(split.axes("ring"), pieces.mesh)
    scores = rule.flops / (2 * (q[3] + v[3])) * share / around
    queries = rule.local(split, pieces.mesh).get("s", q[2])
    size = (
        scores
        * (QUERY_BLOCK / queries if in_query_blocks(queries) else 1)
        * (SCORE + (2 if trained else 1) * itemsize)
    )
    if around > 1:
        # The next piece of keys beside this one, results and gradients summed up in float32, and
        # what is on its way of these.
        keys = sum(pieces.bytes_of(node.inputs[k], pieces.operand_shape(k, split)) for k in (1, 2))
        wide = itemsize / pieces.itemsize(graph.tensors[node.inputs[0]].dtype)
        size += keys + (3 * wide * keys + 2 * wide * results if trained else wide * results)
    return size


def saved_rows(pieces: Pieces) -> np.ndarray:
    """Bytes saved beside operands and results of the graph [splits]: on a ring the result, which
    the graph's own is another copy of, and a float32 for each row of scores; of a fused kernel the
    latter, of Splash the result too."""

    def saved(split: Split) -> float:
        kernel = "ring" if split.axes("ring") else kernel_of(pieces, split)
        if kernel == BLOCKS:
            return 0.0
        (out,), local = pieces.rule.results, pieces.rule.local(split, pieces.mesh)
        width = prod(local[f] for dim in out[3:] for f in dim) if kernel != "cudnn" else 0
        dtype = pieces.graph.tensors[pieces.node.outputs[0]].dtype
        return _rows(pieces, split) * (width * pieces.itemsize(dtype) + SCORE)

    return np.array([saved(split) for split in pieces.splits])
