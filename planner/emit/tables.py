"""The tables of every program: mesh, inputs, parameters, host tables and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.emit.source import comment, literal
from planner.emit.table_rows import table_rows
from planner.emit.text import spec_text
from planner.emit.writer import Parameter, Writer
from planner.execution.layout_flow import stored_layout
from planner.execution.loops import RepeatedBlock
from planner.graph.ir import FLOATS, Graph
from planner.ops import operator_of
from planner.ops.lookup import starts_at_one
from planner.sharding.layout import ISLAND, STAGE, Layout

INTEGERS = {"int64": "int32", "uint64": "uint32"}


@dataclass(frozen=True)
class BlockTable:
    """How a block's weights are named inside it (`short`, by first tensor), and expressions of the
    weights of all repeats and of repeat i."""

    short: Mapping[str, str]
    what: str
    all_repeats: str
    one_repeat: str


def collect_parameters(w: Writer) -> None:
    """One program parameter per weight; weights of a repeated block are stacked along a new first
    dim unless unrolled."""
    graph = w.flow.graph
    stacked = (
        {names[0]: names for block in w.blocks for names in block.weights} if not w.unroll else {}
    )
    within = {n for names in stacked.values() for n in names}
    used = {n for node in graph.nodes for n in node.inputs if n in graph.weights}
    taken = {"loss scale"}  # what programs carry beside parameters (runtime/step/loss_scale.py)
    for name in graph.weights:
        if name not in used or (name in within and name not in stacked):
            continue
        names = stacked.get(name, (name,))
        label = (
            template([graph.labels.get(n, n) for n in names])
            if name in stacked
            else graph.labels.get(name, name)
        )
        while label in taken:
            label += "'"
        taken.add(label)
        w.parameters[name] = Parameter(label, names, name in stacked, w.flow.weights[name])


def template(labels: list[str]) -> str:
    """A common label with `*` where the repeats differ (layers.*.attn.q.weight); the first label
    when they do not line up, or where there is one repeat."""
    if len(labels) == 1:
        return labels[0]
    rows = [label.split(".") for label in labels]
    if len({len(r) for r in rows}) != 1 or len(rows[0]) < 2:
        return labels[0] + " (stacked)"
    return ".".join(c[0] if len(set(c)) == 1 else "*" for c in zip(*rows, strict=True))


def block_table(w: Writer, block: RepeatedBlock, name: str) -> BlockTable:
    """Writes the block's table of weights; see `BlockTable`."""
    graph = w.flow.graph
    labels = {names[0]: [graph.labels.get(n, n) for n in names] for names in block.weights}
    patterns = {t: template(names) for t, names in labels.items()}
    prefix = next((p[: p.index("*.") + 2] for p in patterns.values() if "*." in p), "")
    short: dict[str, str] = {}
    for t, pattern in patterns.items():
        text = pattern.removeprefix(prefix) if prefix and pattern.startswith(prefix) else pattern
        while text in short.values():
            text += "'"
        short[t] = text
    if not w.unroll:
        values = {t: literal(w.parameters[t].key) for t in short}
        regular = True
    else:
        keys = {names[0]: [w.parameters[n].key for n in names] for names in block.weights}
        regular = all(
            patterns[t].replace("*", str(i)) == key
            for t, keys_of in keys.items()
            for i, key in enumerate(keys_of)
        )
        values = {
            t: (
                literal(patterns[t])
                if regular
                else "(" + ", ".join(literal(k) for k in keys[t]) + ")"
            )
            for t in short
        }
    rows = [
        f"# weights of block{name[-1]}: name inside -> parameter"
        + (" (* counts the repeats)" if regular and w.unroll else ""),
        f"{name} = {{",
    ]
    rows += [f"    {literal(short[t])}: {values[t]}," for t in short]
    w.tables.append("\n".join([*rows, "}", ""]))
    kinds = {w.container(t) for t in short}
    stored = (
        "params"
        if kinds <= {"params"}
        else "frozen"
        if kinds == {"frozen"}
        else "(params | frozen)"
    )
    index = 'v.replace("*", str(i))' if regular else "v[i]"
    return BlockTable(
        short,
        prefix.rstrip(".") or "repeated block",
        f"{{k: {stored}[v] for k, v in {name}.items()}}" if short else "{}",
        f"{{k: {stored}[{index}] for k, v in {name}.items()}}" if short else "{}",
    )


