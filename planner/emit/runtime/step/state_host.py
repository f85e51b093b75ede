"""The training step of a program whose optimizer state lies in the host's memory."""

from __future__ import annotations

import functools

import jax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from planner.emit.runtime.collectives.exchange import local_piece
from planner.emit.runtime.files.frame import specs_of
from planner.emit.runtime.files.tables import FROZEN, GRADIENTS, INPUTS, PARAMS
from planner.emit.runtime.step.clip import decays
from planner.emit.runtime.step.fused import fused
from planner.emit.runtime.step.one_step import one_step, results, state_specs
from planner.emit.runtime.step.step_shard_map import collected


def state_at(mesh, spec):
    """How optimizer state that is cut as `spec` says lies between steps: in the host's memory,
    page-locked."""
    return NamedSharding(mesh, spec, memory_kind="pinned_host")


def update_offloaded(change, repeats, p, gradient, state, decaying):
    """`change` of a parameter whose state is in the host's memory: brought here and written back,
    of repeats of a block one after the other. The loop carries the stacks and replaces a repeat
    where it lies: results of a scan would be stacks of their own in the host's memory, from which
    the host copies all state back at the end of a step.
    """

    def changed(p, g, state):
        new, state = change(p, g, jax.device_put(state, jax.memory.Space.Device), decaying)
        return new, jax.device_put(state, jax.memory.Space.Host)

    def one(i, carried):
        element = functools.partial(lax.dynamic_index_in_dim, index=i, keepdims=False)
        p, state = jax.tree.map(element, carried)
        return jax.tree.map(
            lambda stack, new: lax.dynamic_update_index_in_dim(stack, new, i, 0),
            carried,
            changed(p, element(gradient), state),
        )

    if not repeats:
        return changed(p, gradient, state)
    return lax.fori_loop(0, p.shape[0], one, (p, state))


def updated_cut(how, axes, dim, p, gradient, state):
    """A parameter and its state after `how`, an update. Where the state is cut, each device updates
    its piece, and the parameter is gathered."""
    piece, new = how(local_piece(p, axes, dim) if axes else p, gradient, state)
    return collected(piece, p, axes, dim), new


def updated(key, change, p, gradient, state):
    """A parameter and its state after the step."""
    _, _, axes, dim, _ = GRADIENTS[key]
    how = functools.partial(update_offloaded, change, PARAMS[key][2], decaying=decays(key))
    return updated_cut(how, axes, dim, p, gradient, state)


def updated_all(params, state, grads, change):
    """(parameters, optimizer state) after the step, on local pieces."""
    new = {key: updated(key, change, p, grads[key], state[key]) for key, p in params.items()}
    return tuple({key: row[k] for key, row in new.items()} for k in (0, 1))


def on_device(mesh, spec):
    """How what is cut as `spec` says lies on the devices. Their memory is named: where one name is
    missing JAX leaves them all out when it looks for arguments whose places results may take."""
    return NamedSharding(mesh, spec, memory_kind="device")


def parameter_at(mesh, key, spec):
    """How a parameter that is cut as `spec` says lies between steps."""
    return on_device(mesh, spec)


def make_step(mesh):
    """step(params, state, frozen, batch, count) -> what `one_step` does, compiled once; params and
    state are updated in place."""
    p, state, f, b = specs_of(PARAMS), state_specs(), specs_of(FROZEN), specs_of(INPUTS)
    specs_out = p, state, *[P()] * results()
    step = jax.shard_map(one_step, mesh=mesh, in_specs=(p, state, f, b, P()), out_specs=specs_out)
    placed, fixed = (
        {key: parameter_at(mesh, key, spec) for key, spec in specs.items()} for specs in (p, f)
    )
    there, batches, one = (
        {key: (state_at if key in p else on_device)(mesh, spec) for key, spec in state.items()},
        {key: on_device(mesh, spec) for key, spec in b.items()},
        on_device(mesh, P()),
    )
    return jax.jit(
        step,
        in_shardings=(placed, there, fixed, batches, one),
        out_shardings=(placed, there, *[one] * results()),
        donate_argnums=(0, 1),
        compiler_options=fused(mesh),
    )
