"""The program of a serving plan: both phases over one set of weights, caches updated in place, a
loop that generates.

Every layer's weights and cache are arrays of their own, and the layers are written out: of stacks,
which a `lax.scan` over layers needs, compilers copy each layer's part before they use it, which in
a step of generation moves several times the bytes of reading it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import product

from planner.emit.external import external_table
from planner.emit.owned import above, model_text
from planner.emit.program import check_kernels, forward_bodies
from planner.emit.program_text import DTYPES, long_constants
from planner.emit.source import KERNELS, comment, imports_for, literal, names_in, parts_for, tail_of
from planner.emit.tables import (
    collect_parameters,
    inputs_table,
    labels_table,
    layered_table,
    mesh_line,
    parameter_table,
)
from planner.emit.text import array_table, inlined, spec_text
from planner.emit.writer import Function, Parameter, Program, Training, Writer
from planner.errors import PlanError
from planner.execution.layout_flow import derive
from planner.execution.loops import output_layout, repeated_blocks
from planner.execution.plan import Plan
from planner.graph.ir import Graph
from planner.ops import operator_of
from planner.serving.cached import Form
from planner.serving.quantize import as_stored, scales, turned
from planner.serving.result import Service
from planner.serving.rewrite import Sight, window_input
from planner.sharding.layout import local_shape

CACHE_TYPES = {"compute": "None", "fp8": "jnp.float8_e4m3fn"}
"""How keys and values are kept -> its text."""
WEIGHT_TYPES = {"none": "None", "int8": "jnp.int8", "fp8": "jnp.float8_e4m3fn"}
"""How weights of products are kept -> its text."""
FILES = (*KERNELS, "frame", "serve")
READ_COLUMNS = 64
"""Of weights that it reads side by side in one product, the GPU compiler's kernels take so many
columns at a time from each."""


@dataclass(frozen=True)
class Phased:
    """A phase's graph and the plan for it."""

    graph: Graph
    plan: Plan


# Long: one program of two phases, put together part by part in the order of its text.
# Many parameters: two phases, and the options of planner.emit.program.emit.
def emit_serving(
    prompts: Phased,
    step: Phased,
    form: Form,
    service: Service,
    *,
    header: str = "",
    weights_file: str = "",
    compute: str = "float32",
    model_folder: str = ".",
    gpu_memory: float | None = None,
) -> Program:
    """Source text of the program. Raises PlanError P066 for operators without a kernel, P224 where
    the phases would keep a weight differently."""
    writers = []
    for name, phase in (("prompts", prompts), ("step", step)):
        check_kernels(phase.graph)
        flow = derive(phase.graph, phase.plan, training=False)
        runs, reasons = repeated_blocks(flow)
        writers.append(
            Writer(
                flow,
                "shard_map",
                True,
                Training(),
                runs,
                reasons=reasons,
                compute=compute,
                gpu_memory=gpu_memory,
                prefix=f"{name}_",
            )
        )
        collect_parameters(writers[-1])
    first, second = writers
    caches = [second.parameters[past] for past in form.held]  # in the order of the new ones
    weights = [p for p in second.parameters.values() if p not in caches]
    _check_one_layout(first, second, weights)
    for w, doc in (
        (first, "The pass over the prompts: the first tokens, and keys and values."),
        (second, "A step of generation: the next tokens, and their keys and values."),
    ):
        body = forward_bodies(w)[0]
        body.results[:] = _together(body.results, w)
        arguments = ("params", "frozen", "batch")
        w.functions.append(Function(f"{w.prefix}forward", doc, body, arguments, as_tuple=True))
    tables = [
        mesh_line(first),
        f"COMPUTE = {DTYPES[compute]}\n",
        f"CACHE_TYPE = {CACHE_TYPES[service.cache_type]}  # of keys and values; None: COMPUTE\n",
        (
            f"PROMPT, GENERATE, VOCABULARY, ROWS, WAVE = {service.prompt}, {service.generate},"
            f" {_vocabulary(second)}, {service.concurrency}, {service.at_once}\n"
        ),
        (
            f"IDS, MASK, POSITIONS = {literal(form.ids)}, {literal(form.mask)},"
            f" {literal(form.positions)}\n"
        ),
        _windows(second.flow.graph, form),
        inputs_table(first),
        inputs_table(second),
        layered_table(second, "FROZEN", "weight", weights),
        *_kept(second, form),
        _quantized(first, service.quantize),
        *map(_outputs, writers),
    ]
    both = [
        f"GPU_MEMORY = {gpu_memory}  # share of it that JAX takes at the start: what the plan may"
        f" use; None: as it does\n{_apart(writers)}{_merged_labels(first, second)}"
        f"{external_table(_as_stored(first), f)}"
        for f in (model_folder, above(model_folder))
    ]
    return _assembled(writers, "".join(tables), both, header, weights_file)


