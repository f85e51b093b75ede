"""What attention costs: the kernels of both passes, their workspace, and what they save.

A fused kernel (attention_kernels.py) reads its operands, writes its result and a float32 a row, and
keeps scores on chip; pairs that a causal mask or a window leaves out are skipped, by Splash in
whole blocks. Attention in
blocks of queries is plain operations: scores and their gradients pass through memory between them,
and a block computes all pairs with the keys that it meets (attention_pairs.py). The passes over
scores are those that XLA's GPU compiler makes of the emitted kernel (benchmarks/RESULTS.md, "Passes
over attention's scores").
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from math import prod

import numpy as np

from costmodels.hardware.device import AttentionPass
from planner.ops.attention_kernels import (
    BLOCKS,
    CUDNN_ROWS,
    chosen,
    has_mask,
    is_balanced,
    pieces_met,
)
from planner.ops.attention_pairs import Positions, around_ring
from planner.ops.cost import Dots, Kernel, Passes, Pieces, Product
from planner.ops.ring_cost import RingBytes, fused_ring, met_on_ring, ring_workspace
from planner.sharding.rule import Split

SCORE = 4
"""Bytes of a score, float32."""
LONGEST_ROW = 16384
"""Most keys whose scores XLA's GPU compiler normalises in one kernel; longer rows take a pass for
the maximum, one for the sum and one for the weights."""
PRODUCTS = {"cudnn": 2.5, "splash": 3.5}
"""FLOPs of a fused kernel's backward pass, as a multiple of its forward pass: gradients of queries,
keys, values and weights, and the scores again. Splash runs two kernels that each make scores and
the gradient of weights."""


def attention_products(dots: Dots) -> tuple[Product, ...]:
    """Scores = q k', whose share does not depend on how the values' width (e) is cut and which the
    backward pass recomputes; and their product with v."""
    d, e = dots.shapes[0][-1], dots.shapes[2][-1]
    work, share, hot = Fraction(dots.rule.flops), dots.share, dots.trained
    of_scores = prod(share[f] for f in share if f != "e") * work * Fraction(d, d + e)
    of_values = prod(share.values()) * work * Fraction(e, d + e)
    computed, ring = _computed(dots), dots.pairs.get("ring", 1) > 1
    return (
        Product(of_scores, len(hot & {0, 1}), int(bool(hot)), ring, computed=computed),
        Product(of_values, (2 in hot) + bool(hot & {0, 1, 3}), 0, ring, computed=computed),
    )


def _computed(dots: Dots) -> Fraction:
    """Pairs that the emitted blocks compute, as a part of those that FLOPs are counted over. The
    backward pass of a ring needs its result, and the logarithms of its rows."""
    positions, keys = Positions.of(dots.node), dots.shapes[1][2]
    part, devices = dots.share.get("s", Fraction(1)), dots.pairs.get("ring", 1)
    queries = int(dots.shapes[0][2] * part)
    if devices > 1:
        local_sizes = {"s": queries, "t": keys // devices}
        balanced = any(inner.halved and inner.runs(local_sizes) for inner in dots.rule.inner)
        met = around_ring(
            queries, keys // devices, pieces_met(dots.rule, local_sizes, devices), balanced
        )
        pairs = sum(one.computed_pairs for one in met)
    else:
        pairs = positions.computed_pairs(queries, keys, part == 1)
    return Fraction(pairs, queries * positions.counted_keys(keys))


def attention_passes(pieces: Pieces, operands: np.ndarray, results: np.ndarray) -> list[Passes]:
    """The kernels under each split. operands, results: bytes of them [splits]"""
    # Kernels make all scores whatever of the values' width (e) a device has.
    shares = pieces.share("e").tolist()
    return [
        _fused(pieces, split, share, moved, written)
        if kernel_of(pieces, split) != BLOCKS
        else _in_blocks(pieces, split, moved, written)
        for split, share, moved, written in zip(
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
        head_widths=pieces.head_widths,
        compute=pieces.compute,
        partitioned=pieces.partitioned,
    ).kernel


def _fused(pieces: Pieces, split: Split, share: float, operands: float, results: float) -> Passes:
    """One kernel a pass over operands and results; the backward pass also reads the result and its
    gradient and writes gradients of the operands. cuDNN reads a mask as terms of all queries and
    keys, and writes their gradient whether or not it is asked for."""
    queries, keys, values = pieces.graph.shapes(pieces.node.inputs[:3])
    if split.axes("ring"):
        sizes = RingBytes.of(pieces, split, _rows(pieces, split), results)
        products = PRODUCTS[pieces.attention_kernel]
        return fused_ring(pieces, split, sizes, pieces.rule.flops * share, products)
    positions = Positions.of(pieces.node)
    flops = pieces.rule.flops * share * positions.share(queries[2], keys[2])
    if pieces.attention_kernel == "splash":
        flops *= positions.splash_pairs(queries[2], keys[2]) / positions.pairs(queries[2], keys[2])
    wider, width = _wider_bytes(pieces, split), _value_width(pieces, split)
    if wider:
        flops *= 2 * keys[3] / (keys[3] + values[3])
    there, back = _copies(pieces, split, operands, results)
    operands, results = operands + wider, results * (keys[3] / width if wider else 1)
    statistics, bias = SCORE * _rows(pieces, split), _bias_bytes(pieces, split)
    of = partial(AttentionPass, width=keys[3], masked=bias > 0)
    forward = Kernel(flops, operands + results + statistics + bias, attention=of(False))
    backward = Kernel(
        PRODUCTS[pieces.attention_kernel] * flops,
        2 * operands + 2 * results + statistics + 2 * bias,
        attention=of(True),
    )
    return (*there, forward), (backward, *back)


def _copies(pieces: Pieces, split: Split, operands: float, results: float) -> Passes:
    """What is copied around a kernel, in both passes, as XLA compiles it for GPUs
    (benchmarks/RESULTS.md, "Copies around fused attention"). Odd numbers of queries or keys are
    brought to even ones: copies of the operands, and the result's without what is beyond; the
    backward pass makes these again, with the gradient of the result, and copies those of the
    operands. Values that are narrower than keys get zeros behind them, as the gradient of the
    result does, and the result is copied without them. operands, results: bytes as they are."""
    wider, forward, backward = _wider_bytes(pieces, split), list[Kernel](), list[Kernel]()
    if wider:
        narrow = pieces.bytes_of(pieces.node.inputs[2], pieces.operand_shape(2, split))
        widened, cut = Kernel(0.0, 2 * narrow + wider), Kernel(0.0, 2 * results)
        forward += [widened, cut]
        backward += [widened, Kernel(0.0, (2 + wider / narrow) * results), cut]
    if _is_odd(pieces, split):
        copies, cut = Kernel(0.0, 2 * (operands + wider)), Kernel(0.0, 2 * results)
        forward += [copies, cut]
        backward += [copies, copies, cut, cut]
    return tuple(forward), tuple(backward)


def _is_padded(pieces: Pieces, split: Split) -> bool:
    """Whether the kernel reads copies of its operands."""
    return _wider_bytes(pieces, split) > 0 or _is_odd(pieces, split)


def _is_odd(pieces: Pieces, split: Split) -> bool:
    """Whether queries or keys are an odd number, which cuDNN gets one more of."""
    queries, keys = (shape[2] for shape in pieces.graph.shapes(pieces.node.inputs[:2]))
    rows = pieces.rule.local(split, pieces.mesh).get("s", queries)
    return pieces.attention_kernel == "cudnn" and bool(rows % CUDNN_ROWS or keys % CUDNN_ROWS)


def _wider_bytes(pieces: Pieces, split: Split) -> float:
    """Bytes of the zeros behind values that are narrower than keys."""
    keys, values = pieces.graph.shapes(pieces.node.inputs[1:2])[0][3], _value_width(pieces, split)
    if keys == values or pieces.head_widths.as_they_are(keys, values):
        return 0.0
    value_bytes = pieces.bytes_of(pieces.node.inputs[2], pieces.operand_shape(2, split))
    return (keys / values - 1) * value_bytes


def _value_width(pieces: Pieces, split: Split) -> int:
    """Elements of a value, and of a head's result, that a device has."""
    return pieces.operand_shape(2, split)[3]


