"""How gradients are added up over microbatches where the compiler's partitioner places their
reductions over devices. The functions have the names of those in reduce_shard_map.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from planner.emit.runtime.files.tables import GRADIENTS
from planner.emit.runtime.step.squares import sum_of_squares
from planner.emit.runtime.step.step_jit import at


def unreduced(params):
    """Parameters to differentiate by: the compiler reduces gradients over devices by itself."""
    return params


def for_microbatch(params, previous):
    """Parameters as a microbatch reads them."""
    return params


def no_gradients(params):
    """Zeros like the gradients, before the first microbatch."""
    return jax.tree.map(jnp.zeros_like, params)


def add_gradients(sums, grads):
    """Sums over microbatches with one more."""
    return jax.tree.map(jnp.add, sums, grads)


def reduced_mean(sums, count):
    """Gradients from their sums over microbatches."""
    return reduced({key: total / count for key, total in sums.items()})


def reduced(grads):
    """Gradients, cut as they are updated."""
    return {key: at(g, GRADIENTS[key][-1]) for key, g in grads.items()}


def global_norm(grads):
    """The norm of all gradients together."""
    return jnp.sqrt(sum(sum_of_squares(key, g) for key, g in grads.items()))
