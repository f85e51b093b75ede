"""The compiled training step of a program whose optimizer state lies beside its parameters."""

from __future__ import annotations

import jax
from jax.sharding import PartitionSpec as P

from planner.emit.runtime.files.frame import specs_of
from planner.emit.runtime.files.tables import FROZEN, INPUTS, PARAMS
from planner.emit.runtime.step.fused import fused
from planner.emit.runtime.step.one_step import one_step, results, state_specs


def make_step(mesh):
    """step(params, state, frozen, batch, count) -> what `one_step` does, compiled once; params and
    state are updated in place."""
    p, state, f, b = specs_of(PARAMS), state_specs(), specs_of(FROZEN), specs_of(INPUTS)
    specs_out = p, state, *[P()] * results()
    step = jax.shard_map(one_step, mesh=mesh, in_specs=(p, state, f, b, P()), out_specs=specs_out)
    return jax.jit(step, donate_argnums=(0, 1), compiler_options=fused(mesh))
