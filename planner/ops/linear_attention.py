"""Attention to a state that decays and is corrected along the sequence: linear attention with
gates, the gated delta rule. Batch and heads split; a step needs the state of the one before.

The kernel works on chunks of `chunk` steps (planner/emit/runtime/kernels/linear_attention.py) and
makes everything again in its backward pass. What is priced are its products, and the passes over
scores, values and states beside them, fitted to kernels compiled for H100; none was run. One step
from a state that is kept is the recurrence itself: the state crosses memory, and nothing is
multiplied as matrices.
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
from planner.ops.recurrent import operands as operands_of
from planner.sharding.rule import Rule, parse

STATE = 5
"""The operand that is the state before the first step."""
WIDE = 4
"""Bytes of scores and states, float32."""
WIDE_RATE = 2
"""How many times longer products in float32 take than those in two bytes (TF32 on GPUs: half their
rate), which the inverse's are."""


@dataclass(frozen=True)
class _Form:
    """What the compiler makes beside products, fitted to kernels compiled for H100
    (benchmarks/RESULTS.md, "Linear attention"): how often scores, values and states pass through
    memory (float32 scores and states, values in the type computed in), kernels of the loop for each
    chunk; what the backward pass is of the forward one; and what is kept at once of scores and of
    states, in a forward pass and in training, where `levels` more scores are kept for each size of
    the inverse's blocks, and `values_kept` values.
    """

    scores: float
    values: float
    states: float
    launches: float
    backward: float
    kept: tuple[float, float]
    kept_trained: tuple[float, float]
    levels: float = 0.0
    values_kept: float = 0.0


SUMMED = _Form(
    scores=0.5,
    values=10.5,
    states=5,
    launches=1.25,
    backward=3.0,
    kept=(0.5, 2),
    kept_trained=(1, 3.5),
)
"""States that decay (Mamba-2)."""
CORRECTED = _Form(
    scores=26,
    values=15,
    states=9,
    launches=3.5,
    backward=2.95,
    kept=(5, 1),
    kept_trained=(0, 5),
    levels=2,
    values_kept=15,
)
"""States that are corrected too (the delta rule)."""


@dataclass(frozen=True)
class _Product:
    """work: FLOPs of a chunk and head (of heads that share queries and keys: of a group). count:
    how many are alike. again: whether the backward pass makes it again. moved: what one reads and
    writes, of scores, values and states, as in `_Form`. wide: in float32."""

    work: int
    count: int
    again: bool
    moved: tuple[float, float, float] = (0, 0, 0)
    wide: bool = False


