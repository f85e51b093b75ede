"""The text of a program, put together: docstring, imports, tables, the functions it needs, the
model, the step and main."""

from __future__ import annotations

import numpy as np

from costmodels.optimizers import OPTIMIZERS
from planner.emit.external import external_table
from planner.emit.merged_products import merges_at_a_loss
from planner.emit.owned import above, model_text
from planner.emit.source import KERNELS, comment, imports_for, literal, names_in, parts_for, tail_of
from planner.emit.tables import (
    host_tables_text,
    inputs_table,
    labels_table,
    mesh_line,
    offloaded_table,
    outputs_line,
    parameter_table,
)
from planner.emit.text import array_table, inlined
from planner.emit.training_tables import (
    figures_table,
    fused_table,
    gradients_table,
    islands_table,
    no_decay_table,
    orthogonalised_table,
    overlap_table,
    scale_table,
    schedule_table,
    together_table,
)
from planner.emit.uneven import stage_buffer_tables
from planner.emit.writer import Parameter, Workload, Writer
from planner.execution.techniques import INTERLEAVED, ZB_H1, sent_in_loops
from planner.ops import operator_of

DTYPES = {
    "float32": "jnp.float32",
    "bfloat16": "jnp.bfloat16",
    "float16": "jnp.float16",
    "float8_e4m3fn": "jnp.bfloat16",  # of what lies between products
}


def assemble(
    w: Writer, workload: Workload, header: str, weights_file: str, compute: str, model_folder: str
) -> tuple[str, str]:
    """(the program in one file, its model.py beside the runtime)."""
    train = workload == "train"
    model = "\n\n\n".join(function.text() for function in w.functions)
    files, instead = _runtime_files(w, train)
    wanted = names_in(model)
    constants = []
    if long_constants(w):
        file = literal(weights_file or "program.safetensors")
        constants = [f'CONSTANTS = read_safetensors(Path(__file__).with_name({file}), "constant/")']
        wanted = wanted | {"read_safetensors"}
    roots = {"main", "make_gradients"} if train else {"main"}
    before = [*parts_for(wanted, files), *constants]
    after = [text for text in parts_for(roots | wanted, files, instead) if text not in before]
    tables = _edited_tables(w, train, compute)
    kept, owned = (_kept_tables(w, train, compute, f) for f in (model_folder, above(model_folder)))
    code = "\n\n\n".join(
        [f"{tables}{kept}".rstrip("\n"), *before, model, *after, tail_of(files[-1])]
    )
    lines = [comment(line, 160) for line in (header or w.flow.graph.name).splitlines()]
    return (
        f'"""{chr(10).join(lines).rstrip()}\n"""\n\n{imports_for(code)}\n\n{code}\n',
        model_text(lines, tables, model, [owned, *constants], [*files, *instead]),
    )


def _runtime_files(w: Writer, train: bool) -> tuple[list[str], list[str]]:
    """The files of planner/emit/runtime that the program takes functions from, in order, and those
    whose functions take the place of others."""
    plan, backend = w.flow.plan, "shard_map" if w.backend == "shard_map" else "jit"
    files = [*KERNELS, "frame", "fused_overlap" if plan.overlapped_microbatches > 1 else "fused"]
    host_state = "optimizer" in plan.offload
    orthogonalises = train and OPTIMIZERS[w.training.optimizer].orthogonalises
    if train:
        state = ["state_host"] if host_state else ["state_device", "step_device"]
        files += [
            "schedule",
            "squares",
            *(("newton_schulz", f"pieces_{backend}") if orthogonalises else ()),
            w.training.optimizer,
            *_gradient_files(w, backend),
            "clip",
            f"step_{backend}",
            *(state if backend == "shard_map" else ()),
            "one_step",
        ]
        files += ["settings", "feed", "checkpoint", "start"]
        files += (
            ["host_tables", "main_host_tables"]
            if w.flow.graph.host_tables
            else ["watch", "main_train"]
        )
    else:
        files += ["infer_shard_map" if backend == "shard_map" else "step_jit", "main_infer"]
    instead = {
        "loss_scale": w.scales_loss,
        "stage_buffers": w.stages is not None,
        "stage_buffers_host": w.stages is not None and host_state,
        "offloaded_weights": w.offloads_weights,
        "fused_offload": bool(sent_in_loops(plan)),
        "matrices": orthogonalises,
        "together": orthogonalises and bool(w.together) and not host_state,
        "infer_apart": not train and backend == "shard_map" and merges_at_a_loss(w),
        "islands": bool(plan.islands),
    }
    return files, [file for file, taken in instead.items() if taken]


