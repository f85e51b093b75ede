"""How gradients become sums over devices under shard_map: each device adds up its own part, and
every gradient is reduced once, after the last microbatch. Where gradients are cut
(SCATTER_EACH_MICROBATCH) they are scattered in every microbatch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from planner.emit.runtime.collectives.exchange import after, pend, reduce_gradient, zeros_like_piece
from planner.emit.runtime.files.tables import (
    GATHERED,
    GRADIENTS,
    MESH,
    SAME_GRADIENT,
    SCATTER_EACH_MICROBATCH,
)
from planner.emit.runtime.step.squares import copies, sum_of_squares


def unreduced(params):
    """Parameters whose gradients stay sums per device, still to be reduced."""
    return {key: pend(p, GRADIENTS[key][0]) for key, p in params.items()}


def scattered_each(key):
    """(axes, dim) along which a gradient is scattered in every microbatch."""
    _, _, axes, dim, _ = GRADIENTS[key]
    return (axes, dim) if SCATTER_EACH_MICROBATCH else ((), 0)


def for_microbatch(params, previous):
    """Parameters as a microbatch reads them. Those in GATHERED are gathered in every microbatch,
    after `previous`, a result of the one before; the others once for all microbatches."""
    return {key: after(p, previous) if key in GATHERED else p for key, p in params.items()}


def no_gradients(params):
    """Zeros like the gradients, before the first microbatch."""
    return {key: zeros_like_piece(p, *scattered_each(key)) for key, p in params.items()}


def piece_of_microbatch(key, gradient):
    """A gradient of one microbatch, scattered if each one's is. What is scattered is held apart
    from its sum: the TPU's compiler would add up whole gradients, and scatter their sum last."""
    piece = reduce_gradient(gradient, (), *scattered_each(key))
    if SCATTER_EACH_MICROBATCH or key in GATHERED:
        return lax.optimization_barrier(piece)
    return piece


def add_gradients(sums, grads):
    """Sums over microbatches with one more."""
    return jax.tree.map(
        jnp.add, sums, {key: piece_of_microbatch(key, g) for key, g in grads.items()}
    )


def reduced_last(key, gradient):
    """A gradient of all microbatches, reduced as far as it was not in each."""
    _, rest, axes, dim, _ = GRADIENTS[key]
    return reduce_gradient(gradient, rest, () if SCATTER_EACH_MICROBATCH else axes, dim)


def reduced_mean(sums, count):
    """Gradients from their sums over microbatches."""
    grads = {
        key: reduced_last(key, total / count)
        for key, total in sums.items()
        if key not in SAME_GRADIENT
    }
    return grads | {key: grads[other] for key, other in SAME_GRADIENT.items()}


def reduced(grads):
    """The gradients of a batch that runs at once, each in its one reduction."""
    return {key: reduce_gradient(g, *GRADIENTS[key][1:4]) for key, g in grads.items()}


def global_norm(grads):
    """The norm of all gradients together, by one sum over all devices: each adds the squares of its
    pieces, divided by the number of devices that add the same."""
    total = sum(sum_of_squares(key, g) / copies(key) for key, g in grads.items())
    missing = tuple(a for a in MESH if a not in jax.typeof(total).manual_axis_type.varying)
    total = lax.pcast(total, missing, to="varying") if missing else total
    return jnp.sqrt(lax.psum(total, tuple(MESH)))
