"""The training step of a program some of whose weights are offloaded: those of repeated blocks, or
embedding tables, lie in the host's memory with their gradients and the optimizer's state. Functions
that other files have too take the place of those.

A block brings its weights to the device when it begins, in the forward pass and again where the
backward pass recomputes it; a table is brought when it is looked up. What JAX has as the transpose
of that sends their gradients back. Whatever is then done to a stack in the host's memory is done
one repeat after the other.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from planner.emit.runtime.collectives.exchange import after, reduce_gradient, zeros_like_piece
from planner.emit.runtime.files.checkpoint import place_in, read_arrays, restacked, sources_of
from planner.emit.runtime.files.frame import labels_of, padded_shape, repeat_dims
from planner.emit.runtime.files.tables import (
    GATHERED,
    GRADIENTS,
    OFFLOADED,
    PARAMS,
    SAME_GRADIENT,
    SCATTER_EACH_MICROBATCH,
)
from planner.emit.runtime.step.clip import decays
from planner.emit.runtime.step.reduce_shard_map import (
    piece_of_microbatch,
    reduced_last,
    scattered_each,
)
from planner.emit.runtime.step.squares import squares
from planner.emit.runtime.step.state_host import on_device, state_at, update_offloaded, updated_cut


def to_device(weights):
    """Weights on the device."""
    return jax.tree.map(lambda w: jax.device_put(w, jax.memory.Space.Device), weights)


def by_row(key, function, *values):
    """What `function` makes of values like a parameter that are in the host's memory: of a stack
    one row after the other, brought here for that, and sent back."""

    def one(_, row):
        return None, jax.device_put(function(*to_device(row)), jax.memory.Space.Host)

    return lax.scan(one, None, values)[1] if PARAMS[key][2] else one(None, values)[1]


def row_dim(key, dim):
    """A dim of a parameter in its rows."""
    return dim - 1 if PARAMS[key][2] else dim


def for_microbatch(params, previous):
    """Parameters as a microbatch reads them. What is brought or gathered outside repeated blocks
    comes after `previous`, a result of the microbatch before; all else is there for all of them."""

    def one(key, p):
        if key in OFFLOADED:
            if PARAMS[key][2]:
                return p
            return after(to_device(lax.optimization_barrier((p, previous))[0]), previous)
        return after(p, previous) if key in GATHERED else p

    return {key: one(key, p) for key, p in params.items()}


def no_gradients(params):
    """Zeros like the gradients, before the first microbatch."""

    def zeros(key, p):
        axes, dim = scattered_each(key)
        if key not in OFFLOADED:
            return zeros_like_piece(p, axes, dim)
        return by_row(key, lambda row: zeros_like_piece(row, axes, row_dim(key, dim)), p)

    return {key: zeros(key, p) for key, p in params.items()}


def add_gradients(sums, grads):
    """Sums over microbatches with one more."""

    def added(key, total, gradient):
        if key not in OFFLOADED:
            return total + piece_of_microbatch(key, gradient)
        axes, dim = scattered_each(key)
        dim = row_dim(key, dim)
        return by_row(key, lambda t, g: t + reduce_gradient(g, (), axes, dim), total, gradient)

    return {key: added(key, sums[key], g) for key, g in grads.items()}


def reduced_mean(sums, count):
    """Gradients from their sums over microbatches."""

    def mean(key, total):
        if key not in OFFLOADED:
            return reduced_last(key, total / count)
        _, rest, axes, dim, _ = GRADIENTS[key]
        axes, dim = () if SCATTER_EACH_MICROBATCH else axes, row_dim(key, dim)
        return by_row(key, lambda g: reduce_gradient(g / count, rest, axes, dim), total)

    grads = {key: mean(key, total) for key, total in sums.items() if key not in SAME_GRADIENT}
    return grads | {key: grads[other] for key, other in SAME_GRADIENT.items()}


def reduced(grads):
    """The gradients of a batch that runs at once, each in its one reduction."""

    def one(key, gradient):
        _, sum_axes, scatter_axes, dim, _ = GRADIENTS[key]
        if key not in OFFLOADED:
            return reduce_gradient(gradient, sum_axes, scatter_axes, dim)
        if not (sum_axes or scatter_axes):
            return gradient
        dim = row_dim(key, dim)
        return by_row(key, lambda g: reduce_gradient(g, sum_axes, scatter_axes, dim), gradient)

    return {key: one(key, g) for key, g in grads.items()}


def sum_of_squares(key, gradient):
    """The sum of squares of a device's piece of a gradient: row by row of a stack in the host's
    memory."""
    if key not in OFFLOADED:
        return squares(gradient)
    if not PARAMS[key][2]:
        return squares(to_device(gradient))
    return lax.scan(lambda _, row: (None, squares(to_device(row))), None, gradient)[1].sum()


def parameter_at(mesh, key, spec):
    """How a parameter that is cut as `spec` says lies between steps."""
    return state_at(mesh, spec) if key in OFFLOADED else on_device(mesh, spec)


def updated(key, change, p, gradient, state):
    """A parameter and its state after the step: row by row where it lies with its gradient and
    state in the host's memory, else where only its state does."""
    _, _, axes, dim, _ = GRADIENTS[key]
    if key in OFFLOADED:
        return by_row(
            key,
            lambda p, g, s: updated_cut(
                functools.partial(change, decaying=decays(key)), axes, row_dim(key, dim), p, g, s
            ),
            p,
            gradient,
            state,
        )
    how = functools.partial(update_offloaded, change, PARAMS[key][2], decaying=decays(key))
    return updated_cut(how, axes, dim, p, gradient, state)


def place(values, specs, mesh):
    """Arrays on the mesh under their PartitionSpecs, padded up to what their shards need; each
    process gives its devices' pieces. Offloaded weights go to the host's memory at once."""
    arrays = {}
    for key, value in values.items():
        full = padded_shape(value.shape, specs[key])
        value = (
            np.pad(value, [(0, f - n) for f, n in zip(full, value.shape, strict=True)])
            if full != value.shape
            else value
        )
        arrays[key] = jax.make_array_from_callback(
            full,
            parameter_at(mesh, key, specs[key]),
            functools.partial(np.ndarray.__getitem__, np.asarray(value)),
        )
    return arrays


def read(saved, done, about, k, table, dtype, mesh):
    """Value k of every parameter, cut as `table` says, one after the other, so that the device
    never holds more than one of the offloaded ones."""
    import orbax.checkpoint as ocp

    values = {}
    for key in table:
        row = PARAMS[key]
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
            ways[i] = ocp.ArrayRestoreArgs(
                sharding=NamedSharding(mesh, spec),
                global_shape=padded_shape(shape, spec),
                dtype=dtype,
                strict=False,
            )
        arrays = read_arrays(saved, done, about, k, ways)
        stack = jax.jit(
            restacked, static_argnums=(1, 2), out_shardings=NamedSharding(mesh, table[key][-1])
        )
        value = (
            arrays[sources[0][0]] if same else stack([arrays[i] for i, _ in sources], places, first)
        )
        values[key] = jax.device_put(value, parameter_at(mesh, key, table[key][-1]))
    return values