@dataclass(frozen=True)
class Sizes:
    """The sizes of a node: samples x heads, heads that share queries and keys, chunks, steps of a
    chunk, features of keys and of values; whether states are corrected."""

    heads: int
    alike: int
    chunks: int
    steps: int
    keys: int
    values: int
    delta: bool

    @classmethod
    def of(cls, node: Node, shapes: tuple[tuple[int, ...], ...]) -> Sizes:
        """The sizes of a node. shapes: of its operands, queries [B, T, groups, N] first, values
        [B, T, H, P] third."""
        (b, t, groups, n), (heads, p) = shapes[0], shapes[2][2:]
        steps = min(int(node.attrs["chunk"]), t)  # type: ignore[arg-type]
        delta = len(node.inputs) > 4 and bool(node.inputs[4])
        return cls(b * heads, heads // groups, ceil(t / steps), steps, n, p, delta)

    @property
    def form(self) -> _Form:
        """The form of the kernel."""
        return CORRECTED if self.delta else SUMMED

    @property
    def levels(self) -> int:
        """Sizes of blocks that the inverse is put together by."""
        return ceil(log2(self.steps)) if self.steps > 1 else 0

    @property
    def shared(self) -> list[_Product]:
        """Products that are the same for heads that share queries and keys."""
        return [_Product(2 * self.steps**2 * self.keys, 2 if self.delta else 1, True)]

    @property
    def each(self) -> list[_Product]:
        """Products of each head."""
        q, n, p = self.steps, self.keys, self.values
        outer_product = _Product(2 * q * n * p, 1, True, (0, 1, 0.5))
        entering = _Product(2 * q * n * p, 1, False, (0, 1, 0.5))
        if not self.delta:
            return [outer_product, entering, _Product(2 * q * q * p, 1, False, (0.5, 2, 0))]
        inverse = _Product(2 * q**3, 2 * max(0, self.levels - 1), True, (3, 0, 0), wide=True)
        return [
            inverse,
            _Product(2 * q * q * n, 1, True, (1, 2, 0)),
            _Product(2 * q * q * p, 1, True, (1, 2, 0)),
            outer_product,
            replace(outer_product, work=2 * q * n * n),
            _Product(2 * n * n * p, 1, True, (0, 0, 2)),
            replace(entering, again=True),
            entering,
            _Product(2 * q * q * p, 1, False, (0.5, 2, 0)),
        ]

    @property
    def flops(self) -> int:
        """FLOPs of a forward pass."""
        head_work = sum(p.work * p.count for p in self.each)
        shared = sum(p.work * p.count for p in self.shared)
        return (
            self.heads * self.chunks * head_work + self.heads // self.alike * self.chunks * shared
        )

    @property
    def score_bytes(self) -> int:
        """Bytes of the scores of all chunks, once."""
        return WIDE * self.heads * self.chunks * self.steps**2

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all chunks, once."""
        return WIDE * self.heads * self.chunks * self.keys * self.values

    @property
    def value_elements(self) -> int:
        """Elements of the values of all chunks, once."""
        return self.heads * self.chunks * self.steps * self.values


def _rule(node: Node, graph: Graph) -> Rule:
    """Batch and heads split: groups of heads that share queries and keys, and heads of a group."""
    shapes = graph.shapes(node.inputs)
    b, _, groups, _ = shapes[0]
    heads = shapes[2][2]
    batch = "b" if b > 1 else "1"
    sizes = {}
    if groups == heads:
        shared = head_dims = "g" if heads > 1 else "1"
    elif groups == 1:
        shared, head_dims = "1", "r"
    else:
        shared, head_dims, sizes = "g", "(g r)", {"g": groups, "r": heads // groups}
    of_group, of_head = f"{batch} t! {shared}", f"{batch} t! {head_dims}"
    state = f"{batch} {head_dims} p! n!" if node.attrs.get("kept") else f"{batch} {head_dims} n! p!"
    sides = [f"{of_group} n!", f"{of_group} n!", f"{of_head} p!", of_head, of_head, state]
    line = ",".join(side if n else "" for side, n in zip(sides, node.inputs, strict=False))
    results = (f"{of_head} p!", state)
    named_results = [side for side, name in zip(results, node.outputs, strict=False) if name]
    outs = graph.shapes(tuple(name for name in node.outputs if name))
    rule = parse(f"{line} -> {','.join(named_results)}", shapes, outs, sizes=sizes)
    flops = 0 if _alone(node, graph) else Sizes.of(node, tuple(shapes)).flops
    return replace(rule, flops=float(flops))


def _alone(node: Node, graph: Graph) -> bool:
    """Whether a node is one step from a state that is kept."""
    return len(node.inputs) > STATE and graph.tensors[node.inputs[0]].shape[1] == 1


def _text(call: Call) -> str:
    args = operands_of(call, STATE + 1)
    arguments = f", {args[STATE]}" if args[STATE] != "None" else ""
    arguments += ", kept=True" if call.attr("kept", 0) else ""
    text = (
        f"{call.use('linear_attention')}({', '.join(args[:STATE])},"
        f" {call.attr('scale')!r}, {call.attr('chunk')!r}{arguments})"
    )
    return chosen(call, text, 2)


def _products(dots: Dots) -> tuple[Product, ...]:
    if not dots.flops:
        return ()
    sizes = Sizes.of(dots.node, dots.shapes)
    part = prod(dots.share.values(), start=Fraction(1))
    groups = part / dots.share.get("r", Fraction(1)) * (sizes.heads // sizes.alike)
    hot = bool(dots.trained)
    return tuple(
        Product(times * sizes.chunks * p.work * p.count, 2 * hot, int(hot and p.again), inside=True)
        for products, times in ((sizes.shared, groups), (sizes.each, part * sizes.heads))
        for p in products
        if p.count
    )


def _passes(pieces: Pieces, operands: np.ndarray, results: np.ndarray) -> list[Passes]:
    """The kernels under each split: one a product, those that pass over scores, values and states,
    and those of the loop, once a chunk or oftener."""
    if _alone(pieces.node, pieces.graph):
        return _step_passes(pieces, operands, results)
    sizes = Sizes.of(pieces.node, tuple(pieces.graph.shapes(pieces.node.inputs)))
    itemsize = pieces.itemsize(pieces.graph.tensors[pieces.node.inputs[2]].dtype)
    passes = []
    for shares in zip(pieces.share("t").tolist(), pieces.share("r").tolist(), strict=True):
        forward = forward_kernels(sizes, shares, itemsize)
        again = tuple(replace(k, often=k.often * sizes.form.backward) for k in forward)
        passes.append((forward, again))
    return passes


def _step_passes(pieces: Pieces, operands: np.ndarray, results: np.ndarray) -> list[Passes]:
    """The kernels of one step: operands and results cross memory once. Where the state is corrected
    what it gives for the keys must be known before it is written, so that compiled programs read it
    twice, in a kernel each; engines' kernels keep it on the chip."""
    moved = (operands + results).tolist()
    if not pieces.node.inputs[4] or pieces.serves:
        return [((Kernel(0.0, size),), ()) for size in moved]
    node = pieces.node
    shapes = [pieces.operand_shape(STATE, split) for split in pieces.splits]
    states = [pieces.bytes_of(node.inputs[STATE], shape) for shape in shapes]
    return [
        ((Kernel(0.0, state), Kernel(0.0, size)), ())
        for state, size in zip(states, moved, strict=True)
    ]


def forward_kernels(
    sizes: Sizes, shares: tuple[float, float], itemsize: float
) -> tuple[Kernel, ...]:
    """Kernels of a forward pass; the backward pass is `form.backward` times as many. shares: what
    part of the heads one device has, and of the groups; itemsize: bytes of a value."""
    form, z = sizes.form, sizes.chunks
    heads = sizes.heads * shares[0]
    once = (
        np.array([sizes.score_bytes, itemsize * sizes.value_elements, sizes.state_bytes])
        * shares[0]
    )
    loop = form.launches * z
    kernels = [
        Kernel(0.0, form.scores * once[0], 1),
        Kernel(0.0, form.values * once[1], 1),
        Kernel(0.0, form.states * once[2] / loop, loop),
    ]
    groups = sizes.heads / sizes.alike * shares[1]
    for p in sizes.shared:
        rows = z * sizes.steps * (2 * sizes.keys * itemsize + sizes.steps * WIDE)
        kernels.append(Kernel(p.work * groups * z, groups * rows, p.count))
    for p in sizes.each:
        flops = p.work * heads * z * (WIDE_RATE if p.wide else 1)
        kernels.append(Kernel(flops, float(once @ p.moved), p.count))
    return tuple(k for k in kernels if k.often)


def workspace_bytes(sizes: Sizes, itemsize: float, trained: bool) -> float:
    """Scores and what is made of them, states, and in training what each size of the inverse's
    blocks leaves behind."""
    form = sizes.form
    scores, states = form.kept_trained if trained else form.kept
    whole = scores * sizes.score_bytes + states * sizes.state_bytes
    if trained:
        whole += form.levels * sizes.levels * sizes.score_bytes
        whole += form.values_kept * itemsize * sizes.value_elements
    return whole


def _workspace(pieces: Pieces, results: np.ndarray) -> np.ndarray:
    if _alone(pieces.node, pieces.graph):
        return 0.0 * results
    sizes = Sizes.of(pieces.node, tuple(pieces.graph.shapes(pieces.node.inputs)))
    itemsize = pieces.itemsize(pieces.graph.tensors[pieces.node.inputs[2]].dtype)
    return np.asarray(pieces.share("t") * workspace_bytes(sizes, itemsize, pieces.trained))


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
        own_precision=(3, STATE),
        caches=(STATE,),
    )
)