def _kept(w: Writer, form: Form) -> list[str]:
    """CACHE, BEFORE and STATES."""
    tables = []
    for name, what, pairs in (
        ("CACHE", "keys and values so far, as steps hand out new ones", form.pairs),
        ("BEFORE", "rows that convolutions read before the next one", form.rows),
        ("STATES", "states of linear attention, float32, keys last", form.states),
    ):
        kept = [w.parameters[past] for past, _ in pairs]
        tables.append(layered_table(w, name, what, kept) if kept else f"{name} = {{}}\n")
    return tables


def _windows(step: Graph, form: Form) -> str:
    """WINDOWS."""
    sizes = sorted({step.tensors[past].shape[2] for past in form.pasts})
    every = [Sight(n, by_chunks) for n in sizes for by_chunks in (False, True)]
    rows = [(name, s) for s in every if (name := window_input(form, s)) in step.inputs]
    table = ", ".join(f"{literal(name)}: ({s.tokens}, {s.by_chunks})" for name, s in rows)
    return (
        f"WINDOWS = {{{table}}}  # inputs of a step: slots seen of caches of so many tokens, the"
        " last or (True) a chunk's\n"
    )


def _vocabulary(step: Writer) -> int:
    graph = step.flow.graph
    return int(graph.tensors[graph.nodes[graph.producer[graph.outputs[0]]].inputs[0]].shape[-1])


def _check_one_layout(first: Writer, second: Writer, weights: list[Parameter]) -> None:
    """Raises PlanError P224 where the phases would keep a weight differently."""
    shared = [first.parameters[p.tensors[0]] for p in weights if p.tensors[0] in first.parameters]
    if parameter_table(second, "FROZEN", "", weights) != parameter_table(
        first, "FROZEN", "", shared
    ):
        raise PlanError(
            "P224",
            "the two phases of this plan keep the weights in different layouts",
            help=["plan again"],
        )


def _together(results: list[str], w: Writer) -> list[str]:
    """Results of a phase, those that every layer hands out as one expression of all of them."""
    for block in w.blocks:
        first = next((i for i, r in enumerate(results) if r.endswith("[0][0]")), len(results))
        rows = results[first].removesuffix("[0][0]") if first < len(results) else ""
        places = product(range(block.repeats), range(len(block.yields)))
        handed = [f"{rows}[{layer}][{k}]" for layer, k in places]
        end = first + len(handed)
        if handed and results[first:end] == handed:
            results = [*results[:first], f"*(x for row in {rows} for x in row)", *results[end:]]
    return results


def _merged_labels(first: Writer, second: Writer) -> str:
    """LABELS of the weights; caches are stored nowhere."""
    assert first.parameters.keys() <= second.parameters.keys()
    return labels_table(first)


def _quantized(w: Writer, quantize: str) -> str:
    """QUANTIZED and WEIGHT_TYPE."""
    around = turned(w.flow.graph)
    rows = {
        weight: f"({literal(w.parameters[scale].key)}, {dim}, {weight in around})"
        for weight, (scale, dim) in scales(w.flow.graph).items()
        if weight in w.parameters
    }
    kept = f"WEIGHT_TYPE = {WEIGHT_TYPES[quantize]}  # of the weights in QUANTIZED"
    if not rows:
        return f"{kept}\nQUANTIZED = {{}}\n"
    return "\n".join(
        [
            kept,
            "# weight -> (its scales, the dim that each is taken over, whether its dims are the",
            "# other way round than in the model's files)",
            "QUANTIZED = {",
            *(f"    {literal(w.parameters[weight].key)}: {row}," for weight, row in rows.items()),
            "}",
            "",
        ]
    )


