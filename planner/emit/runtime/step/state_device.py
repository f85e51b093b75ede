"""The training step of a program whose optimizer state lies beside its parameters."""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from planner.emit.runtime.collectives.exchange import local_piece
from planner.emit.runtime.files.frame import specs_of
from planner.emit.runtime.files.tables import FROZEN, GRADIENTS, INPUTS, PARAMS
from planner.emit.runtime.step.clip import clipping, decays, measures_norm, update_at
from planner.emit.runtime.step.fused import fused
from planner.emit.runtime.step.gradients_once import gradients
from planner.emit.runtime.step.step_shard_map import collected


def state_at(mesh, spec):
    """How optimizer state that is cut as `spec` says lies between steps."""
    return NamedSharding(mesh, spec)


def local_step(params, state, frozen, batch, count):
    """One optimizer step on local pieces. Where the optimizer's state is cut, each device updates
    its piece, and the parameter is gathered."""
    loss, grads = gradients(params, frozen, batch)
    factor, *norm = clipping(grads)
    change = update_at(count, factor)
    new_params, new_state = {}, {}
    for key, p in params.items():
        _, _, axes, dim, _ = GRADIENTS[key]
        piece, new_state[key] = change(
            local_piece(p, axes, dim) if axes else p, grads[key], state[key], decays(key)
        )
        new_params[key] = collected(piece, p, axes, dim)
    return new_params, new_state, loss, *norm


def make_step(mesh):
    """step(params, state, frozen, batch, count) -> (params, state, loss), with clipping the global
    norm of the gradients too; compiled once, params and state are updated in place."""
    p, state, f, b = specs_of(PARAMS), specs_of(GRADIENTS), specs_of(FROZEN), specs_of(INPUTS)
    out = p, state, *[P()] * (1 + measures_norm())
    step = jax.shard_map(local_step, mesh=mesh, in_specs=(p, state, f, b, P()), out_specs=out)
    return jax.jit(step, donate_argnums=(0, 1), compiler_options=fused(mesh))
