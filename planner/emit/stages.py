"""The functions of a program with pipeline stages: what comes before the blocks, the blocks of one
stage, and what follows the last.

prologue      (params, frozen, batch) -> carried tensors, and what else the blocks read (masks,
              positions)
stage_blocks  (params, frozen, batch, x) -> carried tensors: this stage's blocks, on x or, in the
              first stage, on what `prologue` gives. Where a stage holds several virtual stages it
              takes the number of one too, and of the blocks' parameters those of that one.
epilogue      (params, frozen, batch, x) -> loss of one microbatch times its weight, and the weight
"""

from __future__ import annotations

from planner.emit.blocks import write_block
from planner.emit.body import Body
from planner.emit.source import literal
from planner.emit.values import precise
from planner.emit.writer import Function, Writer
from planner.execution.layout_flow import Flow
from planner.execution.loops import RepeatedBlock, outer_flow, pipelined_block
from planner.execution.pipeline import nodes_needed
from planner.execution.techniques import ZB_H1
from planner.execution.weights_apart import weights_apart
from planner.sharding.layout import Layout

FIRST = ("params", "frozen", "batch")


def write_stages(w: Writer) -> None:
    """Adds the three functions to the writer. Raises PlanError where the blocks cannot be assigned
    to stages."""
    graph, pipeline = w.flow.graph, w.pipeline
    assert pipeline is not None
    block = pipelined_block(w.flow, w.blocks, pipeline, w.reasons)
    flow = w.flow
    for repeated in w.blocks:
        flow = outer_flow(flow, repeated)
    carried = [c.enters for c in block.carries]
    before = nodes_needed(graph, range(block.first), [*carried, *block.shared])
    _write_blocks(w, flow, block, before)
    after = _write_epilogue(w, flow, block)
    w.tables.append(f"CARRIED = {len(carried)}  # tensors handed from stage to stage\n")
    in_blocks, in_epilogue = (
        {n for i in nodes for n in graph.nodes[i].inputs}
        for nodes in ([*before, *pipeline.nodes], after)
    )
    for name, read, other in (
        ("ONLY_BLOCKS", in_blocks, in_epilogue),
        ("ONLY_EPILOGUE", in_epilogue, in_blocks),
    ):
        keys = [
            p.key
            for p in w.parameters.values()
            if set(p.tensors) & read
            and not set(p.tensors) & other
            and w.container(p.tensors[0]) == "params"
        ]
        w.tables.append(
            f"{name} = {{{', '.join(literal(k) for k in keys)}}}  # trained parameters that nothing"
            " else reads\n"
            if keys
            else f"{name} = set()\n"
        )
    if pipeline.schedule == ZB_H1:
        waiting = weights_apart(w.flow, pipeline)
        keys = [literal(p.key) for p in w.parameters.values() if p.tensors[0] in waiting]
        w.tables.append(
            f"WEIGHTS_APART = {{{', '.join(keys)}}}  # gradients made apart from others\n"
            if keys
            else "WEIGHTS_APART = set()\n"
        )


def _write_blocks(w: Writer, flow: Flow, block: RepeatedBlock, before: list[int]) -> None:
    """`prologue` of the nodes before the blocks, and `stage_blocks`."""
    pipeline = w.pipeline
    assert pipeline is not None
    body = _body(w, flow)
    prologue = _body(w, flow)  # the schedule calls it too: no function is around it to ask
    _write(w, prologue, before)
    for i in before:
        body.made_in |= dict.fromkeys(filter(None, w.flow.graph.nodes[i].outputs), prologue)
    prologue.results = [prologue.value(c.enters, c.layout) for c in block.carries]
    doc = "What the first stage's blocks begin with, and what all blocks read beside parameters."
    entering = Function("prologue", doc, prologue, FIRST, as_tuple=True)
    w.functions.append(entering)
    body.lines.append(lambda: entering.call(f"{', '.join(prologue.results)},"))
    for c, variable in zip(block.carries, list(prologue.results), strict=True):
        body.bind(c.enters, c.layout, variable)
    write_block(w, (body,), block, pipeline)
    body.results = [body.value(c.leaves[-1], c.layout) for c in block.carries]
    doc = "The blocks of this stage on one microbatch, from what the stage before hands on."
    arguments: tuple[str, ...] = (*FIRST, "x")
    if pipeline.virtual_stages > 1:
        doc = (
            "One virtual stage's blocks on one microbatch, from what the virtual stage before"
            " hands on."
        )
        arguments = (*FIRST, "x", "virtual")
        stacked = ", ".join(literal(p.key) for p in w.parameters.values() if w.staged(p))
        w.tables.append(
            f"VIRTUAL_STAGES = {pipeline.virtual_stages}  # that a stage holds\n"
            f"PER_VIRTUAL_STAGE = {{{stacked}}}  # parameters whose first dim they are\n"
        )
    w.functions.append(Function("stage_blocks", doc, body, arguments, as_tuple=True))


def _write_epilogue(w: Writer, flow: Flow, block: RepeatedBlock) -> list[int]:
    """`epilogue`, and the nodes in it: those behind the blocks that the loss needs."""
    graph, pipeline = w.flow.graph, w.pipeline
    assert pipeline is not None
    body = _body(w, flow)
    names = [body.fresh("x") for _ in block.carries]
    body.lines.append(f"{', '.join(names)}, = x")
    for c, variable in zip(block.carries, names, strict=True):
        body.bind(c.leaves[-1], c.layout, variable)
    loss = graph.outputs[0]
    nodes = nodes_needed(
        graph,
        [i for i in range(len(graph.nodes)) if i not in pipeline.nodes],
        [loss, *([w.counted] if w.counted else [])],
        {c.leaves[-1] for c in block.carries},
    )
    _write(w, body, nodes)
    source = flow.source[loss]
    mean = body.value(loss, source.stored if source.partial else source)
    if w.counted:
        rows = w.rows(body.value(w.counted, Layout(())))
        body.results = [f"{w.scaled(mean)} * {rows}", rows]
        what = "Sum of the losses of one microbatch and the rows that count"
    else:
        body.results = [w.scaled(mean), "1.0"]
        what = "Mean loss of one microbatch and its weight"
    doc = f"{what}, from what leaves the last stage."
    w.functions.append(Function("epilogue", doc, body, (*FIRST, "x")))
    return nodes


def _body(w: Writer, flow: Flow) -> Body:
    """A function of the program's own, with every weight and input at hand."""
    block_weights = {n for block in w.blocks for names in block.weights for n in names}
    graph = flow.graph
    counter = w.counter
    body = Body(
        flow,
        w.backend,
        helpers=w.helpers,
        arrays=w.arrays,
        counter=counter,
        float_dtype="COMPUTE",
        float8=w.float8,
        precise=precise(graph),
    )
    body.weights = {
        t: f"{w.container(t)}[{literal(p.key)}]"
        for t, p in w.parameters.items()
        if t not in block_weights
    }
    _inputs(body)
    return body


def _inputs(body: Body) -> None:
    for name in body.flow.graph.inputs:
        if name in body.flow.source:
            body.bind(name, body.flow.source[name], f"batch[{literal(name)}]")


def _write(w: Writer, body: Body, nodes: list[int]) -> None:
    """The nodes in order; repeated blocks that are not assigned to stages are loops."""
    starts = {block.first: block for block in w.blocks}
    inside: set[int] = set()
    for i in nodes:
        if i in inside:
            continue
        if i in starts:
            write_block(w, (body,), starts[i])
            inside.update(range(i, starts[i].end))
        else:
            body.node(i)
