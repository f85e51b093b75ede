"""Losses appended for training. Each result is the global mean: partial over the axes that cut the
rows."""

from __future__ import annotations

from math import prod

import numpy as np

from planner.graph.ir import Graph, Node
from planner.ops.base import Call, Operator, register, tuple_text
from planner.ops.cost import Pieces, Reads, Slots
from planner.ops.index import rows_of_table
from planner.ops.pointwise import letters
from planner.sharding.rule import KernelCollective, Rule, parse

LOSSES = {
    "cross_entropy": "CrossEntropyLoss",
    "mse": "MSELoss",
    "l1": "L1Loss",
    "bce": "BCEWithLogitsLoss",
}
"""What users call the losses that can be appended -> their operators."""
CROSS_ENTROPY, USER_LOSS = LOSSES["cross_entropy"], "UserLoss"
LOSS_ROWS, LOSS_VALUES = 512, 2**26
"""Rows of a block of the emitted kernel, at most, and values where an eighth of the rows are more
(planner/emit/runtime/kernels/kernels.py, row_blocks; a test holds the two together)."""


def counted_rows(graph: Graph) -> str:
    """The int32 scalar that counts the rows of a cross-entropy whose number is a part of the data;
    "" for any other loss."""
    node = graph.nodes[graph.producer[graph.outputs[0]]]
    if node.op != CROSS_ENTROPY or len(node.inputs) < 3:
        return ""
    return graph.nodes[graph.producer[node.inputs[2]]].inputs[0]  # before it was made at least 1


def _cross_entropy_rule(node: Node, graph: Graph) -> Rule:
    """Rows and vocabulary split. With the vocabulary cut, the kernel reduces the row maximum, the
    sum of exponentials and the picked logit forward (three float32 all-reduces of one value a row)
    and nothing backward. A third operand is the number of rows that count.
    """
    logits, labels = graph.shapes(node.inputs[:2])
    rows = letters(len(labels))
    inner = (KernelCollective("v", "all-reduce", tuple(rows), 3, 0),)
    # The axis of classes: 1 in ONNX's layout [N, C, d...], last otherwise; the reader of the loss
    # says which.
    axis = int(node.attrs["axis"])  # type: ignore[arg-type]
    wide = [*rows[:axis], "v", *rows[axis:]]
    extra = len(node.inputs) - 2
    return parse(
        f"{' '.join(wide)}, {' '.join(rows)}{', ' * extra} -> ",
        (logits, labels, *[()] * extra),
        ((),),
        inner=inner,
    )


def _cross_entropy(call: Call) -> str:
    axes, axis = call.axes("v"), call.attr("axis")
    rows = letters(len(call.in_shapes[1]))
    count: object = call.attr("count", prod(call.rule.sizes[r] for r in rows))
    local = call.rule.local(call.split, call.mesh)["v"]
    valid = (call.rule.sizes["v"], local) if call.padded("v") or call.wide else None
    ignore = call.node.attrs.get("ignore_index")
    mask = row_mask(call, rows)
    if ignore is not None:
        mask = f"({call.args[1]} != {ignore})" + (f" & {mask}" if mask != "None" else "")
    total = ""
    if len(call.args) > 2:  # as a divisor outside: the kernel closes over its count
        count, total = 1, f" / {call.args[2]}"
    start = call.start("v")
    # Without a split the rows are whole, or cut by a compiler's partitioner, which would gather
    # them for every block.
    blocked = bool(call.split.pairs) or prod(call.mesh.values()) == 1
    return (
        f"{call.use('cross_entropy')}({call.args[0]}, {call.args[1]}, {axis}, {tuple_text(axes)},"
        f" {start}, {valid}, {mask}, {count}, {blocked}){total}"
    )


