"""A whole program: header, tables, forward, loss, gradients reduced once, optimizer, and a main
that runs it anywhere.

Both back ends share every line but the layouts: shard_map programs see local shapes and write each
collective; jit programs see global shapes and state shardings. Values of the model reach the text
only through planner.emit.source.

Functions of the forward pass:
    block     a repeated block, under lax.scan over stacked weights (or called in a loop, unrolled);
              wrapped as the plan recomputes
    part      a stretch that gathers sharded weights (ZeRO stage 3): wrapped so that it gathers
              them again for its backward pass
    stage     a long stretch of anything else, for the reader's sake
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.emit.blocks import write_block
from planner.emit.body import Body
from planner.emit.program_text import assemble, long_constants
from planner.emit.source import comment, literal, user_function
from planner.emit.stages import write_stages
from planner.emit.tables import collect_parameters
from planner.emit.uneven import write_uneven
from planner.emit.values import Backend, precise
from planner.emit.writer import Function, Program, Training, Workload, Writer
from planner.errors import PlanError
from planner.execution.layout_flow import derive
from planner.execution.loops import (
    outer_flow,
    output_layout,
    repeated_blocks,
    tensors_per_microbatch,
)
from planner.execution.orthogonalising import refuse_flat_buffers
from planner.execution.pipeline import pipeline_of
from planner.execution.plan import Plan
from planner.execution.recompute import gathering_parts, is_gathered
from planner.execution.techniques import DUALPIPE, WRITTEN_OUT, sent_in_loops
from planner.execution.uneven_pipeline import uneven_pipeline_of
from planner.graph.ir import Graph
from planner.ops import OPERATORS
from planner.ops.loss import USER_LOSS, counted_rows
from planner.sharding.layout import Layout

__all__ = ["Backend", "Program", "Training", "Workload", "emit"]

STAGE_NODES = 60


# Many parameters: the options of `plan emit`, all but two by keyword.
def emit(
    graph: Graph,
    plan: Plan,
    *,
    workload: Workload,
    backend: Backend = "shard_map",
    unroll: bool = False,
    training: Training = Training(),  # noqa: B008
    header: str = "",
    weights_file: str = "",
    compute: str = "float32",
    model_folder: str = ".",
    gpu_memory: float | None = None,
) -> Program:
    """Source text of the program for a plan.

    graph: that of one microbatch; for training its first output is the scalar loss. compute: type
    of products with weights (between those in float8 is bfloat16). weights_file: name of the
    .safetensors beside the program; model_folder: where external data files lie, seen from the
    program; gpu_memory: share of a GPU's memory that JAX is to preallocate. Raises PlanError when
    pinned layouts cannot be joined.
    """
    flow = derive(graph, plan, training=workload == "train")
    _refuse(graph, plan, backend, unroll)
    stages = uneven_pipeline_of(flow)
    blocks, reasons = repeated_blocks(flow)
    counted = counted_rows(graph) if workload == "train" and plan.accumulation_steps > 1 else ""
    pipeline = pipeline_of(graph, plan)
    w = Writer(
        flow=flow,
        backend=backend,
        unroll=(unroll or plan.blocks == WRITTEN_OUT) and pipeline is None,
        training=training,
        blocks=blocks,
        reasons=reasons,
        counted=counted,
        pipeline=pipeline,
        stages=stages,
        compute=compute,
        gpu_memory=gpu_memory,
    )
    collect_parameters(w)
    w.tables += [user_function(node) for node in graph.nodes if node.op == USER_LOSS]
    if w.pipeline or w.stages:
        (write_uneven if w.stages else write_stages)(w)
    else:
        _write_model(w, workload)
    text, model = assemble(w, workload, header, weights_file, compute, model_folder)
    labels = (
        {b.key: [p.name for p in b.pieces] for b in w.packed}
        if w.packed
        else {p.key: p.tensors for p in w.parameters.values()}
    )
    return Program(
        text,
        long_constants(w),
        {key: tuple(graph.labels.get(t, t) for t in names) for key, names in labels.items()},
        tuple(w.reasons),
        model,
    )


def _write_model(w: Writer, workload: Workload) -> None:
    """`loss_of` of a training step, or `forward`: the whole model of one turn of microbatches."""
    plan = w.flow.plan
    body, *other_bodies = forward_bodies(w)
    name = "loss_of" if workload == "train" else "forward"
    if w.counted:
        body.results.append(w.rows(body.value(w.counted, Layout(()))))
    if other_bodies:
        _join_microbatches(w, body, other_bodies)
    if workload == "train":
        body.results[0] = w.scaled(body.results[0])
    local = (
        " on local pieces; equal on every device" if w.backend == "shard_map" and plan.mesh else ""
    )
    rows = ", and the rows that count" if len(body.results) > 1 else ""
    sums = plan.accumulation_steps > 1
    whose = (
        f"{'Sum of the mean losses' if sums and not w.counted else 'Mean loss'} of"
        f" {plan.overlapped_microbatches} microbatches at the same time"
        if other_bodies
        else ""
    )
    whose = whose or f"Mean loss of one {'microbatch' if plan.microbatches > 1 else 'batch'}"
    doc = f"{whose}{rows}{local}." if workload == "train" else "The model."
    w.functions.append(
        Function(name, doc, body, ("params", "frozen", "batch"), as_tuple=workload == "infer")
    )


def _refuse(graph: Graph, plan: Plan, backend: Backend, unroll: bool) -> None:
    """Refuse what no program is written for. Raises PlanError."""
    check_kernels(graph)
    refuse_partitioned(plan, backend)
    refuse_flat_buffers(graph, plan)
    if plan.schedule == DUALPIPE:
        raise PlanError(
            "P068",
            f"the schedule {DUALPIPE} is priced as frameworks run it, and no program is written"
            " for it",
            help=["plan again with schedule=1f1b"],
        )
    pipeline = pipeline_of(graph, plan)
    if pipeline and pipeline.virtual_stages > 1 and pipeline.repeats % pipeline.chunks:
        raise PlanError(
            "P068",
            f"{pipeline.repeats} repeated blocks do not divide into {pipeline.stages} stages of"
            f" {pipeline.virtual_stages} virtual stages each: launchers lay such stages out, no"
            " program does",
            help=["plan without --for, or pin another number of virtual stages"],
        )
    if graph.host_tables and plan.offload:
        raise PlanError(
            "P076",
            "tables on hosts and optimizer state there do not go together in a program",
            help=["pin offload=none, or --tables device"],
        )
    if unroll and (
        sent := sent_in_loops(plan)
    ):  # the GPU compiler holds more on the device then than it would without
        raise PlanError(
            "P076",
            f"blocks whose {' and '.join(sent)} are offloaded to host memory are written as a loop"
            " only",
            help=["leave --unroll out"],
        )


def refuse_partitioned(plan: Plan, backend: Backend) -> None:
    """Refuse a plan whose collectives the compiler's partitioner cannot place. Plans searched for
    such a program are none."""
    if backend == "shard_map":
        return
    only = {
        "offload to host memory is": bool(plan.in_host_memory),
        "overlapped microbatches (copies) are": (
            plan.overlapped_microbatches > 1
        ),  # it would reduce each copy's gradient
        "pipeline stages are": plan.stages > 1,
        "unequal shares of islands are": bool(plan.islands),
    }
    for what, there in only.items():
        if there:
            raise PlanError(
                "P068" if plan.stages > 1 else "P076",
                f"{what} written for shard_map only",
                help=[
                    "--backend shard_map",
                    "plan MODEL --emit FILE.py --backend jit finds a plan without",
                ],
            )


def check_kernels(graph: Graph) -> None:
    """Refuse, all at once, the operators that cannot be written. They can be planned: their shapes
    are known."""
    bad = {n.op: n.id for n in reversed(graph.nodes) if n.op not in OPERATORS}
    if bad:
        raise PlanError(
            "P066",
            f"no program can be written: {len(bad)} operator(s) have no kernel",
            detail=[f"{op}: node {where!r}"[:160] for op, where in sorted(bad.items())],
            help=["the plan stands; docs/adding-an-operator.md shows how an operator is added"],
        )


def forward_bodies(w: Writer) -> tuple[Body, ...]:
    """The body of the whole model, one for each overlapped microbatch; inner functions are added to
    the writer as they come."""
    graph, flow = w.flow.graph, w.flow
    for block in w.blocks:
        flow = outer_flow(flow, block)
    block_weights = {n for block in w.blocks for names in block.weights for n in names}
    body = Body(
        flow,
        w.backend,
        helpers=w.helpers,
        arrays=w.arrays,
        float_dtype="COMPUTE",
        float8=w.float8,
        precise=precise(graph),
        stem=f"{w.prefix}c",
        behind_blocks=_behind_blocks(w),
    )
    body.weights = {
        t: f"{w.container(t)}[{literal(p.key)}]"
        for t, p in w.parameters.items()
        if t not in block_weights
    }
    body.weights |= {
        t: f"to_device({text})" for t, text in body.weights.items() if t in w.offloaded
    }
    overlapped = w.flow.plan.overlapped_microbatches
    apart = tensors_per_microbatch(w.flow, w.blocks) if overlapped > 1 else frozenset[str]()
    bodies = (body, *(body.for_microbatch(apart) for _ in range(overlapped - 1)))
    for k, b in enumerate(bodies):
        for name in graph.inputs:
            if name in flow.source:
                b.bind(
                    name,
                    flow.source[name],
                    f"batch[{literal(name)}]{f'[{k}]' if overlapped > 1 else ''}",
                )
    index = 0
    starts = {block.first: block for block in w.blocks}
    parts = gathering_parts(w.flow, w.blocks) if w.backend == "shard_map" else ()
    wrapped = {part.start: part for part in parts}
    stages = {stage.start: stage for stage in _stages(w, set(wrapped))}
    while index < len(graph.nodes):
        if index in starts:
            write_block(w, bodies, starts[index])
            index = starts[index].end
        elif index in wrapped:
            _part(w, bodies, wrapped[index], f"{w.prefix}part{sorted(wrapped).index(index)}")
            index = wrapped[index].stop
        elif index in stages:
            _stage(w, bodies, stages[index], f"{w.prefix}stage{sorted(stages).index(index)}")
            index = stages[index].stop
        else:
            for b in bodies:
                b.node(index)
            index += 1
    body.results += [body.value(name, output_layout(flow.source[name])) for name in graph.outputs]
    return bodies


def _behind_blocks(w: Writer) -> int | None:
    """Where training programs under shard_map go on behind their last repeated block, which is in
    a loop or written out."""
    if not w.flow.training or w.pipeline or w.backend != "shard_map":
        return None
    return max((block.end for block in w.blocks), default=None)


def _join_microbatches(w: Writer, body: Body, other_bodies: Sequence[Body]) -> None:
    """Make the results of all overlapped microbatches one: the mean of their losses, or the sum
    where several turns are added up; where rows are counted, the mean over all that count, with
    their number where there are several turns."""
    plan, loss = w.flow.plan, w.flow.graph.outputs[0]
    losses = [
        body.results[0],
        *(b.value(loss, output_layout(w.flow.source[loss])) for b in other_bodies),
    ]
    counted = counted_rows(w.flow.graph)
    if not counted:
        total = " + ".join(losses)
        body.results[:] = [
            total if plan.accumulation_steps > 1 else f"({total}) / {plan.overlapped_microbatches}"
        ]
        return
    rows = [w.rows(b.value(counted, Layout(()))) for b in (body, *other_bodies)]
    both, mean = body.fresh("rows"), body.fresh()
    body.lines += [
        f"{both} = {' + '.join(rows)}",
        (
            f"{mean} = ({' + '.join(f'{x} * {n}' for x, n in zip(losses, rows, strict=True))}) /"
            f" jnp.maximum({both}, {1 / w.weight_rows!r})"
        ),
    ]
    body.results[:] = [mean, both] if plan.accumulation_steps > 1 else [mean]


def _stages(w: Writer, wrapped: set[int]) -> list[range]:
    """Long stretches outside blocks and parts, cut where the module path changes."""
    if wrapped:
        return []
    nodes, stretches, first = w.flow.graph.nodes, [], 0
    ends = sorted([*((block.first, block.end) for block in w.blocks), (len(nodes), len(nodes))])
    for stop, after in ends:
        while stop - first > STAGE_NODES:
            limit = min(first + STAGE_NODES, stop)
            cuts = [
                i
                for i in range(first + STAGE_NODES // 2, limit)
                if nodes[i].scope != nodes[i - 1].scope
            ]
            # the most even cut: where the shallowest scope changes, the later the better
            best = max(
                cuts,
                key=lambda i: (-len(_shared_scope(nodes[i].scope, nodes[i - 1].scope)), i),
                default=limit,
            )
            stretches.append(range(first, best))
            first = best
        first = after
    return stretches


def _shared_scope(a: str, b: str) -> list[str]:
    shared = []
    for x, y in zip(a.split("."), b.split("."), strict=False):
        if x != y:
            break
        shared.append(x)
    return shared


def _part(w: Writer, bodies: Sequence[Body], part: range, name: str) -> None:
    """A function that gathers the weights of a few nodes, wrapped so that they are not kept."""
    graph, body = w.flow.graph, bodies[0]
    mine = list(
        dict.fromkeys(
            n for i in part for n in graph.nodes[i].inputs if n and is_gathered(w.flow, n)
        )
    )
    inner = body.inner(
        tie=True,
        name_collectives=True,
        weights={n: f"w[{literal(w.parameters[n].key)}]" for n in mine},
    )
    _fill(bodies, inner, part)
    shards = ", ".join(f"{literal(w.parameters[n].key)}: {body.weights[n]}" for n in mine)
    # In rows: compilers lay an activation out for the collective that its gradient goes through,
    # and hand that order on to the gradient of logits between two barriers, in two copies of it.
    function = Function(name, f"{_span(graph, part)}.", inner, ("w",), in_rows=True)
    w.functions.append(function)
    body.lines.append(
        lambda: function.call(
            through="recompute({}, no_gathers)",
            arguments=(f"{{{shards}}}", *function.arguments[1:]),
        )
    )


def _stage(w: Writer, bodies: Sequence[Body], stage: range, name: str) -> None:
    """A plain function for a stretch of nodes."""
    graph, body = w.flow.graph, bodies[0]
    readers = {
        n: {i for i, _ in graph.consumers[n]}
        for i in stage
        for n in graph.nodes[i].inputs
        if n in body.weights
    }
    stage_weights = {n: body.weights[n] for n, nodes in readers.items() if nodes <= set(stage)}
    inner = body.inner(weights=stage_weights)
    _fill(bodies, inner, stage)
    dicts = tuple(
        d
        for d in ("params", "frozen")
        if any(text.startswith(d) for text in stage_weights.values())
    )
    function = Function(name, f"{_span(graph, stage)}.", inner, dicts)
    w.functions.append(function)
    body.lines.append(lambda: function.call())


def _fill(bodies: Sequence[Body], inner: Body, nodes: range) -> None:
    pairs = [(bodies[0], inner), *((b, inner.for_microbatch(b.own, b)) for b in bodies[1:])]
    for i in nodes:
        for b, own in pairs:
            own.node(i)
            b.made_in |= dict.fromkeys(filter(None, b.flow.graph.nodes[i].outputs), own)


def _span(graph: Graph, nodes: range) -> str:
    first, last = graph.nodes[nodes.start], graph.nodes[nodes.stop - 1]
    return (
        comment(first.id, 70)
        if len(nodes) == 1
        else f"{comment(first.id, 70)} to {comment(last.id, 70)}"
    )
