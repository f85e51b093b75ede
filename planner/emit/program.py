"""A whole program: header, tables, forward, loss, gradients reduced once, optimizer, and a main that runs it anywhere.

Both back ends share every line but the layouts: shard_map programs see local shapes and write each collective; jit programs see global
shapes and state shardings. Values of the model reach the text only through planner.emit.source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from planner.emit.body import Backend, Body
from planner.emit.runs import Run, find_run, inner_flow, outer_flow
from planner.emit.source import literal
from planner.flow import Flow, Plan, WeightPlan, derive
from planner.graph import Graph
from planner.ops.base import axes_text

Workload = Literal["train", "infer"]


@dataclass(frozen=True)
class Training:
    """What the emitted step does after the gradients."""

    optimizer: str = "adamw"
    lr: float = 1e-4


@dataclass(frozen=True)
class Program:
    """The text and the arrays it reads from the .safetensors beside it (constants too long for the text)."""

    text: str
    constants: Mapping[str, np.ndarray]
    labels: Mapping[str, tuple[str, ...]]
    """program parameter -> labels of the graph weights stacked in it (one when it is not stacked)."""
    unrolled_because: tuple[str, ...] = ()


@dataclass
class Parameter:
    """One entry of the program's parameter dict: a weight, or the stacked weights of a repeated block."""

    key: str
    tensors: tuple[str, ...]
    stacked: bool
    plan: WeightPlan


@dataclass
class Writer:
    """What the parts of one program share while it is written."""

    flow: Flow
    backend: Backend
    unroll: bool
    training: Training
    parameters: dict[str, Parameter] = field(default_factory=dict)  # by first tensor
    reasons: list[str] = field(default_factory=list)
    helpers: set[str] = field(default_factory=set)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


def emit(graph: Graph, plan: Plan, *, workload: Workload, backend: Backend = "shard_map", unroll: bool = False,
         training: Training = Training(), header: str = "", weights_file: str = "") -> Program:  # fmt: skip  # noqa: B008
    """Source text of the program for a plan.

    graph: that of one microbatch; for training its first output is the scalar loss. Raises PlanError when pinned layouts cannot be joined.
    """
    flow = derive(graph, plan, training=workload == "train")
    writer = Writer(flow, backend, unroll, training)
    runs, reasons = emitted_runs(flow)
    writer.reasons.extend(reasons)
    _collect_parameters(writer, runs)
    body = _forward(writer, runs)
    from planner.emit.skeleton import assemble

    text = assemble(writer, body, workload, header, weights_file)
    labels = {p.key: tuple(graph.labels.get(t, t) for t in p.tensors) for p in writer.parameters.values()}
    return Program(text, writer.arrays, labels, tuple(writer.reasons))


def emitted_runs(flow: Flow) -> tuple[list[Run], list[str]]:
    """The repeated blocks that become one function, and why the others do not."""
    runs: list[Run] = []
    reasons: list[str] = []
    for first, period, repeats in flow.plan.runs:
        run = find_run(flow, first, period, repeats)
        if isinstance(run, str):
            reasons.append(run)
        else:
            runs.append(run)
    return runs, reasons


def _collect_parameters(w: Writer, runs: list[Run]) -> None:
    """One program parameter per weight; weights of a repeated block are stacked along a new first dim unless unrolled."""
    graph = w.flow.graph
    stacked = {names[0]: names for run in runs for names in run.weights} if not w.unroll else {}
    within = {n for names in stacked.values() for n in names}
    taken: set[str] = set()
    used = {n for i, node in enumerate(graph.nodes) for n in node.inputs if n in graph.weights}
    for name in graph.weights:
        if name not in used or (name in within and name not in stacked):
            continue
        names = stacked.get(name, (name,))
        label = graph.labels.get(name, name)
        if name in stacked:
            label = _template([graph.labels.get(n, n) for n in names])
        while label in taken:
            label += "'"
        taken.add(label)
        plan = w.flow.weights[name]
        w.parameters[name] = Parameter(label, names, name in stacked, plan)


def _template(labels: list[str]) -> str:
    """A common label with `*` where the repeats differ (layers.*.attn.q.weight); the first label when they do not line up."""
    parts = [label.split(".") for label in labels]
    if len({len(p) for p in parts}) != 1 or len(parts[0]) < 2:
        return labels[0] + " (stacked)"
    return ".".join(c[0] if len(set(c)) == 1 else "*" for c in zip(*parts, strict=True))


def _weight_expression(w: Writer, key: str, plan: WeightPlan, container: str) -> str:
    text = f"{container}[{literal(key)}]"
    if plan.zero == 3 and plan.dim >= 0 and w.backend == "shard_map":
        w.helpers.add("gather_weight")
        return f"gather_weight({text}, {axes_text(plan.axes)}, {plan.dim})"
    return text