def row_mask(call: Call, rows: list[str]) -> str:
    """Expression of a boolean array of the local rows that are real, or None when no row factor is
    padded."""
    parts = []
    local = call.rule.local(call.split, call.mesh)
    for i, f in enumerate(rows):
        if call.padded(f):
            shape = tuple(local[f] if j == i else 1 for j in range(len(rows)))
            parts.append(
                f"(({call.start(f)} + jnp.arange({local[f]})) <"
                f" {call.rule.sizes[f]}).reshape({shape})"
            )
    return " & ".join(parts) if parts else "None"


def _same_shape_rule(node: Node, graph: Graph) -> Rule:
    a, b = graph.shapes(node.inputs)
    names = " ".join(letters(len(a)))
    return parse(f"{names}, {names} -> ", (a, b), ((),))


def _elementwise(expression: str):
    def kernel(call: Call) -> str:
        names = letters(len(call.in_shapes[0]))
        count = prod(call.global_in[0])
        terms = expression.format(*call.args)
        mask = row_mask(call, names)
        if mask != "None":
            terms = f"jnp.where({mask}, {terms}, 0)"
        return f"jnp.sum({terms}, dtype=jnp.float32) / {count}"

    return kernel


def _user_rule(node: Node, graph: Graph) -> Rule:
    """The batch splits; a sample stays whole, since nobody knows what the function does with it."""
    shapes = graph.shapes(node.inputs)
    sides = [
        " ".join(["b", *(f"o{k}x{i}!" for i in range(len(s) - 1))]) for k, s in enumerate(shapes)
    ]
    return parse(", ".join(sides) + " -> ", shapes, ((),))


def _user(call: Call) -> str:
    size, count = call.rule.local(call.split, call.mesh)["b"], call.rule.sizes["b"]
    return (
        f"{call.use('mean_of_samples')}(user_loss({', '.join(call.args)}), {size},"
        f" {row_mask(call, ['b'])}, {count})"
    )


USER_PASSES = 4
"""Times that a user's loss is taken to cross what it reads, forward (twice that backward): read for
a maximum and for a sum, written and read in float32."""
USER_BYTES = 12
"""Bytes a value of the loss's first operand that it is taken to hold: three arrays in float32.
Compiled on the CPU, cross-entropy written plainly holds 8, a focal loss 12, label smoothing 16."""


def _user_workspace(pieces: Pieces, results: np.ndarray) -> np.ndarray:
    shape = pieces.graph.tensors[pieces.node.inputs[0]].shape
    return USER_BYTES * prod(shape) * pieces.share("")


def _cross_entropy_workspace(pieces: Pieces, results: np.ndarray) -> np.ndarray:
    """A block of rows in float32."""
    logits, labels = (pieces.graph.tensors[n].shape for n in pieces.node.inputs[:2])
    values = prod(logits) * pieces.share("")
    rows = prod(labels) * pieces.share("v")
    block = np.maximum(LOSS_ROWS * values / rows, np.minimum(values / 8, LOSS_VALUES))
    return 4 * np.minimum(values, block)


def _cross_entropy_reads(present: Slots, trained: Slots) -> Reads:
    """All operands, and what the kernel summed up."""
    return Reads(present, True)


register(
    Operator(
        "UserLoss", _user_rule, _user, kind="loss", traffic=USER_PASSES, workspace=_user_workspace
    ),
    Operator(
        CROSS_ENTROPY,
        _cross_entropy_rule,
        _cross_entropy,
        kind="loss",
        workspace=_cross_entropy_workspace,
        in_place=True,
        gradient=_cross_entropy_reads,
        pads="v",
        roles={"v": "tensor"},
        words={"v": "classes"},
        index_limit=rows_of_table,
    ),
)
for _name, _terms in (
    ("MSELoss", "jnp.square({0} - {1})"),
    ("L1Loss", "jnp.abs({0} - {1})"),
    ("BCEWithLogitsLoss", "(jnp.maximum({0}, 0) - {0} * {1} + jnp.log1p(jnp.exp(-jnp.abs({0}))))"),
):
    register(Operator(_name, _same_shape_rule, _elementwise(_terms), kind="loss"))
