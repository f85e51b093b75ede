"""The training step of a program in which weights wait in the host's memory, of repeated blocks or
embedding tables, with their gradients and the optimizer's state. Functions that other files have
too take the place of those.

A block brings its weights to the device when it begins, in the forward pass and again where the
backward pass makes it anew; a table is brought when it is looked up. What JAX has as the transpose
of that sends their gradients back. What is then done to a stack in the host's memory is done repeat
by repeat.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from planner.emit.runtime.collectives.exchange import after, reduce_gradient, zeros_like_piece
from planner.emit.runtime.files.checkpoint import place_in, restacked, sources_of
from planner.emit.runtime.files.frame import labels_of, padded_shape, repeat_dims
from planner.emit.runtime.files.tables import (
    AWAY,
    GATHERED,
    GRADIENTS,
    PARAMS,
    SCATTER_EACH_MICROBATCH,
)
from planner.emit.runtime.step.adamw import update
from planner.emit.runtime.step.state_host import on_device, state_at, update_away, updated_cut


def brought(weights):
    """Weights on the device."""
    return jax.tree.map(lambda w: jax.device_put(w, jax.memory.Space.Device), weights)


def by_row(key, function, *values):
    """What `function` makes of values like a parameter that are in the host's memory: of a stack
    one row after the other, brought here for that, and sent back."""

    def one(_, row):
        return None, jax.device_put(function(*brought(row)), jax.memory.Space.Host)

    return lax.scan(one, None, values)[1] if PARAMS[key][2] else one(None, values)[1]


def row_dim(key, dim):
    """A dim of a parameter in its rows."""
    return dim - 1 if PARAMS[key][2] else dim


def reduced(key, gradient, sum_axes, scatter_axes, dim):
    """`reduce_gradient`, row by row where the gradient is in the host's memory."""
    if key not in AWAY:
        return reduce_gradient(gradient, sum_axes, scatter_axes, dim)
    return (
        by_row(
            key, lambda g: reduce_gradient(g, sum_axes, scatter_axes, row_dim(key, dim)), gradient
        )
        if sum_axes or scatter_axes
        else gradient
    )


def in_turn(key, p, cause):
    """A parameter as a microbatch takes it: what is brought or gathered outside repeated blocks not
    before `cause` is there, else once for all microbatches."""
    if key in AWAY:
        return (
            p if PARAMS[key][2] else after(brought(lax.optimization_barrier((p, cause))[0]), cause)
        )
    return after(p, cause) if key in GATHERED else p


def nothing_yet(key, p):
    """Zeros like the gradient of a parameter, before the first microbatch."""
    axes, dim = each_microbatch(key)
    return (
        by_row(key, lambda row: zeros_like_piece(row, axes, row_dim(key, dim)), p)
        if key in AWAY
        else zeros_like_piece(p, axes, dim)
    )


def added(key, total, gradient):
    """A sum over microbatches with one more."""
    axes, dim = each_microbatch(key)
    if key not in AWAY:
        return total + reduce_gradient(gradient, (), axes, dim)
    return by_row(
        key, lambda t, g: t + reduce_gradient(g, (), axes, row_dim(key, dim)), total, gradient
    )


def scaled(key, total, count):
    """The gradient from its sum over microbatches: divided, and reduced over what is left to
    reduce."""
    _, rest, axes, dim, _ = GRADIENTS[key]
    axes = () if SCATTER_EACH_MICROBATCH else axes
    if key not in AWAY:
        return reduce_gradient(total / count, rest, axes, dim)
    return by_row(key, lambda g: reduce_gradient(g / count, rest, axes, row_dim(key, dim)), total)


def each_microbatch(key):
    """(axes, dim) along which a gradient is scattered in every microbatch."""
    _, _, axes, dim, _ = GRADIENTS[key]
    return (axes, dim) if SCATTER_EACH_MICROBATCH else ((), 0)


def kept_at(mesh, key, spec):
    """How a parameter that is cut as `spec` says lies between steps."""
    return state_at(mesh, spec) if key in AWAY else on_device(mesh, spec)


def updated(key, p, gradient, state, count):
    """A parameter and its state after the step: row by row where it waits with its gradient and
    state in the host's memory, else where only its state does."""
    _, _, axes, dim, _ = GRADIENTS[key]
    if key in AWAY:
        return by_row(
            key,
            lambda p, g, s: updated_cut(update, axes, row_dim(key, dim), p, g, s, count),
            p,
            gradient,
            state,
        )
    return updated_cut(
        functools.partial(update_away, PARAMS[key][2]), axes, dim, p, gradient, state, count
    )


def place(values, specs, mesh):
    """Arrays on the mesh under their PartitionSpecs, padded up to what their shards need; each
    process gives its devices' pieces. Weights that wait in the host's memory go there at once."""
    out = {}
    for key, value in values.items():
        full = padded_shape(value.shape, specs[key])
        value = (
            np.pad(value, [(0, f - n) for f, n in zip(full, value.shape, strict=True)])
            if full != value.shape
            else value
        )
        out[key] = jax.make_array_from_callback(
            full,
            kept_at(mesh, key, specs[key]),
            functools.partial(np.ndarray.__getitem__, np.asarray(value)),
        )
    return out


def read(saved, done, about, k, table, dtype, mesh):
    """Value k of every parameter, cut as `table` says, one after the other, so that the device
    never holds more than one of those that wait in the host's memory."""
    import orbax.checkpoint as ocp

    out = {}
    for key, row in PARAMS.items():
        sources = sources_of(key, done, about)
        first = padded_shape(row[0], table[key][-1])[: repeat_dims(row)]
        ways, places = {}, tuple(place_in(about["parameters"][i], j) for i, j in sources)
        for i, _ in sources:
            names, stacked, shape = about["parameters"][i]
            same = (names, shape) == (list(labels_of(key, row)), list(row[0]))
            spec = (
                P(*table[key][-1])
                if same
                else P(*[None] * stacked, *table[key][-1][repeat_dims(row) :])
            )
            ways[str(i)] = ocp.ArrayRestoreArgs(
                sharding=NamedSharding(mesh, spec),
                global_shape=padded_shape(shape, spec),
                dtype=dtype,
                strict=False,
            )
        item = ocp.args.PyTreeRestore(
            dict.fromkeys(ways, 0), restore_args=ways, partial_restore=True
        )
        found = saved.restore(done, args=ocp.args.Composite(**{f"value{k}": item}))[f"value{k}"]
        stack = jax.jit(
            restacked, static_argnums=(1, 2), out_shardings=NamedSharding(mesh, table[key][-1])
        )
        value = (
            found[str(sources[0][0])]
            if same
            else stack([found[str(i)] for i, _ in sources], places, first)
        )
        out[key] = jax.device_put(value, kept_at(mesh, key, table[key][-1]))
    return out
