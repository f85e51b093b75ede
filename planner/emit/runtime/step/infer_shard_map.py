"""The forward pass under shard_map."""

from __future__ import annotations

import jax

from planner.emit.runtime.files.frame import specs_of
from planner.emit.runtime.files.tables import FROZEN, INPUTS, OUTPUT_SPECS, PARAMS, forward


def make_inference(mesh):
    """run(params, frozen, batch) -> outputs, compiled once."""
    p, f, b = specs_of(PARAMS), specs_of(FROZEN), specs_of(INPUTS)
    return jax.jit(jax.shard_map(forward, mesh=mesh, in_specs=(p, f, b), out_specs=OUTPUT_SPECS))