def _apart(writers: list[Writer]) -> str:
    """PRODUCTS_APART."""
    apart = any(_has_narrow_product(w) for w in writers)
    return f"PRODUCTS_APART = {apart}  # whether compilers keep products of one operand apart\n"


def _has_narrow_product(w: Writer) -> bool:
    """Whether a product with a weight, such as a router's, has too few columns for the GPU compiler
    to read them from where they lie, once it has made one product of several; of several that read
    the same rows likewise an odd number of them."""
    graph, mesh = w.flow.graph, dict(w.flow.plan.mesh)
    products = [
        node
        for node in graph.nodes
        if operator_of(node.op).kind == "product" and node.inputs[1] in graph.weights
    ]
    alike = Counter(node.inputs[0] for node in products)
    columns = [
        (local_shape(graph.tensors[out].shape, w.flow.source[out], mesh)[-1], alike[rows])
        for rows, out in ((node.inputs[0], node.outputs[0]) for node in products)
    ]
    return any(n < READ_COLUMNS or (several > 1 and n % READ_COLUMNS) for n, several in columns)


def _as_stored(w: Writer) -> Writer:
    return replace(w, flow=replace(w.flow, graph=as_stored(w.flow.graph)))


def _outputs(w: Writer) -> str:
    """The phase's OUTPUT_SPECS: of the token, then of every layer's keys and values."""
    token, *specs = (spec_text(output_layout(w.flow.source[o])) for o in w.flow.graph.outputs)
    period = next(n for n in range(1, len(specs) + 1) if specs == specs[:n] * (len(specs) // n))
    return (
        f"{w.prefix.upper()}OUTPUT_SPECS ="
        f" ({token}, *({', '.join(specs[:period])},) * {len(specs) // period})\n"
    )


def _assembled(
    writers: list[Writer], tables: str, both: list[str], header: str, weights_file: str
) -> Program:
    """The program, in the order of other programs. tables: what a person edits; both: other tables
    of its one file, and those of its model.py."""
    model = "\n\n\n".join(function.text() for w in writers for function in w.functions)
    mentioned = names_in(model)
    constants = {k: v for w in writers for k, v in long_constants(w).items()}
    before = parts_for(mentioned | ({"read_safetensors"} if constants else set()), FILES)
    functions = parts_for({"main", *mentioned}, FILES)
    if constants:
        before.append(
            "CONSTANTS ="
            f" read_safetensors(Path(__file__).with_name({literal(weights_file or 'program.safetensors')}),"  # noqa: E501
            ' "constant/")'
        )
    small = [
        array_table(key.upper(), value)
        for w in writers
        for key, value in w.arrays.items()
        if inlined(value)
    ]
    blocks = [t for w in writers for t in w.tables]
    tables = "".join([tables, *blocks, *small])
    after = [text for text in functions if text not in before]
    first = f"{tables}{both[0]}".rstrip("\n")
    code = "\n\n\n".join([first, *before, model, *after, tail_of(FILES[-1])]) + "\n"
    lines = [comment(line, 160) for line in header.splitlines()]
    read = [text for text in before if text.startswith("CONSTANTS = ")]
    graph = writers[0].flow.graph
    labels = {
        p.key: tuple(graph.labels.get(t, t) for t in p.tensors)
        for p in writers[0].parameters.values()
    }
    reasons = tuple(dict.fromkeys(r for w in writers for r in w.reasons))
    return Program(
        f'"""{chr(10).join(lines).rstrip()}\n"""\n\n{imports_for(code)}\n\n{code}',
        constants,
        labels,
        reasons,
        model_text(lines, tables, model, [both[1], *read], FILES),
    )
