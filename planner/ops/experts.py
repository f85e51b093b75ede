"""Routed experts: tokens, experts and the experts' hidden width split; by expert parallelism the
same axes cut tokens and experts.

    work     2 M N K of the chosen experts alone: tokens x choices x the weights of one expert
    e        each device runs its own experts on all tokens it sees: the result is partial
    f        every expert's hidden width is cut: the result is partial
    expert-b, expert-s   axes cut tokens and experts together: rows travel to their experts and back
                         inside the kernel

The kernel runs over blocks of rows of one expert, as many as the router's choices need. What is
counted and compared with compilers is the work at balance; what is priced is that of the busiest
device: USUAL_IMBALANCE times that at balance (blocks that are not full, devices that get more than
their part), or what the user says of the router (planner.workload.routing). Experts with a
capacity are those of planner.ops.expert_capacity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import ceil, prod

import numpy as np

from planner.graph.ir import KEPT_FLOAT8, Graph, Node
from planner.ops.attention_kernels import Chosen
from planner.ops.base import Call, NoRule, Operator, register, tuple_text
from planner.ops.cost import Dots, Kernel, Passes, Pieces, Product
from planner.ops.expert_capacity import (
    capacity_of,
    capped_exchange,
    capped_filling,
    capped_passes,
    capped_text,
    capped_workspace,
    sample_dims,
)
from planner.ops.expert_kernels import (
    casts,
    chosen_for_experts,
    kept_itemsize,
    kernel_of,
    kernel_passes,
    kernel_workspace,
    operand_type,
    places,
)
from planner.ops.expert_load import busiest_blocks, busiest_rows, counts_of, imbalance_of
from planner.sharding.rule import KernelCollective, Rule, Split, parse

ROOM = 1.25
"""Rows that a block of an expert's only one has room for, over those at balance."""
BLOCK_ROWS = {False: 512, True: 2048}
"""Rows of a block are at most about so many, where experts get that many; of a training program
more: every block of its backward pass adds to sums of gradients as large as the expert."""
LEAST_ROWS = {False: 256, True: 640}
"""Rows below which a block costs what it moves, not what it computes, on accelerators: its weights,
and in training the sums of their gradients. An expert that gets fewer has one block, with room for
ROOM times its rows, so that most of the experts that get more need no second one."""
SUM_BYTES, LAST_SUM_BYTES = 10, 12
"""Bytes moved for an element of an expert's weights: by every block of the backward pass, which
reads its part of the gradient in bfloat16 and a sum in float32 and writes the sum; and once, to
begin the sum with zeros, read it and add it to the gradient of all experts."""
EXPERT = "expert-"
"""Names of pairs begin with it: tokens and experts cut by the same axes."""
MIXES = {
    "silu": "jax.nn.silu({0})",
    "relu": "jax.nn.relu({0})",
    "relu2": "jnp.square(jax.nn.relu({0}))",
    "gelu": "jax.nn.gelu({0}, approximate=False)",
    "gelu_tanh": "jax.nn.gelu({0}, approximate=True)",
    "sigmoid": "jax.nn.sigmoid({0})",
    "tanh": "jnp.tanh({0})",
    "identity": "{0}",
}
"""Activations by name. Beside them "swiglu" with attrs alpha, beta and limit: g * sigmoid(alpha g)
* (u + beta), g and u bounded."""


def _layers(node: Node) -> int:
    """Products of an expert: three with a gate, else two."""
    return 3 if node.inputs[3] else 2


def token_factors(node: Node, graph: Graph) -> tuple[str, ...]:
    """Factors of the token dims, "1" for those of size one."""
    lead = graph.tensors[node.inputs[0]].shape[:-1]
    names = (
        ("b", "s")
        if len(lead) == 2
        else ("b",)
        if len(lead) == 1
        else tuple(f"b{i}" for i in range(len(lead)))
    )
    return tuple(name if n > 1 else "1" for name, n in zip(names, lead, strict=True))


