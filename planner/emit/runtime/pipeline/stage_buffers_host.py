"""The optimizer's state of uneven pipeline stages in the host's memory. This function takes the
place of that of its name in another file."""

from __future__ import annotations

import functools

import jax
from jax import lax

from planner.emit.runtime.files.tables import PARTS


def update_offloaded(change, _, p, gradient, state, decaying):
    """`change` of a buffer whose state is in the host's memory: brought here and written back, a
    part of the buffer after the other, each replaced where it lies."""

    def one(i, carried):
        element = functools.partial(lax.dynamic_index_in_dim, index=i, keepdims=False)
        p, state = jax.tree.map(element, carried)
        here = jax.device_put(state, jax.memory.Space.Device)
        new, state = change(p, element(gradient), here, element(decaying))
        return jax.tree.map(
            lambda parts, new: lax.dynamic_update_index_in_dim(parts, new, i, 0),
            carried,
            (new, jax.device_put(state, jax.memory.Space.Host)),
        )

    rows = jax.tree.map(lambda x: x.reshape(PARTS, -1), (p, state))
    gradient, decaying = gradient.reshape(PARTS, -1), decaying.reshape(PARTS, -1)
    return jax.tree.map(lambda x: x.reshape(p.shape), lax.fori_loop(0, PARTS, one, rows))