def _bias_bytes(pieces: Pieces, split: Split) -> float:
    """Bytes of the terms that cuDNN adds to scores for a mask: of all queries and keys, for each
    sequence and head if the mask has these."""
    if pieces.attention_kernel != "cudnn" or not has_mask(pieces.node):
        return 0.0
    queries, keys = (shape[2] for shape in pieces.graph.shapes(pieces.node.inputs[:2]))
    rows = pieces.rule.local(split, pieces.mesh).get("s", queries)
    kinds = prod(pieces.operand_shape(3, split)[:-2])
    return float(pieces.itemsize("float32") * kinds * rows * keys)


def _in_blocks(pieces: Pieces, split: Split, operands: float, results: float) -> Passes:
    """The kernels of every block of queries."""
    blocks = _blocks(pieces, split)
    whole = sum(often * rows for often, rows, _ in blocks)
    passes = [
        _of_block(pieces, split, block, (operands + results) / 2 * block[1] / whole)
        for block in blocks
    ]
    if is_balanced(pieces.rule, split, pieces.mesh):
        # Halves change places on entering the ring and on leaving it.
        passes.append(((Kernel(0.0, 2 * (operands + results)),), (Kernel(0.0, 4 * operands),)))
    return tuple(k for f, _ in passes for k in f), tuple(k for _, b in passes for k in b)


