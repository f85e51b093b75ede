"""The functions and tables of a program whose pipeline stages have no block in common
(planner.execution.uneven_pipeline).

    stage0, stage1, ...   (weights, frozen, batch, x) -> what is handed to the next stage; of the
                          last [loss of one microbatch times its weight, the weight]. Where stages
                          hold several virtual stages it is virtual0, virtual1, ...
    each_stage            () -> all of them

Weights lie in flat buffers (planner.execution.stage_buffers), and so does what is handed over; the
tables say where.
"""

from __future__ import annotations

from collections.abc import Collection

from planner.emit.body import Body
from planner.emit.source import comment, literal
from planner.emit.tables import initial_mean
from planner.emit.text import spec_text
from planner.emit.training_tables import no_decay_table
from planner.emit.values import precise
from planner.emit.writer import Function, Writer
from planner.errors import PlanError
from planner.execution.gated_units import gated_units
from planner.execution.layout_flow import Flow
from planner.execution.stage_buffers import PARTS, Buffer, Piece, buffers
from planner.execution.uneven_collectives import uneven_schedule
from planner.execution.uneven_pipeline import (
    UnevenPipeline,
    buffer_elements,
    handed_tensors,
    stage_flow,
)
from planner.ops.base import tuple_text
from planner.sharding.layout import STAGE, Layout

FIRST = ("w", "c", "batch", "x")


def write_uneven(w: Writer) -> None:
    """Adds the stages to the writer, and says what buffers the parameters are packed in."""
    stages, plan = w.stages, w.flow.plan
    assert stages is not None
    if w.backend != "shard_map":
        raise PlanError(
            "P068", "pipeline stages are written for shard_map only", help=["--backend shard_map"]
        )
    w.packed = buffers(w.flow, stages)
    rows = handed_tensors(w.flow, stages)
    for k in range(stages.count):
        _stage(w, stages, k)
    every = Body(w.flow, w.backend, results=[_name(stages, k) for k in range(stages.count)])
    w.functions.append(
        Function("each_stage", "What the stages run, in the order of the model.", every)
    )
    first = uneven_schedule(w.flow).first_backward
    cells = [
        "(" + "".join(f"({tuple_text(h.axes)}, {h.first}, {h.shape}), " for h in row).rstrip() + ")"
        for row in rows
    ]
    room = ", ".join(f"{tuple_text(axes)}: {size}" for axes, size in buffer_elements(rows).items())
    w.tables.append(f"VIRTUAL_STAGES = {plan.virtual_stages}  # of the model that a stage holds\n")
    w.tables.append(
        f"PATHS = {stages.paths}  # per microbatch of a tick: the place along axis stage at which"
        " each stage runs it\n"
    )
    w.tables.append(f"FIRST_BACKWARD = {first}  # tick of the first backward pass\n")
    w.tables.append(
        f"HANDED_SIZES = {{{room}}}  # axes over which devices hand on different values -> elements"
        " of the buffer that is handed on\n"
    )
    w.tables.append(
        "\n".join(
            [
                "# of each virtual stage what it gets: (axes of the buffer, first element, shape)",
                "HANDED = (",
                *(f"    {c}," for c in cells),
                ")",
                "",
            ]
        )
    )


def _name(stages: UnevenPipeline, k: int) -> str:
    return f"{'virtual' if stages.virtual_stages > 1 else 'stage'}{k}"


def _stage(w: Writer, stages: UnevenPipeline, k: int) -> None:
    """One stage, or a virtual stage."""
    graph, flow = w.flow.graph, stage_flow(w.flow, stages, k)
    body = Body(
        flow,
        w.backend,
        helpers=w.helpers,
        arrays=w.arrays,
        counter=w.counter,
        float_dtype="COMPUTE",
        float8=w.float8,
        precise=precise(graph),
        plain=_parted(flow, stages.nodes[k]),
    )
    body.weights = {
        t: f"{'w' if t in w.flow.grad else 'c'}[{literal(w.parameters[t].key)}]"
        for t in stages.weights(k)
    }
    for name in graph.inputs:
        if name in flow.source:
            body.bind(name, flow.source[name], f"batch[{literal(name)}]")
    names = [body.fresh("x") for _ in stages.entering[k]]
    if names:
        body.lines.append(f"{', '.join(names)}, = x")
    for name, variable in zip(stages.entering[k], names, strict=True):
        body.bind(name, flow.source[name], variable)
    for i in stages.nodes[k]:
        body.node(i)
    first, last = (
        comment(graph.nodes[i].id, 60)
        for i in (stages.starts[k], [*stages.starts, len(graph.nodes)][k + 1] - 1)
    )
    if k + 1 < stages.count:
        handed_on = stages.leaving(k)
        body.results = [
            body.value(name, stage_flow(w.flow, stages, k + 1).source[name]) for name in handed_on
        ]
        doc = f"{first} to {last}, on one microbatch: hands on {comment(', '.join(handed_on), 60)}."
        w.functions.append(Function(_name(stages, k), doc, body, FIRST, as_tuple=True))
        return
    source = flow.source[graph.outputs[0]]
    loss = body.value(graph.outputs[0], source.stored if source.partial else source)
    loss = w.scaled(loss, "c")
    if w.counted:
        rows = w.rows(body.value(w.counted, Layout(())))
        body.results = [
            f"jnp.stack([({loss} * {rows}).astype(jnp.float32), {rows}.astype(jnp.float32)])"
        ]
    else:
        body.results = [f"jnp.stack([{loss}.astype(jnp.float32), 1.0])"]
    w.functions.append(
        Function(
            _name(stages, k),
            f"{first} to {last}, on one microbatch: its loss times its weight, and the weight.",
            body,
            FIRST,
        )
    )


