"""The text of a program, put together: docstring, imports, tables, the functions it needs, the
model, the step and main."""

from __future__ import annotations

import numpy as np

from planner.emit.external import external_table
from planner.emit.source import KERNELS, comment, imports_for, literal, names_in, parts_for, tail_of
from planner.emit.tables import (
    fused_table,
    gradients_table,
    host_tables_text,
    inputs_table,
    labels_table,
    mesh_line,
    offloaded_table,
    outputs_line,
    overlap_table,
    parameter_table,
)
from planner.emit.text import array_table, inlined
from planner.emit.uneven import stage_buffer_tables
from planner.emit.writer import Workload, Writer
from planner.execution.pipeline import INTERLEAVED
from planner.execution.techniques import IN_LOOPS
from planner.ops import operator_of

DTYPES = {"float32": "jnp.float32", "bfloat16": "jnp.bfloat16"}


def assemble(
    w: Writer, workload: Workload, header: str, weights_file: str, compute: str, model_folder: str
) -> str:
    """The program's text."""
    train, sharded = workload == "train", w.backend == "shard_map"
    model = "\n\n\n".join(function.text() for function in w.functions)
    steps = "shard_map" if sharded else "jit"
    many = train and w.flow.plan.accumulation_steps > 1
    files = [
        *KERNELS,
        "frame",
        "fused_overlap" if w.flow.plan.overlapped_microbatches > 1 else "fused",
    ]
    if train:
        if w.stages:
            gradients = ["reduce_shard_map", "stages", "virtual_stages", "pipeline_uneven"]
        elif w.pipeline:
            order = ["virtual_stages"] if w.pipeline.schedule == INTERLEAVED else []
            schedule = f"pipeline_{w.pipeline.schedule}"
            gradients = ["reduce_shard_map", "stages", *order, schedule]
        else:
            # Kernels of XLA's CPU back end for these are slow inside loops
            # (planner/emit/runtime/step/loop_convolutions.py).
            convolves = any(
                operator_of(node.op).kind == "convolution" for node in w.flow.graph.nodes
            )
            passes = "by_rows" if w.counted else "accumulated" if many else "once"
            loop = ["loop_turns", "loop_convolutions" if convolves else "loop_scan"] if many else []
            gradients = [*loop, f"reduce_{steps}", f"gradients_{passes}"]
        state = (
            [f"state_{'host' if 'optimizer' in w.flow.plan.offload else 'device'}"]
            if sharded
            else []
        )
        files += [
            w.training.optimizer,
            *gradients,
            f"step_{steps}",
            *state,
            "feed",
            "checkpoint",
            "start",
            *(["host_tables", "main_host_tables"] if w.flow.graph.host_tables else ["main_train"]),
        ]
    else:
        files += ["infer_shard_map" if sharded else "step_jit", "main_infer"]
    roots = {"main", "make_gradients"} if train else {"main"}
    mentioned = names_in(model)
    sliced = any(what in IN_LOOPS for what in w.flow.plan.offload)
    parked = ["stage_buffers_host"] if w.stages and "optimizer" in w.flow.plan.offload else []
    instead = (
        *(["stage_buffers"] if w.stages else []),
        *parked,
        *(["offloaded_weights"] if w.offloads_weights else []),
        *(["fused_offload"] if sliced else []),
    )
    functions = parts_for(roots | mentioned, files, instead)
    before = parts_for(mentioned, files)
    tables = _tables(w, workload, compute, model_folder)
    if kept(w):
        file = literal(weights_file or "program.safetensors")
        constants = f'CONSTANTS = read_safetensors(Path(__file__).with_name({file}), "constant/")'
        functions = parts_for(roots | mentioned | {"read_safetensors"}, files, instead)
        before = [*parts_for(mentioned | {"read_safetensors"}, files), constants]
    after = [text for text in functions if text not in before]
    tail = tail_of(files[-1])
    code = "\n\n\n".join([tables.rstrip("\n"), *before, model, *after, tail]) + "\n"
    lines = [comment(line, 160) for line in (header or w.flow.graph.name).splitlines()]
    return f'"""{chr(10).join(lines).rstrip()}\n"""\n\n{imports_for(code)}\n\n{code}'


def _tables(w: Writer, workload: Workload, compute: str, model_folder: str) -> str:
    train = workload == "train"
    params = [p for p in w.parameters.values() if train and p.tensors[0] in w.flow.grad]
    frozen = [p for p in w.parameters.values() if p not in params]
    parts = [
        mesh_line(w),
        f"COMPUTE = {DTYPES[compute]}\n",
        (
            f"GPU_MEMORY = {w.gpu_memory}  # share of it that JAX takes at the start: what the plan"
            " may use; None: as it does\n"
        ),
    ]
    if train:
        parts.append(f"LEARNING_RATE = {w.training.lr!r}\n")
        parts.append(f"MICROBATCHES = {w.flow.plan.microbatches}\n")
        parts.append(overlap_table(w))
        parts.append(fused_table(w, compute))
    parts.append(inputs_table(w))
    if w.stages:
        return "".join(
            [
                *parts,
                *stage_buffer_tables(w),
                external_table(w, model_folder),
                *w.tables,
                *_small(w),
            ]
        )
    parts.append(parameter_table(w, "PARAMS", "trained parameter", params))
    parts.append(parameter_table(w, "FROZEN", "weight that does not change", frozen))
    parts.append(host_tables_text(w))
    parts.append(offloaded_table(w))
    parts.append(labels_table(w))
    parts.append(external_table(w, model_folder))
    if train:
        parts.append(gradients_table(w, params))
    else:
        parts.append(outputs_line(w))
    return "".join(parts + w.tables + _small(w))


def _small(w: Writer) -> list[str]:
    """Constants that are short enough for the text."""
    return [array_table(key.upper(), value) for key, value in w.arrays.items() if inlined(value)]


def kept(w: Writer) -> dict[str, np.ndarray]:
    """The constants that are too long for the text."""
    return {key: value for key, value in w.arrays.items() if not inlined(value)}