def _rule(node: Node, graph: Graph) -> Rule:
    shapes, outs = graph.shapes(node.inputs), graph.shapes(node.outputs)
    if str(node.attrs.get("activation", "silu")) not in (*MIXES, "swiglu"):
        raise NoRule(f"experts with the activation {node.attrs.get('activation')}")
    tokens, capped = token_factors(node, graph), bool(capacity_of(node))
    lead, sizes = sample_dims(node, graph, tokens) if capped else (" ".join(tokens), {})
    into, out_of = (
        ("e f h!" if node.attrs.get("trans_in") else "e h! f"),
        ("e h! f" if node.attrs.get("trans_out") else "e f h!"),
    )
    of_columns = "e f", "e f", "e h!"  # biases, then scales of weights that are kept in float8
    sides = (f"{lead} h!", f"{lead} k!", f"{lead} k!", into, into, out_of, *of_columns, *of_columns)
    line = ",".join(side if name else "" for side, name in zip(sides, node.inputs, strict=False))
    rule = parse(f"{line} -> {lead} h!", shapes, outs, sizes=sizes, no_pad=frozenset({"e", "f"}))
    cut = (f for dim in rule.operands[1] for f in dim if f not in rule.whole)
    paired = {f"{EXPERT}{f}": (f, "e") for f in cut}
    flops = 2.0 * token_rows(rule, rule.sizes) * rule.sizes["h"] * rule.sizes["f"] * _layers(node)
    inner = capped_exchange if capped else _exchange
    return replace(rule, flops=flops, paired=paired, inner=inner(node, rule, tuple(paired)))


def _exchange(node: Node, rule: Rule, pairs: tuple[str, ...]) -> tuple[KernelCollective, ...]:
    """What travels in a round: how many rounds there are, numbers of experts and rows, and results;
    backward rows, their gradients, shares and what is gained by them (numbers of experts and shares
    in one)."""
    if not pairs:
        return ()
    rows = tuple(f for dim in rule.operands[1] for f in dim)
    short = bool(node.attrs.get(KEPT_FLOAT8))  # rows go to their experts in float8, with a scale
    to = partial(
        KernelCollective,
        "+".join(pairs),
        "all-to-all",
        rows=rows,
        slack=imbalance_of(node),
        counts=counts_of(node),
        kept=False,
        for_result=True,
    )
    return (
        KernelCollective("+".join(pairs), "all-reduce", (), 1, 0, kept=False),
        to((), 1, 0),
        *((to((), 1, 0), to(("h",), 1, 0, 1)) if short else ()),
        to(("h",), 1 if short else 2, 3, 0),
        to((), 0, 1, 8),
        to((), 0, 1, 0),
    )


def token_rows(rule: Rule, sizes: Mapping[str, int]) -> int:
    """Tokens times choices, of local or global sizes."""
    return prod(sizes[f] for dim in rule.operands[1] for f in dim)


def mean_rows(rule: Rule, split: Split, mesh: Mapping[str, int]) -> Fraction:
    """Rows that one expert gets on one device at balance."""
    joint = prod(mesh[a] for name in rule.paired for a in split.axes(name))
    return Fraction(token_rows(rule, rule.local(split, mesh)) * joint, rule.sizes["e"])


def blocks(rule: Rule, split: Split, mesh: Mapping[str, int], trained: bool) -> tuple[int, int]:
    """(rows of a block, blocks of one expert at balance) on one device."""
    mean, most = mean_rows(rule, split, mesh), float(BLOCK_ROWS[trained])
    wanted = min(most, max(float(LEAST_ROWS[trained]), float(mean) / 4))
    count = max(1, round(float(mean) / wanted))
    room = Fraction(ROOM) if count == 1 else 1
    return max(1, ceil(mean * room / count)), count


