"""A repeated block as a function of its own, and the loop that runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.emit.body import Body
from planner.emit.source import comment, literal
from planner.emit.tables import BlockTable, block_table
from planner.emit.text import pattern
from planner.emit.writer import Function, Writer
from planner.execution.block_values import kept_by_name
from planner.execution.loops import RepeatedBlock, gradients_at_once, inner_flow, output_layout
from planner.execution.pipeline import Pipeline
from planner.execution.recompute import block_mode, is_gathered
from planner.execution.save_policies import offloaded_values
from planner.graph.ir import Graph
from planner.sharding.layout import STAGE

KEEP = 'jax.checkpoint_policies.save_only_these_names("collective")'


def write_block(
    w: Writer, bodies: Sequence[Body], block: RepeatedBlock, pipeline: Pipeline | None = None
) -> None:
    """One function for the block, then a scan over stacked weights (or a loop over the repeats when
    unrolled).

    bodies: one of every overlapped microbatch; the function takes all of them one block on.
    pipeline: these blocks are assigned to stages: the scan is over those of this stage, which
    begins with what it gets from the stage before.
    """
    body = bodies[0]
    entering = [b.value(c.enters, c.layout) for b in bodies for c in block.carries]
    table = block_table(w, block, f"{w.prefix.upper()}BLOCK{w.blocks.index(block)}")
    function = _block_function(w, bodies, block, table)
    w.functions.append(function)
    out = body.fresh("x")
    if pipeline:
        entering = _handed(body, entering, pipeline)
    start = entering[0] if len(entering) == 1 else f"({', '.join(entering)})"
    name = _recomputed(w, body, function.name, w.blocks.index(block))
    carried = function.arguments.index("w")
    state = "x" if carried == 1 else "*x"

    more = lambda: "".join(f", {a}" for a in function.arguments[carried + 1 :])  # noqa: E731
    if pipeline:
        _stage_loop(
            body,
            pipeline,
            table.all_repeats,
            lambda weights: f"{name}({state}, {weights}{more()})",
            f"{out}, _ = lax.scan",
            start,
        )
    elif w.unroll:
        _unrolled(w, body, block, table, (out, start, name, carried), more)
    else:
        rows = body.fresh("rows") if block.yields else "_"
        call = f"{name}({state}, w"
        head = f"{out}, {rows} = lax.scan(lambda x, w: " + (
            f"apart({call}" if block.yields else f"({call}"
        )
        rest = (
            f"), {carried})" if block.yields else "), None)"
        ) + f", {start}, {table.all_repeats}, length={block.repeats})"
        body.lines.append(lambda: f"{head}{more()}{rest}")
        if block.yields:
            body.helpers.add("apart")
            _hand_out(w, body, block, lambda k, r: f"{rows}[{k}][{r}]")
    leaving = [(b, carry) for b in bodies for carry in block.carries]
    for i, (b, carry) in enumerate(leaving):
        b.bind(carry.leaves[-1], carry.layout, out if len(leaving) == 1 else f"{out}[{i}]")


def _block_function(
    w: Writer, bodies: Sequence[Body], block: RepeatedBlock, table: BlockTable
) -> Function:
    """The function of one block: (carried tensors of all microbatches, weights, what else it reads)
    -> carried tensors, and results that it hands out of the block."""
    flow, body, mode = w.flow, bodies[0], block_mode(w.flow)
    gathers = w.backend == "shard_map" and any(
        is_gathered(flow, names[0]) for names in block.weights
    )
    inner = body.inner(
        inner_flow(body.flow, block),
        repeats=display_names(flow.graph, block),
        tie=w.unroll and gathers,
        looped=not w.unroll,
        name_collectives=bool(mode),
        named=kept_by_name(flow),
        weights={names[0]: f"w[{literal(table.short[names[0]])}]" for names in block.weights},
    )
    inners = (inner, *(inner.for_microbatch(b.own, b) for b in bodies[1:]))
    carries = [(inner_body, carry) for inner_body in inners for carry in block.carries]
    carried = tuple(inner.fresh("x") for _ in carries)
    for (inner_body, carry), variable in zip(carries, carried, strict=True):
        inner_body.bind(carry.enters, carry.layout, variable)
        if _offloads_inputs(w):
            inner.lines.append(f'{variable} = checkpoint_name({variable}, "entering")')
    if any(names[0] in w.offloaded for names in block.weights):
        inner.lines.append("w = to_device(w)")
    for i in range(block.first, block.first + block.period):
        for inner_body in inners:
            inner_body.node(i)
    inner.results += [inner_body.value(c.leaves[0], c.layout) for inner_body, c in carries]
    inner.results += [
        inner.value(row[0], output_layout(flow.source[row[0]])) for row in block.yields
    ]
    layouts = ", ".join(
        f"{v} {c.layout.spell([f'd{i}' for i in range(len(c.layout.dims))])}"
        for v, (_, c) in zip(carried, carries, strict=True)
    )
    which = f"one of {block.repeats}" if block.repeats > 1 else "one layer"
    what = comment(f"{table.what}, {which}; carries {layouts}", 160)
    return Function(f"{w.prefix}block{w.blocks.index(block)}", f"{what}.", inner, (*carried, "w"))


def _offloads_inputs(w: Writer) -> bool:
    """Whether what enters each block lies in the host's memory until its backward pass."""
    return "activations" in w.flow.plan.offload and block_mode(w.flow) in ("all", "keep")


