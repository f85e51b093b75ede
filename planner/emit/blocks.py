"""A repeated block as a function of its own, and the loop that runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.emit.body import Body
from planner.emit.source import comment, literal
from planner.emit.tables import block_table
from planner.emit.text import pattern
from planner.emit.writer import Function, Writer
from planner.execution.loops import RepeatedBlock, inner_flow, output_layout
from planner.execution.pipeline import Pipeline
from planner.execution.recompute import block_mode, is_gathered
from planner.graph.ir import Graph
from planner.sharding.layout import STAGE

KEEP = 'jax.checkpoint_policies.save_only_these_names("collective")'


def write_block(
    w: Writer, bodies: Sequence[Body], run: RepeatedBlock, pipeline: Pipeline | None = None
) -> None:
    """One function for the block, then a scan over stacked weights (or a loop over the repeats when
    unrolled).

    bodies: one of every copy of the batch; the function takes all copies one block on. pipeline:
    these blocks are dealt out over stages: the scan is over those of this stage, which begins with
    what it is handed.
    """
    number, body = w.runs.index(run), bodies[0]
    flow, inside = w.flow, range(run.first, run.first + run.period)
    mode = block_mode(flow)
    gathers = w.backend == "shard_map" and any(is_gathered(flow, names[0]) for names in run.weights)
    entering = [b.value(c.enters, c.layout) for b in bodies for c in run.carries]
    table = block_table(w, run, f"{w.prefix.upper()}BLOCK{number}")
    inner = body.inner(
        inner_flow(body.flow, run),
        repeats=display_names(w.flow.graph, run),
        tie=w.unroll and gathers,
        name_collectives=bool(mode),
        weights={names[0]: f"w[{literal(table.short[names[0]])}]" for names in run.weights},
    )
    inners = (inner, *(inner.again(b.own, b) for b in bodies[1:]))
    carries = [(each, carry) for each in inners for carry in run.carries]
    carried = tuple(inner.fresh("x") for _ in carries)
    for (each, carry), variable in zip(carries, carried, strict=True):
        each.bind(carry.enters, carry.layout, variable)
    away = "activations" in flow.plan.offload and mode in ("all", "keep")
    inner.lines += [
        f'{variable} = checkpoint_name({variable}, "entering")' for variable in carried if away
    ]
    inner.lines += (
        ["w = to_device(w)"] if any(names[0] in w.offloaded for names in run.weights) else []
    )
    for i in inside:
        for each in inners:
            each.node(i)
    inner.results += [each.value(c.leaves[0], c.layout) for each, c in carries]
    inner.results += [inner.value(row[0], output_layout(flow.source[row[0]])) for row in run.yields]
    layouts = ", ".join(
        f"{v} {c.layout.spell([f'd{i}' for i in range(len(c.layout.dims))])}"
        for v, (_, c) in zip(carried, carries, strict=True)
    )
    what = comment(f"{table.what}, one of {run.repeats}; carries {layouts}", 160)
    block = Function(f"{w.prefix}block{number}", f"{what}.", inner, (*carried, "w"))
    w.functions.append(block)
    out = body.fresh("x")
    if pipeline:
        entering = _handed(body, entering, pipeline)
    start = entering[0] if len(entering) == 1 else f"({', '.join(entering)})"
    name = block.name
    if mode and not (w.backend == "jit" and mode == "part"):
        policy = {"all": "", "keep": f", policy={KEEP}", "part": ", policy=no_gathers"}[mode]
        policy = (
            f", policy=offload_inputs({literal('collective') if mode == 'keep' else ''})"
            if away
            else policy
        )
        wrap = f"recompute({name}{policy})" if w.unroll else f"jax.checkpoint({name}{policy})"
        name = f"{w.prefix}kept{number}"
        body.lines.append(f"{name} = {wrap}")
    state = "x" if len(carried) == 1 else "*x"

    more = lambda: "".join(f", {a}" for a in block.arguments[len(carried) + 1 :])  # noqa: E731
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
        body.lines.append(f"{out} = {start}")
        rows = body.fresh("rows") if run.yields else ""
        body.lines += [f"{rows} = []"] if rows else []
        body.lines.append(f"for i in range({run.repeats}):")
        call = f"    {out} = {name}({'*' if len(carried) > 1 else ''}{out}, {table.one_repeat}"
        body.lines.append(lambda: f"{call}{more()})")
        if rows:
            body.lines.append(f"    {out}, row = apart({out}, {len(carried)})")
            body.lines.append(f"    {rows}.append(row)")
            body.helpers.add("apart")
            _hand_out(w, body, run, lambda k, r: f"{rows}[{r}][{k}]")
    else:
        rows = body.fresh("rows") if run.yields else "_"
        head = f"{out}, {rows} = lax.scan(lambda x, w: " + (
            f"apart({name}({state}, w" if run.yields else f"({name}({state}, w"
        )
        rest = (
            f"), {len(carried)})" if run.yields else "), None)"
        ) + f", {start}, {table.all_repeats}, length={run.repeats})"
        body.lines.append(lambda: f"{head}{more()}{rest}")
        if run.yields:
            body.helpers.add("apart")
            w.stacked.update({row: f"{rows}[{k}]" for k, row in enumerate(run.yields)})
            _hand_out(w, body, run, lambda k, r: f"{rows}[{k}][{r}]")
    leaving = [(b, carry) for b in bodies for carry in run.carries]
    for i, (b, carry) in enumerate(leaving):
        b.bind(carry.leaves[-1], carry.layout, out if len(leaving) == 1 else f"{out}[{i}]")


def _hand_out(w: Writer, body: Body, run: RepeatedBlock, place: Callable[[int, int], str]) -> None:
    """Say where the results are that every repeat hands out: place(which, repeat)."""
    for k, row in enumerate(run.yields):
        for r, name in enumerate(row):
            body.given[name, output_layout(w.flow.source[name])] = place(k, r)


def _handed(body: Body, entering: list[str], pipeline: Pipeline) -> list[str]:
    """What this stage's blocks begin with: in the first stage (and its first virtual stage) what
    enters, elsewhere what the stage before hands on (the argument x)."""
    given = [body.fresh("x") for _ in entering]
    body.helpers.add("pick")
    first = f"lax.axis_index({literal(STAGE)}) == 0"
    first = f"({first}) & (virtual == 0)" if pipeline.virtual_stages > 1 else first
    body.lines.append(f"{', '.join(given)}, = pick({first}, ({', '.join(entering)},), x)")
    return given


def _stage_loop(
    body: Body, pipeline: Pipeline, weights: str, call: Callable[[str], str], scan: str, start: str
) -> None:
    """The scan over this stage's blocks; call(weights): a block's new state. Where stages do not
    divide the repeats, blocks beyond the last hand on what they get."""
    each, repeats = pipeline.blocks_per_tick, pipeline.repeats
    if pipeline.blocks_per_stage * pipeline.stages == repeats:
        body.lines.append(
            lambda: f"{scan}(lambda x, w: ({call('w')}, None), {start}, {weights}, length={each})"
        )
        return
    real = body.fresh("real")
    body.helpers.add("pick")
    body.lines.append(
        f"{real} = lax.axis_index({literal(STAGE)}) * {each} + jnp.arange({each}) < {repeats}"
    )
    body.lines.append(
        lambda: (
            f"{scan}(lambda x, w: (pick(w[1], {call('w[0]')}, x), None), {start}, ({weights},"
            f" {real}), length={each})"
        )
    )


def display_names(graph: Graph, run: RepeatedBlock) -> dict[str, str]:
    """What node ids, tensors and labels of the first repeat are called in the function of all."""
    out = {}
    for names in run.weights:
        labels = [graph.labels.get(n, n) for n in names]
        out[labels[0]] = pattern(labels)
    for i in range(run.first, run.first + run.period):
        nodes = [graph.nodes[i + r * run.period] for r in range(run.repeats)]
        out[nodes[0].id] = pattern([n.id for n in nodes])
        for k, name in enumerate(nodes[0].outputs):
            out[name] = pattern([n.outputs[k] for n in nodes])
    return out