def filling(
    node: Node, rule: Rule, split: Split, mesh: Mapping[str, int], trained: bool
) -> Fraction:
    """Rows that blocks, or places, hold at balance over the rows there are: what rounding up adds
    to the work."""
    if capacity_of(node):
        return capped_filling(node, rule)
    rows, count = blocks(rule, split, mesh, trained)
    return rows * count / mean_rows(rule, split, mesh)


def exchanges(rule: Rule, split: Split) -> bool:
    """Whether tokens travel to their experts inside the kernel."""
    return any(split.axes(name) for name in rule.paired)


def given_rows(rule: Rule, split: Split, mesh: Mapping[str, int]) -> int:
    """Rows that a device's experts may get at a time, whatever the router does."""
    local = rule.local(split, mesh)
    if not exchanges(rule, split):
        return token_rows(rule, local)
    joint = prod(mesh[a] for name in rule.paired for a in split.axes(name))
    return joint * rule.inner[1].places(local, joint)


# Many parameters: a node and where its plan puts it, and what decides besides, by keyword.
def kernel_of_experts(
    node: Node,
    rule: Rule,
    split: Split,
    mesh: Mapping[str, int],
    *,
    trained: bool,
    device_kernel: str,
    on_chip: int,
    compute: str,
    partitioned: bool,
    float8: bool,
) -> Chosen:
    """Which kernel the emitted program runs experts without a capacity with, and why. float8:
    whether the device multiplies it."""
    (rows, count), local = blocks(rule, split, mesh, trained), rule.local(split, mesh)
    return chosen_for_experts(
        local,
        device_kernel=device_kernel,
        on_chip=on_chip,
        compute=operand_type(node, compute, float8),
        partitioned=partitioned,
        given=given_rows(rule, split, mesh),
        held=rows * count * local["e"],
    )


def _mix(call: Call, gated: bool) -> str:
    """The hidden activation as an expression in g (the gate's product) and u."""
    name = str(call.attr("activation", "silu"))
    if name != "swiglu":
        return f"{MIXES[name].format('g')} * u" if gated else MIXES[name].format("u")
    g, u = "g", "u"
    if (limit := call.node.attrs.get("limit")) is not None:
        g, u = f"jnp.minimum(g, {limit!r})", f"jnp.clip(u, -{limit!r}, {limit!r})"
    return f"{g} * jax.nn.sigmoid({call.attr('alpha')!r} * {g}) * ({u} + {call.attr('beta')!r})"


def _kernel(call: Call) -> str:
    x, index, share = call.args[:3]
    gate, up, down, gate_bias, up_bias, down_bias, *scales = (
        *(a or "None" for a in call.args[3:]),
        *["None"] * (9 - len(call.args)),
    )
    if down_bias != "None" and call.axes("f"):
        down_bias = f"jnp.where({call.start('f')} == 0, {down_bias}, 0)"
    mix = _mix(call, gate != "None")
    into, out_of = (
        ("rh,fh->rf" if call.attr("trans_in", 0) else "rh,hf->rf"),
        ("rf,hf->rh" if call.attr("trans_out", 0) else "rf,fh->rh"),
    )
    every = (gate, up, down, gate_bias, up_bias, down_bias, *scales)
    stacks = f"({', '.join(every)})"
    if capacity_of(call.node):
        return capped_text(call, stacks, mix, (into, out_of))
    rows, count = blocks(call.rule, call.split, call.mesh, call.trained)
    how = f'(lambda g, u: {mix}, "{into}", "{out_of}", {rows}, {count})'
    joint = tuple(a for a in call.mesh if any(a in call.axes(name) for name in call.rule.paired))
    if not joint:
        trained = ", trained=True" if call.trained_slots & set(range(3, 9)) else ""
        return (
            f"{call.use('routed_experts')}({x}, {index}, {share}, {stacks}, {call.start('e')},"
            f" {how}{trained})"
        )
    places = call.rule.inner[1].places(
        call.rule.local(call.split, call.mesh), prod(call.mesh[a] for a in joint)
    )
    pieces = tuple((a, call.mesh[a]) for a in call.axes("e"))
    return (
        f"{call.use('exchanged_experts')}({x}, {index}, {share}, {stacks}, {pieces!r},"
        f" {tuple_text(joint)}, {places}, {how})"
    )