def _recomputed(w: Writer, body: Body, name: str, number: int) -> str:
    """The name under which a block's function is called: wrapped as the plan recomputes."""
    mode = block_mode(w.flow)
    if not mode or (w.backend == "jit" and mode == "part"):
        return name
    kept = ["collective"] if mode == "keep" else [*dict.fromkeys(kept_by_name(w.flow).values())]
    sent = offloaded_values(w.flow.plan.recompute)
    saved, offloaded = [n for n in kept if n not in sent], [n for n in kept if n in sent]
    if _offloads_inputs(w):
        offloaded.insert(0, "entering")
    names = ", ".join(map(literal, saved))
    policy = f", policy=save_names({names})" if names else ""
    if mode == "keep":
        policy = f", policy={KEEP}"
    if mode == "part":
        policy = ", policy=no_gathers"
    if offloaded:
        away = ", ".join(map(literal, offloaded))
        policy = f", policy=save_or_offload([{names}], [{away}])"
    wrap = f"recompute({name}{policy})" if w.unroll else f"jax.checkpoint({name}{policy})"
    wrapped = f"{w.prefix}recomputed{number}"
    body.lines.append(f"{wrapped} = {wrap}")
    return wrapped


def _unrolled(
    w: Writer,
    body: Body,
    block: RepeatedBlock,
    table: BlockTable,
    state: tuple[str, str, str, int],
    more: Callable[[], str],
) -> None:
    """The loop over the repeats, written for Python to block. state: the variable that is carried,
    what it begins with, the block's function, and how many tensors are carried; more: the call's
    last arguments."""
    out, start, name, carried = state
    star = "*" if carried > 1 else ""
    body.lines.append(f"{out} = {start}")
    rows = body.fresh("rows") if block.yields else ""
    body.lines += [f"{rows} = []"] if rows else []
    body.lines.append(f"for i in range({block.repeats}):")
    if gradients_at_once(w.flow, block):
        body.helpers.add("at_once")
        body.lines.append(
            lambda: (
                f"    {out} = at_once(lambda *operands: {name}(*operands{more()}))"
                f"({star}{out}, {table.one_repeat})"
            )
        )
    else:
        body.lines.append(lambda: f"    {out} = {name}({star}{out}, {table.one_repeat}{more()})")
    if rows:
        body.lines.append(f"    {out}, row = apart({out}, {carried})")
        body.lines.append(f"    {rows}.append(row)")
        body.helpers.add("apart")
        _hand_out(w, body, block, lambda k, r: f"{rows}[{r}][{k}]")


def _hand_out(
    w: Writer, body: Body, block: RepeatedBlock, place: Callable[[int, int], str]
) -> None:
    """Say where the results are that every repeat hands out: place(which, repeat)."""
    for k, row in enumerate(block.yields):
        for r, name in enumerate(row):
            body.given[name, output_layout(w.flow.source[name])] = place(k, r)


def _handed(body: Body, entering: list[str], pipeline: Pipeline) -> list[str]:
    """What this stage's blocks begin with: in the first stage (and its first virtual stage) what
    enters, elsewhere what the stage before hands on (the argument x)."""
    entered = [body.fresh("x") for _ in entering]
    body.helpers.add("pick")
    first = f"lax.axis_index({literal(STAGE)}) == 0"
    first = f"({first}) & (virtual == 0)" if pipeline.virtual_stages > 1 else first
    body.lines.append(f"{', '.join(entered)}, = pick({first}, ({', '.join(entering)},), x)")
    return entered


def _stage_loop(
    body: Body, pipeline: Pipeline, weights: str, call: Callable[[str], str], scan: str, start: str
) -> None:
    """The scan over this stage's blocks; call(weights): a block's new state. Where stages do not
    divide the repeats, blocks beyond the last hand on what they get."""
    blocks, repeats = pipeline.blocks_per_tick, pipeline.repeats
    if pipeline.blocks_per_stage * pipeline.stages == repeats:
        body.lines.append(
            lambda: f"{scan}(lambda x, w: ({call('w')}, None), {start}, {weights}, length={blocks})"
        )
        return
    real = body.fresh("real")
    body.helpers.add("pick")
    body.lines.append(
        f"{real} = lax.axis_index({literal(STAGE)}) * {blocks} + jnp.arange({blocks}) < {repeats}"
    )
    body.lines.append(
        lambda: (
            f"{scan}(lambda x, w: (pick(w[1], {call('w[0]')}, x), None), {start}, ({weights},"
            f" {real}), length={blocks})"
        )
    )


def display_names(graph: Graph, block: RepeatedBlock) -> dict[str, str]:
    """What node ids, tensors and labels of the first repeat are called in the function of all."""
    shown = {}
    for names in block.weights:
        labels = [graph.labels.get(n, n) for n in names]
        shown[labels[0]] = pattern(labels)
    for i in range(block.first, block.first + block.period):
        nodes = [graph.nodes[i + r * block.period] for r in range(block.repeats)]
        shown[nodes[0].id] = pattern([n.id for n in nodes])
        for k, name in enumerate(nodes[0].outputs):
            shown[name] = pattern([n.outputs[k] for n in nodes])
    return shown