def _bind_weights(w: Writer, body: Body, names: list[tuple[str, str, str]]) -> None:
    """names: (tensor, key, container): bind each weight as it is kept, its gradient pending."""
    for tensor, key, container in names:
        plan = w.flow.weights[tensor]
        expression = _weight_expression(w, key, plan, container)
        if "(" in expression:
            variable = body.fresh("w")
            body.lines.append(f"{variable} = {expression}")
            expression = variable
        body.bind(tensor, w.flow.source[tensor], expression)


def _forward(w: Writer, runs: list[Run]) -> Body:
    graph, flow = w.flow.graph, w.flow
    for run in runs:
        flow = outer_flow(flow, run)
    body = Body(flow, w.backend, helpers=w.helpers, arrays=w.arrays)
    for name in graph.inputs:
        if name in flow.source:
            body.bind(name, flow.source[name], f"batch[{literal(name)}]")
    in_runs = {n for run in runs for names in run.weights for n in names}
    loose = [(p.tensors[0], p.key, "params" if p.tensors[0] in flow.grad else "frozen") for p in w.parameters.values() if p.tensors[0] not in in_runs]
    pending = {t: (t, k, c) for t, k, c in loose}

    def need_weights(indices: range) -> None:
        for i in indices:  # gathered where first used, so that a gathered weight does not live long
            for n in graph.nodes[i].inputs:
                if n in pending:
                    _bind_weights(w, body, [pending.pop(n)])

    index = 0
    by_first = {run.first: run for run in runs}
    while index < len(graph.nodes):
        run = by_first.get(index)
        if run is None:
            need_weights(range(index, index + 1))
            body.node(index)
            index += 1
        else:
            need_weights(range(run.first, run.first + run.period))
            _emit_run(w, body, run, runs.index(run))
            index = run.end
    return body


def _emit_run(w: Writer, body: Body, run: Run, number: int) -> None:
    """One function for the block, then a scan over stacked weights (or a loop over the repeats when unrolled)."""
    graph, flow = w.flow.graph, w.flow
    inner = Body(inner_flow(body.flow, run), w.backend, helpers=w.helpers, arrays=w.arrays, counter=body.counter)
    inside = range(run.first, run.first + run.period)
    entering = [body.value(c.enters, c.layout) for c in run.carries]
    for name in run.shared:
        if name in graph.weights:
            continue
        for i, slot in graph.consumers[name]:
            if i in inside:
                inner.bind(name, flow.need[i, slot], body.value(name, flow.need[i, slot]))
    for (tensor, layout), variable in body.held.items():
        if tensor in graph.weights:
            inner.held.setdefault((tensor, layout), variable)
    for carry in run.carries:
        inner.bind(carry.enters, carry.layout, inner.fresh("c"))
    carried = [inner.held[c.enters, inner._key(c.layout)] for c in run.carries]
    keys = {names[0]: f"w{j}" for j, names in enumerate(run.weights)}
    _bind_weights(w, inner, [(t, k, "w") for t, k in keys.items()])
    for i in inside:
        inner.node(i)
    leaving = [inner.value(c.leaves[0], c.layout) for c in run.carries]
    name = f"block{number}"
    keep = w.flow.plan.recompute
    training = w.flow.training
    if training and keep == "block":
        body.lines.append("@jax.checkpoint")
    elif training and keep == "block-keep":
        body.lines.append("@partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names('collective'))")
    body.lines.append(f"def {name}({_tuple(carried)[1:-1].rstrip(',') if len(carried) == 1 else 'carry'}, w):")
    if len(carried) > 1:
        body.lines.append(f"    {_tuple(carried)} = carry")
    body.lines += [f"    {line}" for line in inner.lines]
    body.lines.append(f"    return {leaving[0] if len(leaving) == 1 else _tuple(leaving)}")
    out = body.fresh("c")
    start = entering[0] if len(entering) == 1 else _tuple(entering)
    if w.unroll:
        tables = []
        for t, key in keys.items():
            names = next(n for n in run.weights if n[0] == t)
            labels = "[" + ", ".join(literal(graph.labels.get(n, n)) for n in names) + "]"
            tables.append(f"{key!r}: {'params' if t in flow.grad else 'frozen'}[{labels}[i]]")
        body.lines.append(f"{out} = {start}")
        body.lines.append(f"for i in range({run.repeats}):")
        body.lines.append(f"    {out} = {name}({out}, {{{', '.join(tables)}}})")
    else:
        rows = []
        for t, key in keys.items():
            rows.append(f"{key!r}: {'params' if t in flow.grad else 'frozen'}[{literal(w.parameters[t].key)}]")
        body.lines.append(f"{out}, _ = lax.scan(lambda carry, w: ({name}(carry, w), None), {start}, {{{', '.join(rows)}}}, length={run.repeats})")
    for i, carry in enumerate(run.carries):
        body.bind(carry.leaves[-1], carry.layout, out if len(run.carries) == 1 else f"{out}[{i}]")


def _tuple(items: list[str]) -> str:
    return "(" + ", ".join(items) + ("," if len(items) == 1 else "") + ")"