def host_tables_text(w: Writer) -> str:
    """HOST_TABLES, of programs that have any."""
    tables = [
        (p.key, w.flow.graph.host_tables[p.tensors[0]])
        for p in w.parameters.values()
        if p.tensors[0] in w.flow.graph.host_tables
    ]
    rows = [
        f"    {literal(key)}: ({table.rows}, ({', '.join(literal(i) for i in table.ids)},)),"
        for key, table in tables
    ]
    return (
        "\n".join(
            [
                "# piece of a table elsewhere -> (rows of the table, inputs with their numbers)",
                "HOST_TABLES = {",
                *rows,
                "}",
                "",
            ]
        )
        if rows
        else ""
    )


def offloaded_table(w: Writer) -> str:
    """OFFLOADED, of programs in which any parameter is offloaded."""
    rows = [f"    {literal(p.key)}," for p in w.parameters.values() if w.is_offloaded(p)]
    return (
        "\n".join(
            [
                "# parameters offloaded to the host's memory, with their gradients",
                "OFFLOADED = {",
                *rows,
                "}",
                "",
            ]
        )
        if w.offloads_weights
        else ""
    )


def _even(w: Writer, shape: tuple[int, ...]) -> tuple:
    """For jit programs: the shape and mesh that decide which axes divide evenly."""
    return (shape, dict(w.flow.plan.mesh)) if w.backend == "jit" else ()


def inputs_table(w: Writer) -> str:
    """INPUTS; with microbatches every input has a first dim that counts them."""
    graph, island_microbatches = w.flow.graph, w.flow.plan.islands
    micro = w.flow.plan.microbatches if w.flow.training else 1
    slots, islands = (
        (len(island_microbatches) * max(island_microbatches), (ISLAND,))
        if island_microbatches
        else (micro, ())
    )
    rows = [
        "# input -> (global shape, dtype, integers below this (0: not an index), how it is cut)"
    ]
    if micro > 1:
        rows[0] += "; the first dim counts microbatches"
    if island_microbatches:
        rows[0] += ", for each island as many as the one with the most runs"
    rows.append(f"{w.prefix.upper()}INPUTS = {{")
    for name in graph.inputs:
        if name in w.flow.source:
            t, layout = graph.tensors[name], w.flow.source[name]
            shape, layout = (
                ((slots, *t.shape), Layout((islands, *layout.dims)))
                if micro > 1
                else (t.shape, layout)
            )
            rows.append(
                f'    {literal(name)}: ({shape}, "{_kind(t.dtype)}", {index_limit(graph, name)},'
                f" {spec_text(layout, *_even(w, shape))}),"
            )
    text = "\n".join([*rows, "}", ""])
    return (
        f"BATCH = {graph.dims.get('batch', 0) * micro}  # samples of a step\n{text}"
        if w.flow.training
        else text
    )


def _kind(dtype: str) -> str:
    return "float" if dtype in FLOATS else INTEGERS.get(dtype, dtype)


def index_limit(graph: Graph, name: str) -> int:
    """Exclusive upper bound of an integer input: the smallest table it looks up in, 0 when it looks
    up nothing (a mask, a length)."""
    if graph.tensors[name].is_float:
        return 0
    limits, queue, followed = [], [name], {name}
    while queue:
        tensor = queue.pop()
        for i, slot in graph.consumers.get(tensor, ()):
            node = graph.nodes[i]
            operator = operator_of(node.op)
            limit = operator.index_limit(node, graph, slot) if operator.index_limit else 0
            if limit:
                limits.append(limit)
            elif operator.passes_values:
                for o in node.outputs:
                    if o not in followed and not graph.tensors[o].is_float:
                        followed.add(o)
                        queue.append(o)
    return min(limits, default=0)


def parameter_table(w: Writer, name: str, what: str, parameters: list[Parameter]) -> str:
    """PARAMS or FROZEN."""
    rows = [f"# {what} -> {_COLUMNS}", f"{name} = {{"]
    rows += table_rows([(p.key, _parameter_row(w, p)) for p in parameters])
    return "\n".join([*rows, "}", ""]) if parameters else f"{name} = {{}}\n"


_COLUMNS = "(shape, dtype, repeats stacked in it, mean of a fresh start, how it is cut)"


