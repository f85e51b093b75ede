"""Microbatches in unequal shares: each place along the mesh axis "island" runs as many as ISLANDS
says, and collectives of a microbatch stay within it; losses and gradients are sums over all.

In INPUTS every island has as many microbatches as the one with the most: those behind its own are
not looked at. These functions take the place of those of their names in other files.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from planner.emit.runtime.files.tables import BATCH, ISLANDS, MICROBATCHES


def over_microbatches(one, start, batch):
    """What `one` leaves after the microbatches of this island; numbers are summed over all islands,
    gradients are still to be."""
    place = lax.axis_index("island")
    turns = jnp.asarray(ISLANDS)[place]

    def turn(i, total):
        microbatch = {
            key: lax.dynamic_index_in_dim(x, i, keepdims=False) for key, x in batch.items()
        }
        return one(total, microbatch)[0]

    with jax.named_scope(f"planned_trips_{max(ISLANDS)}"):
        *numbers, sums = lax.fori_loop(0, turns, turn, jax.tree.map(on_island, start))
    return *(lax.psum(x, "island") for x in numbers), sums


def on_island(x):
    """x as a value that differs from island to island."""
    there = "island" in jax.typeof(x).manual_axis_type.varying
    return x if there else lax.pcast(x, ("island",), to="varying")


def leading(shape):
    """How many first dims of an input count samples: those of microbatches, and of samples in each;
    0 where its dims count something else (positions, a mask)."""
    return 2 if BATCH and len(shape) > 1 and shape[1] * MICROBATCHES == BATCH else 0


def sample_places(numbers, shape):
    """Numbers of samples by microbatch of each island [islands * most microbatches, samples]; where
    an island has fewer, the first stands."""
    most = max(ISLANDS)
    by_microbatch = np.reshape(numbers, (MICROBATCHES, -1))
    places = np.full(shape, numbers[0])
    done = 0
    for island, turns in enumerate(ISLANDS):
        places[island * most : island * most + turns] = by_microbatch[done : done + turns]
        done += turns
    return places
