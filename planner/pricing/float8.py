"""Time of linear layers whose operands programs make float8
(planner/emit/runtime/kernels/float8.py): beside the products, of one byte an element, a pass over
each operand and over the result's gradient for its largest value, and one that writes it in float8.

Products of one operand share its float8 copy, which compilers make once; the backward pass keeps
the operands as they were, and their scales. Weights that are kept in float8 are read as they are.
"""

from __future__ import annotations

import numpy as np

from costmodels.products import Product
from planner.analysis.facts import GraphFacts
from planner.execution.eight_bit import eight_bit
from planner.graph.ir import KEPT_FLOAT8
from planner.ops.cost import Pieces
from planner.pricing.pricer import Pricer
from planner.pricing.product_extents import product_of
from planner.pricing.split_arrays import SplitArrays


def float8_times(
    base: GraphFacts, i: int, cuts: SplitArrays, pieces: Pieces, outs: np.ndarray, pricer: Pricer
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of the forward and backward pass of node i under each split. outs: bytes of a
    device's results [splits]."""
    graph, node = base.graph, base.graph.nodes[i]
    x, w = node.inputs[:2]
    xs, ws = (
        np.array([pieces.bytes_of(n, pieces.operand_shape(slot, s)) for s in pieces.splits])
        for slot, n in enumerate((x, w))
    )
    readers = sum(j in eight_bit(graph) for j, _ in graph.consumers[x])
    work = pieces.rule.flops * pieces.share("")
    extents = product_of(pieces.rule, cuts, work)

    stored_float8 = bool(node.attrs.get(KEPT_FLOAT8))

    def product(read: np.ndarray, written: np.ndarray, of: Product | None) -> np.ndarray:
        return pricer.kernels_s(work, read / 2 + written, pricer.recipe.compute, of)

    def largest(size: np.ndarray) -> np.ndarray:
        return pricer.kernels_s(np.zeros(len(size)), size, pricer.recipe.between)

    def converted(size: np.ndarray) -> np.ndarray:
        return pricer.kernels_s(np.zeros(len(size)), 1.5 * size, pricer.recipe.between)

    # Engines have a kernel that reads a row once.
    forward = (largest(xs) * (not pricer.runtime.serves) + converted(xs)) / readers
    if stored_float8:
        return forward + product(xs + 2 * ws, outs, extents), np.zeros(len(pieces.splits))
    forward += largest(ws) + converted(ws) + product(xs + ws, outs, extents)
    if not pieces.trained:
        return forward, np.zeros(len(pieces.splits))
    backward = largest(outs) + converted(outs)
    if x in base.grad:
        backward += converted(ws) + product(outs + ws, xs, extents and extents.of_left)
    if w in base.grad:
        backward += converted(xs) / readers
        backward += product(outs + xs, ws, extents and extents.of_right)
    return forward, backward
