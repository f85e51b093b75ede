"""The tables of a program: mesh, inputs, parameters, and how gradients are reduced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from costmodels.runtimes import load_runtime
from planner.emit.source import comment, literal
from planner.emit.table_rows import table_rows
from planner.emit.text import spec_text
from planner.emit.writer import Parameter, Writer
from planner.execution.collective import item_sizes
from planner.execution.collectives import collectives
from planner.execution.layout_flow import cut_layout, stored_layout
from planner.execution.loops import RepeatedBlock
from planner.execution.plan import WeightPlan
from planner.execution.recompute import is_gathered
from planner.execution.shared_collectives import outside_blocks
from planner.execution.zero_stages import cut_by_repeats
from planner.graph.ir import FLOATS, Graph
from planner.ops import operator_of
from planner.ops.base import tuple_text
from planner.ops.lookup import starts_at_one
from planner.pricing.bucketing import KINDS, kinds
from planner.pricing.microbatch_overlap import launch_bytes
from planner.sharding.layout import ISLAND, STAGE, Layout, group, padded

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
    graph, turns = w.flow.graph, w.flow.plan.islands
    micro = w.flow.plan.microbatches if w.flow.training else 1
    slots, islands = (len(turns) * max(turns), (ISLAND,)) if turns else (micro, ())
    rows = [
        "# input -> (global shape, dtype, integers below this (0: not an index), how it is cut)"
    ]
    if micro > 1:
        rows[0] += "; the first dim counts microbatches"
    if turns:
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
    limits, queue, seen = [], [name], {name}
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
                    if o not in seen and not graph.tensors[o].is_float:
                        seen.add(o)
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
        shape, layout = _stacked(w, p, shape, layout)
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


def _stacked(
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


def _finer(w: Writer, plan: WeightPlan, shape: tuple[int, ...]) -> Layout:
    """How a jit program cuts optimizer state: as the plan has it where this divides what the weight
    is padded to, else like the weight."""
    kept, finer, mesh = stored_layout(plan), cut_layout(plan), dict(w.flow.plan.mesh)
    return (
        finer
        if padded(shape[plan.zero_dim], kept.dims[plan.zero_dim], mesh)
        % group(finer.dims[plan.zero_dim], mesh)
        == 0
        else kept
    )


def gradients_table(w: Writer, parameters: list[Parameter]) -> str:
    """GRADIENTS; for shard_map programs with microbatches also what is scattered and gathered in
    each."""
    rows, islands = [], (ISLAND,) if w.flow.plan.islands else ()
    for p in parameters:
        plan = p.plan
        cut = plan.zero_stage > 0 and plan.zero_dim >= 0
        scatter = plan.zero_axes if cut and plan.zero_stage < 3 else ()
        rest = tuple(a for a in plan.grad_partial if not (cut and a in plan.zero_axes))
        shape = w.flow.graph.tensors[p.tensors[0]].shape
        by_repeats = cut and _cut_by_repeats(w, p)
        layout = (
            (cut_layout(plan) if w.backend == "shard_map" else _finer(w, plan, shape))
            if cut and not by_repeats
            else plan.layout
        )
        before = p.stacked + (w.virtual_stages(p) > 1)  # dims of the repeats
        shape, layout = _stacked(w, p, shape, layout) if p.stacked else (shape, layout)
        layout = Layout((plan.zero_axes, *layout.dims[1:])) if by_repeats else layout
        dim = 0 if by_repeats else plan.zero_dim + before
        over = (
            (STAGE,) if w.pipeline and not w.staged(p) else islands
        )  # every stage, or island, holds it and adds to its gradient
        rest = (*over, *rest)
        pending = tuple_text(rest if plan.zero_stage == 3 else (*over, *plan.grad_partial))
        ways = (
            f"{pending}, {tuple_text(rest)}, {tuple_text(scatter)}, {dim if scatter else 0}, "
            if w.backend == "shard_map"
            else ""
        )
        rows.append((p.key, f"({ways}{spec_text(layout)}{'' if ways else ','})"))
    what = (
        "axes its gradient is pending over, of these: summed over, scattered over; the dim"
        " scattered; "
        if w.backend == "shard_map"
        else ""
    )
    text = "\n".join(
        [
            f"# parameter -> ({what}how its gradient and its optimizer state are cut)",
            *("GRADIENTS = {", *table_rows(rows), "}", ""),
        ]
    )
    if w.backend == "shard_map" and w.flow.plan.accumulation_steps > 1:
        scattered = any(p.plan.zero_stage == 2 and p.plan.zero_dim >= 0 for p in parameters)
        block_weights = {n for block in w.blocks for names in block.weights for n in names}
        loose = [
            p.key
            for p in parameters
            if is_gathered(w.flow, p.tensors[0]) and p.tensors[0] not in block_weights
        ]
        text += f"SCATTER_EACH_MICROBATCH = {scattered}\n"
        text += _equal_table(w) if not w.pipeline else ""
        text += (
            f"GATHERED = {{{', '.join(literal(k) for k in loose)}}}  # parameters gathered outside"
            " repeated blocks\n"
            if loose
            else "GATHERED = set()\n"
        )
    return text


def _cut_by_repeats(w: Writer, p: Parameter) -> bool:
    """Whether a ZeRO stage cuts a stack of repeats by repeats instead of along a dim of each."""
    plan = p.plan
    if w.backend != "shard_map" or not p.stacked or w.pipeline or w.flow.plan.offload:
        return False
    size = w.flow.graph.tensors[p.tensors[0]].shape[plan.zero_dim]
    mesh = dict(w.flow.plan.mesh)
    ways = group(plan.zero_axes, mesh)
    pieces = group((*plan.layout.dims[plan.zero_dim], *plan.zero_axes), mesh)
    return cut_by_repeats(plan.zero_stage, size, pieces, ways, len(p.tensors))


def _equal_table(w: Writer) -> str:
    """SAME_GRADIENT."""
    pairs = [
        f"{literal(w.parameters[name].key)}: {literal(w.parameters[other].key)}"
        for name, other in outside_blocks(w.flow, w.blocks).merged.gradients.items()
    ]
    return (
        f"SAME_GRADIENT = {{{', '.join(pairs)}}}  # parameters whose gradient is another's, which"
        " is reduced once for both\n"
    )


def overlap_table(w: Writer) -> str:
    """OVERLAPPED_MICROBATCHES, of programs with a loop over microbatches or several at a time."""
    plan = w.flow.plan
    together = plan.overlapped_microbatches
    loops = plan.accumulation_steps > 1 and not w.pipeline and not w.stages
    why = ": one's collectives may run under another's products" if together > 1 else ""
    return (
        f"OVERLAPPED_MICROBATCHES = {together}  # that run at the same time{why}\n"
        if together > 1 or loops
        else ""
    )


def islands_table(w: Writer) -> str:
    """ISLANDS, of programs that have them."""
    turns = w.flow.plan.islands
    return (
        f"ISLANDS = {turns!r}  # microbatches that each place along the axis"
        f" {literal(ISLAND)} runs\n"
        if turns
        else ""
    )


def fused_table(w: Writer, compute: str) -> str:
    """The table FUSED: kinds of collectives that GPUs send together -> up to so many bytes."""
    plan = w.flow.plan
    sizes_of = dict.fromkeys(kinds(plan.zero_stage), plan.bucket_bytes) if plan.bucket_bytes else {}
    if plan.overlapped_microbatches > 1:
        usual_bytes = load_runtime("jax-shard_map").bucket_bytes
        most = launch_bytes(collectives(w.flow, w.blocks, item_sizes(compute)), dict(plan.mesh))
        sizes_of |= {
            k: n
            for kind, n in most.items()
            if (k := kind.replace("-", "_")) in KINDS and n < sizes_of.get(k, usual_bytes)
        }
    sizes = ", ".join(f"{literal(kind)}: {sizes_of[kind]}" for kind in KINDS if kind in sizes_of)
    return (
        f"FUSED = {{{sizes}}}  # collectives that GPUs send together, up to so many"
        f" bytes{'' if sizes else ': as the compiler does by itself'}\n"
    )


def schedule_table(w: Writer) -> str:
    """LEARNING_RATE and how it changes from step to step; options of the program change them."""
    return (
        f"LEARNING_RATE = {w.training.lr!r}\n"
        "WARMUP_STEPS = 0  # over which the learning rate rises in a line\n"
        'SCHEDULE = "constant"  # after these: constant, cosine or linear, down to END_FRACTION of'
        " the rate in the last step\n"
        "END_FRACTION = 0.1\n"
        "STEPS = 3  # to train, in all\n"
        "CLIP_NORM = 0.0  # gradients are scaled down to this norm of all together; 0: not\n"
    )


def figures_table(w: Writer) -> str:
    """What a training program says of its steps, and of what these figures are made."""
    return (
        "NORM_LOGGED = False  # whether a step returns that norm whether it clips or not\n"
        f'ITEMS, ITEM = {w.training.items}, "{w.training.item}"  # a step trains on\n'
        f"MODEL_FLOPS = {w.training.model_flops:.6g}  # of a step over all devices, of causal"
        " attention half; 0: not known\n"
        f"PEAK_FLOPS = {w.training.peak_flops:.6g}  # of a planned device, a second\n"
    )


def scale_table(w: Writer) -> str:
    """LOSS_SCALE, of programs that scale it, and WEIGHT_ROWS, of those that weigh microbatches."""
    scale = "LOSS_SCALE = 2.0**15  # that the loss begins with\n" if w.scales_loss else ""
    weighs = (w.flow.plan.accumulation_steps > 1 and w.counted) or w.pipeline or w.stages
    return scale + (
        f"WEIGHT_ROWS = {w.weight_rows}  # that the weight of a microbatch is counted in\n"
        if weighs
        else ""
    )


def no_decay_table(w: Writer, names: Iterable[tuple[str, str]]) -> str:
    """NO_DECAY. names: (tensor, what it goes by) of trained weights."""
    chosen = [name for tensor, name in names if spared(w.flow.graph, tensor)]
    return _set_of(
        "NO_DECAY", "what weight decay leaves alone: vectors and tables of lookups", chosen
    )


def orthogonalised_table(w: Writer, names: Iterable[tuple[str, str]]) -> str:
    """ORTHOGONALISED. names: as for `no_decay_table`."""
    chosen = [name for tensor, name in names if tensor in w.flow.graph.orthogonalised]
    return _set_of(
        "ORTHOGONALISED", "matrices of hidden layers: all else takes AdamW's steps", chosen
    )


def together_table(w: Writer) -> str:
    """TOGETHER, of programs whose repeats are arrays of their own."""
    rows = [
        f"    ({', '.join(literal(w.parameters[n].key) for n in names)},)," for names in w.together
    ]
    if not rows:
        return ""
    return "\n".join(
        [
            "# of these, what is orthogonalised together: of all repeats",
            "TOGETHER = (",
            *rows,
            ")",
            "",
        ]
    )


def _set_of(name: str, what: str, keys: Iterable[str]) -> str:
    rows = table_rows([(key, "") for key in keys])
    text = [f"{name} = {{", *rows, "}", ""] if rows else [f"{name} = set()", ""]
    return "\n".join([f"# {what}", *text])


def spared(graph: Graph, tensor: str) -> bool:
    """Whether weight decay leaves a weight alone unless somebody says otherwise: scales, biases and
    other vectors, and embedding tables."""
    return sum(n > 1 for n in graph.tensors[tensor].shape) < 2 or any(
        operator_of(graph.nodes[i].op).kind == "lookup" and slot == 0
        for i, slot in graph.consumers.get(tensor, ())
    )


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