def _parameter_row(w: Writer, p: Parameter) -> str:
    """What a table says of a parameter."""
    graph = w.flow.graph
    shape, layout = graph.tensors[p.tensors[0]].shape, stored_layout(p.plan)
    if p.stacked:
        shape, layout = stacked_layout(w, p, shape, layout)
    repeats = len(p.tensors) if p.stacked else 0
    dtype = _kind(graph.tensors[p.tensors[0]].dtype)
    mean = initial_mean(graph, p.tensors[0])
    return f'({shape}, "{dtype}", {repeats}, {mean}, {spec_text(layout)})'


def layered_table(w: Writer, name: str, what: str, parameters: list[Parameter]) -> str:
    """The table of parameters that are not stacked, with one row for those of all layers of a
    block that differ in the number in their names alone."""
    listed = {p.tensors[0]: p for p in parameters}
    rows = [f"# {what} -> {_COLUMNS}", f"{name} = {{"]
    done: set[str] = set()
    for tensor, p in listed.items():
        block = next((b for b in w.blocks if any(tensor in names for names in b.weights)), None)
        if tensor in done:
            continue
        alike = _alike_in_layers(w, block, listed) if block else []
        if tensor not in {t for names, _ in alike for t in names}:
            rows.append(f"    {literal(p.key)}: {_parameter_row(w, p)},")
            continue
        assert block is not None
        done.update(t for names, _ in alike for t in names)
        rows += [
            '    **{key.replace("*", str(i)): row'
            f" for i in range({block.repeats}) for key, row in {{",
            *(f"        {literal(k)}: {_parameter_row(w, listed[t[0]])}," for t, k in alike),
            "    }.items()},",
        ]
    return "\n".join([*rows, "}", ""])


def _alike_in_layers(
    w: Writer, block: RepeatedBlock, listed: Mapping[str, Parameter]
) -> list[tuple[tuple[str, ...], str]]:
    """(tensors of all layers, their common name) of the listed parameters of a block that one row
    tells, in the order of the list."""
    order = list(listed)
    alike = []
    for names in block.weights:
        if all(n in listed for n in names):
            keys = [listed[n].key for n in names]
            common = template(keys)
            rows = {_parameter_row(w, listed[n]) for n in names}
            if [common.replace("*", str(i)) for i in range(len(keys))] == keys and len(rows) == 1:
                alike.append((names, common))
    return sorted(alike, key=lambda row: order.index(row[0][0]))


def stacked_layout(
    w: Writer, p: Parameter, shape: tuple[int, ...], layout: Layout
) -> tuple[tuple[int, ...], Layout]:
    """Shape and layout of stacked weights: all repeats everywhere, or cut over pipeline
    stages, by virtual stages where a stage holds several: [virtual stages,
    repeats of each]."""
    virtual = w.virtual_stages(p)
    first = (virtual, len(p.tensors) // virtual) if virtual > 1 else (len(p.tensors),)
    return (*first, *shape), Layout(
        (*([()] if virtual > 1 else []), (STAGE,) if w.staged(p) else (), *layout.dims)
    )


def labels_table(w: Writer) -> str:
    """LABELS: parameters whose names in the weights file do not follow from their own."""
    rows = []
    for p in w.parameters.values():
        labels = [w.flow.graph.labels.get(t, t) for t in p.tensors]
        usual = [p.key.replace("*", str(i)) for i in range(len(labels))] if p.stacked else [p.key]
        if labels != usual:
            rows.append(f"    {literal(p.key)}: ({', '.join(literal(x) for x in labels)},),")
    if not rows:
        return "LABELS = {}\n"
    return "\n".join(
        [
            "# parameter -> its names in the weights file, where they are others",
            "LABELS = {",
            *rows,
            "}",
            "",
        ]
    )


def initial_mean(graph: Graph, tensor: str) -> float:
    """Scales and variances start around one."""
    return float(starts_at_one(graph, tensor))


def mesh_line(w: Writer) -> str:
    """The line of MESH."""
    return (
        f"MESH = {{{', '.join(f'{literal(a)}: {n}' for a, n in w.flow.plan.mesh)}}}  # axis:"
        " devices, outermost first\n"
    )


def outputs_line(w: Writer) -> str:
    """OUTPUT_SPECS, with the outputs' names."""
    graph, source = w.flow.graph, w.flow.source
    specs = "".join(
        spec_text(source[o].stored, *_even(w, graph.tensors[o].shape)) + ", " for o in graph.outputs
    )
    return f"OUTPUT_SPECS = ({specs.rstrip()})  # {comment(', '.join(graph.outputs), 120)}\n"