def _products(dots: Dots) -> tuple[Product, ...]:
    """The first layer, recomputed in the backward pass; then the last, whose rows' gradient gives
    that of their shares."""
    last, hot = Fraction(1, _layers(dots.node)), dots.trained
    return (
        Product(dots.flops * (1 - last), (0 in hot) + bool(hot & {3, 4}), int(bool(hot))),
        Product(dots.flops * last, bool(hot) + (5 in hot)),
    )


def _passes(pieces: Pieces, operands: np.ndarray, results: np.ndarray) -> list[Passes]:
    """Blocks one after the other on the busiest device: a gather and a scatter of rows, two or
    three products; in the backward pass sums of the weights' gradients too."""
    if capacity_of(pieces.node):
        return capped_passes(pieces, _layers(pieces.node))
    if pieces.grouped_experts:
        return [_grouped(pieces, split) for split in pieces.splits]
    itemsize, weight_itemsize = pieces.itemsize("float32"), kept_itemsize(pieces)
    layers, passes = _layers(pieces.node), list[Passes]()
    stored_float8 = bool(pieces.node.attrs.get(KEPT_FLOAT8))
    summed = len(pieces.trained_slots & {3, 4, 5})
    for split in pieces.splits:
        rows, count = blocks(pieces.rule, split, pieces.mesh, pieces.trained)
        local = pieces.rule.local(split, pieces.mesh)
        h, f = local["h"], local["f"]
        rows_given = _given(pieces, split)
        if kernel := kernel_of(pieces, local, rows_given, rows * count * local["e"]):
            busiest = _rows(pieces, split)
            passes.append(kernel_passes(kernel, pieces, local, rows_given, busiest, layers))
            continue
        often = busiest_blocks(
            pieces.node,
            mean_rows(pieces.rule, split, pieces.mesh),
            rows,
            local["e"],
            pieces.rule.sizes["e"] // local["e"],
        )
        experts, moved = often / count, 4 * rows * h * itemsize
        product = Kernel(2.0 * rows * h * f, h * f * weight_itemsize + rows * (h + f) * itemsize)
        cast_kernels = tuple(
            Kernel(0.0, moved, often) for moved in casts(rows * (h + f) * itemsize, stored_float8)
        )
        forward = (Kernel(0.0, moved, often), *cast_kernels, replace(product, often=layers * often))
        backward_kernels = tuple(replace(k, often=pieces.backward * k.often) for k in forward)
        sums = Kernel(0.0, SUM_BYTES * h * f, summed * often)
        passes.append(
            (
                forward,
                (*backward_kernels, sums, Kernel(0.0, LAST_SUM_BYTES * h * f, summed * experts)),
            )
        )
    return passes


def _busiest(node: Node, rule: Rule, split: Split, mesh: Mapping[str, int]) -> float:
    """Rows of the busiest device over the mean: places where there is a capacity."""
    if capacity_of(node):
        return float(capped_filling(node, rule))
    apart = rule.sizes["e"] // rule.local(split, mesh)["e"]
    return busiest_rows(node, apart) if apart > 1 else 1.0


def _rows(pieces: Pieces, split: Split) -> float:
    """Rows of all experts of the busiest device."""
    rule, mesh = pieces.rule, pieces.mesh
    mean = rule.local(split, mesh)["e"] * float(mean_rows(rule, split, mesh))
    return mean * _busiest(pieces.node, rule, split, mesh)


def _given(pieces: Pieces, split: Split) -> int:
    """Rows that a device's experts have places for: of a program whatever the router does, of an
    engine, which makes room as rows come, those of the busiest device."""
    if pieces.serves:
        return ceil(_rows(pieces, split))
    return given_rows(pieces.rule, split, pieces.mesh)


