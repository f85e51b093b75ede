"""What training steps under shard_map have in common."""

from __future__ import annotations

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from planner.emit.runtime.files.frame import specs_of
from planner.emit.runtime.files.tables import FROZEN, GRADIENTS, INPUTS, PARAMS
from planner.emit.runtime.step.fused import fused
from planner.emit.runtime.step.gradients_once import gradients


def collected(piece, p, axes, dim):
    """A new parameter like p from the pieces that the devices along the axes have made."""
    whole = lax.all_gather(piece, axes, axis=dim, tiled=True, to="invarying") if axes else piece
    return (
        whole if whole.shape == p.shape else lax.slice_in_dim(whole, 0, p.shape[dim], axis=dim)
    )  # padded to be cut


def make_gradients(mesh):
    """gradients(params, frozen, batch) -> (loss, gradients): for checks against another program."""
    p, f, b = specs_of(PARAMS), specs_of(FROZEN), specs_of(INPUTS)
    return jax.jit(
        jax.shard_map(
            gradients, mesh=mesh, in_specs=(p, f, b), out_specs=(P(), specs_of(GRADIENTS))
        ),
        compiler_options=fused(mesh),
    )


def make_loss(mesh):
    """loss(params, frozen, batch), compiled once: what makes gradients is left out."""
    p, f, b = specs_of(PARAMS), specs_of(FROZEN), specs_of(INPUTS)
    loss = jax.shard_map(
        lambda *arrays: gradients(*arrays)[0], mesh=mesh, in_specs=(p, f, b), out_specs=P()
    )
    return jax.jit(loss, compiler_options=fused(mesh))