def _gradient_files(w: Writer, backend: str) -> list[str]:
    """Files with loss and gradients of a step: of its schedule, or of its microbatches."""
    if w.stages:
        return ["reduce_shard_map", "stages", "virtual_stages", "pipeline_uneven"]
    if w.pipeline:
        schedule = w.pipeline.schedule
        schedule_files = {INTERLEAVED: ["virtual_stages"], ZB_H1: ["backward_parts"]}.get(
            schedule, []
        )
        name = f"pipeline_{schedule.replace('-', '_')}"
        return ["reduce_shard_map", "stages", *schedule_files, name]
    if w.flow.plan.accumulation_steps == 1:
        return [f"reduce_{backend}", "gradients_once"]
    # Kernels of XLA's CPU back end for these are slow inside loops
    # (planner/emit/runtime/step/loop_convolutions.py).
    convolves = any(operator_of(node.op).kind == "convolution" for node in w.flow.graph.nodes)
    return [
        "loop_turns",
        "loop_convolutions" if convolves else "loop_scan",
        f"reduce_{backend}",
        "gradients_by_rows" if w.counted else "gradients_accumulated",
    ]


def _edited_tables(w: Writer, train: bool, compute: str) -> str:
    """What a person would change: mesh, type, training, inputs and parameters with their cuts."""
    parts = [mesh_line(w), f"COMPUTE = {DTYPES[compute]}\n"]
    if train:
        parts.append(f"STATE = {DTYPES[w.training.state]}  # of the optimizer\n")
        micro = f"MICROBATCHES = {w.flow.plan.microbatches}\n"
        parts += [schedule_table(w), micro, islands_table(w), scale_table(w)]
        parts.append(overlap_table(w))
    parts.append(inputs_table(w))
    if w.stages:
        parts += stage_buffer_tables(w)
    else:
        params, frozen = _parameters(w, train)
        parts.append(parameter_table(w, "PARAMS", "trained parameter", params))
        parts.append(parameter_table(w, "FROZEN", "weight that does not change", frozen))
        named = [(p.tensors[0], p.key) for p in params]
        parts.append(no_decay_table(w, named) if train else outputs_line(w))
        if train and OPTIMIZERS[w.training.optimizer].orthogonalises:
            parts += [orthogonalised_table(w, named), together_table(w)]
    return "".join([*parts, *w.tables, *_small(w)])


def _kept_tables(w: Writer, train: bool, compute: str, model_folder: str) -> str:
    """What else the runtime reads of a plan: how gradients are reduced, where weights are stored,
    what figures are made of."""
    parts = [
        f"GPU_MEMORY = {w.gpu_memory}  # share of it that JAX takes at the start: what the plan"
        " may use; None: as it does\n"
    ]
    if train:
        parts += [figures_table(w), fused_table(w, compute)]
    if w.stages:
        return "".join([*parts, external_table(w, model_folder)])
    parts += [host_tables_text(w), offloaded_table(w), labels_table(w)]
    parts.append(external_table(w, model_folder))
    if train:
        parts.append(gradients_table(w, _parameters(w, train)[0]))
    return "".join(parts)


def _parameters(w: Writer, train: bool) -> tuple[list[Parameter], list[Parameter]]:
    """(those that train, the others)."""
    params = [p for p in w.parameters.values() if train and p.tensors[0] in w.flow.grad]
    return params, [p for p in w.parameters.values() if p not in params]


def _small(w: Writer) -> list[str]:
    """Constants that are short enough for the text."""
    return [array_table(key.upper(), value) for key, value in w.arrays.items() if inlined(value)]


def long_constants(w: Writer) -> dict[str, np.ndarray]:
    """The constants that are too long for the text."""
    return {key: value for key, value in w.arrays.items() if not inlined(value)}
