"""The functions of a program with pipeline stages: what the blocks are given, the blocks of one
stage, and what follows the last.

enter    (params, frozen, batch) -> carried tensors, and what else the blocks ask for (masks,
positions)
trunk    (params, frozen, batch, x) -> carried tensors: this stage's blocks, on x or, in the first
stage, on what `enter` gives; where a stage holds
         several chunks of blocks also given the chunk's number, and of the blocks' parameters those
         of the chunk
finish   (params, frozen, batch, x) -> loss of one microbatch times its weight, and the weight
"""

from __future__ import annotations

from planner.emit.blocks import write_block
from planner.emit.body import Body
from planner.emit.source import literal
from planner.emit.values import precise
from planner.emit.writer import Function, Writer
from planner.execution.layout_flow import Flow
from planner.execution.loops import outer_flow, pipelined_block
from planner.execution.pipeline import nodes_needed
from planner.sharding.layout import Layout

FIRST = ("params", "frozen", "batch")


def write_stages(w: Writer) -> None:
    """Adds the three functions to the writer. Raises PlanError where the blocks cannot be dealt
    out."""
    graph, pipeline = w.flow.graph, w.pipeline
    assert pipeline is not None
    run = pipelined_block(w.flow, w.runs, pipeline, w.reasons)
    flow = w.flow
    for r in w.runs:
        flow = outer_flow(flow, r)
    carried = [c.enters for c in run.carries]
    body = _body(w, flow)
    given = _body(w, flow)  # the schedule calls it too: it has no function around it to ask
    wanted = [*carried, *run.shared]
    nodes = nodes_needed(graph, range(run.first), wanted)
    _write(w, given, nodes)
    for i in nodes:
        for o in graph.nodes[i].outputs:
            if o:
                body.made_in[o] = given
    given.results = [given.value(c.enters, c.layout) for c in run.carries]
    entering = Function(
        "prologue",
        "What the first stage's blocks are given, and what all blocks read beside parameters.",
        given,
        FIRST,
        as_tuple=True,
    )
    w.functions.append(entering)
    body.lines.append(lambda: entering.call(f"{', '.join(given.results)},"))
    for c, variable in zip(run.carries, list(given.results), strict=True):
        body.bind(c.enters, c.layout, variable)
    write_block(w, (body,), run, pipeline)
    body.results = [body.value(c.leaves[-1], c.layout) for c in run.carries]
    said, arguments = (
        "The blocks of this stage on one microbatch, from what the stage before hands on",
        [*FIRST, "x"],
    )
    if pipeline.virtual_stages > 1:
        said, arguments = (
            (
                "One virtual stage's blocks on one microbatch, from what the virtual stage"
                " before hands on"
            ),
            [*FIRST, "x", "virtual"],
        )
        dealt = [literal(p.key) for p in w.parameters.values() if w.staged(p)]
        w.tables.append(
            f"VIRTUAL_STAGES = {pipeline.virtual_stages}  # that a stage holds\n"
            f"PER_VIRTUAL_STAGE = {{{', '.join(dealt)}}}  # parameters whose first dim they are\n"
        )
    w.functions.append(Function("stage_blocks", f"{said}.", body, tuple(arguments), as_tuple=True))
    last = _body(w, flow)
    names = [last.fresh("x") for _ in run.carries]
    last.lines.append(f"{', '.join(names)}, = x")
    for c, variable in zip(run.carries, names, strict=True):
        last.bind(c.leaves[-1], c.layout, variable)
    arrived = {c.leaves[-1] for c in run.carries}
    results = [graph.outputs[0], *([w.counted] if w.counted else [])]
    ends = nodes_needed(
        graph, [i for i in range(len(graph.nodes)) if i not in pipeline.nodes], results, arrived
    )
    _write(w, last, ends)
    loss = graph.outputs[0]
    source = flow.source[loss]
    last.results.append(last.value(loss, source.stored if source.partial else source))
    if w.counted:
        rows = last.value(w.counted, Layout(()))
        last.results = [f"{last.results[0]} * {rows}", rows]
    else:
        last.results.append("1.0")
    what = (
        "Sum of the losses of one microbatch and the rows that count"
        if w.counted
        else "Mean loss of one microbatch and its weight"
    )
    w.functions.append(
        Function("epilogue", f"{what}, from what leaves the last stage.", last, (*FIRST, "x"))
    )
    w.tables.append(f"CARRIED = {len(carried)}  # tensors handed from stage to stage\n")
    read: list[set[str]] = [
        {n for i in places for n in graph.nodes[i].inputs}
        for places in ([*nodes, *pipeline.nodes], ends)
    ]
    for name, own, other in (
        ("ONLY_BLOCKS", read[0], read[1]),
        ("ONLY_EPILOGUE", read[1], read[0]),
    ):
        keys = [
            p.key
            for p in w.parameters.values()
            if set(p.tensors) & own
            and not set(p.tensors) & other
            and w.container(p.tensors[0]) == "params"
        ]
        w.tables.append(
            f"{name} = {{{', '.join(literal(k) for k in keys)}}}  # trained parameters that nothing"
            " else reads\n"
            if keys
            else f"{name} = set()\n"
        )


def _body(w: Writer, flow: Flow) -> Body:
    """A function of the program's own, with every weight and input at hand."""
    own = {n for run in w.runs for names in run.weights for n in names}
    graph = flow.graph
    counter = w.counter
    body = Body(
        flow,
        w.backend,
        helpers=w.helpers,
        arrays=w.arrays,
        counter=counter,
        float_dtype="COMPUTE",
        precise=precise(graph),
    )
    body.weights = {
        t: f"{w.container(t)}[{literal(p.key)}]" for t, p in w.parameters.items() if t not in own
    }
    _inputs(body)
    return body


def _inputs(body: Body) -> None:
    for name in body.flow.graph.inputs:
        if name in body.flow.source:
            body.bind(name, body.flow.source[name], f"batch[{literal(name)}]")


def _write(w: Writer, body: Body, nodes: list[int]) -> None:
    """The nodes in order, runs of blocks that are not dealt out as loops of their own."""
    starts = {run.first: run for run in w.runs}
    inside: set[int] = set()
    for i in nodes:
        if i in inside:
            continue
        if i in starts:
            write_block(w, (body,), starts[i])
            inside.update(range(i, starts[i].end))
        else:
            body.node(i)
