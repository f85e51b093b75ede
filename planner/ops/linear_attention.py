"""Attention to a state that decays and is corrected along the sequence: linear attention with
gates, the gated delta rule. Batch and heads split; a step needs the state of the one before.

The kernel works through chunks of `chunk` steps (planner/emit/runtime/kernels/linear_attention.py)
and makes everything again in its backward pass. What is priced are its products, and the passes
over a chunk's scores in float32; how many of these passes a compiler makes is a guess, no program
was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, log2, prod

import numpy as np

from planner.graph.ir import Graph, Node
from planner.ops.base import Call, Operator, register
from planner.ops.cost import Dots, Kernel, Passes, Pieces, Product
from planner.ops.recurrent import chosen
from planner.sharding.rule import Rule, parse

WIDE = 4
"""Bytes of scores and states, float32."""
WIDE_RATE = 2
"""How many times longer products in float32 take than those in two bytes (TF32 on GPUs: half their
rate), which the inverse's are."""
SCORE_PASSES = 3
"""Element-wise passes over the scores of a chunk, each reading and writing them (a guess): of the
decay, of what hides later steps, of the corners of the inverse."""


@dataclass(frozen=True)
class _Sizes:
    """Of a node: samples x heads, heads that share queries and keys, chunks, steps of a chunk,
    features of keys and of values; whether states are corrected."""

    heads: int
    alike: int
    chunks: int
    steps: int
    keys: int
    values: int
    delta: bool

    @classmethod
    def of(cls, node: Node, shapes: tuple[tuple[int, ...], ...]) -> _Sizes:
        (b, t, groups, n), (heads, p) = shapes[0], shapes[2][2:]
        steps = min(int(node.attrs["chunk"]), t)  # type: ignore[arg-type]
        delta = len(node.inputs) > 4 and bool(node.inputs[4])
        return cls(b * heads, heads // groups, ceil(t / steps), steps, n, p, delta)

    @property
    def levels(self) -> int:
        """Sizes of blocks that the inverse is put together by."""
        return ceil(log2(self.steps)) if self.steps > 1 else 0

    @property
    def shared(self) -> list[tuple[int, int, bool]]:
        """Products of all chunks at once, the same for heads that share queries and keys: (FLOPs of
        a chunk and group, how many alike, whether the backward pass makes it again)."""
        return [(2 * self.steps**2 * self.keys, 2 if self.delta else 1, True)]

    @property
    def beside(self) -> list[tuple[int, int, bool]]:
        """Likewise of each head."""
        q, n, p = self.steps, self.keys, self.values
        if not self.delta:
            return []
        inverse = (2 * q**3, 2 * max(0, self.levels - 1), True)
        return [(2 * q * q * n, 1, True), (2 * q * q * p, 1, True), inverse]

    @property
    def along(self) -> list[tuple[int, int, bool]]:
        """Likewise of the loop over chunks."""
        q, n, p = self.steps, self.keys, self.values
        again = [(2 * q * n * p, 2 if self.delta else 1, True)]
        return [*again, (2 * q * n * p, 1, False), (2 * q * q * p, 1, False)]

    @property
    def flops(self) -> int:
        """Of a forward pass."""
        each = sum(work * count for work, count, _ in (*self.beside, *self.along))
        shared = sum(work * count for work, count, _ in self.shared)
        return self.heads * self.chunks * each + self.heads // self.alike * self.chunks * shared

    @property
    def score_bytes(self) -> int:
        """Of the scores of all chunks, once."""
        return WIDE * self.heads * self.chunks * self.steps**2


def _rule(node: Node, graph: Graph) -> Rule:
    """Batch and heads split: groups of heads that share queries and keys, and heads of a group."""
    shapes = graph.shapes(node.inputs)
    b, _, groups, _ = shapes[0]
    heads = shapes[2][2]
    batch = "b" if b > 1 else "1"
    shared, each = ("g", "(g r)") if 1 < groups < heads else ("1", "r") if heads > 1 else ("1", "1")
    if groups == heads > 1:
        shared = each = "g"
    of_group, of_head = f"{batch} t! {shared}", f"{batch} t! {each}"
    sides = [f"{of_group} n!", f"{of_group} n!", f"{of_head} p!", of_head, of_head]
    line = ",".join(side for side, _ in zip(sides, node.inputs, strict=False))
    made = (f"{of_head} p!", f"{batch} {each} n! p!")
    left = [side for side, name in zip(made, node.outputs, strict=False) if name]
    outs = graph.shapes(tuple(name for name in node.outputs if name))
    sizes = {"g": groups, "r": heads // groups}
    sizes = {f: n for f, n in sizes.items() if f in of_head}
    rule = parse(f"{line} -> {','.join(left)}", shapes, outs, sizes=sizes)
    return replace(rule, flops=float(_Sizes.of(node, tuple(shapes)).flops))


def _text(call: Call) -> str:
    beta = call.args[4] if len(call.args) > 4 else "None"
    text = (
        f"{call.use('linear_attention')}({', '.join(call.args[:4])}, {beta},"
        f" {call.attr('scale')!r}, {call.attr('chunk')!r})"
    )
    return chosen(call, text, 2)


def _products(dots: Dots) -> tuple[Product, ...]:
    sizes = _Sizes.of(dots.node, dots.shapes)
    part = prod(dots.share.values(), start=Fraction(1))
    groups = part / dots.share.get("r", Fraction(1)) * (sizes.heads // sizes.alike)
    hot = bool(dots.trained)
    kinds = ((sizes.shared, groups), ((*sizes.beside, *sizes.along), part * sizes.heads))
    return tuple(
        Product(times * sizes.chunks * work * count, 2 * hot, int(hot and again), inside=True)
        for products, times in kinds
        for work, count, again in products
        if count
    )


def _passes(pieces: Pieces, operands: np.ndarray, results: np.ndarray) -> list[Passes]:
    """The kernels under each split: one a product and pass over scores; those of the loop run once
    a chunk. Backward, all that is made again, and two products for each."""
    sizes = _Sizes.of(pieces.node, tuple(pieces.graph.shapes(pieces.node.inputs)))
    found = []
    for share, groups, moved, made in zip(
        pieces.share("t").tolist(),
        pieces.share("r").tolist(),
        operands.tolist(),
        results.tolist(),
        strict=True,
    ):
        forward = _kernels(sizes, (share, groups), moved, made)
        found.append((forward, (*forward, *forward, *forward)))
    return found


def _kernels(
    sizes: _Sizes, shares: tuple[float, float], moved: float, made: float
) -> tuple[Kernel, ...]:
    """shares: what part of the heads one device has, and of the groups."""
    heads, z, scores = sizes.heads * shares[0], sizes.chunks, sizes.score_bytes * shares[0]
    groups = sizes.heads / sizes.alike * shares[1]
    state = WIDE * heads * sizes.keys * sizes.values
    kernels = [Kernel(0.0, 2 * scores, SCORE_PASSES)]
    for work, count, _ in sizes.shared:
        alike = scores * groups / heads
        kernels.append(Kernel(work * groups * z, moved / 2 + alike, count))
    for work, count, _ in sizes.beside:
        wide = work == 2 * sizes.steps**3 and count > 2
        flops = work * heads * z * (WIDE_RATE if wide else 1)
        kernels.append(Kernel(flops, 3 * scores if wide else moved / 2 + scores, count))
    for work, count, _ in sizes.along:
        kernels.append(Kernel(work * heads, (moved / 2 + made) / z + 2 * state, count * z))
    return tuple(k for k in kernels if k.often)


def _workspace(pieces: Pieces, results: np.ndarray) -> np.ndarray:
    """Scores and what is made of them; in training, what each size of the inverse's blocks leaves
    behind, and the states of all chunks."""
    sizes = _Sizes.of(pieces.node, tuple(pieces.graph.shapes(pieces.node.inputs)))
    states = WIDE * sizes.heads * sizes.keys * sizes.values
    kept = 4 + (2 * sizes.levels if sizes.delta else 0) if pieces.trained else 4
    whole = kept * sizes.score_bytes + states * (sizes.chunks if pieces.trained else 2)
    return np.asarray(pieces.share("t") * whole + 4 * results)


register(
    Operator(
        "LinearAttention",
        _rule,
        _text,
        passes=_passes,
        workspace=_workspace,
        products=_products,
        roles={"g": "tensor", "r": "tensor"},
        words={"b": "batch", "g": "heads", "r": "heads of a group", "t": "steps"},
        own_precision=(3,),
    )
)
