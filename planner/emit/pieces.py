"""jit programs: nodes that run under shard_map, so that what they send is what the plan says; the
partitioner places the collectives of all others.

    lookups    the partitioner would gather their cotangents over the batch's axes, where the plan
               sums the table's gradient
    sums       products whose result is a sum pending: it may sum whole where the plan scatters
    gradients  products whose weight's gradient is scattered over some of the axes it is pending
               over, along a dim that axes cut already: it would sum over all
    heads      products with padded classes: the gradient of a tied table would be reduced twice,
               once with the padding
    pieces     kernels that it would not divide, or divides wrongly: loops over rows sorted by data,
               kernels that send to their neighbours, images cut by rows, grouped convolutions
    uneven     whatever reads or makes a value that axes do not divide evenly: the partitioner would
               keep it whole on every device

Such a kernel is written as in a shard_map program. Sums pending in its result are taken in it, as
every reader's way begins. Values cut unevenly are padded between such kernels, and weights between
steps, as they are in a shard_map program; other readers get them without the padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Protocol

from planner.emit.text import spec_text
from planner.execution.layout_flow import Flow
from planner.execution.odd_heads import wide_extent, wide_nodes
from planner.graph.ir import Node
from planner.ops.base import axes_text, operator_of
from planner.sharding.layout import Axes, Layout, ReshardStep, group, padded


class Statements(Protocol):
    """What kernels of pieces need of the function that is being written (planner.emit.values)."""

    flow: Flow

    @property
    def mesh(self) -> Mapping[str, int]:
        """axis -> size."""

    def step_text(self, x: str, step: ReshardStep) -> str:
        """The expression of one step of a reshard."""


def by_piece(body: Statements, index: int) -> bool:
    """Whether node `index` runs under shard_map (module docstring); only on several devices, and
    where no operand is a sum pending, which a jit program has nowhere."""
    node, rule, split = body.flow.graph.nodes[index], body.flow.rules[index], body.flow.split(index)
    needs = [body.flow.need.get((index, k)) for k in range(len(node.inputs))]
    if prod(body.mesh.values()) == 1 or any(need is not None and need.partial for need in needs):
        return False
    if operator_of(node.op).by_piece(node) or _exchanges(body, index):
        return True
    if rule.flops and index in wide_nodes(body.flow):
        return True
    if operator_of(node.op).kind == "lookup" and split.pairs:
        return True
    if node.bodies or sum(map(bool, node.outputs)) != 1:
        return False
    result = rule.result(0, split, body.flow.plan.order)
    if rule.flops and (
        result.partial
        or any(_scattered(body, index, k, within=True) for k in range(len(node.inputs)))
    ):
        return True
    layouts = [
        (n, need) for n, need in zip(node.inputs, needs, strict=True) if n and need is not None
    ]
    return any(
        full_shape(body, n, layout) != body.flow.graph.tensors[n].shape
        for n, layout in [*layouts, (next(filter(None, node.outputs)), result)]
    )


def full_shape(body: Statements, tensor: str, layout: Layout) -> tuple[int, ...]:
    """Shape of a tensor whose dims are padded up to what their axes divide evenly, and logits as
    their head makes them."""
    shape = tuple(
        padded(n, axes, body.mesh)
        for n, axes in zip(body.flow.graph.tensors[tensor].shape, layout.dims, strict=True)
    )
    wide = wide_extent(body.flow, tensor, layout.dims[-1]) if shape else 0
    return (*shape[:-1], wide) if wide else shape


def operand(body: Statements, index: int, slot: int) -> str:
    """An operand of a kernel of pieces, x and its number; the gradient of a weight is reduced as
    the plan has it."""
    if scattered := _scattered(body, index, slot):
        axes, others, dim = scattered
        return f"scattered_first(x{slot}, {axes_text(axes)}, {axes_text(others)}, {dim})"
    return f"x{slot}"


def on_pieces(
    body: Statements, text: str, index: int, args: Sequence[str], result: Layout
) -> tuple[str, Layout]:
    """A kernel of pieces under shard_map, with the sums pending in its result, and the layout that
    the result then has."""
    node = body.flow.graph.nodes[index]
    needs = [body.flow.need.get((index, slot)) for slot in range(len(node.inputs))]
    present = [
        (f"x{k}", a, need)
        for k, (a, need) in enumerate(zip(args, needs, strict=True))
        if a and need is not None
    ]
    for step in _taken(body, node, result):
        text = body.step_text(text, step)
        dims = tuple(
            (*axes, *step.axes) if step.kind == "reduce-scatter" and d == step.dim else axes
            for d, axes in enumerate(result.dims)
        )
        result = Layout(dims, tuple(a for a in result.partial if a not in step.axes))
    specs = ", ".join(spec_text(need) for _, _, need in present)
    return (
        (
            f"by_piece(lambda {', '.join(x for x, _, _ in present)}: {text}, ({specs}),"
            f" {spec_text(result)})({', '.join(a for _, a, _ in present)})"
        ),
        result,
    )


def _taken(body: Statements, node: Node, result: Layout) -> Sequence[ReshardStep]:
    """The steps that take a result's pending sums: those that begin every way to a reader, one sum
    where the ways differ."""
    if not result.partial:
        return ()
    tree = body.flow.trees.get(node.outputs[0])
    ways = (
        ([tree.shared_steps] if tree.shared_steps else [*tree.reader_steps.values()])
        if tree
        else []
    )
    steps = [steps[0] for steps in zip(*ways, strict=False) if len(set(steps)) == 1]
    end = next(
        (k for k, s in enumerate(steps) if s.kind not in ("reduce-scatter", "all-reduce")),
        len(steps),
    )
    taken = {a for s in steps[:end] for a in s.axes}
    return (
        steps[:end]
        if taken == set(result.partial)
        else (ReshardStep("all-reduce", result.partial),)
    )


def _scattered(
    body: Statements, index: int, slot: int, within: bool = False
) -> tuple[Axes, Axes, int] | None:
    """(axes, others, dim) of a weight's gradient that the plan scatters along a dim over some of
    the axes it is pending over and sums over the others; None of any other operand. within: only
    along a dim that axes cut already."""
    name = body.flow.graph.nodes[index].inputs[slot]
    plan, need = body.flow.weights.get(name), body.flow.need.get((index, slot))
    if (
        plan is None
        or need is None
        or name not in body.flow.grad
        or not plan.zero_stage
        or plan.zero_dim < 0
        or not set(plan.zero_axes) < set(need.grad_partial)
    ):
        return None
    cut = plan.layout.dims[plan.zero_dim]
    if (within and not cut) or body.flow.graph.tensors[name].shape[plan.zero_dim] % group(
        cut + plan.zero_axes, body.mesh
    ):
        return None
    return (
        plan.zero_axes,
        tuple(a for a in need.grad_partial if a not in plan.zero_axes),
        plan.zero_dim,
    )


def _exchanges(body: Statements, index: int) -> bool:
    """Whether a node's kernel is one of pieces that send to their neighbours, or a convolution of
    cut rows: the partitioner of jax 0.10 gets the gradient of its weight wrong, and gathers what a
    ring passes on."""
    rule, split, node = body.flow.rules[index], body.flow.split(index), body.flow.graph.nodes[index]
    sends = any(
        i.kind == "collective-permute" and i.axes(split, body.flow.plan.order) for i in rule.inner
    )
    return sends or (
        operator_of(node.op).kind == "convolution" and any(split.axes(f) for f in rule.spatial)
    )
