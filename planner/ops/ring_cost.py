"""What attention on a ring costs where a fused kernel attends to its pieces: the kernel once a
piece, and what passes through memory between them.

Results and gradients are added up in float32. On a balanced ring halves of operands are cut out for
the kernel, and put in their places on entering and on leaving.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.hardware.device import AttentionPass
from planner.graph.ir import Node
from planner.ops.attention_kernels import is_balanced, pieces_met
from planner.ops.attention_pairs import Met, around_ring
from planner.ops.cost import Kernel, Passes, Pieces
from planner.sharding.layout import group
from planner.sharding.rule import Split

WIDE = 4
"""Bytes of an element of sums, float32."""


def met_on_ring(pieces: Pieces, split: Split) -> tuple[Met, ...]:
    """The pieces of keys that a device meets."""
    queries, keys = (shape[2] for shape in pieces.graph.shapes(pieces.node.inputs[:2]))
    local = pieces.rule.local(split, pieces.mesh)
    devices = group(split.axes("ring"), pieces.mesh)
    balanced = is_balanced(pieces.rule, split, pieces.mesh)
    pieces_of_keys = pieces_met(pieces.rule, local, devices)
    return around_ring(local.get("s", queries), local.get("t", keys), pieces_of_keys, balanced)


@dataclass(frozen=True)
class RingBytes:
    """Bytes of a device's queries, of its keys and values, of its result, of a float32 for each row
    of scores, and of its queries, keys and values, and result in float32."""

    queries: float
    keys: float
    result: float
    rows: float
    wide_queries: float
    wide_keys: float
    wide_result: float

    @classmethod
    def of(cls, pieces: Pieces, split: Split, rows: float, results: float) -> RingBytes:
        """Those of a node under a split. rows: of scores; results: bytes of the result."""

        def operand(node: Node, k: int) -> float:
            return pieces.bytes_of(node.inputs[k], pieces.operand_shape(k, split))

        queries, keys = operand(pieces.node, 0), operand(pieces.node, 1) + operand(pieces.node, 2)
        wide = WIDE / pieces.itemsize("float32")
        return cls(queries, keys, results, WIDE * rows, wide * queries, wide * keys, wide * results)


def fused_ring(
    pieces: Pieces, split: Split, sizes: RingBytes, flops: float, products: float
) -> Passes:
    """The kernels of both passes. flops: of the forward pass over all pairs of the device's
    queries and all keys; products: FLOPs of the backward pass as a multiple of them."""
    steps_met = met_on_ring(pieces, split)
    queries, keys = steps_met[0].queries, steps_met[0].keys
    width = pieces.graph.shapes(pieces.node.inputs[1:2])[0][3]
    of_pair = flops / (queries * pieces.graph.shapes(pieces.node.inputs[1:2])[0][2])
    q, kv, out, rows = sizes.queries, sizes.keys, sizes.result, sizes.rows
    forward, backward = [], []
    for step in steps_met:
        queries_share, keys_share = step.queries / queries, step.keys / keys
        splash = pieces.attention_kernel == "splash"
        count = step.positions.splash_pairs if splash else step.positions.pairs
        work = of_pair * count(step.queries, step.keys)
        moved_bytes = queries_share * (q + out + rows) + keys_share * kv
        forward += [
            Kernel(work, moved_bytes, step.often, attention=AttentionPass(False, width)),
            Kernel(0.0, queries_share * (out + 3 * rows + 2 * sizes.wide_result), step.often),
        ]
        read_bytes = queries_share * (2 * q + 2 * out + rows) + 2 * keys_share * kv
        sums = queries_share * (q + 2 * sizes.wide_queries) + keys_share * (
            kv + 2 * sizes.wide_keys
        )
        backward += [
            Kernel(products * work, read_bytes, step.often, attention=AttentionPass(True, width)),
            Kernel(0.0, sums, step.often),
        ]
    forward.append(Kernel(0.0, sizes.wide_result + out))
    backward.append(Kernel(0.0, sizes.wide_queries + sizes.wide_keys + q + kv))
    if is_balanced(pieces.rule, split, pieces.mesh):
        half_steps = steps_met[1].often / 2
        forward += [
            Kernel(0.0, q + 2 * kv, half_steps),  # halves cut out
            *(Kernel(0.0, 2 * x) for x in (q, kv, out)),
        ]
        backward += [
            Kernel(0.0, q + 2 * out + 2 * kv, half_steps),
            *(Kernel(0.0, 2 * x) for x in (q, kv, out, q, kv)),
        ]
    return tuple(forward), tuple(backward)


def ring_workspace(sizes: RingBytes, pieces: Pieces, split: Split) -> float:
    """Bytes that a ring takes beside operands, results and its kernel's own: the next piece of keys
    and values, sums in float32 and what is on its way of these, and on a balanced ring operands
    and the result's gradient as it has them."""
    if not pieces.trained:
        size = sizes.keys + sizes.wide_result
    else:
        size = sizes.keys + 3 * sizes.wide_keys + 2 * sizes.wide_result
    if is_balanced(pieces.rule, split, pieces.mesh):
        size += sizes.queries + sizes.keys + sizes.result * pieces.trained
    return size
