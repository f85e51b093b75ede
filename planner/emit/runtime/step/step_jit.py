"""The training step for the compiler's partitioner: shardings are stated, collectives follow."""

from __future__ import annotations

import jax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from planner.emit.runtime.files.frame import make_mesh, specs_of
from planner.emit.runtime.files.tables import (
    FROZEN,
    GRADIENTS,
    INPUTS,
    OUTPUT_SPECS,
    PARAMS,
    forward,
)
from planner.emit.runtime.step.clip import decays
from planner.emit.runtime.step.fused import fused
from planner.emit.runtime.step.gradients_once import gradients
from planner.emit.runtime.step.one_step import one_step, results, state_specs


def at(x, spec):
    """x cut over the mesh as `spec` says."""
    return lax.with_sharding_constraint(x, NamedSharding(make_mesh(), spec))


def by_piece(kernel, specs, result):
    """A function of arrays that are cut over the mesh as `specs` say, computed piece by piece."""
    return jax.shard_map(kernel, mesh=make_mesh(), in_specs=specs, out_specs=result)


def scattered_first(w, axes, others, dim):
    """w under shard_map; its gradient is scattered along `dim` over some axes, then summed over the
    others. It is gathered again because it must be as whole as w: the step keeps a piece, and the
    compiler leaves the gathering out."""

    @jax.custom_vjp
    def same(value):
        return lax.pcast(lax.pcast(value, axes, to="varying"), others, to="varying")

    def back(_, g):
        piece = lax.psum(lax.psum_scatter(g, axes, scatter_dimension=dim, tiled=True), others)
        return (lax.all_gather(piece, axes, axis=dim, tiled=True, to="invarying"),)

    same.defvjp(lambda value: (same(value), None), back)
    return same(w)


def on(mesh, specs):
    """NamedShardings of a tree of PartitionSpecs."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, P))


def updated(key, change, p, gradient, state):
    """A parameter and its state after the step."""
    new, state = change(p, gradient, state, decays(key))
    return at(new, PARAMS[key][-1]), state


def updated_all(params, state, grads, change):
    """(parameters, optimizer state) after the step."""
    new = {key: updated(key, change, p, grads[key], state[key]) for key, p in params.items()}
    return tuple({key: row[k] for key, row in new.items()} for k in (0, 1))


def whole_products(mesh):
    """Compiler options: on TPU products stay whole. Left to itself it makes loops of smaller
    products and messages where it gathers operands or scatters results, and everything they read
    stays in memory until then."""
    return (
        {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}
        if mesh.devices.flat[0].platform == "tpu"
        else {}
    )


def state_at(mesh, spec):
    """How optimizer state that is cut as `spec` says lies between steps."""
    return NamedSharding(mesh, spec)


def make_step(mesh):
    """step(params, state, frozen, batch, count) -> what `one_step` does, compiled once; params and
    state are updated in place."""
    p, state, f, b = (
        on(mesh, specs)
        for specs in (specs_of(PARAMS), state_specs(), specs_of(FROZEN), specs_of(INPUTS))
    )
    scalar = NamedSharding(mesh, P())
    return jax.jit(
        one_step,
        in_shardings=(p, state, f, b, scalar),
        out_shardings=(p, state, *[scalar] * results()),
        donate_argnums=(0, 1),
        compiler_options=whole_products(mesh) | fused(mesh),
    )


def make_gradients(mesh):
    """gradients(params, frozen, batch) -> (loss, gradients): for checks against another program."""
    p, f, b = (on(mesh, specs_of(table)) for table in (PARAMS, FROZEN, INPUTS))
    return jax.jit(
        gradients,
        in_shardings=(p, f, b),
        out_shardings=(NamedSharding(mesh, P()), on(mesh, specs_of(GRADIENTS))),
        compiler_options=whole_products(mesh) | fused(mesh),
    )


def make_loss(mesh):
    """loss(params, frozen, batch), compiled once: what makes gradients is left out."""
    p, f, b = (on(mesh, specs_of(table)) for table in (PARAMS, FROZEN, INPUTS))
    return jax.jit(
        lambda *arrays: gradients(*arrays)[0],
        in_shardings=(p, f, b),
        out_shardings=NamedSharding(mesh, P()),
        compiler_options=whole_products(mesh) | fused(mesh),
    )


def make_inference(mesh):
    """run(params, frozen, batch) -> outputs, compiled once."""
    p, f, b = (on(mesh, specs_of(table)) for table in (PARAMS, FROZEN, INPUTS))
    return jax.jit(
        forward,
        in_shardings=(p, f, b),
        out_shardings=on(mesh, OUTPUT_SPECS),
        compiler_options=whole_products(mesh),
    )