def _blocks(pieces: Pieces, split: Split) -> tuple[tuple[int, float, int], ...]:
    """The blocks of queries: (how many, of how many rows of scores, how many keys each meets)."""
    queries, keys = (shape[2] for shape in pieces.graph.shapes(pieces.node.inputs[:2]))
    local = pieces.rule.local(split, pieces.mesh).get("s", queries)
    of_query = _rows(pieces, split) / local
    if split.axes("ring"):
        blocks = (block for met in met_on_ring(pieces, split) for block in met.blocks())
        return tuple((often, of_query * rows, near) for often, rows, near in blocks)
    parts = Positions.of(pieces.node).parts(local, keys, local == queries)
    rows = of_query * local / sum(n for n, _ in parts)
    return tuple((n, rows, near) for n, near in parts)


def _of_block(pieces: Pieces, split: Split, block: tuple[int, float, int], read: float) -> Passes:
    """Every product, and every pass over scores between them, is a kernel of its own. The backward
    pass makes scores and weights again. Operands are read from memory by each product. block: one
    of `_blocks`; read: what it reads of two of q, k, v and the result. Scores of a block that a
    TPU's core has room for stay in its own memory."""
    often, rows, keys = block
    graph, node = pieces.graph, pieces.node
    (q,) = graph.shapes(node.inputs[:1])
    weight = pieces.itemsize("float32")
    scores = rows * keys
    (out,), local = pieces.rule.results, pieces.rule.local(split, pieces.mesh)
    of_keys = 2 * scores * q[3]
    of_values = 2 * scores * prod(local[f] for f in out[3])
    in_memory = scores * (SCORE + 2 * weight) > pieces.on_chip
    masked = SCORE if node.attrs.get("causal", 0) or has_mask(node) else 0

    def product(of: float, score_bytes: float) -> Kernel:
        return Kernel(of, in_memory * score_bytes * scores + read, often)

    def between(score_bytes: float) -> Kernel:
        return Kernel(0.0, in_memory * score_bytes * scores, often)

    gradient, wide = SCORE + 2 * weight, keys > LONGEST_ROW
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
    of a fused kernel the queries' gradient in float32 and what it adds to scores for a mask, of
    blocks the scores of one."""
    splits_and_bytes = zip(pieces.splits, results.tolist(), strict=True)
    return np.array([_workspace_bytes(pieces, *split) for split in splits_and_bytes])


def _workspace_bytes(pieces: Pieces, split: Split, results: float) -> float:
    """The workspace under one split. results: bytes of the results."""
    # The residual stream's gradient, as wide as the result, as carried and as added to.
    carried = 2 * results if pieces.trained and pieces.repeated else 0.0
    if split.axes("ring"):
        sizes = RingBytes.of(pieces, split, _rows(pieces, split), results)
        carried += ring_workspace(sizes, pieces, split)
    if kernel_of(pieces, split) == BLOCKS:
        return carried + _scores_bytes(pieces, split)
    bias = _bias_bytes(pieces, split)
    if not pieces.trained:
        return carried + bias
    return carried + SCORE / pieces.itemsize("float32") * results + 2 * bias


def _scores_bytes(pieces: Pieces, split: Split) -> float:
    """Scores and their gradient in float32, the weights as computed with, of a block of queries."""
    weights = (2 if pieces.trained else 1) * pieces.itemsize("float32")
    return max(rows * keys for _, rows, keys in _blocks(pieces, split)) * (SCORE + weights)


def saved_rows(pieces: Pieces) -> np.ndarray:
    """Bytes saved beside operands and results of the graph [splits]: on a ring the result, which
    the graph's own is another copy of, and a float32 for each row of scores; of a fused kernel the
    latter, of Splash, and of cuDNN with a row more, the result too."""

    def saved(split: Split) -> float:
        kernel = "ring" if split.axes("ring") else kernel_of(pieces, split)
        if kernel == BLOCKS:
            return 0.0
        (out,), local = pieces.rule.results, pieces.rule.local(split, pieces.mesh)
        saves_result = kernel != "cudnn" or _is_padded(pieces, split)
        width = prod(local[f] for dim in out[3:] for f in dim) if saves_result else 0
        dtype = pieces.graph.tensors[pieces.node.outputs[0]].dtype
        if kernel != "ring" and (zeros := _wider_bytes(pieces, split)):
            width = pieces.graph.shapes(pieces.node.inputs[1:2])[0][3]
            return zeros + _rows(pieces, split) * (width * pieces.itemsize(dtype) + SCORE)
        return _rows(pieces, split) * (width * pieces.itemsize(dtype) + SCORE)

    return np.array([saved(split) for split in pieces.splits])


def kernel_rows(pieces: Pieces) -> np.ndarray:
    """Bytes that a fused kernel, or a ring, saves with its result where that is saved by name: a
    float32 for each row of scores [splits]."""
    return np.array(
        [
            SCORE * _rows(pieces, split)
            if split.axes("ring") or kernel_of(pieces, split) != BLOCKS
            else 0.0
            for split in pieces.splits
        ]
    )