def _parted(flow: Flow, nodes: Collection[int]) -> frozenset[int]:
    """Nodes of gated units that are not all in one stage."""
    units = gated_units(flow.graph, flow.grad, flow.plan.repeated_blocks).inside
    return frozenset(
        i
        for reader, inside in units.items()
        if not {reader, *inside} <= set(nodes)
        for i in (reader, *inside)
    )


def stage_buffer_tables(w: Writer) -> list[str]:
    """PARAMS, FROZEN, LABELS, STAGE_BUFFERS, GRADIENTS and NO_DECAY of such a program."""
    parts = [
        _table(w, "PARAMS", "buffer of trained parameters", [b for b in w.packed if b.trained])
    ]
    parts.append(
        _table(
            w,
            "FROZEN",
            "buffer of weights that do not change",
            [b for b in w.packed if not b.trained],
        )
    )
    rows = [
        f"    {literal(b.key)}: ({', '.join(literal(_label(w, p)) for p in b.pieces)},),"
        for b in w.packed
    ]
    parts.append(
        "\n".join(
            ["# buffer -> names in the weights file of what it holds", "LABELS = {", *rows, "}", ""]
        )
    )
    rows = [
        (
            "# buffer -> its weights, in the order of LABELS: (its virtual stage, first element, a"
            " device's piece, whole shape, mean of a fresh start, how it is cut)"
        ),
        "STAGE_BUFFERS = {",
    ]
    for b in w.packed:
        rows += [
            f"    {literal(b.key)}: (",
            *(f"        {_row(w, p)}," for p in b.pieces),
            "    ),",
        ]
    parts.append("\n".join([*rows, "}", ""]))
    trained = [(p.name, _label(w, p)) for b in w.packed if b.trained for p in b.pieces]
    return [*parts, _gradients(w), no_decay_table(w, trained)]


def _table(w: Writer, name: str, what: str, buffers: list[Buffer]) -> str:
    rows = [f"# {what} -> (shape, dtype, 0, mean of a fresh start, how it is cut)", f"{name} = {{"]
    kind = {
        b.key: "float" if w.flow.graph.tensors[b.pieces[0].name].is_float else b.dtype
        for b in buffers
    }
    rows += [
        f'    {literal(b.key)}: ({_shape(w, b)}, "{kind[b.key]}", 0, 0.0,'
        f" {spec_text(Layout(b.dims))}),"
        for b in buffers
    ]
    return "\n".join([*rows, "}", ""]) if buffers else f"{name} = {{}}\n"


def _shape(w: Writer, b: Buffer) -> tuple[int, ...]:
    mesh = dict(w.flow.plan.mesh)
    return (mesh[STAGE], *(mesh[a] for a in b.axes), b.length)


def _row(w: Writer, p: Piece) -> str:
    graph = w.flow.graph
    return (
        f"({p.chunk}, {p.first}, {p.shape}, {graph.tensors[p.name].shape},"
        f" {initial_mean(graph, p.name)}, {spec_text(p.layout)})"
    )


def _label(w: Writer, p: Piece) -> str:
    return w.flow.graph.labels.get(p.name, p.name)


def _gradients(w: Writer) -> str:
    rows = [
        "# buffer -> (axes its gradient is pending over, of these: summed over, scattered over; the"
        " dim scattered; how its gradient and its optimizer state are cut)"
    ]
    rows.append("GRADIENTS = {")
    buffers = [b for b in w.packed if b.trained]
    for b in buffers:
        dims = (*b.dims[:-1], b.zero_axes)
        dim = len(dims) - 1 if b.zero_axes else 0
        rows.append(
            f"    {literal(b.key)}: ({tuple_text(b.grad_partial)}, {tuple_text(b.rest)},"
            f" {tuple_text(b.zero_axes)}, {dim}, {spec_text(Layout(dims))}),"
        )
    scattered = any(b.zero_stage == 2 for b in buffers)
    if "optimizer" in w.flow.plan.offload:
        rows = [
            (
                f"PARTS = {PARTS}  # of a buffer, whose state is brought from the host's memory one"
                " after the other"
            ),
            *rows,
        ]
    return "\n".join([*rows, "}", f"SCATTER_EACH_MICROBATCH = {scattered}", ""])
