"""The forward pass under shard_map of a model whose products with one operand are better apart.
Takes the place of the function of its name."""

from __future__ import annotations

import jax

from planner.emit.runtime.files.frame import specs_of
from planner.emit.runtime.files.tables import FROZEN, INPUTS, OUTPUT_SPECS, PARAMS, forward


def make_inference(mesh):
    """run(params, frozen, batch) -> outputs, compiled once. On GPUs the compiler would make one
    product of those that read one operand, for which it copies all their weights beside one
    another: more than it saves here."""
    gpu = mesh.devices.flat[0].platform in ("gpu", "cuda")
    p, f, b = specs_of(PARAMS), specs_of(FROZEN), specs_of(INPUTS)
    return jax.jit(
        jax.shard_map(forward, mesh=mesh, in_specs=(p, f, b), out_specs=OUTPUT_SPECS),
        compiler_options={"xla_gpu_dot_merger_threshold_mb": 0} if gpu else {},
    )