def _grouped(pieces: Pieces, split: Split) -> Passes:
    """Of a runtime whose kernels multiply all rows of the busiest device's experts, each expert's
    as efficiently as a product of that size; results are made again, as shares multiply them."""
    rule, local, itemsize = (
        pieces.rule,
        pieces.rule.local(split, pieces.mesh),
        pieces.itemsize("float32"),
    )
    h, f = local["h"], local["f"]
    rows = _busiest(pieces.node, rule, split, pieces.mesh) * float(
        mean_rows(rule, split, pieces.mesh)
    )
    moved = Kernel(0.0, 4 * rows * h * itemsize, local["e"])
    product = Kernel(2 * rows * h * f, (h * f + rows * (h + f)) * itemsize)
    forward = _layers(pieces.node) * local["e"]
    again = pieces.backward * forward + local["e"]
    return (
        (moved, replace(product, often=forward)),
        (replace(moved, often=pieces.backward * local["e"]), replace(product, often=again)),
    )


def _workspace(pieces: Pieces, results: np.ndarray) -> np.ndarray:
    """One expert's weights (in the backward pass their gradients in float32 too), a block of rows,
    and the rows of a round under way: sent, received, worked on and returned."""
    return np.array([_bytes_beside(pieces, split) for split in pieces.splits])


def _bytes_beside(pieces: Pieces, split: Split) -> float:
    if capacity_of(pieces.node):
        return capped_workspace(pieces, split)
    rule, mesh, itemsize = pieces.rule, pieces.mesh, pieces.itemsize("float32")
    (rows, count), local = blocks(rule, split, mesh, pieces.trained), rule.local(split, mesh)
    rows_given = _given(pieces, split)
    one = sum(
        prod(local[f] for dim in rule.operands[k] for f in dim)
        for k in (3, 4, 5)
        if pieces.node.inputs[k]
    ) / max(1, local["e"])
    if kernel := kernel_of(pieces, local, rows_given, rows * count * local["e"]):
        size = kernel_workspace(kernel, pieces, local, rows_given)
    elif pieces.trained:
        size = one * (itemsize + 4) + rows * (3 * local["h"] + 4 * local["f"]) * itemsize
    else:
        size = one * itemsize + rows * (2 * local["h"] + 3 * local["f"]) * itemsize
    if exchanges(rule, split):
        size += (
            (5 if pieces.trained else 3)
            * busiest_rows(pieces.node, rule.sizes["e"] // local["e"])
            * token_rows(rule, local)
            * local["h"]
            * itemsize
        )
    return size


def _sorted_rows(pieces: Pieces) -> np.ndarray:
    """The rows in the order of experts, where one kernel takes them all and they do not travel."""
    return np.array([_bytes_sorted(pieces, split) for split in pieces.splits])


def _bytes_sorted(pieces: Pieces, split: Split) -> float:
    rule, mesh = pieces.rule, pieces.mesh
    if capacity_of(pieces.node) or exchanges(rule, split):
        return 0.0
    (rows, count), local = blocks(rule, split, mesh, pieces.trained), rule.local(split, mesh)
    rows_given = _given(pieces, split)
    kernel = kernel_of(pieces, local, rows_given, rows * count * local["e"])
    row_places = places(kernel, rows_given, local["e"]) if kernel else 0
    return row_places * local["h"] * pieces.itemsize("float32")


register(
    Operator(
        "RoutedExperts",
        _rule,
        _kernel,
        kind="experts",
        passes=_passes,
        filling=filling,
        busiest=_busiest,
        workspace=_workspace,
        kept_unlooped=_sorted_rows,
        products=_products,
        roles={"e": "expert"},
        matrices=lambda node: (3, 4, 5),
        sums_last=lambda node, slot: (
            slot > 5 or bool(node.attrs.get("trans_out" if slot == 5 else "trans_in", 0))
        ),
        words={"e": "experts"},
        extents=True,
        counted="e",
        gathers="e",
        by_piece=lambda node: True,
    )
)
