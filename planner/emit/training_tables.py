"""The tables of a training program: how gradients are reduced and scattered, what runs at a time,
how the learning rate changes, and which weights the optimizer treats otherwise."""

from __future__ import annotations

from collections.abc import Iterable

from costmodels.runtimes import load_runtime
from planner.emit.source import literal
from planner.emit.table_rows import table_rows
from planner.emit.tables import stacked_layout
from planner.emit.text import spec_text
from planner.emit.writer import Parameter, Writer
from planner.execution.collective import item_sizes
from planner.execution.collectives import collectives
from planner.execution.layout_flow import cut_layout, stored_layout
from planner.execution.plan import WeightPlan
from planner.execution.recompute import is_gathered
from planner.execution.shared_collectives import outside_blocks
from planner.execution.zero_stages import cut_by_repeats
from planner.graph.ir import Graph
from planner.ops import operator_of
from planner.ops.base import tuple_text
from planner.pricing.bucketing import KINDS, kinds
from planner.pricing.microbatch_overlap import launch_bytes
from planner.sharding.layout import ISLAND, STAGE, Layout, group, padded


def gradients_table(w: Writer, parameters: list[Parameter]) -> str:
    """GRADIENTS; for shard_map programs with microbatches also what is scattered and gathered in
    each."""
    rows = [(p.key, _gradient_row(w, p)) for p in parameters]
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
        gathered = [
            p.key
            for p in parameters
            if is_gathered(w.flow, p.tensors[0]) and p.tensors[0] not in block_weights
        ]
        text += f"SCATTER_EACH_MICROBATCH = {scattered}\n"
        text += _equal_table(w) if not w.pipeline else ""
        text += (
            f"GATHERED = {{{', '.join(literal(k) for k in gathered)}}}  # parameters gathered"
            " outside repeated blocks\n"
            if gathered
            else "GATHERED = set()\n"
        )
    return text


def _gradient_row(w: Writer, p: Parameter) -> str:
    """What GRADIENTS says of a parameter."""
    plan, islands = p.plan, (ISLAND,) if w.flow.plan.islands else ()
    cut = plan.zero_stage > 0 and plan.zero_dim >= 0
    scattered_over = plan.zero_axes if cut and plan.zero_stage < 3 else ()
    summed_over = tuple(a for a in plan.grad_partial if not (cut and a in plan.zero_axes))
    shape = w.flow.graph.tensors[p.tensors[0]].shape
    by_repeats = cut and _cut_by_repeats(w, p)
    layout = (
        (cut_layout(plan) if w.backend == "shard_map" else _finer(w, plan, shape))
        if cut and not by_repeats
        else plan.layout
    )
    repeat_dims = p.stacked + (w.virtual_stages(p) > 1)  # dims of the repeats
    shape, layout = stacked_layout(w, p, shape, layout) if p.stacked else (shape, layout)
    layout = Layout((plan.zero_axes, *layout.dims[1:])) if by_repeats else layout
    dim = 0 if by_repeats else plan.zero_dim + repeat_dims
    held_by_all = (
        (STAGE,) if w.pipeline and not w.staged(p) else islands
    )  # every stage, or island, holds it and adds to its gradient
    summed_over = (*held_by_all, *summed_over)
    pending = tuple_text(
        summed_over if plan.zero_stage == 3 else (*held_by_all, *plan.grad_partial)
    )
    axes_text = (
        f"{pending}, {tuple_text(summed_over)}, {tuple_text(scattered_over)},"
        f" {dim if scattered_over else 0}, "
        if w.backend == "shard_map"
        else ""
    )
    return f"({axes_text}{spec_text(layout)}{'' if axes_text else ','})"


def _finer(w: Writer, plan: WeightPlan, shape: tuple[int, ...]) -> Layout:
    """How a jit program cuts optimizer state: as the plan has it where this divides what the weight
    is padded to, else like the weight."""
    stored, cut, mesh = stored_layout(plan), cut_layout(plan), dict(w.flow.plan.mesh)
    return (
        cut
        if padded(shape[plan.zero_dim], stored.dims[plan.zero_dim], mesh)
        % group(cut.dims[plan.zero_dim], mesh)
        == 0
        else stored
    )


def _cut_by_repeats(w: Writer, p: Parameter) -> bool:
    """Whether a ZeRO stage cuts a stack of repeats by repeats instead of along a dim of each."""
    plan = p.plan
    if w.backend != "shard_map" or not p.stacked or w.pipeline or w.flow.plan.offload:
        return False
    size = w.flow.graph.tensors[p.tensors[0]].shape[plan.zero_dim]
    mesh = dict(w.flow.plan.mesh)
    zero_pieces = group(plan.zero_axes, mesh)
    pieces = group((*plan.layout.dims[plan.zero_dim], *plan.zero_axes), mesh)
    return cut_by_repeats(plan.zero_stage, size, pieces, zero_pieces, len(p.tensors))


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
    microbatches = w.flow.plan.islands
    return (
        f"ISLANDS = {microbatches!r}  # microbatches that each place along the axis"
        f" {literal(ISLAND)} runs\n"
        if microbatches
        else ""
    )


def fused_table(w: Writer, compute: str) -> str:
    """The table FUSED: kinds of collectives that GPUs send together -> up to so many bytes."""
    plan = w.flow.plan
    sizes_of = dict.fromkeys(kinds(plan.zero_stage), plan.bucket_bytes) if plan.bucket_bytes else {}
    if plan.overlapped_microbatches > 1:
        usual_bytes = load_runtime("jax-shard_map").bucket_bytes
        most_bytes = launch_bytes(
            collectives(w.flow, w.blocks, item_sizes(compute)), dict(plan.mesh)
        )
        sizes_of |= {
            k: n
            for kind, n in most_bytes.items()
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
